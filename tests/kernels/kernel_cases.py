"""One table of attention cases, and the tensors of each: for pytest and for ``sanitizer_case.py``.

Every slot that no table entry counts as valid is NaN, in the whole pool, the scratch unit included; so is what table
entries past a row's length point at. A kernel that reads one token too many says so in its output.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.layout import MAX_UNIT_TOKENS, SCRATCH_UNIT, pack_entries, pool_shape, unit_tokens_for
from octavo.scripts.kernel_races.checking import relative_error

LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class Case:
    """What one call sees: decode, or prefill when ``queries`` is given."""

    name: str
    tokens: tuple[int, ...]  # tokens of each sequence in the cache
    queries: tuple[int, ...] = ()  # how many of them, at the end, are queries
    heads: tuple[int, int] = (4, 2)  # query heads, KV heads
    head_dim: int = 64
    page: int = 16
    segments: tuple[int, ...] = ()  # lengths of sealed segments, in turn; none: one open segment
    tables: str = "shared"  # shared, layer, head, layer+head
    stored: bool = False  # entries with unit_pos
    permuted: bool = True  # and, if there is, in any order
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    mass: bool = False
    gain: float = 1.0  # standard deviation of the raw scores
    rewind: int = 0  # the query stands this many positions before the end
    padding: int = 0  # rows of q that belong to no sequence
    spans: tuple[tuple[int, int], ...] = ()  # bidirectional ranges of positions, in every sequence


DECODE = [
    *(Case(f"lengths-around-page-{p}", (0, 1, p - 1, p, p + 1, 13), page=p, mass=True) for p in (5, 16, 24, 48)),
    *(Case(f"unit-{u}", (0, 3, u, 70), page=u, mass=True) for u in (1, 2, 4, 8, 16, 32, 64)),
    *(
        Case(f"heads-{q}-{kv}", (1, 37), heads=(q, kv), mass=True)
        for q, kv in ((5, 1), (6, 2), (12, 2), (28, 4), (7, 7), (8, 8), (20, 1))
    ),
    *(Case(f"head-dim-{d}", (3, 37), head_dim=d) for d in (16, 32, 64, 80, 96, 112, 128, 160, 256)),
    Case("mass-unit-64-head-dim-256", (70, 0), page=64, head_dim=256, mass=True),
    *(Case(f"tables-{t}", (0, 20, 90), tables=t, mass=True) for t in ("layer", "head", "layer+head")),
    Case("tables-head-stored", (0, 20, 90), page=8, tables="head", stored=True, mass=True, window=30),
    *(Case(f"window-{w}", (0, 5, 90), window=w, mass=True) for w in (1, 7, 16, 33, 200)),
    Case("window-stored", (5, 90), page=8, window=33, stored=True, mass=True),
    Case("softcap-30", (3, 60), softcap=30.0, gain=70.0, mass=True),
    Case("softcap-50-window", (3, 60), softcap=50.0, gain=70.0, window=20),
    Case("large-scores", (3, 60), gain=70.0, mass=True),
    Case("sinks", (0, 1, 60), sinks=True, mass=True),
    Case("sinks-window-softcap", (0, 1, 60), sinks=True, window=17, softcap=30.0, mass=True),
    Case("stored-permuted", (0, 1, 60), page=4, stored=True, mass=True),
    Case("rewound", (1, 40, 70), rewind=5, mass=True),
    Case("before-the-first-token", (1, 40), rewind=70, mass=True),
    Case("rewound-stored", (1, 40, 70), rewind=5, page=8, stored=True, mass=True),
    Case("sealed", (0, 10, 75), segments=(13, 30, 7), mass=True),
    Case("sealed-pages-24", (10, 75), page=24, segments=(10, 30), mass=True),
    Case("sealed-stored", (10, 75), page=24, segments=(10, 30), stored=True, window=50, sinks=True, mass=True),
    Case("all-empty", (0, 0), mass=True),
    Case("all-empty-sinks", (0, 0), sinks=True, mass=True),
]

PREFILL = [
    Case("prefill-from-nothing", (40, 1, 17), queries=(40, 1, 17)),
    Case("prefill-chunk", (100, 30, 0), queries=(20, 3, 0)),
    Case("prefill-padded", (40, 0, 17), queries=(40, 0, 9), padding=11),
    Case("prefill-nothing-but-padding", (40, 0), queries=(0, 0), padding=11),
    Case("prefill-one-query", (70, 33), queries=(1, 1)),
    *(Case(f"prefill-page-{p}", (90,), queries=(21,), page=p) for p in (1, 2, 4, 5, 24, 48, 64)),
    *(Case(f"prefill-heads-{q}-{kv}", (50,), queries=(19,), heads=(q, kv)) for q, kv in ((5, 1), (28, 4), (7, 7))),
    *(Case(f"prefill-head-dim-{d}", (40,), queries=(9,), head_dim=d) for d in (16, 80, 96, 128, 256)),
    *(Case(f"prefill-tables-{t}", (90, 20), queries=(15, 20), tables=t) for t in ("layer", "head", "layer+head")),
    Case("prefill-tables-head-stored", (90, 20), queries=(15, 20), page=8, tables="head", stored=True),
    *(Case(f"prefill-window-{w}", (90, 5), queries=(40, 5), window=w) for w in (1, 16, 33)),
    Case("prefill-softcap", (60,), queries=(30,), softcap=50.0, gain=70.0),
    Case("prefill-sinks", (60, 0, 5), queries=(30, 0, 5), sinks=True, window=20),
    Case("prefill-stored", (60, 7), queries=(30, 7), page=4, stored=True, window=25, sinks=True),
    Case("prefill-sealed", (100,), queries=(30,), segments=(45, 13, 33)),
    Case("prefill-sealed-late", (150,), queries=(20,), segments=(96, 13, 33)),
    Case("prefill-sealed-stored", (90,), queries=(50,), page=24, segments=(13, 30), stored=True, softcap=30.0),
]

PREFILL_SPANS = [  # past a window's edge, past the chunk, past the end, one position, side by side
    Case("spans", (60, 7, 0), (60, 7, 0), spans=((5, 12), (12, 40), (50, 51), (58, 90))),
    Case("spans-chunk", (90, 33), (20, 30), spans=((60, 80), (85, 90))),
    Case("spans-begun-before-the-chunk", (90,), (7,), spans=((40, 86),)),
    Case("spans-window", (90, 20), (60, 20), spans=((3, 30), (40, 81)), window=17),
    Case("spans-window-chunk", (90,), (9,), spans=((10, 85),), window=5, padding=3),
    Case("spans-softcap-sinks", (70,), (40,), spans=((35, 60),), softcap=30.0, gain=70.0, sinks=True),
    Case("spans-stored", (70, 9), (40, 9), page=8, spans=((33, 61), (2, 5)), stored=True),
    Case("spans-sealed-stored", (90,), (50,), page=24, segments=(13, 30), spans=((43, 73),), stored=True, window=20),
    Case("spans-sealed", (100,), (70,), segments=(45, 13, 33), spans=((48, 61),), window=33),
    Case("spans-tables-head", (90, 20), (40, 20), tables="head", page=8, stored=True, spans=((52, 80),)),
    Case(
        "spans-everything", (90, 40), (60, 3), (6, 2), 80, 8, spans=((31, 47), (70, 89)), stored=True, window=11,
        softcap=50.0, gain=30.0, sinks=True, padding=5, tables="layer+head",
    ),
]  # fmt: skip

LARGE_DECODE = [  # for a GPU: many splits, real tiles
    Case("large-ragged", (0, 1, 255, 256, 257, 1000, 5000), heads=(32, 8), head_dim=128, mass=True),
    Case("large-batch-1", (9000,), heads=(32, 8), head_dim=128, mass=True),
    Case("large-one-kv-head", (3000, 10), heads=(5, 1), head_dim=128, page=8, sinks=True, mass=True),
    Case("large-window", (5000, 40), heads=(16, 8), head_dim=256, window=1024, softcap=50.0, gain=30.0),
    Case("large-stored", (2000, 40), heads=(28, 4), head_dim=128, stored=True, tables="layer+head", mass=True),
    Case("large-sealed", (2000, 600), heads=(8, 8), head_dim=64, page=24, segments=(313, 30, 7), mass=True),
]
LARGE_PREFILL = [
    Case("large-prefill", (1500, 700), queries=(1500, 130), heads=(32, 8), head_dim=128),
    Case("large-prefill-window", (1200, 9), queries=(500, 9), heads=(8, 4), head_dim=256, window=300, softcap=50.0),
    Case("large-prefill-sealed", (900,), queries=(300,), heads=(12, 2), page=24, segments=(313, 30, 7), sinks=True),
    Case("large-prefill-stored", (900, 0), queries=(300, 0), heads=(7, 7), stored=True, tables="head", padding=100),
]
LARGE_PREFILL_SPANS = [
    Case("large-spans", (1500, 700), (1500, 130), (32, 8), 128, spans=((100, 356), (600, 700), (1300, 1600))),
    Case("large-spans-window", (1200,), (900,), (8, 4), 256, window=300, spans=((200, 712), (713, 969))),
    Case("large-spans-stored", (900, 40), (500, 40), (28, 4), 128, 24, stored=True, sinks=True, spans=((450, 800),)),
]

# Relative error of the outputs in norm; the probabilities meet the values in the inputs' own precision.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Inputs:
    """The arguments of decode and prefill; ``args()`` puts all but ``q_span`` in the order of the reference."""

    case: Case
    q: Tensor
    pool: Tensor
    table: Tensor
    lengths: Tensor
    q_pos: Tensor
    unit_pos: Tensor | None
    sinks: Tensor | None
    cu_q: Tensor
    q_span: Tensor | None

    def args(self) -> tuple:
        case = self.case
        scores = (self.unit_pos, self.sinks, case.head_dim**-0.5, case.window, case.softcap)
        where = (self.q, self.pool, LAYER, self.table, self.lengths)
        if case.queries:
            return (*where, self.cu_q, self.q_pos, *scores, max(case.queries), True)
        return (*where, self.q_pos, *scores, case.mass, True)


def build(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """The tensors of a case: the same numbers on every device, up to the rounding of ``dtype``."""
    random = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    q_heads, kv_heads = case.heads
    unit = unit_tokens_for([case.page])
    table_layers = LAYERS if "layer" in case.tables else 1
    table_heads = kv_heads if "head" in case.tables else 1
    batch = len(case.tokens)
    rows = [(layer, b, head) for layer in range(table_layers) for b in range(batch) for head in range(table_heads)]

    layouts = [_units(tokens, case, unit) for tokens in case.tokens]
    entries = max(len(valid) for valid, _ in layouts) + 3
    units = len(rows) * entries
    pool = torch.full(pool_shape(units, LAYERS, kv_heads, unit, case.head_dim), torch.nan)
    pages = torch.randperm(units * unit // case.page, generator=random)
    free = (pages[:, None] * (case.page // unit) + torch.arange(case.page // unit)).flatten() + 1

    dead = pack_entries(torch.tensor(SCRATCH_UNIT), MAX_UNIT_TOKENS)  # all NaN: past the length nobody may look
    table = dead.repeat(table_layers, batch, table_heads, entries)
    unit_pos = torch.zeros_like(table)
    lengths = torch.zeros((table_layers, batch, table_heads), dtype=torch.int32)
    for layer, b, head in rows:
        valid, start = layouts[b]
        if table_heads > 1:  # each head keeps its own entries, at least the last
            keep = torch.rand(len(valid), generator=random) < 0.7
            keep[-1:] = True
            valid, start = valid[keep], start[keep]
        if case.stored and case.permuted:
            order = torch.randperm(len(valid), generator=random)
            valid, start = valid[order], start[order]
        ids, free = free[: len(valid)], free[len(valid) :]
        for i, count in zip(ids.tolist(), valid.tolist(), strict=True):
            where = (i, slice(None) if table_layers == 1 else layer, slice(None))
            where += (slice(None) if table_heads == 1 else head, slice(count))
            pool[where] = torch.randn(pool[where].shape, generator=random)
        packed = valid.clone()
        if len(valid):
            lengths[layer, b, head] = (len(valid) - 1) * unit + valid[-1]
            if not case.segments and not case.stored:
                packed[-1] = unit  # an open unit is bounded by the length alone
        table[layer, b, head, : len(valid)] = pack_entries(ids, packed)
        unit_pos[layer, b, head, : len(valid)] = start.int()

    token_pos = []  # of the queries: the last of each sequence
    for b, (valid, start) in enumerate(layouts):
        if not case.stored:
            start = torch.arange(len(valid)) * unit
        slot = torch.arange(unit)
        every = (start[:, None] + slot)[slot < valid[:, None]]
        count = case.queries[b] if case.queries else 1
        token_pos.append(every[len(every) - count :] if len(every) else torch.zeros(count, dtype=torch.int64))
    q_pos = torch.cat([*token_pos, torch.zeros(case.padding, dtype=torch.int64)]) - case.rewind
    q = torch.randn((len(q_pos), q_heads, case.head_dim), generator=random) * case.gain
    cu_q = torch.tensor([0, *(case.queries or ())], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    sinks = torch.randn(q_heads, generator=random) if case.sinks else None
    return Inputs(
        case,
        q.to(device, dtype),
        pool.to(device, dtype),
        table.to(device),
        lengths.to(device),
        q_pos.to(device, torch.int32),
        unit_pos.to(device) if case.stored else None,
        None if sinks is None else sinks.to(device, dtype),
        cu_q.to(device),
        _spans(q_pos, case.spans).to(device) if case.spans else None,
    )


def _spans(q_pos: Tensor, spans: tuple[tuple[int, int], ...]) -> Tensor:
    """The span that each query is in, int32 [T, 2]."""
    q_span = torch.zeros((len(q_pos), 2), dtype=torch.int32)
    for first, past_last in spans:
        q_span[(q_pos >= first) & (q_pos < past_last)] = torch.tensor([first, past_last], dtype=torch.int32)
    return q_span


def _units(tokens: int, case: Case, unit: int) -> tuple[Tensor, Tensor]:
    """Valid count and first position of each unit of a sequence, page by page, segment by segment."""
    valid: list[int] = []
    start: list[int] = []
    position = 0
    for length in cycle(case.segments or (max(tokens, 1),)):
        length = min(length, tokens - position)
        if length == 0:
            break
        slots = -(-length // case.page) * case.page
        for first in range(0, slots, unit):
            valid.append(max(min(length - first, unit), 0))
            start.append(position + first)
        position += length
    while valid and valid[-1] == 0:  # the open page holds units that no token has reached
        valid.pop()
        start.pop()
    return torch.tensor(valid, dtype=torch.int64), torch.tensor(start, dtype=torch.int64)


def in_turn(cases: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """(case, other) for ``parametrize``: each case with one of the others by default, in turn, and with the rest among
    the slow tests."""
    return [
        pytest.param(case, other, marks=() if (i - j) % len(others) == 0 else pytest.mark.slow)
        for i, case in enumerate(cases)
        for j, other in enumerate(others)
    ]


def error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of the truth; infinite where only one of the two is finite."""
    return relative_error(got.cpu(), want.cpu())


def bits(x: Tensor) -> Tensor:
    """What can be compared bit by bit, NaN included, on the CPU; whole numbers as they are."""
    return x.cpu().view({2: torch.int16, 4: torch.int32}[x.element_size()]) if x.is_floating_point() else x.cpu()


def check(
    got: tuple[Tensor, ...], want: tuple[Tensor, ...], dtype: torch.dtype, backend: str = "triton", gain: float = 1.0
) -> None:
    """Compare (out, lse[, mass]); ``gain`` is the case's, since the softmax of large scores magnifies their rounding.

    The last two are sums of fp32 scores whatever the inputs are, except on the CPU, whose matrix products round the
    scores to the inputs' own precision.
    """
    bounds = [TOLERANCE[dtype], 1e-5, 3e-5]
    if backend.startswith("cpu") and dtype != torch.float32:
        bounds = [3 * TOLERANCE[dtype]] * 3
    for name, a, b, bound in zip(("out", "lse", "mass"), got, want, bounds, strict=False):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.shape} {a.dtype}, not {b.shape} {b.dtype}"
        found = error(a, b)
        bound *= max(1.0, gain / 10)
        assert found <= bound, f"{name}: relative error {found:.2e} > {bound:.0e}"
