"""A pool seen from outside, unit by unit and step by step, against a walk that looks every token up."""

import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.core import SamplingParams
from octavo.core.inspection import page_watch
from octavo.core.inspection.page_census import (
    ABSENT,
    CACHED,
    CELL,
    FREE,
    HELD,
    HOST,
    IMAGE,
    MAX_REQUESTS,
    SHARED,
    PageCensus,
    units_by_request,
)
from octavo.core.inspection.page_watch import Frame, PageWatch
from octavo.core.serving.prompts import TokenSegment

GREEDY = {"ignore_eos": True}


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


@pytest.fixture(scope="module")
def two_windows():
    """Every second of four layers has a window of 8: two groups, in units of two layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, use_sliding_window=True, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()


def walk(engine):
    """Unit -> (state, request or None if it may be anybody's, tokens), by asking for every single token's slot."""
    pool, unit_tokens = engine._pool, engine.config.unit_tokens
    found = {unit: (FREE if unit <= pool.total_units else ABSENT, None, 0) for unit in range(1, 1 + pool.most_units)}
    for page in np.flatnonzero(pool.refs == 0).tolist():
        if page in pool.index:
            slices = engine._plan.groups[pool.index.group(page)].slices
            units = pool.units_of(np.array([page], np.int32), int(pool.size[page]))[0].reshape(slices, -1)
            for token in range(units.shape[1] * unit_tokens):
                for unit in units[:, token // unit_tokens].tolist():
                    before = found[unit][2] if found[unit][0] == CACHED else 0
                    found[unit] = CACHED, None, before + (token < len(pool.index.node(page).tokens))
    holders = {}
    for sequence in sorted([*engine._scheduler.running, *engine._scheduler.parked], key=lambda s: s.request.arrival):
        for table in sequence.tables:
            entries = table.entries(0, table.n_pages, sequence.layout)
            for unit in filter(None, entries.ravel().tolist()):
                holders.setdefault(unit, []).append((sequence, table, entries))
    for unit, listed in holders.items():
        sequence, _, entries = listed[0]
        entry = int(np.argwhere(entries == unit)[0][1])
        slots = sequence.layout.slots(0, sequence.computed) // unit_tokens
        layout = sequence.layout
        first = [layout.first_entry(page) for page in range(sequence.table.n_pages)]
        kind = layout.kind(max(page for page, start in enumerate(first) if start <= entry))
        state = SHARED if len(listed) > 1 else IMAGE if kind == "image" else HELD
        found[unit] = (state, sequence.request.request_id, int((slots == entry).sum()))
    return found


def same(cells, requests, engine):
    """What cells say is what a walk finds."""
    for unit, (state, request, count) in walk(engine).items():
        cell = cells[unit]
        assert (int(cell["state"]), int(cell["tokens"])) == (state, count), unit
        if request is not None:
            assert requests[cell["request"] - 1] == request
        assert (cell["page"] == 0) == (state in (FREE, ABSENT))


class TestCensus:
    def test_every_state_of_a_small_pool(self, t_model, engine_for):
        engine = engine_for(t_model, pool_tokens=40)
        engine.generate([tokens(8)], SamplingParams(max_tokens=1, **GREEDY))
        engine.submit([*tokens(8), 5], SamplingParams(max_tokens=4, n=2, temperature=1.0, **GREEDY), request_id="a")
        engine.submit(tokens(6, 1), SamplingParams(max_tokens=4, **GREEDY), request_id="b")
        engine.step()
        engine.step()
        census = PageCensus()
        cells = census.take(engine)
        assert census.requests == ["b", "a"]
        assert [(STATE[s], census.requests[r - 1] if r else "-", n) for _, r, s, n in cells[1:8].tolist()] == [
            ("shared", "a", 4),
            ("shared", "a", 4),
            ("held", "a", 2),
            ("held", "b", 4),
            ("held", "b", 3),
            ("held", "a", 2),  # the other sample's own copy of the last page
            ("free", "-", 0),
        ]
        assert cells["page"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0]
        assert census.tables.tolist() == [0, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0]
        assert units_by_request(engine) == {"a": 4, "b": 2}

    def test_a_cached_page_stays_its_request_s_until_others_have_it(self, t_model, engine_for):
        engine, census = engine_for(t_model, pool_tokens=16), PageCensus()
        for name, seed in (("a", 0), ("b", 1)):
            engine.submit(tokens(8, seed), SamplingParams(max_tokens=2, **GREEDY), request_id=name)
            while engine.has_work():
                engine.step()
                census.take(engine)
            cached = census.cells[census.cells["state"] == CACHED]
            owners = [census.requests[r - 1] for r in cached["request"].tolist()]
            assert owners == ["a"] * 2 if name == "a" else sorted(owners) == ["a", "b", "b"]
        blind = PageCensus().take(engine)
        assert set(blind["request"][blind["state"] == CACHED].tolist()) == {0}

    @pytest.mark.parametrize("kind", ["plain", "window", "two_windows", "segments", "host", "elastic", "large_pages"])
    def test_it_is_what_a_walk_finds_after_every_step(self, request, t_model, engine_for, kind):
        """Shared prompts, samples, sessions, preemption, eviction; layouts of every kind."""
        model = request.getfixturevalue({"window": "w_model", "two_windows": "two_windows"}.get(kind, "t_model"))
        fields = {
            "plain": {},
            "window": {},
            "two_windows": {"pool_tokens": 80},
            "segments": {"page_policies": {"image": 6}},
            "host": {"host_tokens": 64},
            "elastic": {"base_share": 0.25, "growth_tokens": 12},
            "large_pages": {"page_tokens": 6},
        }[kind]
        engine = engine_for(model, **{"pool_tokens": 60, "max_seqs": 4, **fields})
        engine.costs.restore_is_cheaper = lambda *facts: True  # or else the speed of this machine decides
        watch = engine.watch = PageWatch()
        rng, seen = random.Random(1), []
        session = engine.session(tokens(5, 9))
        shared = tokens(10, 7)
        for number in range(12):
            prompt = shared[: rng.randrange(11)] + tokens(rng.randrange(1, 12), number)
            if kind == "segments" and number % 2:
                prompt = [TokenSegment("text", prompt), TokenSegment("image", tokens(7, number % 4))]
            engine.submit(
                prompt,
                SamplingParams(max_tokens=rng.randrange(1, 9), n=rng.choice([1, 1, 3]), temperature=1.0, **GREEDY),
            )
            if number % 4 == 0 and session._busy is None:
                session.submit(SamplingParams(max_tokens=3, **GREEDY))
            for _ in range(rng.randrange(4)):
                if engine.has_work():
                    engine.step()
                    same(watch.cells_at(-1), watch.requests, engine)
                    seen.append(watch.cells_at(-1))
        while engine.has_work():
            engine.step()
            same(watch.cells_at(-1), watch.requests, engine)
            seen.append(watch.cells_at(-1))
        assert len(watch.frames) == len(seen) > 15
        assert all((watch.cells_at(i) == cells).all() for i, cells in enumerate(seen))
        states = np.unique(np.concatenate(seen)["state"][1:])
        assert {FREE, CACHED, HELD, SHARED} <= set(states.tolist())
        assert (HOST in states, ABSENT in states) == (kind == "host", kind == "elastic")
        assert engine.stats().evictions

    def test_an_image_has_a_state_of_its_own(self, t_model, engine_for):
        engine = engine_for(t_model, page_tokens=4, page_policies={"image": 8}, pool_tokens=80)
        engine.submit([TokenSegment("text", [5] * 3), TokenSegment("image", [6] * 9), TokenSegment("text", [7])])
        engine.step()
        states = PageCensus().take(engine)["state"]
        text, image = (
            engine._scheduler.running[0].table.pages()[[0, 3]],
            engine._scheduler.running[0].table.pages()[1:3],
        )
        assert (states[text] == HELD).all()
        assert (states[engine._pool.units_of(image, 2)] == IMAGE).all() and (states == IMAGE).sum() == 4

    def test_the_host_tier_comes_behind_the_device(self, t_model, engine_for):
        engine, census = engine_for(t_model, pool_tokens=16, host_tokens=12), PageCensus()
        engine.costs.restore_is_cheaper = lambda *facts: True
        for seed in range(4):
            engine.generate([tokens(9, seed)], SamplingParams(max_tokens=2, **GREEDY))
            cells = census.take(engine)
            host = cells[1 + 4 :]
            assert len(host) == engine._host.units_total == 3
            assert (host["state"] == HOST).sum() == engine._host.units_held
            assert set(host["tokens"][host["state"] == HOST].tolist()) <= {4}
            for page, held in engine._host._pages.items():
                assert cells["page"][4 + held.units].tolist() == [4 + page] * len(held.units)
        assert engine._host.units_held == 3

    def test_requests_beyond_the_last_number_share_it(self):
        census = PageCensus()
        census.requests = [str(i) for i in range(MAX_REQUESTS - 1)]
        assert [census._number(name) for name in ("x", "y", "x", "z")] == [MAX_REQUESTS] * 4
        assert len(census.requests) == MAX_REQUESTS and census.requests[-1] == "x"


STATE = page_watch.STATES


class Script:
    """An engine that is nothing but its counters; ``cells`` are what a census of it finds."""

    def __init__(self, units=6):
        self.cells = np.zeros(1 + units, CELL)
        self.config = SimpleNamespace(unit_tokens=4)
        self._pool = SimpleNamespace(most_units=units, evictions=0)
        self._scheduler = SimpleNamespace(hit_tokens=0, query_tokens=0, preemptions=0, running=[], waiting=[])
        self._steps = 0

    def set(self, unit, state, count=4, request=1):
        self.cells[unit] = unit if state else 0, request if state else 0, state, count if state else 0


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(PageCensus, "take", lambda self, engine: engine.cells.copy())
    return Script()


class TestWatch:
    def test_frames_hold_only_what_changed(self, script):
        watch = PageWatch()
        script.set(2, HELD, 3)
        watch.observe(script)
        script.set(2, HELD, 4)
        script.set(5, HELD, 1)
        watch.observe(script)
        watch.observe(script)
        assert [frame.units.tolist() for frame in watch.frames] == [[2], [2, 5], []]
        assert watch.frames[1].cells["tokens"].tolist() == [4, 1]
        assert watch.cells_at(0)["tokens"].tolist() == [0, 0, 3, 0, 0, 0, 0]
        assert (watch.cells_at(2) == script.cells).all() and (watch.cells_at(-1) == script.cells).all()
        assert (watch.unit_tokens, watch.device_units) == (4, 6)

    def test_numbers_over_time(self, script):
        watch = PageWatch()
        watch.observe(script)
        script._scheduler.hit_tokens, script._scheduler.query_tokens = 30, 40
        script._scheduler.running, script._scheduler.waiting = [1, 2], [3]
        script._steps, script._pool.evictions, script._scheduler.preemptions = 7, 5, 3
        for unit, state, count in ((1, HELD, 4), (2, SHARED, 2), (3, CACHED, 4), (6, ABSENT, 0)):
            script.set(unit, state, count)
        watch.observe(script)
        series = watch.series()
        assert np.isnan([series["hit_rate"][0], series["utilisation"][0]]).all()
        assert (series["hit_rate"][1], series["utilisation"][1]) == (0.75, 6 / 8)
        assert series["in_use"].tolist() == [0, 2 / 5]
        last = watch.moments[1]
        assert [int(last[key]) for key in ("step", "running", "waiting", "evictions", "preemptions")] == [7, 2, 1, 5, 3]
        assert last["units"].tolist() == [2, 1, 1, 1, 0, 0, 1] and watch.moments["seconds"][0] == 0 < last["seconds"]

    @given(st.integers(2, 9), st.integers(2, 40), st.lists(st.lists(st.integers(1, 6), max_size=4), max_size=70))
    def test_thinning_loses_steps_and_nothing_else(self, max_frames, max_changes, changes):
        script, watch, truth = Script(), PageWatch(max_frames, max_changes), {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PageCensus, "take", lambda self, engine: engine.cells.copy())
            for number, units in enumerate(changes):
                script._steps = number
                for unit in units:
                    script.set(unit, HELD if script.cells[unit]["state"] == FREE else FREE, number % 4)
                watch.observe(script)
                truth[number] = script.cells.copy()
                assert len(watch.frames) < max_frames or len(watch.frames) == 1
                assert len(watch.frames) == 1 or sum(len(f.units) for f in watch.frames) <= max_changes
        steps = watch.moments["step"].tolist()
        assert steps == sorted(set(steps)) and len(steps) == len(watch.frames)
        assert not changes or steps[-1] + watch._every > len(changes) - 1
        for frame, step in enumerate(steps):
            assert (watch.cells_at(frame) == truth[step]).all()
        assert all((np.diff(frame.units) > 0).all() for frame in watch.frames)

    def test_merging_keeps_the_later_of_two_changes(self):
        def frame(units, counts):
            cells = np.zeros(len(units), CELL)
            cells["tokens"] = counts
            return Frame(np.array(units, np.int32), cells)

        merged = page_watch._merged(frame([2, 5, 7], [1, 2, 3]), frame([1, 5], [8, 9]))
        assert merged.units.tolist() == [1, 2, 5, 7] and merged.cells["tokens"].tolist() == [8, 1, 9, 3]

    @pytest.mark.parametrize("value", [1, 0, -3, 2.0, True, None])
    @pytest.mark.parametrize("name", ["max_frames", "max_changes"])
    def test_bounds_that_are_none_are_refused(self, name, value):
        with pytest.raises(ValueError, match=rf"{name} must be an integer of at least 2, got {value!r}"):
            PageWatch(**{name: value})

    def test_watching_changes_no_token(self, t_model, engine_for):
        prompts, params = [tokens(9), [*tokens(9), 5, 6], tokens(4, 2)], SamplingParams(max_tokens=9, **GREEDY)
        engine = engine_for(t_model, pool_tokens=40)
        plain = engine.generate(prompts, params)
        watched = engine_for(t_model, pool_tokens=40)
        watched.watch = PageWatch()
        assert [c.samples[0].token_ids for c in watched.generate(prompts, params)] == [
            c.samples[0].token_ids for c in plain
        ]
        assert watched.stats() == engine.stats()
        watched.check()
        frames = len(watched.watch.frames)
        watch, watched.watch = watched.watch, None
        watched.generate(prompts, params)
        assert len(watch.frames) == frames

    def test_who_does_not_watch_imports_nothing(self):
        script = "import sys, octavo.core.engine; print('octavo.core.inspection.page_watch' in sys.modules)"
        done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == "False", done.stderr
