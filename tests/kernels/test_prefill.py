"""Prefill beyond one query after another: bidirectional spans, dense parts, TMA; and the gather that the parts need."""

import logging
from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    LARGE_PREFILL,
    LARGE_PREFILL_SPANS,
    LAYER,
    LAYERS,
    PREFILL,
    PREFILL_SPANS,
    Case,
    build,
    check,
)

from octavo.kernels import log, ops
from octavo.kernels.layout import entry_units, pack_entries, pool_shape
from octavo.kernels.reference import backend as reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
TRITON = pytest.param("triton", marks=interpreted)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def ids(x):
    return x.name if isinstance(x, Case) else str(x).removeprefix("torch.")


def call(backend, inputs, **named):
    return ops.prefill(*inputs.args(), backend, q_span=inputs.q_span, **named)


def compare(backend, case, dtype, device="cpu", **named):
    inputs = build(case, dtype, device)
    want = reference.prefill(*inputs.args(), q_span=inputs.q_span)
    check(call(backend, inputs, **named), want, dtype, backend, case.gain)


class TestSpans:
    @pytest.mark.parametrize("backend", ["cpu", TRITON])
    @pytest.mark.parametrize("case", PREFILL_SPANS, ids=ids)
    def test_agrees_with_the_reference(self, case, backend, small_tiles):
        compare(backend, case, torch.float32)

    @pytest.mark.parametrize("backend", ["cpu", TRITON])
    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=ids)
    @pytest.mark.parametrize("case", [PREFILL_SPANS[1], PREFILL_SPANS[-1]], ids=ids)
    def test_half_precision(self, case, dtype, backend):
        compare(backend, case, dtype)

    @pytest.mark.parametrize("backend", ["reference", "cpu", TRITON])
    @pytest.mark.parametrize("stored", [False, True], ids=["ordered", "stored"])
    def test_who_sees_whom(self, backend, stored, small_tiles):
        """Equal scores and one-hot values: the output says which positions a query saw, and how many."""
        tokens, window, spans = 60, 7, ((5, 9), (9, 33), (40, 70))
        inputs = build(Case("seen", (tokens,), (tokens,), (2, 1), 64, 4, window=window, spans=spans), torch.float32)
        ids = entry_units(inputs.table[0, 0, 0, : tokens // 4])
        pool = inputs.pool.clone()
        pool[ids, LAYER, 0] = 0.0
        pool[ids, LAYER, 1, 0] = torch.eye(64)[:tokens].view(-1, 4, 64)
        inputs = replace(inputs, pool=pool)
        if stored:
            order = torch.randperm(len(ids))
            table = inputs.table.clone()
            table[0, 0, 0, : len(ids)] = pack_entries(ids[order], 4)
            inputs = replace(
                inputs, table=table, unit_pos=torch.nn.functional.pad(order * 4, (0, 3)).int()[None, None, None]
            )
        out = call(backend, inputs)[0][:, 0, :tokens]  # [query, key]
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        want = (distance >= 0) & (distance < window)
        for first, past_last in spans:
            want[first:past_last, first:past_last] = True
        torch.testing.assert_close(out, want / want.sum(1, keepdim=True), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("backend", ["reference", "cpu", TRITON])
    def test_no_span_changes_no_bit(self, backend, small_tiles):
        inputs = build(Case("no-span", (60, 9), (30, 9), window=11), torch.float32)
        none = replace(inputs, q_span=torch.zeros((39, 2), dtype=torch.int32))
        for a, b in zip(call(backend, none), call(backend, inputs), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("backend", ["reference", "cpu", TRITON])
    def test_opcheck(self, backend):
        inputs = build(Case("opcheck", (20,), (9,), head_dim=16, spans=((12, 18),)), torch.float32)
        inputs.pool.nan_to_num_(0.5)
        torch.library.opcheck(torch.ops.octavo.prefill.default, (*inputs.args(), backend), {"q_span": inputs.q_span})


GATHER = [
    Case("whole-units", (64, 16)),
    Case("open-unit", (70, 0, 1)),
    Case("holes", (100, 30), segments=(45, 13, 33)),
    Case("pages-24-of-units-8", (100, 75), page=24, segments=(10, 30)),
    Case("units-of-64", (130, 40), page=64, segments=(70,)),
    Case("head-dim-80", (40,), head_dim=80),
    Case("tables", (90, 20), tables="layer+head"),
]


class TestGather:
    @pytest.mark.parametrize("backend", ["cpu", TRITON])
    @pytest.mark.parametrize("tokens", [1, 48, 128])
    @pytest.mark.parametrize("case", GATHER, ids=ids)
    def test_brings_every_bit(self, case, tokens, backend):
        inputs = build(case, torch.bfloat16)
        args = (inputs.pool, LAYER, inputs.table, inputs.lengths, tokens)
        for got, want in zip(ops.gather(*args, backend), reference.gather(*args), strict=True):
            assert torch.equal(got, want)

    def test_reference_is_the_rows_in_order(self):
        inputs = build(Case("order", (21,), heads=(2, 1), page=8, segments=(5, 16)), torch.float32)
        keys, values = reference.gather(inputs.pool, LAYER, inputs.table, inputs.lengths, 24)
        first, second, third = entry_units(inputs.table[0, 0, 0, :3])
        rows = torch.cat([inputs.pool[first, LAYER, :, 0, :5], *inputs.pool[[second, third], LAYER, :, 0]], 1)
        assert torch.equal(torch.stack([keys, values])[:, 0, 0, :21], rows)
        assert (keys[..., 21:, :] == 0).all() and (values[..., 21:, :] == 0).all()

    @pytest.mark.parametrize("backend", ["reference", "cpu", TRITON])
    def test_opcheck(self, backend):
        inputs = build(Case("opcheck", (20,), head_dim=16), torch.float32)
        inputs.pool.nan_to_num_(0.5)
        torch.library.opcheck(
            torch.ops.octavo.gather.default, (inputs.pool, LAYER, inputs.table, inputs.lengths, 24, backend)
        )


DENSE = [
    (Case("square", (64,), (64,)), [(0, 0, 64, 0)]),
    (Case("square-and-rest", (75,), (75,)), [(0, 0, 64, 0)]),
    (Case("square-padded", (64,), (64,), padding=3), [(0, 0, 64, 0)]),
    (Case("two-squares", (32, 48), (32, 48)), [(0, 0, 32, 0), (1, 32, 48, 0)]),
    (Case("chunk", (96,), (32,)), [(0, 0, 32, 64)]),
    (Case("chunk-and-rest", (100,), (21,)), [(0, 0, 16, 64)]),
    (Case("chunk-on-little", (60,), (40,)), []),
    (Case("short", (15, 90), (15, 3)), []),
    (Case("mixed", (40, 33, 100, 0, 64), (40, 2, 37, 0, 17), padding=4),
     [(0, 0, 32, 0), (2, 42, 32, 32), (4, 79, 16, 32)]),
    (Case("heads-14-2", (100, 40), (37, 40), (14, 2), 16), [(0, 0, 32, 32), (1, 37, 32, 0)]),
    (Case("units-of-8", (90, 50), (40, 50), page=24), [(0, 0, 32, 32), (1, 40, 48, 0)]),
    (Case("tables-layer", (90, 50), (40, 50), tables="layer"), [(0, 0, 32, 32), (1, 40, 48, 0)]),
    (Case("holes", (75,), (75,), segments=(13, 30, 7), stored=True, permuted=False), [(0, 0, 64, 0)]),
    (Case("holes-chunk", (100,), (40,), segments=(13, 30), stored=True, permuted=False), []),
    (Case("holes-mixed", (40, 33, 100, 0, 64), (40, 2, 37, 0, 64), padding=4, page=24, segments=(10, 30), stored=True,
          permuted=False), [(0, 0, 32, 0), (4, 79, 64, 0)]),
]  # fmt: skip
"""Cases and their parts (sequence, first row, rows, context) in the small grains of the tests."""


def known(case):
    """What the host knows of a case; nothing where tokens lie in any order."""
    if case.stored and case.permuted:
        return {}
    counts = list(case.queries)
    return {"counts": counts, "contexts": [n - count for n, count in zip(case.tokens, counts, strict=True)]}


@pytest.fixture
def small_grains(small_tiles):
    """Dense parts of 16 rows on 32 tokens of context."""
    from octavo.kernels.triton import settings

    with settings.trial("prefill_dense", row_grain=16, context_grain=32, min_rows=32, min_chunk_rows=16):
        yield


@interpreted
class TestDense:
    @pytest.mark.parametrize(("case", "parts"), DENSE, ids=ids)
    def test_agrees_with_the_reference(self, case, parts, small_grains, monkeypatch):
        from octavo.kernels.triton import prefill_dense

        found = []
        work_out = prefill_dense.dense_parts
        monkeypatch.setattr(prefill_dense, "dense_parts", lambda *args: found.append(work_out(*args)) or found[0])
        compare("triton", case, torch.float32, **known(case))
        assert [(part.b, part.first, part.rows, part.base) for part in found[0]] == parts

    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=ids)
    def test_half_precision(self, dtype, small_grains):
        case = DENSE[8][0]
        compare("triton", case, dtype, **known(case))

    def test_ragged_batches(self, small_grains):
        """Host and device work out the same parts, whatever the lengths."""
        random = torch.Generator().manual_seed(7)
        for i in range(5):
            counts = torch.randint(0, 70, (3,), generator=random)
            contexts = torch.randint(0, 2, (3,), generator=random) * torch.randint(0, 80, (3,), generator=random)
            tokens = tuple((counts + contexts).tolist())
            case = Case(
                f"ragged-{i}", tokens, tuple(counts.clamp(min=1).minimum(counts + contexts).tolist()), (2, 1), 16
            )
            compare("triton", case, torch.float32, **known(case))

    @pytest.mark.parametrize(
        "case",
        [
            Case("window", (64,), (64,), window=50),
            Case("softcap", (64,), (64,), softcap=30.0),
            Case("sinks", (64,), (64,), sinks=True),
            Case("stored", (64,), (64,), stored=True),
            Case("spans", (64,), (64,), spans=((3, 9),)),
            Case("tables-head", (64,), (64,), tables="head"),
        ],
        ids=ids,
    )
    def test_what_sdpa_lacks_stays_paged(self, case, small_grains, monkeypatch):
        from octavo.kernels.triton import prefill_dense

        monkeypatch.setattr(prefill_dense, "sdpa", None)  # a call would fail
        compare("triton", case, torch.float32, **known(case))

    def test_the_result_alone_is_not_copied(self, small_grains, monkeypatch):
        from octavo.kernels.triton import prefill_dense

        monkeypatch.setattr(prefill_dense, "native", None)
        inputs = build(DENSE[0][0], torch.float32)
        args = (*inputs.args()[:-1], False)
        out, lse = ops.prefill(*args, "triton", **known(inputs.case))
        assert lse.numel() == 0 and out.stride() == inputs.q.stride()
        check((out,), reference.prefill(*args)[:1], torch.float32)

    def test_log(self, small_grains, monkeypatch, caplog):
        monkeypatch.setattr(log, "KERNELS", True)
        monkeypatch.setattr(log, "_said", set())
        caplog.set_level(logging.INFO, "octavo.kernels")
        for case in (DENSE[5][0], DENSE[6][0]):
            compare("triton", case, torch.float32, **known(case))
        first, second = (record.getMessage() for record in caplog.records)
        assert first.startswith("prefill: triton, gather and SDPA for 16 queries on 64, else Triton; ")
        assert second.startswith("prefill: triton, Triton; ")


TMA = [Case("tma", (90, 20), (70, 20)), Case("tma-64", (150,), (80,), page=64), Case("tma-w", (99,), (70,), window=40)]


@interpreted
@pytest.mark.parametrize("case", TMA, ids=ids)
def test_tma(case, small_tiles):
    from octavo.kernels.triton import settings

    with settings.trial("prefill", TMA=1):
        compare("triton", case, torch.float32)


@pytest.mark.gpu
class TestGPU:
    @pytest.mark.parametrize("dtype", DTYPES, ids=ids)
    @pytest.mark.parametrize("case", PREFILL_SPANS + LARGE_PREFILL_SPANS, ids=ids)
    def test_spans(self, case, dtype):
        compare("triton", case, dtype, "cuda")

    @pytest.mark.parametrize("case", GATHER, ids=ids)
    def test_gather(self, case):
        inputs = build(case, torch.bfloat16, "cuda")
        args = (inputs.pool, LAYER, inputs.table, inputs.lengths, 128)
        for got, want in zip(ops.gather(*args, "triton"), reference.gather(*args), strict=True):
            assert torch.equal(got, want)

    @pytest.mark.parametrize("dtype", DTYPES, ids=ids)
    @pytest.mark.parametrize(("case", "parts"), DENSE, ids=ids)
    def test_dense(self, case, parts, dtype, small_grains):
        compare("triton", case, dtype, "cuda", **known(case))

    @pytest.mark.parametrize(
        "case",
        [
            Case("large-square", (2048,), (2048,), (32, 8), 128),
            Case("large-chunk", (9300,), (1100,), (32, 8), 128, 64),
            Case("large-mixed", (2500, 300, 9300), (2500, 30, 1100), (28, 4), 128, padding=9),
        ],
        ids=ids,
    )
    def test_dense_in_the_real_grains(self, case):
        compare("triton", case, torch.bfloat16, "cuda", **known(case))

    @pytest.mark.parametrize("page", [64, 16])
    @pytest.mark.parametrize("block_n", [16, 32, 64])
    def test_tma(self, page, block_n):
        from octavo.kernels.triton import settings

        with settings.trial("prefill", TMA=1, BLOCK_N=block_n):
            compare("triton", Case("large-tma", (1500, 700), (1500, 130), (32, 8), 128, page), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("case", PREFILL + LARGE_PREFILL, ids=ids)
    def test_other_settings(self, case):
        """What a chip's table may hold: two programs an SM."""
        from octavo.kernels.triton import settings

        with settings.trial("prefill", BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2):
            compare("triton", case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("backend", ["reference", "cpu", TRITON])
def test_where_pages_lie_changes_no_bit(backend, small_grains):
    inputs = build(Case("moved", (100, 40), (37, 40)), torch.float32)
    order = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(len(inputs.pool) - 1) + 1])
    pool = torch.empty(pool_shape(len(order) - 1, LAYERS, 2, 16, 64))
    pool[order] = inputs.pool
    table = pack_entries(order[entry_units(inputs.table)], inputs.table & 127)
    moved = replace(inputs, pool=pool, table=table)
    for a, b in zip(
        call(backend, moved, **known(inputs.case)), call(backend, inputs, **known(inputs.case)), strict=True
    ):
        assert torch.equal(a, b)
