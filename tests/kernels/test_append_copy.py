"""Append and copy: they write what they should, bit by bit, and nothing else. Where keys are turned on the way, the
keys are compared in their rounding, and the digests with the stored keys, bit by bit."""

from dataclasses import dataclass

import pytest
import torch
from kernel_cases import bits

from octavo.kernels import ops
from octavo.kernels.layout import pack_entries, pool_shape
from octavo.kernels.reference import backend as reference

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
TARGETS = [
    ("reference", "cpu"),
    ("cpu", "cpu"),
    pytest.param(("triton", "cpu"), marks=interpreted),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]
LAYERS = 3


def random_pool(dtype, device, kv_heads=2, unit=8, head_dim=64):
    pool = torch.randn(pool_shape(7, LAYERS, kv_heads, unit, head_dim), dtype=torch.float32)
    pool[2] = torch.nan  # a NaN must move like any other value
    return pool.to(device, dtype)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "unit", "head_dim"),
    [(0, 8, 64), (1, 8, 64), (17, 8, 64), (40, 16, 80), (5, 1, 96), (9, 64, 256), (6, 4, 16)],
)
def test_append(target, dtype, tokens, unit, head_dim):
    backend, device = target
    pool = random_pool(dtype, device, unit=unit, head_dim=head_dim)
    slots = torch.randperm(7 * unit)[:tokens] + unit  # any unit but scratch
    qkv = torch.randn(tokens, 6, head_dim).to(device, dtype)
    k, v = qkv[:, 2:4], qkv[:, 4:]  # slices of a fused projection
    want = bits(pool).clone()
    for t, slot in enumerate(slots.tolist()):
        want[slot // unit, 1, 0, :, slot % unit] = bits(k[t])
        want[slot // unit, 1, 1, :, slot % unit] = bits(v[t])
    ops.append(k, v, pool, 1, slots.to(device), backend)
    assert torch.equal(bits(pool), want)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_padding_rows_may_share_the_scratch_unit(target):
    backend, device = target
    pool = random_pool(torch.float32, device)
    want = bits(pool).clone()
    k = torch.ones(5, 2, 64, device=device)
    ops.append(k, k, pool, 0, torch.zeros(5, dtype=torch.int64, device=device), backend)
    assert torch.equal(bits(pool)[1:], want[1:])


@dataclass(frozen=True)
class Fused:
    """A step of some sequences, each of which has ``start`` tokens in the cache and appends ``count``."""

    name: str
    chunks: tuple[tuple[int, int], ...]  # (start, count)
    page: int = 16
    unit: int = 16
    kv_heads: int = 2
    head_dim: int = 64
    rotary: int = 0  # dimensions that are turned
    digests: bool = True
    slices: int = 1
    undigested: int = 0  # the last sequences have row -1
    padding: int = 0


CASES = [
    Fused("decode, one of four fills its page", ((15, 1), (14, 1), (0, 1), (40, 1))),
    Fused("decode, all fill their pages, turned", ((15, 1), (31, 1), (47, 1)), rotary=64),
    Fused("a prompt in one chunk", ((0, 37),), rotary=64),
    Fused("chunks that begin and end within pages", ((5, 20), (11, 4), (3, 30), (13, 3)), rotary=64),
    Fused("a page of three units", ((0, 25), (23, 1), (20, 30)), page=24, unit=8, rotary=32),
    Fused("a page of units of one token", ((3, 9), (4, 1)), page=5, unit=1, head_dim=80),
    Fused("part of the dimensions turned", ((0, 18), (15, 1)), head_dim=80, rotary=20),
    Fused("turned, no digests", ((0, 5), (9, 1)), rotary=64, digests=False),
    Fused("slices, padding, a dense sequence", ((0, 34), (15, 1), (0, 16)), slices=3, undigested=1, padding=3),
]
LARGE = [
    Fused("256 decodes in step", ((79, 1),) * 256, kv_heads=8, head_dim=128, rotary=128),
    Fused("256 decodes", tuple((16 + i % 48, 1) for i in range(256)), kv_heads=8, head_dim=128, rotary=128),
    Fused("a prompt of 8k", ((0, 8192),), kv_heads=8, head_dim=128, rotary=128),
    Fused("pages of 24", ((1000, 3000), (17, 4096)), page=24, unit=8, kv_heads=8, head_dim=128, rotary=64),
    Fused("pages of 64, wide heads", ((0, 777), (1, 2000)), page=64, unit=64, kv_heads=1, head_dim=256, rotary=256),
]


class FusedStep:
    """The arguments of ``append_fused`` for a case. Slots that no sequence has filled, and all digests, are NaN."""

    def __init__(self, case, dtype, device, seed=0):
        torch.manual_seed(seed)
        layers, head_dim = 2, case.head_dim
        entries = max(start + count for start, count in case.chunks) // case.unit + 1
        entries = -(-entries // (case.page // case.unit)) * (case.page // case.unit)
        shape = (case.slices, len(case.chunks), entries)
        units = torch.randperm(case.slices * len(case.chunks) * entries).view(shape) + 1
        self.case, self.layer, self.table_slice = case, 1, case.slices - 1
        self.tables = pack_entries(units, case.unit)
        self.pool = torch.full(pool_shape(units.numel(), layers, case.kv_heads, case.unit, head_dim), torch.nan).to(
            dtype
        )
        tokens = torch.randn(sum(count for _, count in case.chunks) + case.padding, 3 * case.kv_heads, head_dim)
        self.k, self.v = tokens.to(device, dtype)[:, case.kv_heads :].chunk(2, 1)  # slices of a fused projection
        slots, rows, q_pos = [torch.zeros(0)], [torch.zeros(0)], [torch.zeros(0)]
        for row, (start, count) in enumerate(case.chunks):
            position = torch.arange(start + count)
            slot = units[self.table_slice, row, position // case.unit] * case.unit + position % case.unit
            old = torch.randn(2, start, case.kv_heads, head_dim).to(dtype)
            reference.append(old[0], old[1], self.pool, self.layer, slot[:start])
            slots.append(slot[start:])
            q_pos.append(position[start:])
            rows.append(torch.full((count,), -1 if row >= len(case.chunks) - case.undigested else row))
        pad = torch.zeros(case.padding)
        self.slots = torch.cat([*slots, pad]).long().to(device)
        self.rows = torch.cat([*rows, pad - 1]).int().to(device)
        self.q_pos = torch.cat([*q_pos, pad]).int().to(device)
        self.pool, self.tables = self.pool.to(device), self.tables.to(device)
        self.digests = torch.full(
            (len(self.pool), 3, case.kv_heads, 2, head_dim), torch.nan, device=device, dtype=dtype
        )
        self.cos = self.sin = None
        if case.rotary:
            frequencies = 10000 ** -(torch.arange(0, case.rotary, 2, device=device) / case.rotary)
            angles = (self.q_pos[:, None] * frequencies).repeat(1, 2)
            self.cos, self.sin = angles.cos(), angles.sin()

    def run(self, backend, pool=None, digests=None, cos=None, sin=None):
        pool, digests = (
            self.pool.clone() if pool is None else pool,
            self.digests.clone() if digests is None else digests,
        )
        ops.append_fused(
            self.k, self.v, pool, self.layer, self.slots,
            self.cos if cos is None else cos, self.sin if sin is None else sin,
            digests if self.case.digests else None, 2, self.tables, self.table_slice, self.rows, self.q_pos,
            self.case.page, backend,
        )  # fmt: skip
        return pool, digests

    def sealed(self):
        """(first unit, units) of each page that the step fills."""
        page_units = self.case.page // self.case.unit
        for row, (start, count) in enumerate(self.case.chunks[: len(self.case.chunks) - self.case.undigested]):
            for page in range(start // self.case.page, (start + count) // self.case.page):
                entries = self.tables[:, row, page * page_units : (page + 1) * page_units].long() >> 9
                yield int(entries[0, 0]), entries[self.table_slice]


def check_fused(step, backend, dtype):
    pool, digests = step.run(backend)
    want, _ = step.run("reference")
    if step.case.rotary:
        torch.testing.assert_close(pool[1:], want[1:], equal_nan=True)
    else:
        assert torch.equal(bits(pool[1:]), bits(want[1:]))
    assert torch.equal(bits(pool[1:, :, 1]), bits(want[1:, :, 1]))  # V, and what nobody writes
    expected = step.digests.clone()
    if step.case.digests:
        for first, units in step.sealed():
            keys = pool[units, step.layer, 0]  # [page_units, Hkv, u, D]
            expected[first, 2] = torch.stack([keys.amin((0, 2)), keys.amax((0, 2))], 1)
    assert torch.equal(bits(digests), bits(expected))


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_append_fused(target, dtype, case):
    backend, device = target
    check_fused(FusedStep(case, dtype, device), backend, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_append_fused_at_real_sizes(dtype, case):
    check_fused(FusedStep(case, dtype, "cuda"), "triton", dtype)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_large_blocks_fill_several_pages_each(target):
    """What a long prompt takes: a program of 16 tokens fills up to four pages of 4, each read in two pieces."""
    from octavo.kernels.triton import settings

    backend, device = target
    step = FusedStep(Fused("", ((2, 41), (3, 1), (7, 1)), page=4, unit=4, rotary=64), torch.float32, device)
    with settings.trial("append", BLOCK_T=16, SEAL_ELEMENTS=2 * 64):
        check_fused(step, backend, torch.float32)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_where_units_lie_does_not_matter(target):
    backend, device = target
    case = Fused("", ((5, 20), (15, 1)), page=16, unit=8, rotary=64)
    step = FusedStep(case, torch.float32, device)
    pool, digests = step.run(backend)
    move = torch.randperm(len(pool) - 1, device=device) + 1  # unit i + 1 goes to move[i]
    step.pool[move], step.digests[move] = step.pool[1:].clone(), step.digests[1:].clone()
    step.tables = pack_entries(move[(step.tables.long() >> 9) - 1], case.unit)
    step.slots = move[step.slots // case.unit - 1] * case.unit + step.slots % case.unit
    moved_pool, moved_digests = step.run(backend)
    assert torch.equal(bits(moved_pool[move]), bits(pool[1:]))
    assert torch.equal(bits(moved_digests[move]), bits(digests[1:]))


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_digests_may_lie_in_any_order_of_axes(target):
    """Minima in one piece and maxima in another, as views of one store."""
    backend, device = target
    step = FusedStep(CASES[0], torch.float32, device)
    _, want = step.run(backend)
    apart = torch.full((2, *want.shape[:3], want.shape[4]), torch.nan, device=device)
    step.run(backend, digests=apart.permute(1, 2, 3, 0, 4))
    assert torch.equal(bits(apart), bits(want.permute(3, 0, 1, 2, 4).contiguous()))


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_angles_may_be_in_the_dtype_of_the_model(target):
    backend, device = target
    step = FusedStep(CASES[3], torch.bfloat16, device)
    cos, sin = step.cos.bfloat16(), step.sin.bfloat16()
    pool, _ = step.run(backend, cos=cos, sin=sin)
    want, _ = step.run("reference", cos=cos.float(), sin=sin.float())
    torch.testing.assert_close(pool, want, equal_nan=True)


def test_keys_are_turned_as_hugging_face_turns_them():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    step = FusedStep(CASES[3], torch.float32, "cpu")
    k = step.k.transpose(0, 1)[None]  # [1, Hkv, T, D]
    _, want = apply_rotary_pos_emb(k, k, step.cos[None], step.sin[None])
    pool, _ = step.run("reference")
    unit = step.slots // step.case.unit
    torch.testing.assert_close(pool[unit, step.layer, 0, :, step.slots % step.case.unit], want[0].transpose(0, 1))


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("digested", [False, True])
def test_append_fused_is_registered_as_it_behaves(backend, digested):
    step = FusedStep(Fused("", ((2, 3), (3, 1)), page=4, unit=4, rotary=16, head_dim=16), torch.float32, "cpu")
    pool, digests = step.pool.nan_to_num(0.5), step.digests.nan_to_num(0.5) if digested else None  # opcheck compares
    args = (step.k, step.v, pool, 1, step.slots, step.cos, step.sin, digests, 2)
    seal = (step.tables, 0, step.rows, step.q_pos) if digested else (None, 0, None, None)
    torch.library.opcheck(torch.ops.octavo.append_fused.default, (*args, *seal, 4, backend))


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pairs", [[], [(1, 4)], [(2, 5), (1, 3), (1, 7), (0, 0)]], ids=len)
def test_copy_units(target, dtype, pairs):
    backend, device = target
    pool = random_pool(dtype, device, head_dim=80)
    want = bits(pool).clone()
    for source, destination in pairs:
        want[destination] = want[source]
    ops.copy_units(pool, torch.tensor(pairs, dtype=torch.int32, device=device).view(-1, 2), backend)
    assert torch.equal(bits(pool), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layers", "kv_heads", "head_dim"), [(32, 8, 128), (30, 3, 64), (3, 1, 256)])
def test_copy_units_at_real_sizes(dtype, layers, kv_heads, head_dim):
    pool = torch.randn(pool_shape(300, layers, kv_heads, 16, head_dim), device="cuda").to(dtype)
    pairs = (torch.randperm(300, device="cuda")[:200].view(100, 2) + 1).int()
    want = pool.clone()
    reference.copy_units(want, pairs)
    ops.copy_units(pool, pairs, "triton")
    assert torch.equal(pool, want)


@pytest.mark.gpu
def test_copy_units_beyond_32_bits_of_elements():
    shape = pool_shape(2**31 // (16 * 2 * 8 * 16 * 128) + 4, 16, 8, 16, 128)
    pool = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    pool[3].normal_()
    ops.copy_units(pool, torch.tensor([[3, shape[0] - 1]], dtype=torch.int32, device="cuda"), "triton")
    assert torch.equal(pool[-1], pool[3])


def test_reference_append_agrees_with_its_layout():
    """Slot = unit * u + offset, one run a (unit, layer, K or V, head)."""
    pool = torch.zeros(pool_shape(2, 1, 2, 4, 2))
    k = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    reference.append(k, -k, pool, 0, torch.tensor([2 * 4 + 3]))
    assert pool[2, 0, 0, :, 3].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert pool[2, 0, 1, :, 3].tolist() == [[-1.0, -2.0], [-3.0, -4.0]]
    assert pool.count_nonzero() == 8
