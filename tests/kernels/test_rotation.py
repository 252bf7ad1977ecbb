"""Rotation: keys moved in their pages, queries turned to meet keys stored elsewhere; partial attentions joined."""

import mmap

import pytest
import torch
from kernel_cases import bits, error

from octavo.kernels import ops
from octavo.kernels.layout import pool_shape
from octavo.kernels.reference import backend as reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
TARGETS = [
    ("reference", "cpu"),
    ("cpu", "cpu"),
    pytest.param(("triton", "cpu"), marks=interpreted),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYERS = 4
KINDS = [0, 1, 1, 0]
TURNED = {torch.float32: 5e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}  # rounding of the result
JOINED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture
def small_blocks():
    """Several tiles a unit, blocks of heads and of states: the last one only partly filled."""
    from octavo.kernels.triton import settings

    with (
        settings.trial("rotate_keys", BLOCK_BYTES=1024, TILES=3),
        settings.trial("rotate_queries", BLOCK_HEADS=2),
        settings.trial("merge_states", BLOCK_S=2),
    ):
        yield


def frequencies(rotary, bases=(10_000.0, 1_000_000.0)):
    """fp32 [kinds, Dr/2], as transformers makes them."""
    exponent = torch.arange(0, rotary, 2).float() / rotary
    return torch.stack([1 / base**exponent for base in bases])


def turned(x, angles, interleaved=False):
    """fp64 truth: ``x [..., D]`` turned by ``angles [..., Dr/2]``, pair by pair as complex numbers."""
    x, half = x.double(), angles.shape[-1]
    out = x.clone()
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(half), slice(half, 2 * half)
    z = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angles), angles)
    out[..., first], out[..., second] = z.real, z.imag
    return out


def pairs(*rows):
    """(source, destination) units, int32 [n, 2]."""
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "unit", "head_dim", "rotary", "interleaved"),
    [
        (2, 8, 64, 64, False),
        (2, 8, 64, 64, True),
        (3, 4, 80, 32, False),
        (1, 16, 96, 96, False),
        (3, 1, 128, 64, True),
        (2, 8, 40, 20, False),
    ],
)
def test_keys(target, dtype, kv_heads, unit, head_dim, rotary, interleaved, small_blocks):
    """K of the listed units turns in the listed layers, V goes along, and nothing else changes by a bit."""
    backend, device = target
    pool = torch.randn(pool_shape(7, LAYERS, kv_heads, unit, head_dim)).to(dtype)
    pool[2, :, :, :, -1:] = torch.nan  # an unused slot of a unit that moves
    units = pairs((2, 5), (3, 3), (2, 7), (0, 0), (1, 4))
    deltas = torch.tensor([700, -5, -131_072, 0, 1], dtype=torch.int32)
    inv_freq, kinds = frequencies(rotary), torch.tensor(KINDS, dtype=torch.int32)
    got = pool.clone().to(device)
    moves = (x.to(device) for x in (units, deltas, inv_freq, kinds))
    ops.rotate_keys(got, *moves, 1, 4, interleaved, backend)
    got = got.cpu()
    want = pool.clone()
    for (source, target_unit), delta in zip(units.tolist(), deltas.tolist(), strict=True):
        for layer in range(1, 4):
            want[target_unit, layer] = pool[source, layer]
            angles = delta * inv_freq[KINDS[layer]].double()
            keys = turned(pool[source, layer, 0], angles, interleaved).to(dtype)
            want[target_unit, layer, 0, ..., :rotary] = keys[..., :rotary]
    still = torch.ones(pool.shape, dtype=torch.bool)
    still[[5, 3, 7, 4], 1:, 0, :, :, :rotary] = False
    assert torch.equal(bits(got)[still], bits(want)[still])
    assert torch.equal(got.isnan(), want.isnan())
    assert error(got.nan_to_num(), want.nan_to_num()) <= TURNED[dtype]


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_far_moves_are_exact(target):
    """At 131,072 positions the product of delta and frequency in fp32 would be off by up to 0.004 rad."""
    backend, device = target
    deltas = torch.tensor([131_072, -131_072, 99_991, 65_537, -1, 3], dtype=torch.int32)
    inv_freq = frequencies(128)
    q = torch.randn(1, 4, 128)
    rows = torch.zeros(len(deltas), dtype=torch.int32)
    got = ops.rotate_queries(q.to(device), rows.to(device), deltas.to(device), inv_freq[0].to(device), False, backend)
    angles = -deltas.double()[:, None, None] * inv_freq[0].double()
    want = turned(q.expand(len(deltas), 4, 128), angles.expand(-1, 4, -1))
    assert (got.cpu() - want).abs().max() <= 3e-7 * q.abs().max()


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_move_there_and_back(target):
    """One unit after another, and a delta of zero or a frequency of zero (a layer without rotary) changes no bit."""
    backend, device = target
    pool = torch.randn(pool_shape(3, 2, 2, 4, 16), device=device)
    want = pool.clone()
    inv_freq = torch.stack([frequencies(16)[0], torch.zeros(8)]).to(device)
    kinds = torch.tensor([0, 1], dtype=torch.int32, device=device)

    def move(source, target, delta):
        units = pairs((source, target)).to(device)
        deltas = torch.tensor([delta], dtype=torch.int32, device=device)
        ops.rotate_keys(pool, units, deltas, inv_freq, kinds, 0, 2, False, backend)

    move(1, 2, 0)
    assert torch.equal(pool[2], want[1])
    move(1, 3, 5000)
    assert torch.equal(pool[3, 1], want[1, 1]) and not torch.equal(pool[3, 0], want[1, 0])
    move(3, 3, -5000)
    torch.testing.assert_close(pool[3], want[1], rtol=0, atol=2e-6)
    assert torch.equal(pool[1], want[1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_conventions_of_transformers(interleaved):
    """A key that transformers turned for position 40, moved by 60, is the key it turns for position 100."""
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as adjacent
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves

    inv_freq = frequencies(32)[:1]
    key = torch.randn(1, 2, 4, 32)  # [1, Hkv, u, D]

    def stored(position):
        angles = torch.full((1, 4, 1), float(position)) * inv_freq
        angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
        return (adjacent if interleaved else halves)(key, key, angles.cos(), angles.sin())[1][0]

    pool = torch.zeros(pool_shape(1, 1, 2, 4, 32))
    pool[1, 0, 0] = stored(40)
    kinds = torch.zeros(1, dtype=torch.int32)
    delta = torch.tensor([60], dtype=torch.int32)
    ops.rotate_keys(pool, pairs((1, 1)), delta, inv_freq, kinds, 0, 1, interleaved, "reference")
    torch.testing.assert_close(pool[1, 0, 0], stored(100), rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreted)])
def test_units_beyond_two_to_the_31_elements(backend):
    shape = pool_shape(2**31 // (2 * 2 * 8 * 64) + 3, 1, 2, 8, 64)
    pool = torch.frombuffer(mmap.mmap(-1, 2 * torch.Size(shape).numel()), dtype=torch.float16).view(shape)
    last = len(pool) - 1
    assert last * pool.stride(0) > 2**31
    pool[last] = torch.randn(shape[1:]).half()
    near = pool[last - 1 :].clone()
    inv_freq, kinds = frequencies(64), torch.zeros(1, dtype=torch.int32)
    deltas = torch.tensor([300], dtype=torch.int32)
    reference.rotate_keys(near, pairs((1, 0)), deltas, inv_freq, kinds, 0, 1, False)
    ops.rotate_keys(pool, pairs((last, last - 1)), deltas, inv_freq, kinds, 0, 1, False, backend)
    assert error(pool[last - 1], near[0]) <= TURNED[torch.float16]


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary", "interleaved"),
    [(4, 64, 64, False), (5, 64, 32, True), (7, 80, 32, False), (1, 96, 96, False)],
)
def test_queries(target, dtype, heads, head_dim, rotary, interleaved, small_blocks):
    backend, device = target
    fused = torch.randn(3, heads + 2, head_dim, device=device).to(dtype)
    q = fused[:, :heads]  # a slice of a fused projection
    rows = torch.tensor([2, 0, 2, 1, 2], dtype=torch.int32, device=device)
    deltas = torch.tensor([0, 17, -4000, 90_000, 1], dtype=torch.int32, device=device)
    inv_freq = frequencies(rotary)[0].to(device)
    got = ops.rotate_queries(q, rows, deltas, inv_freq, interleaved, backend)
    angles = -deltas.double()[:, None, None] * inv_freq.double()
    want = turned(q[rows.long()], angles.expand(-1, heads, -1), interleaved)
    assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous()
    assert torch.equal(bits(got[0]), bits(q[2]))
    assert torch.equal(bits(got[..., rotary:]), bits(q[rows.long(), :, rotary:]))
    assert error(got, want) <= TURNED[dtype]


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_turned_query_meets_the_key_where_it_was_stored(target):
    """q' . k_stored = q . k_moved."""
    backend, device = target
    pool = torch.randn(pool_shape(2, 1, 1, 8, 64), device=device)
    q = torch.randn(1, 1, 64, device=device)
    inv_freq = frequencies(64)[:1].to(device)
    delta = torch.tensor([1234], dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    ops.rotate_keys(pool, pairs((1, 2)).to(device), delta, inv_freq, zero, 0, 1, False, backend)
    back = ops.rotate_queries(q, zero, delta, inv_freq[0], False, backend)
    torch.testing.assert_close(pool[1, 0, 0, 0] @ back[0, 0], pool[2, 0, 0, 0] @ q[0, 0], rtol=0, atol=1e-4)


def states(count, heads, head_dim, dtype, device="cpu"):
    """Random states; every third is of no key."""
    outs = torch.randn(count, heads, head_dim)
    lses = torch.randn(count, heads) * 4
    outs[1::3], lses[1::3] = 0, -torch.inf
    return outs.to(device, dtype), lses.to(device)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 64), (3, 80)])
def test_merge(target, dtype, with_sinks, heads, head_dim, small_blocks):
    """Rows of 1, 0, 5, 1 (of no key) and 4 states; the last two states belong to nobody."""
    backend, device = target
    edges = [0, 1, 1, 6, 7, 8, 12]
    outs, lses = states(14, heads, head_dim, dtype, device)
    outs[6], lses[6] = 0, -torch.inf
    outs[12:], lses[12:] = torch.nan, torch.nan
    sinks = torch.randn(heads).to(device, dtype) if with_sinks else None
    bounds = torch.tensor(edges, dtype=torch.int32, device=device)
    out, lse = ops.merge_states(outs, lses, bounds, sinks, backend)
    assert out.dtype == dtype and out.shape == (6, heads, head_dim) and lse.dtype == torch.float32
    for b in range(6):
        logits = lses[edges[b] : edges[b + 1]].double()
        values = outs[edges[b] : edges[b + 1]].double()
        if sinks is not None:
            logits = torch.cat([logits, sinks.double()[None]])
            values = torch.cat([values, torch.zeros_like(values[:1] if len(values) else outs[:1].double())])
        weights = logits.softmax(0).nan_to_num()
        assert error(out[b], (weights[..., None] * values).sum(0)) <= JOINED[dtype]
        assert error(lse[b], logits.logsumexp(0)) <= 2e-6
    if sinks is None:
        assert not out[[1, 3]].any() and lse[[1, 3]].isneginf().all()
        assert torch.equal(out[0], outs[0])


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_merge_is_associative(target):
    backend, device = target
    outs, lses = states(9, 3, 16, torch.float32, device)

    def merge(outs, lses, *edges):
        return ops.merge_states(outs, lses, torch.tensor(edges, dtype=torch.int32, device=device), None, backend)

    once = merge(outs, lses, 0, 9)
    for edges in ((0, 4, 9), (0, 0, 2, 8, 9), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)):
        twice = merge(*merge(outs, lses, *edges), 0, len(edges) - 1)
        for a, b in zip(once, twice, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("op", ["rotate_keys", "rotate_queries", "merge_states"])
def test_opcheck(op, backend):
    pool = torch.randn(pool_shape(4, 2, 2, 8, 16))
    ints = torch.tensor([1, 0, 1], dtype=torch.int32)
    outs, lses = states(3, 2, 16, torch.float32)
    args = {
        "rotate_keys": (pool, pairs((1, 2), (3, 3), (1, 4)), ints * 7, frequencies(16), ints[1:], 0, 2, False),
        "rotate_queries": (torch.randn(2, 4, 16), ints, ints * 9, frequencies(16)[0], True),
        "merge_states": (outs, lses, torch.tensor([0, 2, 3], dtype=torch.int32), torch.randn(2)),
    }[op]
    torch.library.opcheck(getattr(torch.ops.octavo, op).default, (*args, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", [(128, 128), (80, 32), (256, 256)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_gpu_keys_at_real_sizes(dtype, rotary, interleaved):
    head_dim, rotary = rotary
    pool = torch.randn(pool_shape(64, 16, 8, 16, head_dim), device="cuda").to(dtype)
    order = torch.randperm(64, dtype=torch.int32) + 1
    units = torch.cat([order[:40].view(20, 2), order[40:, None].expand(-1, 2)]).contiguous().cuda()
    deltas = torch.randint(-131_072, 131_073, (len(units),), dtype=torch.int32, device="cuda")
    inv_freq, kinds = frequencies(rotary).cuda(), torch.arange(16, dtype=torch.int32, device="cuda") % 2
    want = pool.clone()
    reference.rotate_keys(want, units, deltas, inv_freq, kinds, 3, 15, interleaved)
    ops.rotate_keys(pool, units, deltas, inv_freq, kinds, 3, 15, interleaved, "triton")
    assert error(pool, want) <= TURNED[dtype]
    assert torch.equal(bits(pool[:, :, 1]), bits(want[:, :, 1])) and torch.equal(bits(pool[:, :3]), bits(want[:, :3]))
