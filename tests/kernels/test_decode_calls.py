"""Decoding layer after layer in one call each: it stores, bit for bit, and gives what the reference does."""

import logging

import pytest
import torch
from kernel_cases import DECODE, TOLERANCE, Case, build

from octavo.kernels import log
from octavo.kernels.cpu import compiler
from octavo.kernels.cpu.decode_calls import DecodeCalls
from octavo.kernels.layout import entry_units
from octavo.kernels.reference import backend as reference
from octavo.scripts.kernel_races.checking import relative_error

pytestmark = pytest.mark.skipif(not compiler._compiler(), reason="there is no C compiler")

PLAIN = [case for case in DECODE if case.tables == "shared" and not case.stored and min(case.tokens) > 0]


def last_slots(inputs):
    """Of each sequence, int64 [1, B]: where its last token is."""
    length, page = inputs.lengths[0, :, 0].long() - 1, inputs.pool.shape[4]
    units = entry_units(inputs.table)[0, :, 0].gather(1, (length // page)[:, None])[:, 0]
    return (units * page + length % page)[None]


def both(inputs, q, k, v, layers=(0, 1)):
    """(output, pool) after each layer, by the calls and by the reference."""
    slots, pools = last_slots(inputs), (inputs.pool.clone(), inputs.pool.clone())
    table, lengths, case = inputs.table, inputs.lengths, inputs.case
    scores = inputs.sinks, case.head_dim**-0.5, case.window, case.softcap
    calls = DecodeCalls(pools[0], table[:, :, 0], slots, lengths[0, :, 0], inputs.q_pos)
    for layer in layers:
        got = calls.attend(layer, 0, q, k, v, *scores)
        reference.append(k, v, pools[1], layer, slots[0])
        want, _, _ = reference.decode(
            q, pools[1], layer, table, lengths, inputs.q_pos, None, *scores, want_mass=False, want_lse=False
        )
        yield got, want, *pools


def projections(inputs, dtype):
    (batch, heads, dim), kv_heads = inputs.q.shape, inputs.pool.shape[3]
    shapes = (batch, heads, dim), (batch, kv_heads, dim), (batch, kv_heads, dim)
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_stores_and_attends_as_the_reference(case, dtype):
    inputs = build(case, dtype)
    for got, want, pool, expected in both(inputs, *projections(inputs, dtype)):
        assert got.is_contiguous() and got.dtype == dtype and torch.equal(pool.nan_to_num(), expected.nan_to_num())
        assert relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("strided", ["heads first", "last axis apart"])
def test_whatever_the_strides(strided):
    inputs = build(Case("strided", (5, 40)), torch.bfloat16)
    first, second = (0, 1) if strided == "heads first" else (1, 2)
    parts = [
        x.transpose(first, second).contiguous().transpose(first, second) for x in projections(inputs, torch.bfloat16)
    ]
    for got, want, pool, expected in both(inputs, *parts):
        assert torch.equal(pool.nan_to_num(), expected.nan_to_num()) and relative_error(got, want) < 8e-3


def test_another_type_than_the_pool_is_left_to_the_ops():
    inputs = build(Case("types", (5, 40)), torch.float32)
    for got, _, pool, _ in both(inputs, *projections(inputs, torch.bfloat16), layers=[0]):
        assert got is None and torch.equal(pool.nan_to_num(), inputs.pool.nan_to_num())


def test_a_slot_past_the_pool_is_told_and_nothing_is_written():
    inputs = build(Case("past", (5, 40)), torch.float32)
    pool, slots = inputs.pool.clone(), last_slots(inputs)
    slots[0, 1] = len(pool) * pool.shape[4]
    calls = DecodeCalls(pool, inputs.table[:, :, 0], slots, inputs.lengths[0, :, 0], inputs.q_pos)
    with pytest.raises(IndexError, match="a slot past a pool"):
        calls.attend(0, 0, *projections(inputs, torch.float32), None, 1.0, 0, 0.0)
    assert torch.equal(pool.nan_to_num(), inputs.pool.nan_to_num())


def test_the_log_says_what_decodes(monkeypatch, caplog):
    monkeypatch.setattr(log, "KERNELS", True)
    monkeypatch.setattr(log, "_said", set())
    caplog.set_level(logging.INFO, "octavo.kernels")
    inputs = build(Case("log", (5, 40), head_dim=16), torch.float32)
    assert len(list(both(inputs, *projections(inputs, torch.float32)))) == 2
    (said,) = [record.getMessage() for record in caplog.records if record.name == "octavo.kernels"]
    assert said.startswith("decode: cpu, compiled C, appends too; pool of float32 on cpu, 2 layers")
