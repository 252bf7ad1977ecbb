"""Block statistics: exact rows of small pools, and sums that must agree with the engine's counters."""

import random

import pytest

from octavo.core import SamplingParams
from octavo.core.inspection.statistics import block_statistics
from octavo.core.serving.prompts import TokenSegment

GREEDY = {"ignore_eos": True}
UNIT_BYTES = 2 * 2 * 2 * 4 * 16 * 4  # layers, K and V, heads, slots, head size, fp32


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


def row(**changes):
    empty = {
        "pool": "device", "state": "free", "request": None, "page_tokens": None, "pages": 0, "units": 0,
        "slots_used": 0, "slots_wasted": 0, "bytes": UNIT_BYTES * changes["units"], "mean_run_units": 0.0,
        "references": 0, "idle_steps": None,
    }  # fmt: skip
    return {**empty, **changes}


def test_an_untouched_pool_is_one_free_stretch(t_model, engine_for):
    assert block_statistics(engine_for(t_model, pool_tokens=40)) == [row(units=10, mean_run_units=10.0)]


def test_rows_of_a_small_pool(t_model, engine_for):
    engine = engine_for(t_model, pool_tokens=40)
    engine.generate([tokens(8)], SamplingParams(max_tokens=1, **GREEDY))  # pages 1 and 2, cached
    engine.generate([tokens(4, 3)], SamplingParams(max_tokens=1, **GREEDY))  # page 3
    engine.submit([*tokens(8), 5], SamplingParams(max_tokens=4, n=2, temperature=1.0, **GREEDY), request_id="a")
    engine.submit(tokens(6, 1), SamplingParams(max_tokens=4, **GREEDY), request_id="b")
    engine.step()
    engine.step()
    before = engine.stats(), engine._pool.refs.tolist()
    found = block_statistics(engine)
    assert found == [
        row(units=3, mean_run_units=3.0),
        row(state="held", request="b", page_tokens=4, pages=2, units=2, slots_used=7, slots_wasted=1,
            mean_run_units=2.0, references=2),
        row(state="held", request="a", page_tokens=4, pages=2, units=2, slots_used=4, slots_wasted=4,
            mean_run_units=1.0, references=2),
        row(state="shared", request="a", page_tokens=4, pages=2, units=2, slots_used=8, mean_run_units=2.0,
            references=4),
        row(state="cached", page_tokens=4, pages=1, units=1, slots_used=4, mean_run_units=1.0, idle_steps=2.0),
    ]  # fmt: skip
    assert (engine.stats(), engine._pool.refs.tolist()) == before
    engine.check()


@pytest.mark.parametrize("kind", ["plain", "segments", "window", "host", "elastic"])
def test_sums_are_the_engine_s_counters(request, t_model, engine_for, kind):
    model = request.getfixturevalue("w_model" if kind == "window" else "t_model")
    fields = {
        "segments": {"page_policies": {"image": 6}},
        "host": {"host_tokens": 32},
        "elastic": {"base_share": 0.25, "growth_tokens": 12},
    }.get(kind, {})
    engine = engine_for(model, pool_tokens=60, **fields)
    engine.costs.restore_is_cheaper = lambda *facts: True
    for seed in range(6):
        prompt = tokens(9 + seed, seed)
        if kind == "segments":
            prompt = [TokenSegment("text", prompt), TokenSegment("image", tokens(7, seed)), TokenSegment("text", [5])]
        engine.submit(prompt, SamplingParams(max_tokens=4, n=2, **GREEDY))
    while engine.has_work():
        engine.step()
        stats, rows = engine.stats(), block_statistics(engine)
        device = [r for r in rows if r["pool"] == "device"]
        units = {state: sum(r["units"] for r in device if r["state"] in states) for state, states in STATES.items()}
        assert units == {"held": stats.units_held, "cached": stats.units_cached, "free": stats.units_free}
        for r in device:
            assert r["bytes"] == r["units"] * engine._runner.kv[0].nbytes
            slots = r["slots_used"] + r["slots_wasted"]
            assert slots == (r["units"] * engine.config.unit_tokens if r["state"] not in ("free", "absent") else 0)
            assert (r["page_tokens"] or 0) * r["pages"] == slots
        host = [r for r in rows if r["pool"] == "host"]
        assert sum(r["units"] for r in host) == (0 if engine._host is None else engine._host.units_total)
        references = sum(r["references"] for r in rows)
        assert references == sum((t.pages() > 0).sum() for s in engine._scheduler.running for t in s.tables)
    sizes = {r["page_tokens"] for r in rows} - {None}
    assert sizes == ({4, 6} if kind == "segments" else {4})


STATES = {"held": ("held", "shared", "image"), "cached": ("cached",), "free": ("free",)}
