"""Pages in host memory, read by heads that choose them: the same bits as in the pool, in less of it."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core import SamplingParams
from octavo.core.hosting.away import StepAway
from octavo.core.hosting.copies_ahead import CopiesAhead
from octavo.core.memory import transfer_costs
from octavo.core.step_plan import StepPlan
from octavo.sparse.host_placement import PREFETCHES, Host
from octavo.sparse.lossless import Lossless
from octavo.sparse.replacement.policies import REPLACEMENTS

from .method_cases import NAMES, SMALLER, make

BY_KEYS = ("oracle", "sparq", "tidal", "less_is_more", "hierarchical")
BY_DIGESTS = [name for name in NAMES if name not in (*BY_KEYS, "oracle_token")]
PROMPT = random.Random(3).choices(range(3, 128), k=90)  # 22 pages of 4 and an open one
UNIT_BYTES = 2 * 4 * 16 * 4


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


@pytest.fixture(scope="module")
def hosted_engine(engine_for):
    """``engine_for`` with a host tier full of NaN; the bus is not measured."""

    def build(model, **fields):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer_costs, "measure_bytes_per_s", lambda *_: 1e9)
            engine = engine_for(model, **{"host_tokens": 800, **fields})
        engine._host.kv.fill_(torch.nan)
        engine.costs.restore_is_cheaper = lambda *_: True
        return engine

    return build


def hosted(chosen, slack=8, **parts):
    return replace(chosen, placement=Host(slack, **parts))


def params(**kwargs):
    return SamplingParams(**{"max_tokens": 18, "ignore_eos": True, "seed": 1, "logprobs": 2, **kwargs})


def run(engine, drain, requests, after_step=None):
    """``requests``: id -> (prompt, params, method)."""
    for request_id, (prompt, sampling, one) in requests.items():
        engine.submit(prompt, sampling, method=one, request_id=request_id)
    return drain(engine, after_step).completions


def one(engine, drain, chosen, prompt=PROMPT, **sampling):
    return run(engine, drain, {"a": (prompt, params(**sampling), chosen)})["a"].samples[0]


def away(engine):
    return [sequence.away for sequence in engine._scheduler.running]


def assert_same(sample, expected):
    """Tokens, and their log-probabilities bit for bit; what attention and choosing read is the same too."""
    assert sample.token_ids == expected.token_ids and sample.logprobs == expected.logprobs
    assert sample.kv_bytes_read == expected.kv_bytes_read and sample.digest_bytes_read == expected.digest_bytes_read


@pytest.fixture(scope="module")
def in_pool(model, engine_for, drain):
    """What a method of the table gives with all pages in the pool."""
    return cache(lambda name: one(engine_for(model), drain, make(name)))


def _cells():
    """Every method with every prefetch; by default those whose guesses depend on the method."""
    for name in BY_DIGESTS:
        for prefetch in PREFETCHES:
            usual = name == "quest" or prefetch in ("none", "next_query")
            yield pytest.param(name, prefetch, marks=() if usual else pytest.mark.slow)


@pytest.mark.parametrize("name, prefetch", list(_cells()))
def test_bits_are_those_of_pages_in_the_pool(name, prefetch, model, in_pool, hosted_engine, drain,
                                             assert_nothing_pinned):  # fmt: skip
    engine = hosted_engine(model)
    sample = one(engine, drain, hosted(make(name), prefetch=prefetch))
    assert_same(sample, in_pool(name))
    assert 0 <= sample.resident_misses < sample.resident_lookups
    assert sample.resident_misses or prefetch == "next_query", "of what no query decides all may be foreseen"
    assert 0 <= sample.prefetched_read <= sample.pages_prefetched
    assert (sample.pages_prefetched > 0) is (prefetch != "none")
    assert sample.host_bytes_read == (sample.resident_misses + sample.pages_prefetched) * UNIT_BYTES
    assert (sample.prefetch_scoring_bytes_read > 0) is (prefetch == "next_query" and sample.digest_bytes_read > 0)
    assert_nothing_pinned(engine)


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("policy, backend", [("lru", "cpu"), *((name, "reference") for name in REPLACEMENTS)])
def test_no_policy_changes_a_bit(policy, prefetch, backend, model, engine_for, hosted_engine, drain):
    chosen = make("quest")
    engine = hosted_engine(model, backend=backend)
    sample = one(engine, drain, hosted(chosen, replacement=REPLACEMENTS[policy](), prefetch=prefetch))
    assert_same(sample, one(engine_for(model, backend=backend), drain, chosen))
    assert sample.host_bytes_read == (sample.resident_misses + sample.pages_prefetched) * UNIT_BYTES
    assert (sample.pages_prefetched > 0) is (prefetch != "none")


class LateCopies(CopiesAhead):
    """Copies ahead as late as the waits allow: what a GPU may do whose bus is slow. Copies are made in order."""

    def __init__(self, device):
        self.waiting = []

    def add(self, layer, copy, *read):
        self.waiting.append((layer, copy))

    def wait(self, layer):
        last = max((at for at, (other, _) in enumerate(self.waiting) if other == layer), default=-1)
        self.make(last + 1)

    def wait_all(self):
        self.make(len(self.waiting))

    def make(self, count):
        made, self.waiting = self.waiting[:count], self.waiting[count:]
        for _, copy in made:
            copy()


def copies_as(kind, monkeypatch):
    monkeypatch.setattr("octavo.core.hosting.hosted_pages.CopiesAhead", kind)


class TestLookingAhead:
    @pytest.mark.parametrize("prefetch", PREFETCHES[1:])
    def test_late_copies_change_no_bit(self, prefetch, model, engine_for, hosted_engine, drain, monkeypatch):
        copies_as(LateCopies, monkeypatch)
        chosen = make("quest", dense_layers=[])
        sample = one(hosted_engine(model), drain, hosted(chosen, prefetch=prefetch))
        assert_same(sample, one(engine_for(model), drain, chosen))
        assert sample.prefetched_read > 0

    @pytest.mark.parametrize("prefetch", PREFETCHES[1:])
    def test_frames_that_were_given_back(self, prefetch, model, engine_for, hosted_engine, drain, monkeypatch):
        """Copies to the frames of a request that was aborted are made before its units are another's."""
        copies_as(LateCopies, monkeypatch)
        chosen = make("quest", dense_layers=[])
        engine = hosted_engine(model, pool_tokens=28 * 4)
        engine.submit(PROMPT[::-1], params(), method=hosted(chosen, prefetch=prefetch), request_id="gone")
        for _ in range(4):
            engine.step()
        (copies,) = (each._ahead for each in engine._runner.hosted.values())
        under_way = len(copies.waiting)
        assert (under_way > 0) is (prefetch == "previous_step"), "others are waited for in the step that begins them"
        engine.abort("gone")
        engine.submit(PROMPT, params(), request_id="next")
        engine.step()
        copies.wait_all()  # whatever is under way still is done by now
        assert drain(engine).completions["next"].samples[0].token_ids == one(engine_for(model), drain, None).token_ids

    def test_what_a_layer_chooses_is_fetched_for_the_next(self, model, hosted_engine, drain, monkeypatch):
        """While layer 0 attends, after its own fetch, and waited for by layer 1; the last layer looks nowhere."""
        told = []

        class Told(CopiesAhead):
            def add(self, layer, copy, *read):
                told.append(("copies for", layer))
                super().add(layer, copy, *read)

            def wait(self, layer):
                told.append(("fetches", layer))

        copies_as(Told, monkeypatch)
        order = [("fetches", 0), ("copies for", 1), ("fetches", 1), ("copies for", 2), ("fetches", 2)]
        for prefetch in ("previous_layer", "next_query"):
            one(hosted_engine(model), drain, hosted(make("quest", dense_layers=[]), prefetch=prefetch), max_tokens=3)
            assert told == order * 2
            told.clear()
        one(hosted_engine(model), drain, hosted(make("quest", dense_layers=[1]), prefetch="previous_layer"))
        assert told[:3] == [("fetches", 0), ("copies for", 2), ("fetches", 2)]

    def test_layers_that_add_nothing_are_foreseen(self, make_llama, hosted_engine, drain, monkeypatch):
        """Then the queries are exactly those that come, and only the first layer ever waits for a page."""
        model, misses = make_llama(num_hidden_layers=3), Counter()
        with torch.no_grad():
            for layer in model.model.layers[:2]:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        fetch = StepAway.fetch

        def watched(away, layer, pages, frames, missing, *, ahead=False):
            if not ahead:
                misses[layer] += int(missing.sum())
            fetch(away, layer, pages, frames, missing, ahead=ahead)

        monkeypatch.setattr(StepAway, "fetch", watched)
        sample = one(hosted_engine(model), drain, hosted(make("quest", dense_layers=[]), prefetch="next_query"))
        assert misses[0] == sample.resident_misses > 0 == misses[1] == misses[2]
        assert sample.prefetched_read == sample.pages_prefetched > 0
        assert sample.prefetch_scoring_bytes_read * 3 == sample.digest_bytes_read * 2

    def test_layers_that_share_a_choice_are_foreseen(self, model, hosted_engine, drain):
        """Layers 1 and 2 read what layer 0 chose."""
        chosen = replace(make("quest", dense_layers=[]), choosing_layers=(0,))
        for prefetch, slack in (("previous_layer", 24), ("next_query", 0)):
            sample = one(hosted_engine(model), drain, hosted(chosen, slack, prefetch=prefetch))
            assert 0 < sample.prefetched_read == sample.pages_prefetched == 2 * sample.resident_misses
            assert sample.prefetch_scoring_bytes_read == 0

    def test_prompts_beside_it_ask_nothing(self, model, engine_for, hosted_engine, drain):
        """Rows that decode look ahead, whatever else the step computes."""
        chosen = make("quest")
        requests = {i: (PROMPT[k:] + PROMPT[:k], params(max_tokens=10, logprobs=None)) for k, i in enumerate("abcd")}
        results = []
        for engine, method in (
            (engine_for(model, step_tokens=40), chosen),
            (hosted_engine(model, step_tokens=40), hosted(chosen, prefetch="next_query")),
        ):
            done = run(engine, drain, {i: (*asked, method if i != "b" else None) for i, asked in requests.items()})
            results.append({i: completion.samples[0].token_ids for i, completion in done.items()})
        assert results[0] == results[1]
        assert done["a"].samples[0].prefetched_read > 0 == done["b"].samples[0].pages_prefetched

    def test_engines_of_two_threads(self, model, engine_for, hosted_engine, drain):
        """Hooks of one engine's pass see no pass of another's."""
        chosen = make("quest")
        expected = one(engine_for(model), drain, chosen, logprobs=None).token_ids
        engines = [hosted_engine(model) for _ in range(2)]
        ahead = hosted(chosen, prefetch="next_query")
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda engine: one(engine, drain, ahead, logprobs=None).token_ids, engines))
        assert found == [expected] * 2

    def test_layers_in_no_list(self, model, hosted_engine, monkeypatch):
        engine = hosted_engine(model)
        monkeypatch.setattr(engine._model, "model", torch.nn.Linear(1, 1))
        with pytest.raises(ValueError, match=r"keeps its 3 layers in no list, so what the next one asks cannot be"):
            engine.submit(PROMPT, method=hosted(make("quest"), prefetch="next_query"))


@pytest.mark.parametrize("page_tokens", [4, 12, 16])
@pytest.mark.parametrize("dense_layers", [[], [0], [0, 2]])
def test_pages_of_several_units_and_any_number_of_dense_layers(
    page_tokens, dense_layers, model, engine_for, hosted_engine, drain
):
    parts = {"dense_layers": dense_layers, "keep": {"sink_tokens": 4, "recent_tokens": 2 * page_tokens}}
    chosen = make("quest", 4 * page_tokens, **parts)
    prompt = random.Random(4).choices(range(3, 128), k=200)
    fields = {"page_tokens": page_tokens, "pool_tokens": 90 * page_tokens}
    seen = []
    engine = hosted_engine(model, **fields)
    sample = run(
        engine, drain, {"a": (prompt, params(), hosted(chosen, page_tokens))}, lambda _: seen.append(away(engine))
    )["a"].samples[0]
    assert_same(sample, one(engine_for(model, **fields), drain, chosen, prompt))
    full = len(prompt) // page_tokens
    if full - 2 > 5 + -(-(full - 2) * len(dense_layers) // 3):
        assert seen[1] == [full - 2], "all full pages but two recent ones leave with the first decoded token"
    else:
        assert max(map(max, filter(None, seen))) == 0, "frames would take more than they free"


def test_layers_with_a_window_keep_their_pages(g_model, engine_for, hosted_engine, drain):
    chosen = make("quest", dense_layers=[])
    engine = hosted_engine(g_model)
    seen = []
    sample = run(engine, drain, {"a": (PROMPT, params(), hosted(chosen))}, lambda _: seen.append(away(engine)))["a"]
    assert_same(sample.samples[0], one(engine_for(g_model), drain, chosen))
    assert seen[1] == [21] and seen[-2] == [25]


@pytest.fixture(scope="session")
def assert_nothing_pinned(assert_idle):
    def check(engine):
        assert_idle(engine)
        assert engine.stats().host_units_pinned == 0 and not engine._host._in
        assert all(not hosted._leaving for hosted in engine._runner.hosted.values())

    return check


class TestMemory:
    def test_what_stays_on_the_device(self, model, hosted_engine, drain):
        engine, stats = hosted_engine(model), []
        chosen = hosted(make("quest"), slack=8)  # 5 pages a head, and 2 more; layer 0 of 3 reads everything
        run(engine, drain, {"a": (PROMPT, params(), chosen)}, lambda _: stats.append(engine.stats()))
        after_prompt, first, last = stats[0], stats[1], stats[-2]
        assert (after_prompt.units_held, after_prompt.host_units_pinned) == (23, 0)
        # 21 pages of 22 are away; 7 frames, 7 pages of packed runs of layer 0, a recent page and the open one.
        assert (first.units_held, first.host_units_pinned) == (7 + 7 + 2, 21)
        assert (last.units_held, last.host_units_pinned) == (7 + 9 + 2, 25)
        assert first.host_units_held == 21 and first.units_held + first.units_cached + first.units_free == 100

    def test_more_requests_run_at_once(self, model, engine_for, hosted_engine, drain):
        """A pool of 60 pages holds two requests of 24 to 33 pages, or five of 9, prompt by prompt."""
        chosen = make("quest", dense_layers=[])
        prompts = {str(i): random.Random(i).choices(range(3, 128), k=92) for i in range(6)}
        peaks, results = [], []
        for engine, method in ((engine_for, chosen), (hosted_engine, hosted(chosen))):
            built = engine(model, pool_tokens=60 * 4, step_tokens=92)
            done = run(
                built,
                drain,
                {i: (prompt, params(max_tokens=32, logprobs=None), method) for i, prompt in prompts.items()},
            )
            results.append({i: completion.samples[0].token_ids for i, completion in done.items()})
            peaks.append(built.stats().running_peak)
        assert results[0] == results[1]
        assert peaks[1] >= 2 * peaks[0]

    def test_a_tier_without_room_leaves_pages_where_they_are(self, model, engine_for, hosted_engine, drain):
        chosen = make("quest")
        prompts = {i: random.Random(i).choices(range(3, 128), k=90) for i in "abc"}
        engine = hosted_engine(model, host_tokens=40 * 4, step_tokens=90)
        seen = set()
        together = run(
            engine, drain, {i: (prompt, params(), hosted(chosen)) for i, prompt in prompts.items()},
            lambda _: seen.add(tuple(away(engine))),
        )  # fmt: skip
        assert max(map(sum, seen)) <= 40 and any(0 in each and max(each) > 20 for each in seen)
        for i, prompt in prompts.items():
            assert together[i].samples[0].token_ids == one(engine_for(model), drain, chosen, prompt).token_ids

    @pytest.mark.parametrize("dense_layers", [[], [0]])
    def test_frames_in_place_of_pages(
        self, dense_layers, model, engine_for, hosted_engine, drain, assert_nothing_pinned
    ):
        """The prompt fills the pool but for three pages, fewer than frames take: pages that leave become frames."""
        chosen, stats = make("quest", dense_layers=dense_layers), []
        engine = hosted_engine(model, pool_tokens=26 * 4)
        engine.submit(PROMPT, params(max_tokens=12), method=hosted(chosen), request_id="a")
        sample = drain(engine, lambda _: stats.append(engine.stats())).completions["a"].samples[0]
        assert_same(sample, one(engine_for(model), drain, chosen, max_tokens=12))
        assert stats[1].units_held == 7 + 7 * len(dense_layers) + 2 and stats[1].host_units_pinned == 21
        assert stats[1].units_cached == 21 - 7 - 7 * len(dense_layers), "what became a frame is found in the host tier"
        assert_nothing_pinned(engine)
        again = one(engine, drain, None, max_tokens=2)
        assert again.token_ids == one(engine_for(model), drain, None, max_tokens=2).token_ids

    def test_pages_of_others_are_no_frames(self, model, engine_for, hosted_engine, drain, assert_nothing_pinned):
        """A dense request holds the same pages, and the pool is full: they stay where they are."""
        chosen = make("quest", dense_layers=[])
        engine = hosted_engine(model, pool_tokens=29 * 4)
        engine.submit(PROMPT, params(max_tokens=10), request_id="dense")
        engine.step()
        engine.submit(PROMPT, params(max_tokens=6), method=hosted(chosen), request_id="host")
        done = drain(engine).completions
        assert done["host"].samples[0].resident_lookups == 0
        assert done["host"].samples[0].token_ids == one(engine_for(model), drain, chosen, max_tokens=6).token_ids
        assert_nothing_pinned(engine)


class TestSharing:
    def test_a_prefix_is_in_the_host_tier_once(self, model, engine_for, hosted_engine, drain, assert_nothing_pinned):
        chosen, dense = make("quest"), []
        prompts = {"a": PROMPT, "b": PROMPT[:80] + PROMPT[:10]}
        engine = hosted_engine(model)
        methods = {"a": hosted(chosen), "b": hosted(chosen)}
        for i in prompts:
            engine.submit(prompts[i], params(), method=methods[i], request_id=i)
        together = drain(engine, lambda _: dense.append(engine.stats().host_units_pinned)).completions
        assert dense[2] == 21 + 1, "20 pages are shared, and each has one of its own"
        for i, prompt in prompts.items():
            assert together[i].samples[0].token_ids == one(engine_for(model), drain, chosen, prompt).token_ids
        assert_nothing_pinned(engine)

    def test_samples_of_one_prompt(self, model, engine_for, hosted_engine, drain, assert_nothing_pinned):
        chosen = make("quest")
        sampling = {"temperature": 0.9, "seed": 5, "logprobs": None, "max_tokens": 20}
        engine = hosted_engine(model)
        forked = run(engine, drain, {"a": (PROMPT, params(n=3, **sampling), hosted(chosen))})["a"]
        expected = run(engine_for(model), drain, {"a": (PROMPT, params(n=3, **sampling), chosen)})["a"]
        assert [s.token_ids for s in forked.samples] == [s.token_ids for s in expected.samples]
        assert all(sample.resident_lookups for sample in forked.samples)
        assert_nothing_pinned(engine)

    def test_beside_others_of_the_same_batch(self, model, engine_for, hosted_engine, drain, assert_nothing_pinned):
        """Dense, in the pool, in the host tier, drafting, and short ones, of which nothing is away."""
        quest, arkvale = make("quest"), make("arkvale")
        requests = {
            "dense": (PROMPT, None), "pool": (PROMPT, quest), "host": (PROMPT, hosted(quest)),
            "other": (PROMPT[5:], hosted(quest, 4)), "arkvale": (PROMPT, hosted(arkvale)),
            "short": (PROMPT[:30], hosted(quest)),  # its frames would take what its pages do
            "drafts": (PROMPT, Lossless(quest, 3)),
        }  # fmt: skip
        engine = hosted_engine(model)
        together = run(engine, drain, {i: (prompt, params(), chosen) for i, (prompt, chosen) in requests.items()})
        assert {i: c.samples[0].resident_lookups > 0 for i, c in together.items()} == {
            "dense": False, "pool": False, "host": True, "other": True, "arkvale": True, "short": False,
            "drafts": False,
        }  # fmt: skip
        for i, (prompt, chosen) in requests.items():
            in_pool = i in ("dense", "pool", "drafts")
            alone = one(engine_for(model) if in_pool else hosted_engine(model), drain, chosen, prompt)
            assert together[i].samples[0].token_ids == alone.token_ids
        assert together["drafts"].samples[0].token_ids == together["dense"].samples[0].token_ids
        assert together["drafts"].samples[0].drafts.accepted > 0
        assert_nothing_pinned(engine)

    def test_a_dense_request_finds_the_exact_pages(self, model, engine_for, hosted_engine, drain):
        """They come back out of the host tier; what the method has shaped does not."""
        engine = hosted_engine(model, pool_tokens=40 * 4)
        first = one(engine, drain, hosted(make("quest")))
        pages = engine._pool.allocate(engine._pool.available)  # the device forgets everything
        engine._pool.release(pages)
        longer = PROMPT + first.token_ids
        after = run(engine, drain, {"d": (longer, params(max_tokens=6), None)})["d"]
        assert after.cached_tokens == 88
        assert after.samples[0].token_ids == one(engine_for(model), drain, None, longer, max_tokens=6).token_ids


class TestLife:
    @pytest.mark.parametrize("steps", [2, 9, 15])
    def test_preempted_and_resumed(self, steps, model, engine_for, hosted_engine, drain, assert_nothing_pinned):
        chosen = make("quest")
        engine = hosted_engine(model)
        engine.submit(PROMPT, params(), method=hosted(chosen), request_id="a")
        for _ in range(steps):
            engine.step()
        (sequence,) = engine._scheduler.running
        assert sequence.away >= 21
        engine._scheduler._preempt(sequence, StepPlan())
        engine.check()
        assert engine.stats().units_held == engine.stats().host_units_pinned == 0
        sample = drain(engine).completions["a"].samples[0]
        assert sample.token_ids == one(engine_for(model), drain, chosen).token_ids
        assert_nothing_pinned(engine)

    def test_preemption_when_memory_is_short(self, model, engine_for, hosted_engine, drain, assert_nothing_pinned):
        """An urgent request takes the frames of two others."""
        chosen = make("quest")
        prompts = {str(i): random.Random(i).choices(range(3, 128), k=70 + i) for i in range(2)}
        engine = hosted_engine(model, pool_tokens=34 * 4)
        for i, prompt in prompts.items():
            engine.submit(prompt, params(), method=hosted(chosen), request_id=i)
        for _ in range(4):
            engine.step()
        engine.submit(PROMPT, params(max_tokens=4), request_id="urgent", priority=1)
        together = drain(engine).completions
        assert engine.stats().preemptions > 0
        for i, prompt in prompts.items():
            alone = one(engine_for(model), drain, chosen, prompt)
            assert together[i].samples[0].token_ids == alone.token_ids
        assert_nothing_pinned(engine)

    def test_aborted(self, model, hosted_engine, assert_nothing_pinned):
        engine = hosted_engine(model)
        engine.submit(PROMPT, params(), method=hosted(make("quest")), request_id="a")
        for _ in range(3):
            engine.step()
        assert away(engine) == [21] and engine.stats().host_units_pinned == 21
        engine.abort("a")
        engine.step()
        assert_nothing_pinned(engine)
        assert engine.stats().host_units_held == 21, "they stay findable"

    def test_turns_of_a_session(self, model, engine_for, hosted_engine, assert_nothing_pinned):
        chosen, outputs = make("quest"), []
        for engine, method in ((engine_for(model), chosen), (hosted_engine(model), hosted(chosen))):
            session = engine.session(PROMPT, method=method)
            session.generate(params(max_tokens=10))
            session.append(PROMPT[:9])
            twin = session.fork()
            outputs.append([s.generate(params(max_tokens=10)).samples[0].token_ids for s in (session, twin)])
            session.close()
            twin.close()
            engine.check()
        assert outputs[0] == outputs[1]
        assert_nothing_pinned(engine)

    def test_a_score_is_that_of_pages_in_the_pool(self, model, engine_for, hosted_engine):
        chosen, target = make("quest"), PROMPT[:20]
        engine = hosted_engine(model)
        assert engine.score(PROMPT, target, method=hosted(chosen)) == engine_for(model).score(
            PROMPT, target, method=chosen
        )
        assert engine._runner.hosted

    def test_a_step_that_fails_is_made_again(self, model, engine_for, hosted_engine, drain, monkeypatch):
        """The first decode step fails when pages have left, and when they are just leaving."""
        chosen = make("quest")
        for where in (
            "octavo.core.execution.page_copies.PageCopies.carry_out",
            "octavo.core.hf_model.HFModel.forward",
        ):
            engine = hosted_engine(model)
            engine.submit(PROMPT, params(), method=hosted(chosen), request_id="a")
            engine.step()
            with monkeypatch.context() as patch:

                def fail(*_, **__):
                    raise MemoryError("no")

                patch.setattr(where, fail)
                with pytest.raises(MemoryError):
                    engine.step()
            engine.check()
            expected = one(engine_for(model), drain, chosen)
            assert drain(engine).completions["a"].samples[0].token_ids == expected.token_ids

    @pytest.mark.parametrize("grown", ["host_units", "frame_units", "digest_rows", "sets"])
    def test_maps_that_could_not_grow_grow_again(
        self, grown, model, engine_for, hosted_engine, drain, monkeypatch, assert_nothing_pinned
    ):
        """Rows come with sequences and columns with pages. What had been taken for the pages that leave is given back,
        and those that are away already stay."""
        chosen, long = make("quest"), params(max_tokens=40)
        asked = {"a": (PROMPT[:50], long, hosted(chosen)), "b": (PROMPT[::-1], long, hosted(chosen))}
        expected = run(engine_for(model), drain, {name: (*one[:2], chosen) for name, one in asked.items()})
        engine, failed = hosted_engine(model, step_tokens=60), []
        hold = {"cat": torch.cat, "pad": torch.nn.functional.pad}

        def fails_once(name):
            def grow(tensor, *args, **kwargs):
                one = tensor[0] if isinstance(tensor, list) else tensor
                hosts = [*engine._runner.hosted.values()]
                of = next((h.sets.frame_of if grown == "sets" else getattr(h, grown) for h in hosts), None)
                if one is of and name not in failed:
                    failed.append(name)
                    raise MemoryError("no")
                return hold[name](tensor, *args, **kwargs)

            return grow

        monkeypatch.setattr(torch, "cat", fails_once("cat"))
        monkeypatch.setattr(torch.nn.functional, "pad", fails_once("pad"))
        for name, (prompt, sampling, one) in asked.items():
            engine.submit(prompt, sampling, method=one, request_id=name)
        done = {}
        while engine.has_work():
            with suppress(MemoryError):
                done |= {out.request_id: out.completion for out in engine.step() if out.completion}
            engine.check()
        assert sorted(failed) == (["cat"] if grown == "frame_units" else ["cat", "pad"])
        for name in asked:
            assert done[name].samples[0].token_ids == expected[name].samples[0].token_ids
        assert_nothing_pinned(engine)

    @pytest.mark.parametrize("prefetch", PREFETCHES)
    @pytest.mark.parametrize("call", [0, 3, 10])
    def test_a_step_that_ends_where_pages_have_frames_and_have_not_come(
        self, call, prefetch, model, in_pool, hosted_engine, drain, monkeypatch, assert_nothing_pinned
    ):
        """As Ctrl-C may end it. Waits that have begun are forgotten, too."""
        engine = hosted_engine(model)
        engine.submit(PROMPT, params(), method=hosted(make("quest"), prefetch=prefetch), request_id="a")
        fetch, calls = StepAway.fetch, []

        def leave(away, *args, **kwargs):
            calls.append(away)
            if len(calls) == call + 1:
                away.waits.mark()
                raise KeyboardInterrupt
            return fetch(away, *args, **kwargs)

        monkeypatch.setattr(StepAway, "fetch", leave)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(20):
                engine.step()
        engine.check()
        assert not any(layer._forward_pre_hooks for layer in model.modules())
        sample = drain(engine).completions["a"].samples[0]
        assert (sample.token_ids, sample.logprobs) == (in_pool("quest").token_ids, in_pool("quest").logprobs)
        assert 0 <= engine.stats().host_wait_s < 600
        assert_nothing_pinned(engine)

    def test_steps_are_not_replayed(self, model, engine_for, hosted_engine, drain):
        chosen = make("quest")
        engine = hosted_engine(model, execution="graph")
        assert one(engine, drain, hosted(chosen), logprobs=None).resident_lookups > 0


class TestRefusals:
    def test_without_a_host_tier(self, model, engine_for):
        with pytest.raises(ValueError, match=r"quest keeps its pages in host memory, and host_tokens=0 .* least 256"):
            engine_for(model).submit(PROMPT, method=hosted(make("quest")))
        with pytest.raises(ValueError, match="host_tokens=0"):
            engine_for(model, method=hosted(make("quest")))

    def test_a_request_larger_than_the_tier(self, model, hosted_engine, drain):
        engine = hosted_engine(model, host_tokens=30 * 4)
        with pytest.raises(ValueError, match=r"32 pages of a request of 90 \+ 40 tokens .* 32 units, .* tier has 30"):
            engine.submit(PROMPT, params(max_tokens=40), method=hosted(make("quest")))
        assert one(engine, drain, hosted(make("quest")), max_tokens=12).resident_lookups > 0

    def test_layers_with_a_window_in_the_same_tables(self, g_model, hosted_engine):
        with pytest.raises(
            ValueError, match=r"layers of .* with a window would miss them there; set layer_groups=True"
        ):
            hosted_engine(g_model, layer_groups=False).submit(PROMPT, method=hosted(make("quest", dense_layers=[])))

    @pytest.mark.parametrize("name", BY_KEYS)
    def test_scorers_that_read_keys(self, name, model, hosted_engine):
        chosen = hosted(make(name, **({"choosing_layers": [1]} if "choosing_layers" in SMALLER.get(name, {}) else {})))
        with pytest.raises(
            ValueError, match=r"reads keys of (all|some) pages to choose, and .* leaves them in host memory"
        ):
            hosted_engine(model).submit(PROMPT, method=chosen)

    @pytest.mark.parametrize(
        "parts, message",
        [
            ({"slack_tokens": -1}, "placement.slack_tokens must be an integer of at least 0, got -1"),
            (
                {"prefetch": "next"},
                "placement.prefetch='next' is none of: none, previous_step, previous_layer, next_query",
            ),
            ({"prefetch": "previous_step", "slack_tokens": 0}, "slack_tokens=0 leaves none"),
            ({"prefetch": "previous_layer", "slack_tokens": 0}, "slack_tokens=0 leaves none"),
        ],
    )
    def test_parameters(self, parts, message):
        with pytest.raises(ValueError, match=message):
            Host(**parts)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def traffic(model, engine_for, hosted_engine, assert_nothing_pinned, monkeypatch_module):
    """A machine of random requests; whatever happens, each gets the tokens that it gets alone and in the pool."""
    quest = make("quest")
    alone = {}

    def expected(prompt, new):
        if (prompt, new) not in alone:
            engine = engine_for(model)
            name = engine.submit(list(prompt), params(max_tokens=new, logprobs=None), method=quest)
            alone[prompt, new] = engine.finish([name])[name].samples[0].token_ids
        return alone[prompt, new]

    class Traffic(RuleBasedStateMachine):
        @initialize(policy=st.sampled_from(sorted(REPLACEMENTS)), prefetch=st.sampled_from(PREFETCHES),
                    pool=st.sampled_from([50, 80]), host=st.sampled_from([45, 200]),
                    copies=st.sampled_from([CopiesAhead, LateCopies]))  # fmt: skip
        def build(self, policy, prefetch, pool, host, copies):
            copies_as(copies, monkeypatch_module)
            self.engine = hosted_engine(model, pool_tokens=pool * 4, host_tokens=host * 4)
            self.methods = [None, quest, hosted(quest, replacement=REPLACEMENTS[policy](), prefetch=prefetch)]
            self.asked = {}

        @rule(start=st.integers(0, 3), length=st.sampled_from([20, 60, 90]), new=st.sampled_from([3, 20, 40]),
              kind=st.sampled_from([0, 1, 2, 2, 2]))  # fmt: skip
        def submit(self, start, length, new, kind):
            prompt = tuple((PROMPT + PROMPT)[start // 2 * 40 : start // 2 * 40 + length])
            name = self.engine.submit(list(prompt), params(max_tokens=new, logprobs=None), method=self.methods[kind])
            self.asked[name] = (prompt, new) if kind else None

        @rule(steps=st.integers(1, 12))
        def step(self, steps):
            for _ in range(steps if self.engine.has_work() else 0):
                self.take(self.engine.step())
                self.engine.check()
                if not self.engine.has_work():
                    break

        @precondition(lambda self: self.asked)
        @rule(which=st.integers(0, 9))
        def abort(self, which):
            name = sorted(self.asked)[which % len(self.asked)]
            self.engine.abort(name)

        @precondition(lambda self: self.engine._scheduler.running)
        @rule(which=st.integers(0, 9))
        def preempt(self, which):
            running = self.engine._scheduler.running
            self.engine._scheduler.preempt(running[which % len(running)])

        def take(self, outputs):
            for output in outputs:
                if output.completion is not None:
                    asked = self.asked.pop(output.request_id)
                    sample = output.completion.samples[0]
                    if asked is not None and sample.finish_reason == "length":
                        assert sample.token_ids == expected(*asked)

        @invariant()
        def holds(self):
            if hasattr(self, "engine"):
                self.engine.check()

        def teardown(self):
            if hasattr(self, "engine"):
                while self.engine.has_work():
                    self.take(self.engine.step())
                assert_nothing_pinned(self.engine)

    return Traffic


def test_random_traffic(traffic):
    from hypothesis import settings
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(traffic, settings=settings(max_examples=12, stateful_step_count=15, derandomize=True))


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_bits_are_the_same_on_a_gpu(prefetch, make_llama, engine_for, hosted_engine, drain):
    """Triton kernels, pinned memory, and fetches ahead on a stream of their own. One request at a time: who decodes
    beside it decides where the kernel divides a row, and so the order of its sums."""
    model = make_llama(num_hidden_layers=3).to("cuda")
    chosen = make("quest")
    fields = {"backend": "triton", "execution": "eager"}
    results = []
    for engine, method in ((engine_for, chosen), (hosted_engine, hosted(chosen, prefetch=prefetch))):
        served = engine(model, **fields)
        done = [run(served, drain, {"one": (PROMPT[i:], params(), method)})["one"] for i in range(4)]
        results.append([(completion.samples[0].token_ids, completion.samples[0].logprobs) for completion in done])
    assert results[0] == results[1]
