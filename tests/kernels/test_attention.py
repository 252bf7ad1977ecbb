"""Decode and prefill of every backend against the reference."""

import mmap
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from kernel_cases import DECODE, LARGE_DECODE, LARGE_PREFILL, LAYER, PREFILL, TOLERANCE, Case, build, check, in_turn

from octavo.kernels import ops
from octavo.kernels.cpu.attention import decode_gathered, prefill_gathered
from octavo.kernels.layout import entry_units, pack_entries, pool_shape
from octavo.kernels.reference import backend as reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
BACKENDS = ["cpu", "cpu-gathered", pytest.param("triton", marks=interpreted)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALF_CASES = ("unit-8", "unit-64", "heads-28-4", "head-dim-80", "sinks-window-softcap", "sealed-stored", "large-scores")
HALF_CASES += ("prefill-chunk", "prefill-head-dim-80", "prefill-sealed-late", "prefill-sealed-stored", "prefill-padded")
DIRECT_CASES = ("unit-8", "window-16", "sinks-window-softcap", "sealed-stored", "all-empty", "all-empty-sinks")


def ids(x):
    return x.name if isinstance(x, Case) else str(x).removeprefix("torch.")


def call(op, backend, inputs):
    if backend == "cpu-gathered":  # what a machine without a compiler runs
        if op == "decode":
            return decode_gathered(*inputs.args())
        *args, _, want_lse = inputs.args()
        return prefill_gathered(*args, want_lse)
    return getattr(ops, op)(*inputs.args(), backend)


def compare(backend, case, dtype, device="cpu"):
    """A backend on a case against the reference."""
    inputs = build(case, dtype, device)
    op = "prefill" if case.queries else "decode"
    check(call(op, backend, inputs), getattr(reference, op)(*inputs.args()), dtype, backend, case.gain)


@pytest.mark.parametrize("backend", ["cpu", "cpu-gathered"])
@pytest.mark.parametrize("case", DECODE, ids=ids)
def test_decode_cpu(case, backend):
    compare(backend, case, torch.float32)


@interpreted
@pytest.mark.parametrize("case", DECODE, ids=ids)
def test_decode_triton(case, small_tiles):
    compare("triton", case, torch.float32)


@interpreted
@pytest.mark.parametrize("case", [case for case in DECODE if case.name in DIRECT_CASES], ids=ids)
def test_decode_triton_without_splits(case, small_tiles):
    """A table so short that one program finishes a row."""
    from octavo.kernels.triton import settings

    with settings.trial("decode", min_split_tokens=4096):
        compare("triton", case, torch.float32)


@pytest.mark.parametrize("case", PREFILL, ids=ids)
def test_prefill_cpu(case):
    compare("cpu", case, torch.float32)


@interpreted
@pytest.mark.parametrize("case", PREFILL, ids=ids)
def test_prefill_triton(case, small_tiles):
    compare("triton", case, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "dtype"), in_turn([c for c in DECODE + PREFILL if c.name in HALF_CASES], DTYPES[1:]), ids=ids
)
def test_half_precision(case, dtype, backend):
    compare(backend, case, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtypes", "case"),
    in_turn([*permutations(DTYPES, 2)], [c for c in DECODE + PREFILL if c.name in ("unit-8", "prefill-chunk")]),
    ids=lambda x: "q-{}-pool-{}".format(*map(ids, x)) if isinstance(x, tuple) else ids(x),
)
def test_a_pool_of_another_dtype_than_the_queries(case, dtypes, backend):
    """The queries are numbers that both types have, so what is compared is no rounding of theirs."""
    q_dtype, pool_dtype = dtypes
    coarse = max(dtypes, key=TOLERANCE.get)
    inputs = build(case, pool_dtype)
    inputs = replace(inputs, q=inputs.q.bfloat16().to(q_dtype))
    op = "prefill" if case.queries else "decode"
    check(call(op, backend, inputs), getattr(reference, op)(*inputs.args()), coarse, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in DECODE + PREFILL if c.name in ("sinks", "prefill-sinks")], ids=ids)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, on what is then not taken
def test_a_sink_of_minus_infinity_is_none(case, backend):
    inputs = build(case, torch.float32)
    inputs.sinks[::2] = -torch.inf
    op = "prefill" if case.queries else "decode"
    check(call(op, backend, inputs), getattr(reference, op)(*inputs.args()), torch.float32, backend)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("case", DECODE + PREFILL, ids=ids)
def test_bf16_with_the_real_tiles(case):
    compare("triton", case, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("case", DECODE + PREFILL + LARGE_DECODE + LARGE_PREFILL, ids=ids)
def test_gpu(case, dtype):
    compare("triton", case, dtype, "cuda")


@pytest.mark.gpu
def test_gpu_graph_follows_the_lengths():
    """A graph captured on one set of lengths replays on another: nothing that was launched depends on them."""
    case = Case("graph", (3000, 40, 0), heads=(32, 8), head_dim=128, mass=True)
    inputs = build(case, torch.bfloat16, "cuda")
    call("decode", "triton", inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call("decode", "triton", inputs)
    for lengths in ((700, 1, 0), (3000, 40, 0), (0, 33, 0)):
        inputs.lengths[0, :, 0] = torch.tensor(lengths)
        inputs.q_pos[:] = torch.tensor(lengths).sub(1).clamp(min=0)
        graph.replay()
        check(got, reference.decode(*inputs.args()), torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [(), (5, 5)], ids=["decode", "prefill"])
def test_query_heads_read_their_own_kv_head(backend, queries):
    """With V constant in each KV head, the output names the head that was read."""
    case = Case("mapping", (9, 30), queries, heads=(28, 4))
    inputs = build(case, torch.float32)
    values = inputs.pool[:, :, 1]
    values.copy_(torch.where(values.isnan(), torch.nan, torch.arange(4.0)[:, None, None]))
    out = call("prefill" if queries else "decode", backend, inputs)[0]
    want = torch.arange(4.0).repeat_interleave(7)[None, :, None].expand_as(out)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize(
    "case", [Case("p", (9, 70), mass=True), Case("p", (9, 70), (4, 30))], ids=["decode", "prefill"]
)
def test_where_pages_lie_changes_no_bit(backend, case):
    inputs = build(case, torch.float32)
    order = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(len(inputs.pool) - 1) + 1])
    pool = torch.empty_like(inputs.pool)
    pool[order] = inputs.pool
    table = pack_entries(order[entry_units(inputs.table)], inputs.table & 127)
    op = "prefill" if case.queries else "decode"
    for a, b in zip(call(op, backend, inputs), call(op, backend, replace(inputs, pool=pool, table=table)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mass_is_a_share(backend):
    inputs = build(Case("share", (0, 1, 60), mass=True), torch.float32)
    mass = call("decode", backend, inputs)[2]
    torch.testing.assert_close(mass.sum(2), torch.tensor([0.0, 1.0, 1.0])[:, None].expand(3, 2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [(), (3, 4)], ids=["decode", "prefill"])
def test_strided_queries_keep_their_layout(backend, queries):
    """q may be a slice of a fused projection; the output has the strides that the registered shape promises."""
    case = Case("strided", (9, 30), queries)
    inputs = build(case, torch.float32)
    wide = torch.cat([inputs.q, torch.full_like(inputs.q, torch.nan)], 1)
    q = wide[:, : inputs.q.shape[1]]
    op = "prefill" if queries else "decode"
    out = call(op, backend, replace(inputs, q=q))[0]
    assert out.stride() == torch.empty_like(q).stride()
    check((out,), call(op, "reference", inputs)[:1], torch.float32)


def far_pool(head_dim: int) -> torch.Tensor:
    """A pool of over 2^31 elements, fp16, of which only the pages that are touched take memory."""
    shape = pool_shape(2**31 // (2 * 2 * 8 * head_dim) + 3, 1, 2, 8, head_dim)
    memory = mmap.mmap(-1, 2 * torch.Size(shape).numel())
    return torch.frombuffer(memory, dtype=torch.float16).view(shape)


@pytest.mark.parametrize("backend", ["reference", "cpu", BACKENDS[-1]])
def test_units_beyond_two_to_the_31_elements(backend):
    """Append, copy, decode and prefill through units whose first element has an offset over 2^31."""
    head_dim, unit = 64, 8
    pool = far_pool(head_dim)
    last = len(pool) - 1
    assert last * pool.stride(0) > 2**31
    tokens = 12
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn((2, tokens, 2, head_dim), generator=random).half()
    units = torch.tensor([last, last - 1])
    slots = (units[:, None] * unit + torch.arange(unit)).flatten()[:tokens]
    near = torch.zeros(pool_shape(2, 1, 2, unit, head_dim), dtype=torch.float16)
    reference.append(k, v, near, 0, (torch.tensor([2, 1])[:, None] * unit + torch.arange(unit)).flatten()[:tokens])
    ops.append(k, v, pool, 0, slots, backend)
    assert torch.equal(pool[units], near[[2, 1]])
    ops.copy_units(pool, torch.tensor([[last, last - 2], [last - 1, 1]], dtype=torch.int32), backend)
    assert torch.equal(pool[[last - 2, 1]], near[[2, 1]])

    q = torch.randn((5, 4, head_dim), generator=random).half()
    lengths = torch.full((1, 1, 1), tokens, dtype=torch.int32)
    rest = (None, None, head_dim**-0.5, 0, 0.0)
    q_pos = torch.arange(tokens - 5, tokens, dtype=torch.int32)
    cu_q = torch.tensor([0, 5], dtype=torch.int32)
    far_table = pack_entries(units, unit)[None, None, None]
    near_table = pack_entries(torch.tensor([2, 1]), unit)[None, None, None]
    got = ops.decode(q[:1], pool, 0, far_table, lengths, q_pos[-1:], *rest, True, True, backend)
    check(
        got,
        reference.decode(q[:1], near, 0, near_table, lengths, q_pos[-1:], *rest, True, True),
        torch.float16,
        backend,
    )
    got = ops.prefill(q, pool, 0, far_table, lengths, cu_q, q_pos, *rest, 5, True, backend)
    check(got, reference.prefill(q, near, 0, near_table, lengths, cu_q, q_pos, *rest, 5, True), torch.float16, backend)


def test_layer_is_not_the_first():
    assert LAYER > 0  # a kernel that forgot the layer's offset would pass on layer 0
