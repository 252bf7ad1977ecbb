"""Budgets that are the same in pages or in bytes, against a search of all budgets."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from octavo.core import SamplingParams
from octavo.scripts import budgets, build
from octavo.scripts.build import method
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import SparseSettings

PARTS: dict[str, Any] = {"keep": {"sink_tokens": 4, "recent_tokens": 4}, "dense_layers": [0]}
METHODS = ("streaming", "random", "quest", "arkvale_ball", "lserve", "sparq", "knorm", "ada_kv", "pyramid_kv", "tidal")
CONTEXT = 120


@pytest.fixture(scope="module")
def engine(make_llama: Any, engine_for: Any) -> Any:
    return engine_for(make_llama(num_hidden_layers=3))


@cache
def made(name: str) -> Any:
    more = {
        "lserve": {"digest": {"sub_pages": 2}},
        "tidal": {"choosing_layers": [1]},
        "pyramid_kv": {"budget": {"kept_tokens": 12, "first_layer": 1}},
    }
    return method(name, budget_tokens=40, **PARTS, **more.get(name, {}))


@pytest.mark.parametrize("share", [0.5, 0.6, 0.75, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_the_largest_budget_that_fits_is_found(name: str, share: float, engine: Any) -> None:
    dense = budgets.step_bytes(engine, None, CONTEXT)

    def read(one: Any) -> int:
        return budgets.step_bytes(engine, one, CONTEXT)

    fitting = []
    for pages in range(3, 31):
        try:
            one = budgets.with_tokens(name, made(name), 4 * pages)
            one.validate(engine.spec, 4)
        except ValueError:  # pyramid_kv: too little for what it keeps
            continue
        if read(one) <= share * dense:
            fitting.append(one)
    if not fitting:
        with pytest.raises(ConfigError, match="bytes are too few"):
            budgets.within(name, made(name), engine, share * dense, read, CONTEXT)
        return
    found = budgets.within(name, made(name), engine, share * dense, read, CONTEXT)
    assert read(found) <= share * dense
    most = fitting[-1].budget.tokens
    assert found.budget.tokens == most if name != "pyramid_kv" else most - 8 <= found.budget.tokens <= most
    assert found.name == made(name).name and found.keep == made(name).keep


def test_what_is_counted_stays_within_the_bytes(engine: Any, drain: Any) -> None:
    """All methods read as many bytes at the context that they were matched for, to a page of K and V."""
    settings = SparseSettings(match="bytes", budget_bytes=60_000, match_context=100)
    found = budgets.matched({name: made(name) for name in METHODS}, engine, settings)
    page = 4 * 2 * 2 * 16 * 4  # a page of one layer: tokens, K and V, KV heads, size, bytes
    for name, one in found.items():
        request = engine.submit(list(range(3, 102)), SamplingParams(max_tokens=2, ignore_eos=True), method=one)
        sample = drain(engine).completions[request].samples[0]
        assert sample.decode_steps == 1
        read = sample.kv_bytes_read + sample.digest_bytes_read
        assert read <= 60_000, name
        assert read > 60_000 - 3 * page, name


def test_pages_are_pages_of_the_engine(engine: Any) -> None:
    methods = {"dense": None, "quest": made("quest")}
    found = budgets.matched(methods, engine, SparseSettings(match="pages", budget_pages=7))
    assert found["dense"] is None and found["quest"].budget.tokens == 28  # type: ignore[union-attr]
    assert budgets.matched(methods, engine, SparseSettings()) == methods


def test_too_few_bytes_say_how_many_there_must_be(engine: Any) -> None:
    settings = SparseSettings(match="bytes", budget_bytes=9_000, match_context=100)
    with pytest.raises(
        ConfigError, match=r"method quest: 9,000 bytes are too few: .* at least ([0-9,]+) of 100 tokens"
    ):
        budgets.matched({"quest": made("quest")}, engine, settings)
    with pytest.raises(ConfigError, match=r"it has no budget\.tokens"):
        budgets.matched({"own": object()}, engine, settings)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"match": "bits"}, "sparse.match=bits: unknown; did you mean 'bytes'?"),
        ({"match": "pages"}, "sparse.budget_pages has no value"),
        ({"match": "bytes", "budget_bytes": 5}, "sparse.match_context has no value"),
        ({"budget_pages": 5}, "sparse.budget_pages=5 says nothing with sparse.match=tokens"),
        ({"match": "pages", "budget_pages": 0}, "sparse.budget_pages=0: must be at least 1"),
    ],
)
def test_refusals(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SparseSettings(**keys)
    assert message in str(raised.value)


def test_a_sample_says_its_budget() -> None:
    assert build.budget_of(made("quest")) == {"budget_tokens": 40}
    assert build.budget_of(None) == {}
