"""Short chunks on long contexts: few queries a sequence, with the context shared out over programs."""

import logging
from dataclasses import replace

import pytest
import torch
from kernel_cases import LAYER, Case, build, check, in_turn

from octavo.kernels import log, ops
from octavo.kernels.layout import entry_units, pack_entries
from octavo.kernels.reference import backend as reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
TRITON = pytest.param("triton", marks=interpreted)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

CASES = [
    Case("short-drafts", (150, 200), (2, 2)),
    Case("short-ragged", (150, 33, 90, 5), (8, 1, 3, 5)),
    Case("short-one-query", (70, 33), (1, 1)),
    Case("short-from-nothing", (8, 3, 1), (8, 3, 1)),
    Case("short-nobody-between", (90, 40, 0, 150), (3, 0, 0, 4)),
    Case("short-first-and-last-empty", (0, 90, 0), (0, 3, 0), padding=2),
    Case("short-padded", (90, 150), (4, 2), padding=7),
    Case("short-padded-sinks", (90, 150), (4, 2), padding=7, sinks=True),
    Case("short-nothing-cached", (0, 0), (1, 3), sinks=True),
    Case("short-across-a-tile", (82, 33), (5, 8)),  # the queries stand on both sides of a tile's end
    *(Case(f"short-page-{page}", (90, 20), (5, 2), page=page) for page in (1, 5, 24, 64)),
    Case("short-heads-5-1", (90, 20), (3, 5), (5, 1)),
    Case("short-heads-28-4", (40, 20), (4, 2), (28, 4)),
    Case("short-heads-7-7", (40, 20), (3, 9), (7, 7)),
    *(Case(f"short-head-dim-{dim}", (70,), (5,), head_dim=dim) for dim in (16, 80)),
    *(Case(f"short-tables-{tables}", (90, 20), (5, 3), tables=tables) for tables in ("layer", "head", "layer+head")),
    Case("short-tables-head-stored", (90, 20), (5, 3), page=8, tables="head", stored=True),
    *(Case(f"short-window-{window}", (90, 5), (6, 5), window=window) for window in (1, 7, 33)),
    Case("short-softcap", (60, 90), (5, 3), softcap=50.0, gain=70.0),
    Case("short-large-scores", (60, 90), (5, 3), gain=70.0),
    Case("short-sinks", (60, 0, 5), (8, 0, 5), sinks=True, window=20),
    Case("short-stored", (60, 7), (8, 7), page=4, stored=True, window=25, sinks=True),
    Case("short-sealed", (100,), (8,), segments=(45, 13, 33)),
    Case("short-sealed-stored", (90,), (7,), page=24, segments=(13, 30), stored=True, softcap=30.0),
    Case("short-rewound", (90, 40), (5, 3), rewind=6),
    Case("short-before-the-first-token", (30, 90), (5, 3), rewind=27, sinks=True),
]
HALF = [case for case in CASES if case.name in ("short-ragged", "short-heads-28-4", "short-padded-sinks")]
LARGE = [
    *(Case(f"large-short-{count}", (3000, 700, 5000), (count,) * 3, (32, 8), 128) for count in (2, 4, 8, 16)),
    Case("large-short-one", (9000,), (8,), (32, 8), 128),
    Case("large-short-ragged", (3000, 40, 0, 1, 5000), (16, 3, 0, 1, 9), (28, 4), 128, padding=9, sinks=True),
    Case("large-short-window", (5000, 40), (7, 7), (16, 8), 256, window=1024, softcap=50.0, gain=30.0),
    Case("large-short-64-rows", (2500, 100), (16, 2), (4, 1), 256, page=64),
    Case("large-short-stored", (2000, 40), (5, 8), (28, 4), 128, page=24, stored=True, tables="layer+head"),
    Case("large-short-sealed", (2000, 600), (8, 3), (8, 8), 64, page=24, segments=(313, 30, 7)),
    Case("large-short-batch", (1000,) * 70, (4,) * 70, (8, 2), 128),
]


def ids(x):
    return x.name if isinstance(x, Case) else str(x).removeprefix("torch.")


@pytest.fixture
def small_shares():
    """Tiles of 16 slots and shares of at least one, so that short contexts are split."""
    from octavo.kernels.triton import settings

    with (
        settings.trial("prefill_short", BLOCK_M=64, BLOCK_N=16, num_stages=1, min_split_tokens=16),
        settings.trial("combine", BLOCK_S=2),
    ):
        yield


@pytest.fixture
def only_short(monkeypatch):
    """The paged kernel without a split is out of reach."""
    from octavo.kernels.triton import prefill_dense

    monkeypatch.setattr(prefill_dense, "native", None)


def call(backend, inputs):
    return ops.prefill(*inputs.args(), backend)


def compare(case, dtype, device="cpu", **changed):
    inputs = replace(build(case, dtype, device), **changed)
    check(call("triton", inputs), reference.prefill(*inputs.args()), dtype, gain=case.gain)


def filled_up(name, **parts):
    """Chunks of 5, 3, 1 and 0 queries that are filled up to 5 rows, as a program of fixed shape has them: at the last
    position again, and where there is no token at 0, seeing nothing."""
    inputs = build(Case(name, (90, 60, 33, 5), (5,) * 4, **parts), torch.float32)
    lengths, q_pos = inputs.lengths.clone(), inputs.q_pos.view(4, 5)
    asked = torch.tensor([5, 3, 1, 0], dtype=torch.int32)
    lengths -= (5 - asked)[None, :, None]
    last = q_pos[:, :1] + asked[:, None] - 1
    return replace(inputs, lengths=lengths, q_pos=torch.minimum(q_pos, last).clamp(min=0).flatten())


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("backend", ["cpu", TRITON])
def test_chunks_that_are_filled_up_where_nothing_is_split(backend, window):
    inputs = filled_up("filled", window=window)
    check(call(backend, inputs), reference.prefill(*inputs.args()), torch.float32)


@interpreted
@pytest.mark.usefixtures("small_shares", "only_short")
class TestInterpreted:
    @pytest.mark.parametrize("case", CASES, ids=ids)
    def test_agrees_with_the_reference(self, case):
        compare(case, torch.float32)

    @pytest.mark.parametrize(("case", "dtype"), in_turn(HALF, DTYPES[1:]), ids=ids)
    def test_half_precision(self, case, dtype):
        compare(case, dtype)

    @pytest.mark.parametrize("programs", [1, 9])
    @pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=ids)
    def test_any_number_of_programs(self, case, programs):
        from octavo.kernels.triton import settings

        with settings.trial("prefill_short", programs_per_sm=programs):
            compare(case, torch.float32)

    @pytest.mark.parametrize("page", [8, 64])
    def test_other_tiles(self, page):
        """A least share of several tiles; tiles that are larger than a unit, and smaller."""
        from octavo.kernels.triton import settings

        with settings.trial("prefill_short", BLOCK_N=32, min_split_tokens=64):
            compare(Case("short-tiles", (150, 90), (3, 8), page=page), torch.float32)

    @pytest.mark.parametrize("parts", [{}, {"window": 7}, {"sinks": True}], ids=str)
    def test_chunks_that_are_filled_up(self, parts):
        inputs = filled_up("short-filled", **parts)
        check(call("triton", inputs), reference.prefill(*inputs.args()), torch.float32)

    def test_strided_queries_keep_their_layout(self):
        inputs = build(Case("short-strided", (90, 30), (3, 4)), torch.float32)
        q = torch.cat([inputs.q, torch.full_like(inputs.q, torch.nan)], 1)[:, : inputs.q.shape[1]]
        out = call("triton", replace(inputs, q=q))[0]
        assert out.stride() == torch.empty_like(q).stride()
        check((out,), reference.prefill(*inputs.args())[:1], torch.float32)

    def test_a_wide_table_without_a_long_context(self):
        """Most programs have no share, and a chunk that one program has whole is finished by it."""
        inputs = build(Case("short-wide", (9, 20), (2, 5)), torch.float32)
        table = torch.nn.functional.pad(inputs.table, (0, 300))
        check(call("triton", replace(inputs, table=table)), reference.prefill(*inputs.args()), torch.float32)

    def test_each_query_is_a_decode(self):
        inputs = build(Case("short-alone", (90, 150), (3, 3)), torch.float32)
        out, lse = call("triton", inputs)
        scores = (None, None, inputs.case.head_dim**-0.5, 0, 0.0, False, True)
        for query in range(3):
            rows = torch.tensor([query, 3 + query])
            where = (inputs.q[rows], inputs.pool, LAYER, inputs.table, inputs.lengths, inputs.q_pos[rows])
            want = reference.decode(*where, *scores)
            check((out[rows], lse[rows]), want[:2], torch.float32)

    def test_where_pages_lie_changes_no_bit(self):
        inputs = build(Case("short-moved", (100, 40), (3, 7)), torch.float32)
        order = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(len(inputs.pool) - 1) + 1])
        pool = torch.empty_like(inputs.pool)
        pool[order] = inputs.pool
        moved = replace(inputs, pool=pool, table=pack_entries(order[entry_units(inputs.table)], inputs.table & 127))
        for a, b in zip(call("triton", moved), call("triton", inputs), strict=True):
            assert torch.equal(a, b)

    def test_the_log_sum_exp_only_on_request(self):
        inputs = build(Case("short-lse", (90,), (3,)), torch.float32)
        out, lse = ops.prefill(*inputs.args()[:-1], False, "triton")
        assert lse.numel() == 0 and torch.equal(out, call("triton", inputs)[0])


@pytest.mark.parametrize("backend", ["reference", "cpu", TRITON])
def test_who_sees_whom(backend, small_shares):
    """Equal scores and one-hot values: the output says which positions a query saw, and how many."""
    tokens, count, window = 60, 7, 21
    inputs = build(Case("short-seen", (tokens,), (count,), (2, 1), 64, 4, window=window), torch.float32)
    units = entry_units(inputs.table[0, 0, 0, : tokens // 4])
    pool = inputs.pool.clone()
    pool[units, LAYER, 0] = 0.0
    pool[units, LAYER, 1, 0] = torch.eye(64)[:tokens].view(-1, 4, 64)
    out = call(backend, replace(inputs, pool=pool))[0][:, 0, :tokens]  # [query, key]
    distance = torch.arange(tokens - count, tokens)[:, None] - torch.arange(tokens)
    want = (distance >= 0) & (distance < window)
    torch.testing.assert_close(out, want / want.sum(1, keepdim=True), rtol=1e-6, atol=0)


@interpreted
class TestChoice:
    @pytest.mark.parametrize(
        ("case", "short"),
        [
            (Case("fits", (200, 30), (16, 2)), True),
            (Case("one-too-many", (200, 30), (17, 2)), False),
            (Case("a-short-table", (70, 30), (4, 2)), False),
            (Case("spans", (200,), (4,), spans=((190, 200),)), False),
        ],
        ids=ids,
    )
    def test_by_shapes_and_features(self, case, short, monkeypatch):
        from octavo.kernels.triton import prefill_short

        asked = []
        run = prefill_short.short
        monkeypatch.setattr(prefill_short, "short", lambda *args: asked.append(args) or run(*args))
        inputs = build(case, torch.float32)
        got = ops.prefill(*inputs.args(), "triton", q_span=inputs.q_span)
        check(got, reference.prefill(*inputs.args(), q_span=inputs.q_span), torch.float32)
        assert bool(asked) == short

    def test_log(self, monkeypatch, caplog):
        monkeypatch.setattr(log, "KERNELS", True)
        monkeypatch.setattr(log, "_said", set())
        caplog.set_level(logging.INFO, "octavo.kernels")
        call("triton", build(Case("short-log", (200,), (2,)), torch.float32))
        assert caplog.messages[0].startswith("prefill: triton, Triton, split over the context; ")

    def test_no_sequence(self):
        """Rows of nobody alone: there is nothing to split."""
        inputs = build(Case("short-none", (200,), (2,)), torch.float32)
        none = replace(
            inputs, table=inputs.table[:, :0], lengths=inputs.lengths[:, :0], cu_q=torch.zeros(1, dtype=torch.int32)
        )
        out, lse = call("triton", none)
        assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.gpu
class TestGPU:
    @pytest.mark.parametrize("dtype", DTYPES, ids=ids)
    @pytest.mark.parametrize("case", CASES, ids=ids)
    def test_small_shares(self, case, dtype, small_shares):
        compare(case, dtype, "cuda")

    @pytest.mark.parametrize("dtype", DTYPES, ids=ids)
    @pytest.mark.parametrize("case", LARGE, ids=ids)
    def test_large(self, case, dtype):
        compare(case, dtype, "cuda")

    def test_graph_follows_the_lengths(self):
        """A graph captured on one set of lengths and chunks replays on another."""
        inputs = build(Case("short-graph", (3000, 40, 700), (8, 8, 8), (32, 8), 128), torch.bfloat16, "cuda")
        call("triton", inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call("triton", inputs)
        for lengths, counts in (((700, 9, 0), (3, 8, 0)), ((3000, 40, 700), (8, 1, 5)), ((0, 33, 699), (0, 2, 8))):
            inputs.lengths[0, :, 0] = torch.tensor(lengths)
            inputs.cu_q[:] = torch.tensor([0, *counts]).cumsum(0)
            positions = [torch.arange(n - count, n) for n, count in zip(lengths, counts, strict=True)]
            inputs.q_pos[: sum(counts)] = torch.cat(positions)
            graph.replay()
            check(got, reference.prefill(*inputs.args()), torch.bfloat16)
