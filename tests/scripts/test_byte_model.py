"""The closed form of bytes, and the context from which a method reads less, against a search of all contexts."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest

from octavo.core import SamplingParams
from octavo.scripts import build, byte_model
from octavo.scripts.build import method
from octavo.scripts.byte_model import ByteModel

PARTS: dict[str, Any] = {"keep": {"sink_tokens": 4, "recent_tokens": 4}, "dense_layers": [0]}
METHODS = ("streaming", "quest", "lserve", "sparq", "oracle", "twilight", "knorm")


@pytest.fixture(scope="module")
def engine(make_llama: Any, engine_for: Any) -> Any:
    return engine_for(make_llama(num_hidden_layers=3))


@cache
def made(name: str) -> Any:
    more = {"digest": {"sub_pages": 2}} if name == "lserve" else {}
    return method(name, budget_tokens=20, **PARTS, **more)


@pytest.mark.parametrize("weight_bytes", [0, 50_000])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_pays_from_the_last_context_at_which_it_did_not(
    name: str, weight_bytes: int, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_model, "FARTHEST", 1200)
    model, chosen = ByteModel(engine, weight_bytes), made(name)
    for gain, batch in ((1.0, 1), (1.2, 3), (1.3, 8), (20.0, 1)):
        bad = [n for n in range(1, 301) if model.speedup(chosen, 4 * n, batch) <= gain]
        expected = None if bad[-1] == 300 else 4 * (bad[-1] + 1)
        assert model.pays_from(chosen, gain, batch) == expected


def test_a_step_is_weights_once_and_the_rest_a_sequence(engine: Any) -> None:
    model = ByteModel(engine, 1000)
    assert model.step(None, 40, 3) == 1000 + 3 * model.read(None, 40)
    assert model.read(None, 40) == 40 * engine.spec.kv_bytes_per_token(4)
    assert model.speedup(None, 40, 3) == 1.0


def test_what_is_read_to_choose_puts_off_the_break_even(engine: Any) -> None:
    model = ByteModel(engine, 0)
    assert model.pays_from(made("streaming")) == 24  # the budget is 20 tokens
    quest, oracle = model.pays_from(made("quest")), model.pays_from(made("oracle"))
    assert quest is not None and oracle is not None and 24 < quest < oracle


def test_digests_are_those_of_full_pages(engine: Any, drain: Any) -> None:
    chosen = made("quest")
    engine.submit(list(range(3, 48)), SamplingParams(max_tokens=3, ignore_eos=True), method=chosen)
    drain(engine)
    store = engine._runner._digest_store(chosen)
    row = math.prod(store._store.shape[2:]) * store._store.shape[0] * 4
    assert build.digest_bytes(engine, chosen, 47) == 11 * row
    assert build.digest_bytes(engine, made("streaming"), 47) == build.digest_bytes(engine, None, 47) == 0


def test_only_rows_of_methods_say_where_they_pay(engine: Any) -> None:
    rows = [{"method": "dense"}, {"method": "quest"}]
    dense, quest = byte_model.with_break_even(rows, {"dense": None, "quest": made("quest")}, ByteModel(engine, 0))
    assert dense == {"method": "dense"}
    assert quest.keys() == {
        "method", "break_even_tokens", "plus_30_percent_tokens_batch_1", "plus_30_percent_tokens_batch_8",
    }  # fmt: skip
