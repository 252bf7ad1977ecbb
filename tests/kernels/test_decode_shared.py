"""Decoding with shared prefixes: every backend against the decode that reads each table by itself."""

import random
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from kernel_cases import LAYER, LAYERS, TOLERANCE, check, error, in_turn
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.cpu.shared import decode_shared_gathered
from octavo.kernels.layout import MAX_UNIT_TOKENS, SCRATCH_UNIT, entry_units, pack_entries, pool_shape
from octavo.kernels.reference import backend as reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
BACKENDS = ["reference", "cpu", "cpu-gathered", pytest.param("triton", marks=interpreted)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """Groups of sequences: ``runs[i]`` shared slots in front of each of the ``own[i]`` lengths; 0: no group."""

    name: str
    runs: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    unit: int = 16
    tables: str = "shared"
    sinks: bool = False
    softcap: float = 0.0
    gain: float = 1.0


CASES = [
    Case("one-group", (64,), ((5, 17, 1),)),
    Case("two-groups-and-two-alone", (48, 16, 0), ((1, 20), (3, 33, 16), (7, 40))),
    Case("no-group", (0,), ((1, 30, 16),)),
    Case("a-group-of-one", (32, 32), ((9,), (4, 8))),
    Case("a-row-of-padding", (32, 0), ((9, 1), (0,))),
    Case("nothing-but-padding", (0,), ((0, 0),)),
    Case("own-ends-with-the-run", (32,), ((0, 5, 0),)),
    Case("long-own-short-run", (16,), ((90, 3),)),
    Case("batch-of-one", (0,), ((20,),)),
    Case("large-group", (32,), (tuple(range(1, 40)),)),
    *(Case(f"unit-{u}", (64, 128), ((3, 10), (u, u + 1, 1)), unit=u) for u in (1, 2, 8, 32, 64)),
    *(
        Case(f"heads-{q}-{kv}", (48, 0), ((1, 20, 3), (5,)), heads=(q, kv))
        for q, kv in ((5, 1), (9, 3), (28, 4), (7, 7))
    ),
    *(Case(f"head-dim-{d}", (32,), ((1, 20),), head_dim=d) for d in (16, 80, 128, 256)),
    *(Case(f"tables-{t}", (32, 16), ((1, 20), (3, 4)), tables=t) for t in ("layer", "head", "layer+head")),
    Case("sinks", (48, 0), ((1, 20), (5, 0)), sinks=True),
    Case("softcap", (48,), ((1, 20),), softcap=30.0, gain=30.0),
    Case("sinks-softcap", (48, 16), ((1, 20), (2, 2)), softcap=30.0, sinks=True, gain=30.0),
]
HALF_CASES = ("two-groups-and-two-alone", "unit-8", "unit-64", "heads-9-3", "head-dim-80", "sinks-softcap")
SPLIT_CASES = ("one-group", "two-groups-and-two-alone", "long-own-short-run", "a-row-of-padding")

LARGE = [  # for a GPU: real tiles, splits, groups of more query rows than a tile has
    Case("samples-16", (8192,), (tuple(range(500, 516)),), heads=(32, 8), head_dim=128),
    Case("samples-64", (4096, 0), (tuple(range(1, 65)), (3000, 17)), heads=(32, 8), head_dim=128),
    Case("ragged", (2048, 512, 16, 0), ((1, 900), (5, 6, 7), (4000, 1), (2500, 0)), heads=(28, 4), head_dim=128),
    Case("unit-8-large", (1000, 3000), ((100, 7, 300), (1, 2)), heads=(9, 3), unit=8, sinks=True),
    Case("wide-large", (1600,), ((5, 70, 300),), heads=(16, 8), head_dim=256, unit=64, softcap=50.0, gain=30.0),
    Case("multi-query-large", (2048,), ((100, 7, 300, 64, 1),), heads=(20, 1), head_dim=128),
]


def ids(x):
    return x.name if isinstance(x, Case) else str(x).removeprefix("torch.")


@dataclass(frozen=True)
class Inputs:
    case: Case
    q: Tensor
    pool: Tensor
    table: Tensor
    lengths: Tensor
    q_pos: Tensor
    groups: Tensor
    sinks: Tensor | None

    def shared_args(self):
        scores = (self.sinks, self.case.head_dim**-0.5, self.case.softcap)
        return self.q, self.pool, LAYER, self.table, self.lengths, self.q_pos, self.groups, *scores

    def decode_args(self):
        scores = (None, self.sinks, self.case.head_dim**-0.5, 0, self.case.softcap)
        return self.q, self.pool, LAYER, self.table, self.lengths, self.q_pos, *scores, False, False

    def truth(self):
        return reference.decode(*self.decode_args())[0]


def build(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Random tensors; NaN in every slot that holds no token, and behind the entries that no row may look at. The rows
    of a group are scattered over the batch, and pages over the pool."""
    q_heads, kv_heads = case.heads
    unit, batch = case.unit, sum(map(len, case.own))
    table_layers, table_heads = LAYERS if "layer" in case.tables else 1, kv_heads if "head" in case.tables else 1
    rows = random.sample(range(batch), batch)
    tokens = [run + n for run, own in zip(case.runs, case.own, strict=True) for n in own]
    entries = max(-(-n // unit) for n in tokens) + 2
    copies = table_layers * table_heads
    used = copies * (sum(run // unit for run in case.runs) + sum(-(-n // unit) for own in case.own for n in own))
    pool = torch.full(pool_shape(used, LAYERS, kv_heads, unit, case.head_dim), torch.nan)
    free = (torch.randperm(used) + 1).tolist()
    table = pack_entries(torch.tensor(SCRATCH_UNIT), MAX_UNIT_TOKENS).repeat(table_layers, batch, table_heads, entries)
    lengths = torch.zeros((table_layers, batch, table_heads), dtype=torch.int32)

    def stored(count, layer, head):
        """Units of ``count`` fresh tokens."""
        taken = [free.pop() for _ in range(-(-count // unit))]
        layers = slice(None) if table_layers == 1 else layer
        heads = slice(None) if table_heads == 1 else head
        for i, one in enumerate(taken):
            where = (one, layers, slice(None), heads, slice(min(unit, count - i * unit)))
            pool[where] = torch.randn(pool[where].shape)
        return pack_entries(torch.tensor(taken, dtype=torch.int64), unit)

    for layer in range(table_layers):
        for head in range(table_heads):
            place = iter(rows)
            for run, own in zip(case.runs, case.own, strict=True):
                common = stored(run, layer, head)
                for n in own:
                    b, full = next(place), torch.cat([common, stored(n, layer, head)])
                    table[layer, b, head, : len(full)] = full
                    lengths[layer, b, head] = run + n
    groups = grouping(rows, [(run, len(own)) for run, own in zip(case.runs, case.own, strict=True)])
    q_pos = torch.zeros(batch, dtype=torch.int32)
    for b, n, run in zip(rows, tokens, groups[3][rows].tolist(), strict=True):
        q_pos[b] = max(n - 1, run)  # a row stands behind its run, whether its own first token is stored or not
    q = torch.randn(batch, q_heads, case.head_dim) * case.gain
    sinks = torch.randn(q_heads).to(device, dtype) if case.sinks else None
    tensors = (table, lengths, q_pos, groups)
    return Inputs(case, q.to(device, dtype), pool.to(device, dtype), *(x.to(device) for x in tensors), sinks)


def grouping(rows: list[int], groups: list[tuple[int, int]]) -> Tensor:
    """The op's ``groups`` for (run, size) of consecutive ``rows``; a run of 0 is no group."""
    parts, at = [], 0
    for run, size in groups:
        parts.append((run, rows[at : at + size]))
        at += size
    grouped = [part for part in parts if part[0]]
    out = torch.zeros((4, len(rows) + 1), dtype=torch.int32)
    members = [b for _, part in grouped for b in part] + [b for run, part in parts if not run for b in part]
    bounds = [0, *accumulate(len(part) for _, part in grouped)]
    out[0, :-1] = torch.tensor(members)
    out[1] = torch.tensor(bounds + bounds[-1:] * (len(rows) + 1 - len(bounds)))
    for i, (run, part) in enumerate(grouped):
        out[2, i] = run
        out[3, part] = run
    return out


@pytest.fixture(autouse=True)
def fresh_numbers(request):
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)
    random.seed(seed)
    yield
    print(f"{request.node.name}: seed {seed}")


@pytest.fixture
def small_shared_tiles(small_tiles):
    """As ``small_tiles``, for the prefix items too."""
    from octavo.kernels.triton import settings

    with settings.trial("shared", BLOCK_M=16, BLOCK_N=16, num_stages=1):
        yield


def call(backend, inputs):
    if backend == "cpu-gathered":  # what a machine without a compiler runs
        return decode_shared_gathered(*inputs.shared_args())
    return ops.decode_shared(*inputs.shared_args(), backend)


def compare(backend, case, dtype, device="cpu"):
    inputs = build(case, dtype, device)
    check((call(backend, inputs),), (inputs.truth(),), dtype, backend, case.gain)


@pytest.mark.parametrize("backend", BACKENDS[:3])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_it_is_decode(case, backend):
    compare(backend, case, torch.float32)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_it_is_decode_in_triton(case, small_shared_tiles):
    compare("triton", case, torch.float32)


@interpreted
@pytest.mark.parametrize("case", [case for case in CASES if case.name in SPLIT_CASES], ids=ids)
def test_it_is_decode_in_triton_with_the_real_tiles(case):
    compare("triton", case, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "dtype"), in_turn([case for case in CASES if case.name in HALF_CASES], DTYPES[1:]), ids=ids
)
def test_half_precision(case, dtype, backend):
    compare(backend, case, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_of_another_dtype_than_the_queries(backend):
    inputs = build(CASES[1], torch.float16)
    inputs = replace(inputs, q=inputs.q.float())
    check((call(backend, inputs),), (inputs.truth(),), torch.float16, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(4))
def test_random_groups(number, backend):
    """Groups of any sizes; some runs are longer than what follows, some rows have nothing of their own."""
    runs = tuple(random.choice([0, 16, 16, 48, 80]) for _ in range(random.randint(1, 4)))
    own = tuple(tuple(random.randint(0, 40) for _ in range(random.randint(1, 5))) for _ in runs)
    compare(backend, Case("random", runs, own), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_pages_lie_changes_no_bit(backend):
    inputs = build(CASES[1], torch.float32)
    order = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(len(inputs.pool) - 1) + 1])
    pool = torch.empty_like(inputs.pool)
    pool[order] = inputs.pool
    moved = replace(inputs, pool=pool, table=pack_entries(order[entry_units(inputs.table)], inputs.table & 127))
    assert torch.equal(call(backend, inputs), call(backend, moved))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_queries_keep_their_layout(backend):
    inputs = build(CASES[1], torch.float32)
    wide = torch.cat([inputs.q, torch.full_like(inputs.q, torch.nan)], 1)
    q = wide[:, : inputs.q.shape[1]]
    out = call(backend, replace(inputs, q=q))
    assert out.stride() == torch.empty_like(q).stride()
    check((out,), (inputs.truth(),), torch.float32, backend)


@pytest.mark.parametrize("backend", ["cpu-gathered", BACKENDS[-1]])
def test_a_run_is_read_once(backend):
    """Give all rows of a group but one tables whose head is garbage: who reads the run for each row shows."""
    inputs = build(Case("once", (64,), ((5, 17, 1),)), torch.float32)
    want = inputs.truth()
    first = int(inputs.groups[0, 0])
    for b in range(3):
        if b != first:
            inputs.table[0, b, 0, :4] = pack_entries(torch.tensor(SCRATCH_UNIT), inputs.case.unit)
    check((call(backend, inputs),), (want,), torch.float32, backend)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: x.groups[0].fill_(0), "list"),
        (lambda x: x.groups[1, 1:].fill_(1), "own|without a group"),
        (lambda x: x.groups[1, 0].fill_(1), "bounds"),
        (lambda x: x.groups[2, 0].add_(1), "whole units"),
        (lambda x: x.groups[2, 0].sub_(16), "own"),
        (lambda x: x.groups[2:].mul_(2), "differ|not full"),
        (lambda x: x.groups[3, -2].fill_(16), "own"),
        (lambda x: x.table[0, 1, 0, 1].add_(1 << 9), "differ"),
        (lambda x: x.table[0, :, 0, 1].sub_(1), "not full"),
        (lambda x: x.q_pos[1].fill_(63), "end in their run"),
        (lambda x: x.lengths[0, 2].fill_(63), "end in their run"),
    ],
)
def test_the_reference_finds_what_is_not_so(wrong, says):
    inputs = build(Case("wrong", (64,), ((5, 17, 1),)), torch.float32)
    wrong(inputs)
    with pytest.raises(AssertionError, match=says):
        call("reference", inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("case", CASES + LARGE, ids=ids)
def test_gpu(case, dtype):
    compare("triton", case, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=ids)
def test_gpu_is_as_exact_as_decode(case):
    inputs = build(case, torch.bfloat16, "cuda")
    truth = inputs.truth()
    alone = error(ops.decode(*inputs.decode_args(), "triton")[0], truth)
    assert error(call("triton", inputs), truth) <= max(2 * alone, TOLERANCE[torch.float32])


@pytest.mark.gpu
def test_gpu_graph_follows_the_groups():
    """A graph captured on one set of groups and lengths replays on others: nothing launched depends on them."""
    case = LARGE[2]
    inputs = build(case, torch.bfloat16, "cuda")
    others = [
        build(replace(case, own=own), torch.bfloat16, "cuda")
        for own in (case.own, ((1, 2), (900, 1, 1), *case.own[2:]))
    ]
    width = max(x.table.shape[3] for x in (inputs, *others))
    others = [replace(x, table=torch.nn.functional.pad(x.table, (0, width - x.table.shape[3]))) for x in others]
    buffers = replace(
        others[0],
        table=others[0].table.clone(),
        pool=inputs.pool.new_zeros((max(len(x.pool) for x in others), *inputs.pool.shape[1:])),
    )
    call("triton", buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call("triton", buffers)
    for other in others:
        for name in ("q", "table", "lengths", "q_pos", "groups"):
            getattr(buffers, name).copy_(getattr(other, name))
        buffers.pool[: len(other.pool)] = other.pool
        graph.replay()
        check((got,), (other.truth(),), torch.bfloat16)
    buffers.groups.copy_(grouping(list(range(len(buffers.q))), [(0, len(buffers.q))]))  # nobody shares any more
    graph.replay()
    check((got,), (others[-1].truth(),), torch.bfloat16)
