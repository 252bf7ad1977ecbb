"""Zero copy: rows that read one physical image at different positions see what copies with turned keys would show."""

import pytest
import torch
from kernel_cases import error

from octavo.kernels.layout import MAX_UNIT_TOKENS, SCRATCH_UNIT, pack_entries, pool_shape
from octavo.kernels.reference import backend as reference
from octavo.kernels.zero_copy import VirtualRows, attend, cut

pytestmark = pytest.mark.usefixtures("poisoned_memory")

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
TARGETS = [
    ("reference", "cpu"),
    ("cpu", "cpu"),
    pytest.param(("triton", "cpu"), marks=interpreted),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]
LAYER = 1
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # the parts are rounded, then their sum


@pytest.fixture
def small_blocks():
    """Tiles that short parts fill, blocks that heads and states do not; a decode program a row, for the interpreter."""
    from octavo.kernels.triton import settings

    with (
        settings.trial("decode", BLOCK_N=16, num_stages=1, min_split_tokens=4096),
        settings.trial("prefill", BLOCK_M=16, BLOCK_N=16, num_stages=1),
        settings.trial("rotate_queries", BLOCK_HEADS=2),
        settings.trial("merge_states", BLOCK_S=2),
    ):
        yield


class Album:
    """Rows that hold the same images, stored once, each at positions of its own.

    A row is text, image, text, image, ..., text. Text pages are the row's own. An image's keys are stored for wherever
    it was first computed, a random position; its last page is partly filled.

        pool, table     what the rows share: one copy of each image
        moved, plain    what a plain attention reads: a copy of each image for each row, its keys turned there

    Every slot that holds no token is NaN; so are the units that entries past a row's length point at.
    """

    def __init__(
        self, dtype, device="cpu", heads=(4, 2), head_dim=16, unit=4, rows=2, images=(3,), text=5, layers=2, seed=0
    ):
        random = torch.Generator().manual_seed(seed)

        def number(low, high):
            return int(torch.randint(low, high, (1,), generator=random))

        units = 1
        shared = []  # of each image: its units, and the position that they were stored for
        for count in images:
            shared.append((range(units, units + count), number(0, 4000)))
            units += count
        shared_rows, plain_rows, lengths = [], [], []  # entries are (unit, valid count)
        moves, deltas, parts = [(SCRATCH_UNIT, SCRATCH_UNIT)], [0], []
        for row in range(rows):
            entries, plain = [], []
            for image in range(len(images) + 1):
                is_last = image == len(images)
                own = number(0, text) + is_last
                parts.append((row, len(entries), own, 0))
                fresh = [(units + i, unit) for i in range(own)]
                units += own
                entries += fresh
                plain += fresh
                if is_last:
                    break
                pages, stored = shared[image]
                delta = len(entries) * unit - stored
                parts.append((row, len(entries), len(pages), delta))
                for page in pages:
                    valid = unit if page != pages[-1] else max(unit // 2, 1)
                    entries.append((page, valid))
                    plain.append((units, valid))
                    moves.append((page, units))
                    deltas.append(delta)
                    units += 1
            shared_rows.append(entries)
            plain_rows.append(plain)
            lengths.append((len(entries) - 1) * unit + number(1, unit + 1))

        pool = torch.full(pool_shape(units - 1, layers, heads[1], unit, head_dim), torch.nan)
        for entries, length in zip(shared_rows, lengths, strict=True):
            for j, (page, valid) in enumerate(entries):
                filled = min(valid, length - j * unit)
                pool[page, :, :, :, :filled] = torch.randn(pool[page, :, :, :, :filled].shape, generator=random)
        exponent = torch.arange(0, head_dim, 2).float() / head_dim
        inv_freq = torch.stack([10_000.0**-exponent, 1_000_000.0**-exponent])
        moved = pool.clone()
        kinds = torch.arange(layers, dtype=torch.int32) % 2
        reference.rotate_keys(moved, _int32(moves), _int32(deltas), inv_freq, kinds, 0, layers, False)

        self.unit, self.heads, self.head_dim, self.random = unit, heads[0], head_dim, random
        self.pool, self.moved = pool.to(device, dtype), moved.to(device, dtype)
        capacity = max(map(len, shared_rows)) + 2
        self.table, self.plain = (_table(rows, capacity).to(device) for rows in (shared_rows, plain_rows))
        self.lengths = _int32(lengths).view(1, rows, 1).to(device)
        self.parts = _int32(parts).to(device)
        self.inv_freq = inv_freq[LAYER % 2].to(device)

    def last_queries(self, count):
        """q [B * count, Hq, D] and q_pos, of the last tokens of every row."""
        q = torch.randn(self.lengths.shape[1] * count, self.heads, self.head_dim, generator=self.random)
        back = torch.arange(-count, 0, dtype=torch.int32, device=self.pool.device)
        return q.to(self.pool), (self.lengths.view(-1, 1) + back).flatten()

    def check(self, backend, count=1, with_sinks=False, window=0, softcap=0.0, stored=False):
        """``count`` queries of each row against plain attention over the moved copies."""
        q, q_pos = self.last_queries(count)
        rows, capacity = self.table.shape[1], self.table.shape[3]
        ints = {"dtype": torch.int32, "device": q.device}
        unit_pos = (torch.arange(capacity, **ints) * self.unit).expand(1, rows, 1, capacity) if stored else None
        sinks = torch.randn(self.heads, generator=self.random).to(q) if with_sinks else None
        scores = (sinks, self.head_dim**-0.5, window, softcap)

        virtual = cut(self.table, self.lengths, q_pos, unit_pos, self.parts, self.unit)
        got = attend(q, self.pool, LAYER, virtual, self.inv_freq, *scores, False, backend)
        where = (q, self.moved, LAYER, self.plain, self.lengths)
        if count == 1:
            want = reference.decode(*where, q_pos, unit_pos, *scores, False, True)
        else:
            cu_q = torch.arange(rows + 1, **ints) * count
            want = reference.prefill(*where, cu_q, q_pos, unit_pos, *scores, count, True)
        bound = TOLERANCE[q.dtype] * (3 if backend == "cpu" else 1)  # its scores are rounded to the inputs' type
        for a, b in zip(got, want, strict=False):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert error(a, b) <= bound


def _int32(values):
    return torch.tensor(values, dtype=torch.int32)


def _table(rows, capacity):
    """int32 [1, B, 1, capacity] of entries (unit, valid count); past a row's end nobody may look: all NaN."""
    dead = (SCRATCH_UNIT, MAX_UNIT_TOKENS)
    filled = torch.tensor([row + [dead] * (capacity - len(row)) for row in rows])
    return pack_entries(filled[..., 0], filled[..., 1])[None, :, None]


CALLS = [
    {},
    {"with_sinks": True},
    {"window": 11, "with_sinks": True},
    {"softcap": 20.0},
    {"stored": True, "window": 15},
    {"count": 5},
    {"count": 7, "with_sinks": True, "window": 13},
    {"count": 9, "stored": True, "softcap": 20.0},
    {"count": 16},  # queries before, inside and after the last image
]


def name(call):
    return "-".join(f"{key}-{value}" for key, value in call.items()) or "decode"


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("call", CALLS, ids=name)
def test_one_image_at_many_positions(target, call, small_blocks):
    backend, device = target
    Album(torch.float32, device, seed=CALLS.index(call)).check(backend, **call)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_half_precision(target, dtype, count, small_blocks):
    backend, device = target
    Album(dtype, device, heads=(6, 2), images=(2,), text=3).check(backend, count, with_sinks=True)


@pytest.mark.parametrize("seed", range(12))
def test_random_albums(seed):
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(1, 5, (seed % 4,), generator=random).tolist()
    shape = {"heads": (4, 1 + seed % 2), "unit": 2 ** (seed % 5), "rows": 1 + seed % 3, "images": images}
    album = Album(torch.float32, **shape, seed=seed)
    album.check("cpu", with_sinks=seed % 2 == 0)
    album.check("reference", count=min(3, int(album.lengths.min())), window=(seed % 3) * 20)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("count", [1, 3])
def test_parts_of_nothing_and_open_ends_do_not_matter(target, count, small_blocks):
    """A graph has room for more parts than a batch needs, and a last part leaves room for tokens to come."""
    backend, device = target
    album = Album(torch.float32, device)
    q, q_pos = album.last_queries(count)
    padded = [row for part in album.parts.tolist() for row in (part, [part[0], 1, 0, 77])]
    padded[-2][2] = album.table.shape[3] - padded[-2][1]
    outs = []
    for parts in (album.parts, _int32(padded).to(device)):
        virtual = cut(album.table, album.lengths, q_pos, None, parts, album.unit)
        outs.append(attend(q, album.pool, LAYER, virtual, album.inv_freq, None, 0.1, 0, 0.0, False, backend)[0])
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_where_pages_lie_changes_no_bit(target, small_blocks):
    backend, device = target
    album = Album(torch.float32, device)
    q, q_pos = album.last_queries(1)
    order = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(len(album.pool) - 1) + 1]).to(device)
    pool = torch.empty_like(album.pool)
    pool[order] = album.pool
    outs = []
    for where, table in (
        (album.pool, album.table),
        (pool, pack_entries(order[(album.table >> 9).long()], album.table & 127)),
    ):
        virtual = cut(table, album.lengths, q_pos, None, album.parts, album.unit)
        outs.append(attend(q, where, LAYER, virtual, album.inv_freq, None, 0.1, 0, 0.0, False, backend))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def ragged(album, counts):
    """The parts of an album as virtual rows of ``counts[row]`` queries each, the last tokens of every row; its queries,
    and ``cu_q``."""
    unit, parts, lengths = album.unit, album.parts.tolist(), album.lengths.flatten().tolist()
    first = [sum(counts[:row]) for row in range(len(counts) + 1)]
    table, states = [], []
    for row, begins, entries, delta in parts:
        own = album.table[:, row, :, begins : begins + entries]
        table.append(torch.nn.functional.pad(own, (0, max(entries for *_, entries, _ in parts) - entries)))
        valid = [min(unit, lengths[row] - (begins + i) * unit) for i in range(entries)]
        held = sum(max(min(here, int(e) & 127), 0) for here, e in zip(valid, own.flatten(), strict=True))
        for i in range(counts[row]):
            states.append((first[row] + i, lengths[row] - counts[row] + i - begins * unit, delta, held))
    q_rows, q_pos, deltas, _ = map(list, zip(*states, strict=True))
    sizes = [counts[row] for row, *_ in parts]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    device = album.pool.device
    order = sorted(range(len(q_rows)), key=lambda i: q_rows[i])
    per_query = [q_rows.count(i) for i in range(first[-1])]
    rows = VirtualRows(
        table=torch.stack(table, 1).to(device),
        lengths=_int32([states[at][3] for at in starts[:-1]]).view(1, -1, 1).to(device),
        unit_pos=None,
        q_rows=_int32(q_rows).to(device),
        q_pos=_int32(q_pos).to(device),
        deltas=_int32(deltas).to(device),
        cu_q=_int32(starts).to(device),
        bounds=_int32([sum(per_query[:i]) for i in range(len(per_query) + 1)]).to(device),
        order=torch.tensor(order, device=device),
        max_q=max(counts),
    )
    q = torch.randn(first[-1], album.heads, album.head_dim, generator=album.random).to(album.pool)
    return q, rows, _int32(first).to(device)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("counts", [(3, 7), (1, 4), (5, 1)], ids=str)
def test_rows_with_chunks_of_different_lengths(target, counts, small_blocks):
    backend, device = target
    album = Album(torch.float32, device, seed=sum(counts))
    q, rows, cu_q = ragged(album, counts)
    scores = (torch.randn(album.heads, generator=album.random).to(q), album.head_dim**-0.5, 13, 0.0)
    got = attend(q, album.pool, LAYER, rows, album.inv_freq, *scores, False, backend)
    ends = [int(length) for length in album.lengths.flatten()]
    q_pos = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, counts, strict=True)]).int().to(device)
    where = (q, album.moved, LAYER, album.plain, album.lengths, cu_q, q_pos, None)
    want = reference.prefill(*where, *scores, max(counts), True)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) <= TOLERANCE[torch.float32] * (3 if backend == "cpu" else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("count", [1, 200])
def test_gpu_real_sizes(dtype, count):
    shape = {"heads": (32, 8), "head_dim": 128, "unit": 16, "rows": 4, "images": (36, 36, 36), "text": 60}
    Album(dtype, "cuda", **shape).check("triton", count, with_sinks=True)


@pytest.mark.gpu
def test_gpu_graph_follows_lengths_parts_and_deltas():
    """A graph captured on one batch replays on another: nothing that was launched depends on what is in it."""
    shape = {"heads": (8, 2), "head_dim": 128, "unit": 16, "rows": 4, "images": (9, 5), "text": 20}
    albums = [Album(torch.bfloat16, "cuda", **shape, seed=seed) for seed in range(2)]
    units, capacity = (max(getattr(a, x).shape[i] for a in albums) for x, i in (("pool", 0), ("table", 3)))
    pool = albums[0].pool.new_zeros((units, *albums[0].pool.shape[1:]))
    table = albums[0].table.new_zeros((1, 4, 1, capacity))
    lengths, parts = torch.empty_like(albums[0].lengths), torch.empty_like(albums[0].parts)
    q, q_pos = albums[0].last_queries(1)
    scores = (None, 0.1, 0, 0.0)

    def load(album):
        pool[: len(album.pool)] = album.pool
        table[..., : album.table.shape[3]] = album.table
        lengths.copy_(album.lengths)
        parts.copy_(album.parts)
        q_pos.copy_(album.lengths.flatten() - 1)

    def step():
        virtual = cut(table, lengths, q_pos, None, parts, 16)
        return attend(q, pool, LAYER, virtual, albums[0].inv_freq, *scores, False, "triton")

    load(albums[0])
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for album in reversed(albums):
        load(album)
        graph.replay()
        where = (q, album.moved, LAYER, album.plain, album.lengths, q_pos)
        assert error(got[0], reference.decode(*where, None, *scores, False, True)[0]) <= TOLERANCE[torch.bfloat16]
