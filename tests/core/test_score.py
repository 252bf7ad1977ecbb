"""Log-likelihoods against one teacher-forced pass of the model itself."""

import random

import pytest
import torch

from octavo.core import CapacityError, SamplingParams


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


def teacher_forced(model, prompt, target):
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *target]])).logits[0].float()
    rows = logits[len(prompt) - 1 : -1].log_softmax(1)
    return rows.gather(1, torch.tensor(target)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("prompt, target", [(1, 1), (4, 4), (8, 1), (9, 7), (3, 20)])
@pytest.mark.parametrize("fields", [{}, {"step_tokens": 3}, {"page_tokens": 5}], ids=["whole", "chunks", "page_5"])
def test_equals_the_model(t_model, engine_for, assert_idle, prompt, target, fields):
    engine = engine_for(t_model, **fields)
    got = engine.score(tokens(prompt), tokens(target, 1))
    assert got == pytest.approx(teacher_forced(t_model, tokens(prompt), tokens(target, 1)), abs=1e-4)
    assert_idle(engine)


def test_window(w_model, engine_for):
    got = engine_for(w_model).score(tokens(17), tokens(13, 1))
    assert got == pytest.approx(teacher_forced(w_model, tokens(17), tokens(13, 1)), abs=1e-4)


def test_the_prompts_prefix_is_reused_and_the_target_never(t_model, engine_for):
    engine = engine_for(t_model)
    first = engine.score(tokens(13), tokens(8, 1))
    assert engine.stats().hit_tokens == 0
    assert engine.score(tokens(13), tokens(8, 1)) == pytest.approx(first, abs=1e-5)
    assert engine.stats().hit_tokens == 12
    other = engine.score(tokens(13), tokens(3, 2))
    assert other == pytest.approx(teacher_forced(t_model, tokens(13), tokens(3, 2)), abs=1e-4)


def test_preemption(t_model, engine_for, drain, assert_idle):
    engine = engine_for(t_model, pool_tokens=48, step_tokens=5)
    engine.submit(tokens(12, 5), SamplingParams(max_tokens=20, ignore_eos=True), request_id="older")
    items = [(tokens(9, seed), tokens(16, seed + 9), None) for seed in range(3)]
    got = engine.score_many(items)
    assert engine.stats().preemptions > 0
    for scores, (prompt, target, _) in zip(got, items, strict=True):
        assert scores == pytest.approx(teacher_forced(t_model, prompt, target), abs=1e-4)
    drained = drain(engine)
    assert len(drained.completions["older"].samples[0].token_ids) == 20
    assert_idle(engine)


def test_more_rows_than_one_step_may_ask_for(t_model, engine_for, monkeypatch):
    monkeypatch.setattr("octavo.core.sequence.KNOWN_LOGPROB_ROWS", 3)
    engine = engine_for(t_model)
    got = engine.score(tokens(9), tokens(14, 1))
    assert got == pytest.approx(teacher_forced(t_model, tokens(9), tokens(14, 1)), abs=1e-4)
    assert engine.stats().steps == -(-22 // 3)


def test_text(make_llama, engine_for, byte_tokenizer):
    model = make_llama(258)
    got = engine_for(model, byte_tokenizer).score("ab", "cd")
    assert got == pytest.approx(teacher_forced(model, [256, 97, 98], [99, 100]), abs=1e-4)


def test_of_a_drawn_sample_equals_its_logprobs(t_model, engine_for):
    engine = engine_for(t_model)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=9, logprobs=0, ignore_eos=True)
    sample = engine.generate([tokens(7)], params)[0].samples[0]
    drawn = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert engine.score(tokens(7), sample.token_ids) == pytest.approx(drawn, abs=1e-4)


@pytest.mark.parametrize(
    "prompt, target, error, message",
    [
        ([5], [], ValueError, "the text is empty"),
        ([], [5], ValueError, "the prompt is empty"),
        ([5], [128], ValueError, "token id 128"),
        ([5] * 30, [5] * 3, CapacityError, "30 tokens and 3 new ones are 33 tokens"),
    ],
    ids=["no_target", "no_prompt", "bad_id", "too_long"],
)
def test_refuses(t_model, engine_for, assert_idle, prompt, target, error, message):
    engine = engine_for(t_model, max_model_tokens=32)
    with pytest.raises(error, match=message):
        engine.score(prompt, target)
    with pytest.raises(error, match=message):
        engine.score_many([([5], [6], None), (prompt, target, None)])
    assert_idle(engine)


def test_a_target_up_to_the_very_limit(t_model, engine_for):
    engine = engine_for(t_model, max_model_tokens=32, pool_tokens=32)
    assert len(engine.score(tokens(20), tokens(12, 1))) == 12
