"""Append and decode in one call: what is stored, what is attended to, and that nothing else is read or written."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import DECODE, LARGE_DECODE, LAYER, TOLERANCE, Case, bits, build, error

from octavo.kernels import ops
from octavo.kernels.layout import SCRATCH_UNIT, entry_units, pack_entries
from octavo.kernels.reference import backend as reference
from octavo.kernels.reference.pages import rotated

pytestmark = pytest.mark.usefixtures("poisoned_memory")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
NAMES = (
    "lengths-around-page-16", "lengths-around-page-5", "unit-1", "unit-64", "heads-5-1", "heads-28-4", "heads-7-7",
    "head-dim-16", "head-dim-80", "head-dim-128", "head-dim-256", "tables-layer", "window-1", "window-16", "window-33",
    "softcap-50-window", "large-scores", "sinks", "sinks-window-softcap", "all-empty-sinks",
)  # fmt: skip
CASES = [case for case in DECODE if case.name in NAMES]
LARGE = [case for case in LARGE_DECODE if case.name in ("large-ragged", "large-batch-1", "large-one-kv-head")]
LARGE += [case for case in LARGE_DECODE if case.name == "large-window"]


def inputs_of(case, dtype, device, rotary):
    """A step of the case in which the last token of each row is new: its slot is NaN, as all memory that nobody filled,
    and K and V come as slices of a fused projection."""
    torch.manual_seed(len(case.name))
    made = build(replace(case, mass=False), dtype, device)
    unit, (q_heads, kv_heads) = made.pool.shape[4], case.heads
    length = made.lengths[-1, :, 0].long()
    last = (length - 1).clamp(min=0)
    entry = made.table[-1, :, 0].gather(1, (last // unit)[:, None])[:, 0]
    units = torch.where(length > 0, entry_units(entry).long(), SCRATCH_UNIT)
    slots = units * unit + last % unit
    made.pool[units, LAYER, :, :, last % unit] = torch.nan
    batch, head_dim = len(length), case.head_dim
    fused = (torch.randn(batch, q_heads + 2 * kv_heads, head_dim) * max(case.gain**0.5, 1)).to(device, dtype)
    q, k, v = fused.split([q_heads, kv_heads, kv_heads], 1)
    angles = torch.randn(batch, rotary // 2).repeat(1, 2)
    cos, sin = (None, None) if not rotary else (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
    args = (LAYER, slots, made.table, made.lengths, made.q_pos, cos, sin, made.sinks)
    return q, k, v, made.pool, (*args, head_dim**-0.5, case.window, case.softcap)


def compare(backend, case, dtype, device="cpu", rotary=0):
    q, k, v, pool, args = inputs_of(case, dtype, device, rotary)
    want_pool, got_pool = pool.clone(), pool.clone()
    want = reference.append_decode(q, k, v, want_pool, *args)
    got = ops.append_decode(q, k, v, got_pool, *args, backend)
    assert got.shape == want.shape and got.dtype == want.dtype
    bound = TOLERANCE[dtype] * (3 if backend == "cpu" and dtype != torch.float32 else 1) * max(1.0, case.gain / 10)
    assert error(got, want) <= bound
    # K once it is turned may differ by a rounding; all else is alike bit by bit, but for the scratch unit.
    torch.testing.assert_close(got_pool[1:], want_pool[1:], rtol=1e-2, atol=1e-2, equal_nan=True)
    assert torch.equal(bits(got_pool)[1:, :, 1], bits(want_pool)[1:, :, 1])
    untouched = torch.ones_like(got_pool, dtype=torch.bool)
    slots, unit = args[1], pool.shape[4]
    untouched[slots // unit, LAYER, :, :, slots % unit] = False
    untouched[SCRATCH_UNIT] = False
    assert torch.equal(bits(got_pool)[untouched.cpu()], bits(pool)[untouched.cpu()])


def ids(x):
    return x.name if isinstance(x, Case) else str(x)


def rotary_of(case):
    """Whole heads, parts of them, and nothing, in turn."""
    return (case.head_dim, case.head_dim // 4, 0)[len(case.name) % 3]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_cpu(case):
    compare("cpu", case, torch.float32, rotary=rotary_of(case))


@interpreted
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_triton(case, small_tiles):
    compare("triton", case, torch.float32, rotary=rotary_of(case))


@interpreted
@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("unit-64", "window-16", "sinks")], ids=ids)
def test_triton_without_splits(case, small_tiles):
    """A table so short that one program finishes a row."""
    from octavo.kernels.triton import settings

    with settings.trial("decode", min_split_tokens=4096):
        compare("triton", case, torch.float32, rotary=case.head_dim)


@interpreted
def test_bf16_in_the_interpreter(small_tiles):
    compare("triton", CASES[0], torch.bfloat16, rotary=CASES[0].head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=ids)
def test_gpu(case, dtype):
    compare("triton", case, dtype, "cuda", rotary=rotary_of(case))


def test_it_is_append_and_decode_one_after_the_other():
    q, k, v, pool, args = inputs_of(CASES[0], torch.float32, "cpu", rotary=64)
    layer, slots, table, lengths, q_pos, cos, sin, sinks, scale, window, softcap = args
    want = pool.clone()
    reference.append(rotated(k, cos, sin), v, want, layer, slots)
    scores = (None, sinks, scale, window, softcap)
    out, _, _ = reference.decode(rotated(q, cos, sin), want, layer, table, lengths, q_pos, *scores, False, False)
    assert torch.equal(reference.append_decode(q, k, v, pool, *args), out)
    assert torch.equal(bits(pool), bits(want))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(1, 63, 64), (1000, 17, 0, 255, 2049), (9000,)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_steps_that_follow_on_one_another_see_each_others_tokens(head_dim, lengths):
    """Nothing lies between the launches, so that each begins while the one before stores its tokens."""
    torch.manual_seed(0)
    steps, unit, kv_heads, q_heads = 40, 16, 2, 8
    entries = -(-(max(lengths) + steps) // unit)
    ids = 1 + torch.randperm(len(lengths) * entries).view(1, len(lengths), 1, entries)
    pool = torch.randn(len(lengths) * entries + 1, 1, 2, kv_heads, unit, head_dim).to("cuda", torch.bfloat16)
    begun = torch.tensor(lengths)
    inputs = []
    for step in range(steps):
        length = torch.where(begun > 0, begun + step, 0)
        valid = (length[:, None] - unit * torch.arange(entries)).clamp(0, unit)[None, :, None]
        last = (length - 1).clamp(min=0)
        units = ids[0, torch.arange(len(lengths)), 0, last // unit]
        slots = torch.where(length > 0, units * unit + last % unit, SCRATCH_UNIT * unit)
        qkv = torch.randn(len(lengths), q_heads + 2 * kv_heads, head_dim).to("cuda", torch.bfloat16)
        parts = qkv.split([q_heads, kv_heads, kv_heads], 1)
        table = pack_entries(ids, valid)
        state = [slots, table, length.int()[None, :, None], (length - 1).int()]
        inputs.append((*parts, *(t.cuda() for t in state)))
    want_pool, scores = pool.clone(), (None, None, None, head_dim**-0.5, 0, 0.0)
    step_of = [
        ((q, k, v), (0, slots, table, length, q_pos, *scores)) for q, k, v, slots, table, length, q_pos in inputs
    ]
    want = [reference.append_decode(*qkv, want_pool, *args) for qkv, args in step_of]
    got = [ops.append_decode(*qkv, pool, *args, "triton") for qkv, args in step_of]
    for one, other in zip(got, want, strict=True):
        assert error(one, other) <= TOLERANCE[torch.bfloat16]
    assert torch.equal(bits(pool)[1:], bits(want_pool)[1:])
