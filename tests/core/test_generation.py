"""Large batches: prompts are read and texts written beside the steps, with the same outputs in the same order, errors
of the same types, and no thread left behind."""

import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import BatchError, EngineConfig, SamplingParams
from octavo.core.inspection.stage_clock import StageClock
from octavo.core.serving import generation
from octavo.core.serving.detokenizer import Detokenizer
from octavo.core.serving.prompts import PromptReader

from ..cells import covering
from ..pictures import Picture, image_engine

LETTERS = [chr(97 + i) for i in range(26)]


@pytest.fixture
def words(piece_tokenizer):
    return piece_tokenizer([*LETTERS, "<s>", "</s>"], specials=[26, 27], bos=26, eos=27)


@pytest.fixture(params=["eager", "graph"])
def execution(request):
    return request.param


@pytest.fixture
def build(execution, make_llama, words, poison_pool):
    model = make_llama(28)
    model.generation_config.eos_token_id = 27

    def build(threads, tokenizer=words, **fields):
        fields = {"execution": execution, "host_threads": threads, **fields}
        return image_engine(model, poison_pool, tokenizer=tokenizer, **fields)

    return build


def texts(n, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randint(1, 20))) for _ in range(n)]


PARAMS = {
    "greedy": SamplingParams(max_tokens=8),
    "drawn, unseeded": SamplingParams(max_tokens=8, temperature=1.0, n=2),
    "to the end of text": SamplingParams(max_tokens=30, temperature=2.0, include_stop=True),
    "stop strings": SamplingParams(max_tokens=20, temperature=1.5, stop=("a", "xy")),
    "log-probabilities": SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=0),
}


@pytest.mark.parametrize(
    ("params", "step_tokens", "execution"),
    covering(PARAMS, [24, 8192], ["graph", "eager"]),
    indirect=["execution"],
)
def test_the_same_outputs_in_the_same_order(step_tokens, params, build, assert_idle):
    params = PARAMS[params]
    prompts = [*texts(12), ["ab", Picture(1, 7), "c"], [1, 2, 3], *texts(3, 1)]
    assert len(prompts) > generation.WORTH
    outputs = []
    for threads in (0, 1, 3):
        engine = build(threads, step_tokens=step_tokens)
        outputs.append(engine.generate(prompts, params))
        engine.check()
        assert not engine.has_work() and engine.stats().units_held == 0
    one, *others = outputs
    assert any(completion.text for completion in one)
    for other in others:
        for mine, its in zip(one, other, strict=True):
            assert mine.prompt_token_ids == its.prompt_token_ids and mine.request_id == its.request_id
            for a, b in zip(mine.samples, its.samples, strict=True):
                assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)


def test_who_computes_beside_whom_depends_on_no_thread(build, monkeypatch):
    """However long each prompt takes to be read."""
    plans = []
    for seed in range(3):
        engine, rng = build(3, step_tokens=30), random.Random(seed)
        read, schedule = engine._prompts.read_segments, engine._scheduler.schedule

        def slow(prompt, read=read, rng=rng):
            threading.Event().wait(rng.random() / 100)
            return read(prompt)

        def noted(*, schedule=schedule, **how):
            plan = schedule(**how)
            plans[-1].append([(c.sequence.request.request_id, c.start, c.count) for c in plan.chunks])
            return plan

        monkeypatch.setattr(engine._prompts, "read_segments", slow)
        monkeypatch.setattr(engine._scheduler, "schedule", noted)
        plans.append([])
        engine.generate(texts(24), SamplingParams(max_tokens=5, ignore_eos=True))
    assert plans[0] == plans[1] == plans[2] and len(plans[0]) > 5


def test_steps_begin_before_the_last_prompt_is_read(build, monkeypatch):
    monkeypatch.setattr(generation, "AHEAD", 4)
    engine, done = build(2, step_tokens=30), []
    read = engine._prompts.read_segments
    monkeypatch.setattr(engine._prompts, "read_segments", lambda prompt: done.append(prompt) or read(prompt))
    step, seen = engine.step, []
    monkeypatch.setattr(engine, "step", lambda: seen.append(len(done)) or step())
    engine.generate(texts(40), SamplingParams(max_tokens=3))
    assert seen[0] < 15 and len(done) == 40


@pytest.mark.parametrize("threads", [0, 2])
def test_errors_are_those_of_their_own_prompts(threads, build, assert_idle):
    prompts = texts(20)
    prompts[3], prompts[11], prompts[17], prompts[19] = "NO", 7, [99], ["x", object()]
    params = [SamplingParams(max_tokens=3)] * 20
    params[5] = "nonsense"
    params[8] = SamplingParams(max_tokens=900, ignore_eos=True)
    engine = build(threads, step_tokens=24)
    with pytest.raises(BatchError) as caught:
        engine.generate(prompts, params)
    assert sorted(caught.value.errors) == [3, 5, 8, 11, 17, 19]
    assert all(isinstance(error, ValueError) for error in caught.value.errors.values())
    alone = build(0).generate([p for i, p in enumerate(prompts) if i not in caught.value.errors], params[0])
    assert [c.text for c in caught.value.completions if c] == [c.text for c in alone]
    assert_idle(engine)


def test_no_thread_outlives_the_call(build, monkeypatch, assert_idle):
    before = set(threading.enumerate())
    engine = build(2)
    engine.generate(texts(20), SamplingParams(max_tokens=3))
    assert set(threading.enumerate()) <= before
    step, steps = engine.step, []

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(texts(200), SamplingParams(max_tokens=9))
    monkeypatch.undo()
    assert set(threading.enumerate()) <= before
    while engine.has_work():
        engine.step()
    assert_idle(engine)


@pytest.mark.parametrize("prompts", [["ab", "c"], [[1, 2]] * 40], ids=["few", "token ids"])
def test_threads_begin_only_where_they_are_worth_it(prompts, build, monkeypatch):
    monkeypatch.setattr(generation, "ThreadPoolExecutor", lambda *args, **more: pytest.fail("a thread was begun"))
    assert len(build(2).generate(prompts, SamplingParams(max_tokens=2))) == len(prompts)


def test_others_news_is_kept(build):
    engine = build(2)
    other = engine.submit("abc", SamplingParams(max_tokens=6, ignore_eos=True))
    engine.generate(texts(20), SamplingParams(max_tokens=12, ignore_eos=True))
    news = []
    while engine.has_work():
        news += engine.step()
    assert {out.request_id for out in news} == {other} and sum(len(out.new_token_ids) for out in news) == 6
    assert "".join(out.new_text for out in news) == next(o.completion for o in news if o.completion).text


@given(st.lists(st.integers(0, 257), max_size=40))
def test_a_text_written_at_once_is_the_stream_in_sum(byte_tokenizer, tokens):
    """Any bytes, so any broken characters."""
    stream = Detokenizer(byte_tokenizer, (), False)
    streamed = "".join(stream.add(token, search=True) for token in tokens) + stream.finish()
    assert PromptReader(byte_tokenizer, 258).write(tokens) == streamed


@pytest.fixture(scope="module")
def real_tokenizer():
    folder = Path.home() / ".cache/octavo/models/SmolLM2-135M-Instruct"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("make setup makes the embedded model")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 49_151), max_size=20))
def test_with_a_real_tokenizer(real_tokenizer, tokens):
    stream = Detokenizer(real_tokenizer, (), False)
    streamed = "".join(stream.add(token, search=True) for token in tokens) + stream.finish()
    assert PromptReader(real_tokenizer, 49_152).write(tokens) == streamed


def test_nonsense():
    for value in (-1, True, 1.5):
        with pytest.raises(ValueError, match="host_threads"):
            EngineConfig(host_threads=value)


class TestStageClock:
    def test_every_stage_is_seen_and_nothing_stays(self, build, monkeypatch):
        engine = build(2)
        owners = (engine._prompts, engine._scheduler, engine._runner)
        before = [set(vars(owner)) for owner in owners]
        times = iter(range(10_000))
        monkeypatch.setattr("octavo.core.inspection.stage_clock.time.perf_counter", lambda: float(next(times)))
        with StageClock(engine).running() as clock:
            engine.generate(texts(20), SamplingParams(max_tokens=4, ignore_eos=True))
        assert clock.seconds["tokenise"] >= 20 and clock.seconds["detokenise"] >= 20
        assert clock.seconds["plan"] > 0 and clock.seconds["compute"] > 0 and clock.wall_s > 0
        assert (clock.seconds["wait"] > 0) == (engine.config.execution == "graph")
        assert clock.percent("plan") == pytest.approx(100 * clock.seconds["plan"] / clock.wall_s)
        assert [set(vars(owner)) for owner in owners] == before

    def test_it_ends_with_its_block_however_that_ends(self, build):
        engine = build(0)
        with pytest.raises(BatchError), StageClock(engine).running():
            engine.generate(["NO"])
        assert "read_segments" not in vars(engine._prompts)
