"""What goes wrong in the middle of a step: nothing is lost, nothing is wrong afterwards."""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.execution import device_tables
from octavo.core.execution.device_tables import DeviceTables
from octavo.core.execution.token_list import TokenList
from octavo.core.memory.block_table import BlockTable
from octavo.core.sequence import Sequence
from octavo.core.serving.requests import new_request
from octavo.scripts.build import method

GREEDY = {"ignore_eos": True, "max_tokens": 9}


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


def once(function, error, at=1):
    """``function``, but its first call, or the one ``at`` a place, raises."""
    calls = count(1)

    def wrapped(*args, **kwargs):
        if next(calls) == at:
            raise error
        return function(*args, **kwargs)

    return wrapped


def broken_sampler(engine, monkeypatch):
    from octavo.core import engine as module

    monkeypatch.setattr(module, "sample", once(module.sample, MemoryError("sort")))


def broken_tables(engine, monkeypatch):
    tables = engine._runner._tables
    tables.entries = BrokenOnce(tables.entries)


class BrokenOnce:
    """The device table, whose first update fails."""

    def __init__(self, entries):
        self._entries, self._left = entries, [MemoryError("copy")]

    def view(self, *shape):
        if self._left:
            raise self._left.pop()
        return self._entries.view(*shape)

    def __getattr__(self, name):
        return getattr(self._entries, name)

    def __getitem__(self, key):
        return self._entries[key]


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
@pytest.mark.parametrize("damage", [broken_sampler, broken_tables])
def test_a_step_that_fails_is_made_again(damage, steps, t_model, engine_for, drain, assert_idle, monkeypatch):
    prompts = {"a": tokens(11), "b": tokens(6, 1)}
    expected = {}
    for name, prompt in prompts.items():
        expected[name] = engine_for(t_model).generate([prompt], SamplingParams(**GREEDY))[0].samples[0].token_ids
    engine = engine_for(t_model)
    for name, prompt in prompts.items():
        engine.submit(prompt, SamplingParams(**GREEDY), request_id=name)
    early = [news for _ in range(steps) for news in engine.step()]
    damage(engine, monkeypatch)
    with pytest.raises(MemoryError):
        for _ in range(20):
            early += engine.step()
    engine.check()
    drained = drain(engine)
    assert {name: drained.completions[name].samples[0].token_ids for name in prompts} == expected
    assert_idle(engine)


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_a_page_of_its_own_is_filled_though_planning_failed_behind_it(
    execution, t_model, engine_for, drain, assert_idle, monkeypatch
):
    """Two of three samples take a copy of the page that they share, the second of them at the second try."""
    params = SamplingParams(n=3, temperature=1.0, seed=0, **GREEDY)
    (expected,) = engine_for(t_model).generate([tokens(6)], params)
    engine = engine_for(t_model, execution=execution)
    engine.submit(tokens(6), params, request_id="a")
    engine.step()
    copy, calls = BlockTable.copy_on_write, []

    def second_fails(table, page):
        calls.append(page)
        if len(calls) == 2:
            raise MemoryError("table")
        return copy(table, page)

    monkeypatch.setattr(BlockTable, "copy_on_write", second_fails)
    with pytest.raises(MemoryError):
        while True:
            engine.step()
    assert drain(engine).completions["a"].samples == expected.samples and len(calls) == 3
    assert_idle(engine)


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("where", ["enter", "published", "publish_each"])
@pytest.mark.parametrize("model", ["t_model", "g_model"])
def test_pages_that_could_not_be_published_are_published_by_the_next_step(
    model, where, at, request, engine_for, drain, assert_idle, monkeypatch
):
    """Samples that share pages, and another request that begins like them."""
    model, params, hits = request.getfixturevalue(model), SamplingParams(n=2, **GREEDY), []
    for fails in (False, True):
        engine = engine_for(model, page_tokens=4, step_tokens=16)
        owner = {"enter": engine._pool.index, "published": engine._scheduler, "publish_each": engine._pool}[where]
        if fails:
            monkeypatch.setattr(owner, where, once(getattr(owner, where), MemoryError("index"), at))
        for name, prompt in {"a": tokens(14), "b": [*tokens(9), 5, 6, 7]}.items():
            engine.submit(prompt, params, request_id=name)
        failures = 0
        while engine.has_work():
            try:
                engine.step()
            except MemoryError:
                failures += 1
            engine.check()
        assert failures == fails
        before = engine.stats().hit_tokens
        engine.generate([tokens(14)], SamplingParams(**GREEDY))
        hits.append(engine.stats().hit_tokens - before)
        assert_idle(engine)
    assert hits[0] == hits[1] > 0


def test_a_row_that_could_not_be_moved_is_moved_again(t_model, engine_for, drain, assert_idle, monkeypatch):
    """Replayed steps take the lowest rows, so those of who came last move when the first ones end."""
    lengths = {"a": 4, "b": 9, "c": 12}
    params = {name: SamplingParams(max_tokens=new, ignore_eos=True) for name, new in lengths.items()}
    expected = {
        name: engine_for(t_model).generate([tokens(11, new)], params[name])[0].samples[0].token_ids
        for name, new in lengths.items()
    }
    engine, close_gaps = engine_for(t_model, execution="graph"), DeviceTables.close_gaps
    broken = once(device_tables.upload, MemoryError("copy"))

    def close(self):
        with monkeypatch.context() as patch:
            patch.setattr(device_tables, "upload", broken)
            return close_gaps(self)

    monkeypatch.setattr(DeviceTables, "close_gaps", close)
    for name, new in lengths.items():
        engine.submit(tokens(11, new), params[name], request_id=name)
    done = {}
    with pytest.raises(MemoryError):
        while True:
            done |= {out.request_id: out.completion for out in engine.step() if out.completion}
    done |= drain(engine).completions
    assert {name: done[name].samples[0].token_ids for name in lengths} == expected
    assert_idle(engine)


def test_a_prompt_that_breaks_the_tokenizer_is_refused_alone(t_model, engine_for, byte_tokenizer):
    from octavo.core import BatchError, Engine, EngineConfig
    from octavo.core.serving.prompts import PromptReader

    class Strict:
        def __call__(self, text, add_special_tokens=True):
            if text == "bad":
                raise TypeError("surrogates")
            return {"input_ids": [5, 6]}

        def decode(self, ids, **_):
            return "x" * len(ids)

        eos_token_id = None

    engine = Engine(t_model, Strict(), EngineConfig(page_tokens=4, pool_tokens=400))
    with pytest.raises(BatchError, match="cannot read 'bad': surrogates") as caught:
        engine.generate(["good", "bad"], SamplingParams(**GREEDY))
    assert caught.value.completions[0].samples[0].finish_reason == "length"
    assert not engine.has_work()
    with pytest.raises(ValueError, match="needs a tokenizer"):
        PromptReader(None, 10).read("x")


@pytest.mark.parametrize("prompts", [None, 5])
def test_prompts_must_be_a_list(prompts, t_model, engine_for):
    with pytest.raises(ValueError, match="must be a list of prompts"):
        engine_for(t_model).generate(prompts)


def test_a_method_is_not_a_name(t_model, engine_for):
    with pytest.raises(ValueError, match="'quest' is no sparse method"):
        engine_for(t_model).submit(tokens(4), method="quest")
    with pytest.raises(ValueError, match="'quest' is no sparse method"):
        engine_for(t_model, method="quest")


def test_one_thread_at_a_time(t_model, engine_for):
    engine = engine_for(t_model)
    engine.submit(tokens(4), SamplingParams(**GREEDY))
    seen = []
    forward = engine._runner.run

    def intrude():
        with pytest.raises(RuntimeError, match="another thread"):
            engine.step()
        seen.append("refused")

    def slow(*args):
        other = threading.Thread(target=intrude)
        other.start()
        other.join()
        return forward(*args)

    engine._runner.run = slow
    engine.step()
    assert seen == ["refused"]


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("models", [(0, 1), (0, 0)], ids=["two_models", "one_model"])
def test_engines_of_several_threads(models, execution, make_llama, engine_for):
    """Their passes take turns: what is put up for one is not taken down by another."""
    made = [make_llama(seed=seed) for seed in set(models)]
    prompts = [tokens(9, seed) for seed in range(3)]

    def generate(model):
        engine = engine_for(model, backend="cpu", execution=execution)
        return [[c.samples[0].token_ids for c in engine.generate(prompts, SamplingParams(**GREEDY))] for _ in range(4)]

    expected = [generate(made[model]) for model in models]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(models)) as threads:
            found = list(threads.map(generate, [made[model] for model in models]))
    finally:
        sys.setswitchinterval(interval)
    assert found == expected
    assert all(model.config._attn_implementation != "octavo" for model in made)


def test_the_callers_autocast_does_not_reach_the_model(t_model, engine_for):
    expected = engine_for(t_model).generate([tokens(9)], SamplingParams(**GREEDY))[0].samples[0].token_ids
    with torch.autocast("cpu", torch.bfloat16):
        got = engine_for(t_model, backend="cpu").generate([tokens(9)], SamplingParams(**GREEDY))
    assert got[0].samples[0].token_ids == expected


def test_a_rewritten_page_gets_a_new_digest(make_llama, engine_for):
    """A turn is cut back across a page that was full and digested; the page is written again."""
    model = make_llama(num_hidden_layers=3)
    quest = method("quest", budget_tokens=12, keep={"sink_tokens": 4, "recent_tokens": 0}, dense_layers=[])
    for seed in range(6):
        engine = engine_for(model, prefix_cache=False)
        session = engine.session(tokens(30, seed), method=quest)
        session.generate(SamplingParams(max_tokens=8, ignore_eos=True))
        cut = session._parked
        session.tokens = session.tokens[:33]
        session._spans = [session._spans[0]._replace(stop=33)]
        cut.truncate(33)
        session.append(tokens(9, seed + 50))
        got = session.generate(SamplingParams(max_tokens=8, ignore_eos=True))
        engine.check()
        fresh = engine_for(model, prefix_cache=False).session(tokens(30, seed), method=quest)
        fresh.generate(SamplingParams(max_tokens=8, ignore_eos=True))
        fresh.tokens, fresh._spans = session.tokens[: -len(got.samples[0].token_ids)], session._spans[:1]
        fresh._parked.rewind()
        again = fresh.generate(SamplingParams(max_tokens=8, ignore_eos=True))
        assert got.samples[0].token_ids == again.samples[0].token_ids


def test_pages_that_a_drawing_method_shaped_belong_to_its_seed(make_llama, engine_for):
    model = make_llama(num_hidden_layers=3)
    drawing = method("random", budget_tokens=12, keep={"sink_tokens": 4, "recent_tokens": 0}, dense_layers=[])
    engine, prompt = engine_for(model), tokens(45)
    first = engine.submit(prompt, SamplingParams(seed=1, **GREEDY), method=drawing)
    shaped = engine.finish([first])[first].samples[0].token_ids
    keys = []
    for seed in (1, 2):
        request = new_request(engine, prompt, SamplingParams(seed=seed), None, drawing, 0, None)
        keys.append(Sequence(request, 0, TokenList(prompt + shaped), engine._pool, engine._plan).keys(12))
    assert [one == other for one, other in zip(*keys, strict=True)] == [True] * 11 + [False]


def test_rows_that_fit_their_budget_cost_nothing_to_choose(make_llama, engine_for):
    model = make_llama(num_hidden_layers=3)
    quest = method("quest", budget_tokens=16, keep={"sink_tokens": 4, "recent_tokens": 0}, dense_layers=[])
    engine = engine_for(model)
    short = engine.submit(tokens(4), SamplingParams(**GREEDY), method=quest)
    long = engine.submit(tokens(60), SamplingParams(**GREEDY), method=quest)
    done = engine.finish([short, long])
    assert done[short].samples[0].digest_bytes_read == 0 < done[long].samples[0].digest_bytes_read
