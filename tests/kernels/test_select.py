"""Page score and page top-k of every backend: the bound against brute force, the choice exactly, ties included."""

import zlib
from dataclasses import dataclass, replace

import pytest
import torch
from kernel_cases import TOLERANCE, build, error
from kernel_cases import Case as AttentionCase

from octavo.kernels import ops
from octavo.kernels.layout import entry_units, pack_entries
from octavo.kernels.reference import backend as reference

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # The maximum of pages that are all NaN: the interpreter, which is numpy, remarks on it.
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
BACKENDS = ["reference", "cpu", pytest.param("triton", marks=interpreted)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYERS, LAYER = 3, 1


@pytest.fixture
def small_tiles():
    """At most two tiles of 16 pages a program; blocks of 32 pages in 16 lanes, so that short rows have many of them."""
    from octavo.kernels.triton import settings

    with (
        settings.trial("page_score", BLOCK_P=16, most_tiles=2, num_stages=1),
        settings.trial("page_topk", BLOCK=32, LANES=16, COMPARISONS=64),
    ):
        yield


def ids(x):
    return getattr(x, "name", None) or str(x).removeprefix("torch.")


def generator(name):
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


# Page score


@dataclass(frozen=True)
class ScoreCase:
    name: str
    n_pages: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    width: int = 0  # pages of room; 0: those of the longest sequence


SCORE = [
    ScoreCase("ragged", (0, 1, 2, 16, 17, 18, 70)),
    ScoreCase("room-to-spare", (5, 33), width=130),
    ScoreCase("nothing", (0, 1), width=40),
    *(ScoreCase(f"heads-{q}-{kv}", (9, 40), heads=(q, kv)) for q, kv in ((5, 1), (28, 4), (7, 7), (20, 1))),
    *(ScoreCase(f"head-dim-{d}", (9, 20), head_dim=d) for d in (16, 32, 80, 96, 128, 256)),
]
LARGE_SCORE = [
    ScoreCase("large-ragged", (2048, 1, 700, 33), heads=(32, 8), head_dim=128),
    ScoreCase("large-one", (8192,), heads=(32, 8), head_dim=128),
    ScoreCase("large-one-kv-head", (3000, 10), heads=(5, 1), head_dim=256, width=4000),
]


def boxes(case, dtype, device="cpu", order=0):
    """Arguments of ``page_score`` but the last: a store that is NaN wherever no sealed page of a sequence lies, with
    the layers outside and both parts of a head side by side. ``order`` shuffles where the pages lie."""
    random = generator(case.name)
    q_heads, kv_heads = case.heads
    width = case.width or max(case.n_pages)
    sealed = [max(n - 1, 0) for n in case.n_pages]
    q = torch.randn(len(case.n_pages), q_heads, case.head_dim, generator=random)
    parts = torch.randn(2, sum(sealed), kv_heads, case.head_dim, generator=random).sort(0).values
    places = torch.randperm(sum(sealed) + 5, generator=generator(f"order {order}"))[: sum(sealed)] + 1
    store = torch.full((LAYERS, sum(sealed) + 6, kv_heads, 2, case.head_dim), torch.nan)
    store[LAYER, places] = parts.permute(1, 2, 0, 3)
    rows = torch.zeros(len(case.n_pages), width, dtype=torch.int64)
    for row, ours in zip(rows, places.split(sealed), strict=True):
        row[: len(ours)] = ours
    low, high = store.to(device, dtype).transpose(0, 1).unbind(3)
    n_pages = torch.tensor(case.n_pages, dtype=torch.int32, device=device)
    return q.to(device, dtype), low, high, LAYER, rows.to(device), n_pages


def compare_scores(backend, case, dtype, device="cpu"):
    for per_query_head in (False, True):
        args = *boxes(case, dtype, device), per_query_head
        got, want = ops.page_score(*args, backend), reference.page_score(*args)
        assert got.shape == want.shape and got.dtype == want.dtype == torch.float32
        assert error(got, want) <= 1e-5  # products of two halves are exact in fp32


@pytest.mark.parametrize("case", SCORE, ids=ids)
def test_reference_scores_are_the_largest_corner_of_the_box(case):
    q, low, high, layer, rows, n_pages = boxes(case, torch.float32)
    got = reference.page_score(q, low, high, layer, rows, n_pages, True)
    group = q.shape[1] // low.shape[2]
    for b, n in enumerate(case.n_pages):
        assert (got[b, :, max(n - 1, 0) :] == -torch.inf).all()
        for page in range(n - 1):
            corners = torch.stack([low[rows[b, page], layer], high[rows[b, page], layer]])
            corners = corners.repeat_interleave(group, 1)  # [2, Hq, D]
            torch.testing.assert_close(got[b, :, page], (corners * q[b]).amax(0).sum(-1), rtol=1e-4, atol=1e-4)
    grouped = got.unflatten(1, (-1, group)).amax(2)
    assert torch.equal(reference.page_score(q, low, high, layer, rows, n_pages, False), grouped)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("case", SCORE, ids=ids)
def test_score(case, backend):
    compare_scores(backend, case, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_score_in_all_dtypes_with_the_real_tiles(dtype, backend):
    for case in (SCORE[0], ScoreCase("real", (200, 3), heads=(8, 2), head_dim=128)):
        compare_scores(backend, case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("case", SCORE + LARGE_SCORE, ids=ids)
def test_score_gpu(case, dtype):
    compare_scores("triton", case, dtype, "cuda")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
def test_where_pages_lie_does_not_matter(backend):
    one, other = (ops.page_score(*boxes(SCORE[0], torch.float32, order=i), False, backend) for i in range(2))
    assert torch.equal(one, other)


@interpreted
def test_rows_of_a_store_beyond_two_to_the_31_elements():
    """The layer's and the row's distance from the store's first element do not fit an int32."""
    args = list(boxes(ScoreCase("far", (4,)), torch.float16))
    want = reference.page_score(*args, False)
    rows, kv_heads, dim = args[1].shape[0], *args[1].shape[2:]
    far = torch.empty(0, dtype=torch.float16).set_(torch.UntypedStorage(2 * (2**31 + 2**20)))
    stride = (2**31 - 2**20) // rows
    spread = far.as_strided((rows, LAYERS, kv_heads, 2, dim), (stride, 2**20 // LAYERS, 2 * dim, dim, 1))
    spread[:, LAYER] = torch.stack([args[1][:, LAYER], args[2][:, LAYER]], 2)
    args[1:3] = spread.unbind(3)
    # Rounded alike up to the order of sums, which is the processor's; a wrong row or layer is nothing like it.
    torch.testing.assert_close(ops.page_score(*args, False, "triton"), want, rtol=1e-5, atol=1e-5)


# Page top-k


@dataclass(frozen=True)
class TopkCase:
    name: str
    n_pages: tuple[int, ...]
    heads: int = 2
    most: int = 7
    budgets: tuple[int, ...] = ()  # of each row in turn; none: ``most``
    kept: float = 0.1  # share of the pages that are kept
    values: str = "random"  # what scores look like
    page_units: int = 1
    width: int = 0


TOPK = [
    TopkCase("ragged", (0, 1, 2, 7, 8, 9, 16, 17, 33, 70)),
    TopkCase("room-to-spare", (5, 33), width=130),
    TopkCase("nothing", (0, 0), width=20),
    TopkCase("one-page", (1, 1), most=1),
    TopkCase("budget-one", (40, 3), most=1),
    TopkCase("all-of-it", (40, 17), most=64),
    TopkCase("all-but-one", (40, 17), most=39),
    TopkCase("budgets", (40, 17, 60), most=20, budgets=(0, 1, 2, 20, 19, 7)),
    TopkCase("heads-agree", (40, 17), heads=1),
    TopkCase("units-2", (40, 17), page_units=2),
    TopkCase("units-3", (40, 0), page_units=3),
    *(TopkCase(f"kept-{share}", (40, 17, 60), kept=share) for share in (0.0, 0.5, 1.0)),
    *(
        TopkCase(f"values-{values}", (40, 17, 70), most=12, values=values)
        for values in (
            "equal",
            "few",
            "low",
            "positive",
            "negative",
            "tiny",
            "zeros",
            "infinite",
            "nan",
            "ascending",
            "huge",
        )
    ),
    # Of few lanes, and of more lanes than there are pages to list (page_topk.py).
    TopkCase("few-lanes", (32, 29, 18), values="periodic"),
    TopkCase("few-lanes-equal", (32, 29, 18), values="few"),
    TopkCase("few-lanes-kept", (32, 29, 18), values="infinite", kept=0.7),
    TopkCase("few-lanes-low", (32, 29, 18), values="low"),
]
LARGE_TOPK = [
    TopkCase("large-8192", (8192, 8191, 5000, 4), heads=8, most=128),
    TopkCase("large-8192-few", (8192, 8191, 5000, 4), heads=8, most=128, values="few", page_units=2),
    TopkCase("large-2048", (2048, 100), heads=8, most=128),
    TopkCase("large-8192-kept", (8192, 6000), most=100, kept=0.5),
    TopkCase("large-8192-periodic", (8192, 8191, 5000), most=128, values="periodic"),
    TopkCase("large-20000", (20000, 9000, 8193), heads=2, most=500),
    TopkCase("large-20000-few", (20000, 9000, 8193), heads=2, most=500, values="few"),
]
BY_BLOCKS = ("few-lanes", "few-lanes-equal", "few-lanes-kept", "few-lanes-low", "values-equal", "values-low")
BY_BLOCKS += ("ragged", "all-but-one", "budgets", "units-2", "kept-0.5", "values-few", "values-nan")
PAGE_TOKENS = 16


def values_of(kind, shape, random):
    normal = torch.randn(shape, generator=random)
    one_of_three = torch.randint(3, shape, generator=random)
    return {
        "random": lambda: normal * 20 + 10,
        "equal": lambda: torch.full(shape, -3.5),
        "few": lambda: torch.randint(-2, 3, shape, generator=random).float(),
        "positive": lambda: normal.exp(),
        "negative": lambda: -normal.exp(),
        "tiny": lambda: normal * 1e-41,  # denormal
        "zeros": lambda: torch.tensor([0.0, -0.0, 1e-45])[one_of_three],
        "infinite": lambda: torch.tensor([torch.inf, -torch.inf, 1.0])[one_of_three],
        "nan": lambda: torch.tensor([torch.nan, -torch.inf, 1.0])[one_of_three],
        "ascending": lambda: torch.arange(shape[-1]).float().expand(shape).contiguous(),
        "huge": lambda: normal * 1e38,
        "periodic": lambda: normal + 9 * (torch.arange(shape[-1]) % 16 < 3),
        "low": lambda: torch.tensor([torch.nan, -torch.inf, -torch.inf])[one_of_three],
    }[kind]()


def ranked(case, device="cpu"):
    """Arguments of ``page_topk``: NaN scores, kept pages and wild table entries past each sequence's pages."""
    random = generator(case.name)
    batch, width = len(case.n_pages), case.width or max(case.n_pages)
    n_pages = torch.tensor(case.n_pages, dtype=torch.int32)
    scores = values_of(case.values, (batch, case.heads, width), random)
    keep = torch.rand(batch, width, generator=random) < case.kept
    sealed = torch.arange(width) < n_pages[:, None] - 1
    scores[~sealed[:, None].expand_as(scores)] = torch.nan
    keep |= ~sealed
    budgets = case.budgets or (case.most,)
    rows = range(batch * case.heads)
    budget = torch.tensor([budgets[row % len(budgets)] for row in rows]).view(batch, case.heads)
    lengths = (n_pages - 1) * PAGE_TOKENS + torch.randint(1, PAGE_TOKENS + 1, (batch,), generator=random)
    units = torch.randperm(batch * width * case.page_units, generator=random).view(batch, -1) + 1
    table = pack_entries(units, PAGE_TOKENS // case.page_units)
    table[(torch.arange(width) >= n_pages[:, None]).repeat_interleave(case.page_units, 1)] = -1
    tensors = [x.to(device) for x in (scores, budget, keep, n_pages, lengths.int().clamp(min=0), table)]
    return (*tensors, PAGE_TOKENS, case.page_units, case.most)


def brute_force(scores, budget, keep, n_pages, lengths, table, page_tokens, page_units, most):
    """The same choice by Python's sort, one row at a time."""
    batch, heads, width = scores.shape
    listed = min(most, width)
    pages, counts, entries, slots = [], [], [], []
    for b in range(batch):
        for head in range(heads):
            n = int(n_pages[b])

            def worth(page, b=b, head=head, n=n):
                score = float(scores[b, head, page])
                rank = 3 if page == n - 1 else 2 if keep[b, page] else 1
                return -rank, 0.0 if rank > 1 else -(score if score == score else -torch.inf), page

            k = min(max(int(budget[b, head]), 1), listed, n)
            chosen = sorted(sorted(range(n), key=worth)[:k])
            units = [int(table[b, page * page_units + unit]) for page in chosen for unit in range(page_units)]
            pages.append(chosen + [0] * (listed - k))
            entries.append(units + [0] * ((listed - k) * page_units))
            counts.append(k)
            slots.append((k - 1) * page_tokens + int(lengths[b]) - (n - 1) * page_tokens if k else 0)
    shapes = (batch, heads, listed), (batch, heads), (batch, heads, listed * page_units), (batch, heads)
    results = zip((pages, counts, entries, slots), shapes, strict=True)
    return tuple(torch.tensor(x, dtype=torch.int32).view(shape) for x, shape in results)


def compare_choice(backend, case, device="cpu"):
    args = ranked(case, device)
    got = ops.page_topk(*args, backend)
    for name, a, b in zip(("pages", "counts", "entries", "slots"), got, reference.page_topk(*args), strict=True):
        assert a.dtype == b.dtype == torch.int32 and torch.equal(a, b), name


@pytest.mark.parametrize("case", TOPK, ids=ids)
def test_reference_choice_is_that_of_a_sort(case):
    args = ranked(case)
    for got, want in zip(reference.page_topk(*args), brute_force(*args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=interpreted)])
def test_lengths_that_are_a_column(backend):
    """Of one sequence a column lies as well as a row does."""
    several = next(case for case in TOPK if len(case.n_pages) > 1)
    case = replace(several, n_pages=(max(several.n_pages),))
    *before, lengths, table, page_tokens, page_units, most = ranked(case)
    column = torch.stack([lengths, lengths], 1)[:, 0]
    assert column.stride(0) == 2
    got = ops.page_topk(*before, column, table, page_tokens, page_units, most, backend)
    for a, b in zip(got, reference.page_topk(*ranked(case)), strict=True):
        assert torch.equal(a, b)


@interpreted
@pytest.mark.parametrize("case", [case for case in TOPK if case.name in BY_BLOCKS], ids=ids)
def test_choice_triton_by_blocks(case, small_tiles):
    compare_choice("triton", case)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("case", TOPK, ids=ids)
def test_choice(case, backend):
    compare_choice(backend, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", TOPK + LARGE_TOPK, ids=ids)
def test_choice_gpu(case):
    compare_choice("triton", case, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_scores_go_to_the_lower_page(backend):
    scores = torch.zeros(1, 1, 9)
    keep = torch.zeros(1, 9, dtype=torch.bool)
    keep[0, [4, 6]] = True
    nine, tokens, table = torch.tensor([9]).int(), torch.tensor([9 * 16 - 3]).int(), pack_entries(torch.arange(9), 16)
    pages, counts, entries, slots = ops.page_topk(
        scores, torch.tensor([[5]]), keep, nine, tokens, table[None], 16, 1, 6, backend
    )
    assert pages.tolist() == [[[0, 1, 4, 6, 8, 0]]] and counts.tolist() == [[5]]
    assert entry_units(entries).tolist() == [[[0, 1, 4, 6, 8, 0]]] and slots.tolist() == [[4 * 16 + 13]]


# Both, and the decode over what they list


def check_decode_of_listed(backend, tokens, most, dtype, device="cpu", heads=(4, 2), head_dim=64):
    """Score, list and decode, against plain attention over the tokens of the pages that were listed."""
    inputs = build(AttentionCase("select", tokens, heads=heads, head_dim=head_dim), dtype, device)
    units = entry_units(inputs.table[0, :, 0])
    n_pages = -(-inputs.lengths[0, :, 0] // 16)
    width = int(n_pages.max())
    keys = inputs.pool[units[:, :width]][:, :, :, 0]  # [B, P, layers, Hkv, u, D]
    flat = keys.flatten(0, 1)
    rows = torch.arange(len(flat), device=device).view(len(units), width)
    keep = torch.zeros(len(units), width, dtype=torch.bool, device=device)
    scores = ops.page_score(inputs.q, flat.amin(3), flat.amax(3), 1, rows, n_pages, False, backend)
    budget = torch.full(scores.shape[:2], most, device=device)
    lengths, table = inputs.lengths[0, :, 0], inputs.table[0, :, 0]
    pages, counts, entries, slots = ops.page_topk(scores, budget, keep, n_pages, lengths, table, 16, 1, most, backend)
    scale = head_dim**-0.5
    args = (inputs.q_pos, None, None, scale, 0, 0.0, False, True)
    out, _, _ = ops.decode(inputs.q, inputs.pool, 1, entries[None], slots[None], *args, backend)
    for b in range(len(units)):
        for head in range(heads[1]):
            chosen = pages[b, head, : counts[b, head]].long()
            group = heads[0] // heads[1]
            q = inputs.q[b, head * group : (head + 1) * group].float()
            runs = inputs.pool[units[b, chosen], 1, :, head]  # [n, 2, u, D]
            k, v = runs.transpose(0, 1).flatten(1, 2)[:, : slots[b, head]].float()
            want = (q @ k.T * scale).softmax(1) @ v
            assert error(out[b, head * group : (head + 1) * group], want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decode_reads_what_was_listed(backend, small_tiles):
    check_decode_of_listed(backend, (90, 16, 17, 5), 4, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_a_decode_reads_what_was_listed_gpu(dtype):
    check_decode_of_listed("triton", (9000, 300, 5), 40, dtype, "cuda", (32, 8), 128)


@pytest.mark.gpu
def test_a_graph_follows_the_pages():
    """A graph captured with some page counts, budgets and scores replays with others."""
    score_args, topk_args = boxes(LARGE_SCORE[0], torch.bfloat16, "cuda"), ranked(LARGE_TOPK[0], "cuda")

    def both():
        return ops.page_score(*score_args, False, "triton"), *ops.page_topk(*topk_args, "triton")

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = both()
    for pages, budget in (((1, 5, 2000, 0), 100), ((8192, 0, 77, 4000), 1)):
        topk_args[0].normal_()
        topk_args[1].fill_(budget)
        topk_args[3].copy_(torch.tensor(pages))
        score_args[5].copy_(torch.minimum(torch.tensor(pages), torch.tensor(LARGE_SCORE[0].n_pages)))  # with a box
        graph.replay()
        assert error(got[0], reference.page_score(*score_args, False)) <= 1e-5
        for a, b in zip(got[1:], reference.page_topk(*topk_args), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend):
    args = boxes(SCORE[0], torch.float32)
    torch.library.opcheck(torch.ops.octavo.page_score.default, (*args, True, backend))
    torch.library.opcheck(torch.ops.octavo.page_topk.default, (*ranked(TOPK[0]), backend))
