"""The demo model in a size that learns in seconds: tokenizer, batches, training, saving, and serving by the engine."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.multimodal.demo_data import EXAMS, GROUPS, collate, exam_batches, exam_questions, training_step
from octavo.multimodal.demo_exam import engine_score, photograph_scores, shared_questions
from octavo.multimodal.demo_model import MAX_BYTES, DemoConfig, DemoModel, demo_prompt, load_demo, save_demo
from octavo.multimodal.demo_photographs import photograph_exam
from octavo.multimodal.demo_tokenizer import (
    BOS,
    EOS,
    IGNORED,
    IMAGE,
    PAD,
    UNKNOWN,
    VOCABULARY,
    build_tokenizer,
    token_ids,
)
from octavo.multimodal.demo_training import Recipe, Trainer, answer_loss, answered
from octavo.multimodal.reuse import ZeroCopyReuse
from octavo.multimodal.scenes_follow_ups import Exchange
from octavo.multimodal.scenes_prompts import prompt_parts, words
from octavo.multimodal.scenes_render import draw, render

TINY = DemoConfig(
    patch=24, tower_width=64, tower_layers=1, hidden=64, inner=128, layers=2, heads=4, kv_heads=2, max_tokens=512
)


@pytest.fixture(scope="module", autouse=True)
def _needs_open_clip():
    try:
        DemoModel(TINY)
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


# Words


def test_the_tokenizer_gives_words_back(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*words(), "in image 3 , what colour is the ring ?", "question : how many crosses ? answer :"]:
        ids = again(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"] == [VOCABULARY[BOS], *token_ids(text)]
        assert again.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text
    assert len(again) == len(VOCABULARY) == len({*VOCABULARY.values()})
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == tuple(map(VOCABULARY.get, (BOS, EOS, PAD)))


def test_users_may_write_as_they_like(tokenizer):
    ids = tokenizer("What colour is the circle?", add_special_tokens=False)["input_ids"]
    assert ids == token_ids("what colour is the circle ?")
    assert tokenizer("zebra <image>", add_special_tokens=False)["input_ids"] == [VOCABULARY[UNKNOWN], VOCABULARY[IMAGE]]


# Batches


def test_a_batch_is_prompts_images_and_answers():
    questions = exam_questions("needle_digit of 2", 0, 5)
    parts = [prompt_parts(question.question, 2) for question in questions]
    batch = collate(questions, parts, 16)
    assert batch.token_ids.shape == batch.labels.shape and batch.token_ids.shape[1] % 32 == 0
    assert (len(batch.backgrounds), batch.images) == (10, 2)
    for ids, labels, question in zip(batch.token_ids, batch.labels, questions, strict=True):
        learnt = labels != IGNORED
        assert (ids[learnt] == labels[learnt]).all()
        assert ids[learnt].tolist() == [*token_ids(question.answer), VOCABULARY[EOS]]
        assert (ids == VOCABULARY[IMAGE]).sum() == 32 and (ids[np.argmax(learnt) :] == VOCABULARY[PAD]).any()


def test_what_is_asked_later_follows_the_answer():
    [question] = exam_questions("colour", 0, 1)
    later = [Exchange("how many objects ?", "3"), Exchange("is there a red circle ?", "yes")]
    batch = collate([question], [prompt_parts(question.question, 1)], 1, [later])
    row, labels = batch.token_ids[0], batch.labels[0]
    end = [VOCABULARY[EOS]]
    told = [*token_ids(question.answer), *end, *token_ids("3"), *end, *token_ids("yes"), *end]
    assert row[labels != IGNORED].tolist() == labels[labels != IGNORED].tolist() == told
    start = int(np.argmax(labels != IGNORED)) + 2
    asked = token_ids("question : how many objects ? answer :")
    assert row[start : start + len(asked)].tolist() == asked


def test_batches_hold_the_tokens_that_the_engine_reads(tokenizer):
    model = DemoModel(TINY)
    demo_encoder = load_parts(model)
    engine = Engine(model.language.eval(), tokenizer, EngineConfig(pool_tokens=1024), encoders={"image": demo_encoder})
    [question] = exam_questions("in image k of 2", 0, 1)
    [batch] = exam_batches([question], TINY.image_tokens)
    [completion] = engine.generate(
        [demo_prompt(draw(question.scenes), question.question)], SamplingParams(max_tokens=1)
    )
    start = int(np.argmax(batch.labels[0] != IGNORED))
    image = VOCABULARY[IMAGE]
    expected = batch.token_ids[0, :start]
    read = np.array(completion.prompt_token_ids)
    assert len(read) == start and (read[expected != image] == expected[expected != image]).all()


def load_parts(model):
    from octavo.multimodal.image_encoder import ImageEncoder

    return ImageEncoder(model.tower, model.projector)


def test_steps_are_a_function_of_seed_and_number():
    def made(seed, step):
        return training_step(seed, step, descriptions=0.5, groups=4, step_images=64, follow_up=0, image_tokens=4)

    for one, same, other in zip(made(0, 1), made(0, 1), made(0, 2), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one[:4], same[:4], strict=True))
        assert not np.array_equal(one.things, other.things)
    for batch, (low, high) in zip(made(1, 1), GROUPS, strict=True):
        assert low <= batch.images <= high and len(batch.backgrounds) == len(batch.token_ids) * batch.images
        assert len(batch.backgrounds) <= 16
    descriptions = training_step(0, 0, descriptions=1.0, groups=1, step_images=32, follow_up=0, image_tokens=4)
    assert (descriptions[0].labels[0] != IGNORED).sum() >= 6


def test_how_images_are_read_is_drawn_apart_from_what_is_asked():
    def made(step, alone):
        return training_step(
            0, step, descriptions=0.5, groups=4, step_images=16, follow_up=1, image_tokens=4, alone=alone
        )

    for step in range(20):
        for whole, mixed, alone in zip(made(step, 0.0), made(step, 0.5), made(step, 1.0), strict=True):
            assert not whole.alone and alone.alone
            assert all(np.array_equal(a, b) for a, b in zip(whole[:5], mixed[:5], strict=True))
    share = np.mean([batch.alone for step in range(50) for batch in made(step, 0.25)])
    assert 0.15 < share < 0.35


def test_the_longest_training_prompt_fits_the_model():
    longest = max(
        batch.token_ids.shape[1]
        for step in range(40)
        for batch in training_step(0, step, descriptions=0.5, groups=4, step_images=256, follow_up=6, image_tokens=144)
    )
    assert longest <= DemoConfig().max_tokens


@pytest.mark.parametrize("name", EXAMS)
def test_exams_repeat_and_differ_by_seed(name):
    assert exam_questions(name, 1, 4) == exam_questions(name, 1, 4) != exam_questions(name, 2, 4)


# Images that see themselves only

LAYOUTS = {
    "one, behind the first token": [[0, "question : what colour is the circle ? answer :"]],
    "apart": [["image 1 :", 0, "image 2 :", 1, "question : which image has more objects ? answer :"]],
    "adjacent": [["look at it closely .", 0, 1, 2, "take your time .", 3, "answer :"]],
    "rows of several lengths": [
        ["question : how many objects ?", 0, 1, "answer :"],
        ["image 1 :", 2, "image 2 :", 3, "question : how many red circles in image 2 ? answer :"],
    ],
}
"""Prompts of one batch: text, and numbers of images."""


@pytest.fixture(scope="module")
def asked():
    """A model that is not as indifferent to what it attends to as fresh weights are, and a question on four images."""
    model = DemoModel(TINY).eval()
    with torch.no_grad():
        for name, weight in model.language.named_parameters():
            if "proj" in name:
                weight.mul_(8)
    return model, exam_questions("in image k of 4", 3, 1)[0]


@torch.no_grad()
def trained_logprobs(model, question, layout, alone):
    """[B, L, words], as training computes them."""
    batch = collate([question] * len(layout), layout, TINY.image_tokens)
    places = np.flatnonzero(batch.token_ids == VOCABULARY[IMAGE])
    pixels = render(torch.from_numpy(batch.things), torch.from_numpy(batch.backgrounds))
    return model(torch.from_numpy(batch.token_ids), pixels, torch.from_numpy(places), alone).log_softmax(-1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("alone", [False, True], ids=["whole", "alone"])
def test_training_reads_images_as_the_engine_does(alone, layout, asked, tokenizer):
    """Alone: as under ``zero_copy`` without context, when images are computed and when they are found."""
    model, question = asked
    reuse = ZeroCopyReuse(context_tokens=0) if alone else None
    config = EngineConfig(pool_tokens=1024)
    engine = Engine(model.language, tokenizer, config, encoders={"image": load_parts(model)}, reuse=reuse)
    trained = trained_logprobs(model, question, layout, alone)
    other = trained_logprobs(model, question, layout, not alone)
    images = draw(question.scenes)
    prompts = [[part if isinstance(part, str) else images[part] for part in parts] for parts in layout]
    for asks in ({"prompt_logprobs": 8}, {}):
        for row, completion in enumerate(engine.generate(prompts, SamplingParams(max_tokens=1, logprobs=8, **asks))):
            entries = [*(completion.prompt_logprobs or [None] * len(completion.prompt_token_ids))[1:]]
            entries += completion.samples[0].logprobs
            told = {at: entry for at, entry in enumerate(entries) if entry is not None}
            assert max(told) == len(completion.prompt_token_ids) - 1 and len(told) >= (3 if asks else 1)
            for at, entry in told.items():
                for token, logprob in entry.items():
                    assert logprob == pytest.approx(trained[row, at, token].item(), abs=1e-4), at
            assert (trained[row, max(told)] - other[row, max(told)]).abs().max() > 0.01
        engine.check()


# Learning


def test_the_loss_counts_answers_by_the_root_of_their_length():
    labels = torch.tensor([[0, 3, IGNORED, IGNORED, IGNORED], [0, 1, 2, 1, 2]])
    labels[:, 0] = IGNORED
    logits = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    losses = -logits.log_softmax(-1)
    short = losses[0, 0, 3]
    long = losses[1, 0, 1] + losses[1, 1, 2] + losses[1, 2, 1] + losses[1, 3, 2]
    torch.testing.assert_close(answer_loss(logits, labels), (short + long / 2) / (1 + 2))


def test_an_answer_is_right_as_a_whole():
    labels = torch.tensor([[IGNORED, IGNORED, 1, 2], [IGNORED, IGNORED, 1, 2]])
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 2, 0], [3, 1, 3, 0]]), 4).float()
    assert answered(logits, labels).tolist() == [True, False]


def test_the_rate_rises_and_falls_with_steps_or_time():
    recipe = Recipe(steps=1000, train_seconds=100.0, warmup_steps=10, learning_rate=1.0)
    assert recipe.progress(500, 10.0) == recipe.progress(10, 50.0) == 0.5
    assert recipe.progress(0, 200.0) == 1.0
    assert recipe.rate(0, 0.0) == pytest.approx(0.1) and recipe.rate(9, 0.0) == 1.0
    assert recipe.rate(500, 0.5) == pytest.approx(0.505) and recipe.rate(1000, 1.0) == pytest.approx(0.01)
    assert recipe.mixture(0.19) == (0.7, 2) and recipe.mixture(0.2) == (0.1, 4)


@pytest.fixture(scope="module")
def learnt():
    """A tiny model that knows 32 questions by heart, and the questions."""
    questions = [*exam_questions("colour", 0, 16), *exam_questions("digit", 0, 16)]
    recipe = Recipe(learning_rate=3e-3, warmup_steps=5)
    trainer = Trainer(DemoModel(TINY), recipe, torch.device("cpu"))
    [batch] = exam_batches(questions, TINY.image_tokens)
    before = trainer.step([batch], recipe.rate(0, 0.0)).item()
    for step in range(1, 400):
        loss = trainer.step([batch], recipe.rate(step, 0.0)).item()
        if loss < 0.01:  # an answer whose words are not all the likeliest adds at least ln 2 / 64 = 0.0108
            break
    assert loss < 0.01 < 1 < before
    return trainer, questions


def test_a_tiny_model_learns_by_heart_what_it_sees(learnt):
    trainer, questions = learnt
    assert trainer.accuracy(questions) == 1.0
    assert trainer.accuracy(questions, "wrong") < 0.5, "the images matter"
    assert trainer.accuracy(questions, "blank") < 0.5


# Saving and serving


@pytest.fixture(scope="module")
def saved(learnt, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    size = save_demo(folder, learnt[0].model, "a card\n")
    assert size == sum(file.stat().st_size for file in folder.iterdir()) < MAX_BYTES
    return folder


def test_the_saved_folder_answers_through_the_engine_as_in_training(learnt, saved):
    _, questions = learnt
    demo = load_demo(saved, device="cpu")
    engine = Engine(demo.model, demo.tokenizer, EngineConfig(pool_tokens=4096), encoders={"image": demo.encoder})
    assert engine_score(engine, questions).answers == 1.0
    assert engine_score(engine, questions, "wrong").answers < 0.5
    assert engine_score(engine, questions, "blank").answers < 0.5
    engine.check()


def test_what_is_saved_is_the_model_in_bf16(learnt, saved):
    from safetensors.torch import load_file

    model = learnt[0].model
    demo = load_demo(saved, device="cpu")
    parts = {
        "language": (demo.model, model.language),
        "projector": (demo.encoder.projector, model.projector),
        "tower": (demo.encoder.tower.tower, model.tower.tower),
    }
    for part, (loaded, trained) in parts.items():
        there = trained.state_dict()
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, there[name].bfloat16().float()), f"{part} {name}"
    weights = {
        name for file in saved.glob("*.safetensors") for name, t in load_file(file).items() if t.dtype != torch.bfloat16
    }
    assert not weights
    assert json.loads((saved / "open_clip_config.json").read_text())["model_cfg"]["vision_cfg"]["patch_size"] == 24
    assert (saved / "README.md").read_text() == "a card\n"


def test_training_normalises_pixels_as_the_encoder_does(learnt):
    model = learnt[0].model
    encoder = load_parts(model)
    images = draw(exam_questions("compare", 0, 1)[0].scenes)
    normal = (torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) - model.mean) / model.deviation
    read = encoder.tower.preprocess([encoder.read(image) for image in images])
    torch.testing.assert_close(normal, read, atol=1e-5, rtol=1e-5)


def test_given_images_take_the_place_of_scenes(learnt):
    trainer, questions = learnt
    images = [draw(question.scenes) for question in questions]
    assert trainer.accuracy(questions, images=images) == trainer.accuracy(questions) == 1.0
    assert trainer.accuracy(questions, images=images[1:] + images[:1]) < 0.5


def test_a_verdict_may_be_right_where_the_answer_is_not():
    class Says:
        def generate(self, prompts, params):
            said = ["circle left , ring right , left . yes", "circle left , ring left , left . yes", "yes", "no"]
            return [SimpleNamespace(samples=[SimpleNamespace(text=f" {text}")]) for text in said]

    [question] = exam_questions("relation", 0, 1)
    same = [question._replace(answer="circle left , ring right , left . yes")] * 4
    assert engine_score(Says(), same) == (0.25, 0.75)


def test_a_second_question_finds_the_image_of_the_first(saved):
    demo = load_demo(saved, device="cpu")
    config = EngineConfig(pool_tokens=4096, page_tokens=4, page_policies={"image": 4})
    engine = Engine(demo.model, demo.tokenizer, config, encoders={"image": demo.encoder})
    shared = shared_questions(engine, 0, 6)
    assert shared.hit_tokens >= 6 * TINY.image_tokens and shared.query_tokens > shared.hit_tokens
    assert 0 <= shared.first <= 1 and 0 <= shared.second <= 1


def test_exams_with_photographs_are_of_the_engine_and_of_training(learnt, saved):
    demo = load_demo(saved, device="cpu")
    engine = Engine(demo.model, demo.tokenizer, EngineConfig(pool_tokens=4096), encoders={"image": demo.encoder})
    names = ["colour, on photographs", "in image k of 2, among photographs"]
    found = photograph_scores(engine, 0, 4, names)
    assert set(found) == set(names), "matplotlib ships one, and is always there"
    for name in names:
        questions, images = photograph_exam(name, 0, 4)
        assert found[name].verdicts >= found[name].answers == learnt[0].accuracy(questions, images=images)


def test_the_full_model_is_small_enough(tmp_path):
    assert 20_000_000 < save_demo(tmp_path, DemoModel(DemoConfig()), "") < MAX_BYTES
    with pytest.raises(ValueError, match="the folder may have 36,000,000"):
        save_demo(tmp_path / "large", DemoModel(replace(DemoConfig(), inner=2048)), "")
    assert not (tmp_path / "large").exists()


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(
        ValueError, match=r"holds no demo model, it has no config.json; make one with scripts/train_demo"
    ):
        load_demo(tmp_path)


def test_seeds_make_the_same_weights_and_leave_torchs_state_alone():
    state = torch.get_rng_state()
    one, same, other = DemoModel(TINY, 1), DemoModel(TINY, 1), DemoModel(TINY, 2)
    assert torch.equal(state, torch.get_rng_state())
    pairs = zip(one.state_dict().values(), same.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(one.language.model.embed_tokens.weight, other.language.model.embed_tokens.weight)
