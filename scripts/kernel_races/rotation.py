"""Races of rotation: K16, keys turned in their pages or on the way to others, and queries turned to meet shared pages.

Keys are read and written once each; a copy takes V along. The rival gathers, turns and scatters with torch, with
cosines and sines ready made. The race of shared pages asks what zero copy costs over a plain decode of the same pages,
and what it gains over a decode of copies, one for each row, as one would have without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.layout import pack_entries, pool_shape
from octavo.kernels.reference import backend as reference
from octavo.kernels.zero_copy import VirtualRows, attend, cut
from octavo.scripts.kernel_races.checking import relative_error
from octavo.scripts.kernel_races.race import Field, Race, Target

KEYS, QUERIES = "K16 rotate", "K16 query rotation"
KV_HEADS, UNIT, DIM, LAYERS = 8, 16, 128, 32
UNIT_KEY_BYTES = LAYERS * KV_HEADS * UNIT * DIM * 2
ROUND_BYTES = 150e6
"""What the calls of a round touch at least: over twice an L2."""

ROWS, TOKENS, IMAGES, IMAGE_UNITS = 8, 8192, 4, 36


def races() -> list[Race]:
    return [
        *(_keys(megabytes, in_place) for megabytes in (32, 256) for in_place in (True, False)),
        Race(
            QUERIES,
            f"decode {ROWS} x 8k, {IMAGES} shared images of {IMAGE_UNITS * UNIT} tokens",
            moved_bytes=((ROWS * (TOKENS - IMAGES * IMAGE_UNITS * UNIT)) + IMAGES * IMAGE_UNITS * UNIT)
            * (2 * KV_HEADS * DIM * 2),
            flops=0,
            build=_build_shared,
        ),
    ]


def _keys(megabytes: int, in_place: bool) -> Race:
    count = (megabytes << 20) // UNIT_KEY_BYTES
    moved = (2 if in_place else 4) * count * UNIT_KEY_BYTES

    return Race(
        KEYS,
        f"{megabytes} MB of keys, {'in place' if in_place else 'copied'}",
        moved_bytes=moved,
        flops=0,
        build=partial(_build_keys, count, in_place),
        target=Target("80 % of the copy rate", lambda times: times.us["octavo"] <= times.floor_us / 0.8),
        bound="copy",
    )


def _build_keys(count: int, in_place: bool, device: torch.device) -> Field:
    layers, dtype = LAYERS, torch.bfloat16
    calls = int(ROUND_BYTES // (count * UNIT_KEY_BYTES)) + 1
    if device.type == "cpu":  # in Triton's interpreter, where a race checks its own code
        count, layers, dtype, calls = 2, 2, torch.float32, 1
    inv_freq, kinds = _frequencies(device), torch.zeros(layers, dtype=torch.int32, device=device)

    def inputs(calls: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """A pool, and of each call the units [count, 2] and the deltas [count]."""
        wide = 1 if in_place else 2
        shape = pool_shape(calls * count * wide, layers, KV_HEADS, UNIT, DIM)
        pool = torch.empty(shape, device=device, dtype=dtype).normal_()
        order = (torch.randperm(calls * count * wide, device=device) + 1).int()
        units = order.view(calls, count, wide).expand(-1, -1, 2).contiguous()
        deltas = torch.randint(-4096, 4096, (calls, count), device=device, dtype=torch.int32)
        return pool, list(units), list(deltas)

    pool, units, deltas = inputs(calls)

    def error() -> float:
        fresh, (pairs,), (by,) = inputs(1)
        want = fresh.clone()
        reference.rotate_keys(want, pairs, by, inv_freq, kinds, 0, layers, False)
        target = pairs[:, 1].long()
        if not in_place:
            fresh[target] = torch.nan
        ops.rotate_keys(fresh, pairs, by, inv_freq, kinds, 0, layers, False, "triton")
        got, want = (x[target].float().transpose(1, 2).flatten(2) for x in (fresh, want))
        errors = (got - want).norm(dim=2) / want.norm(dim=2)  # of K and of V of each unit
        return float(errors.amax())

    arguments = list(zip(units, deltas, strict=True))
    return Field(
        {
            "octavo": [
                partial(ops.rotate_keys, pool, pairs, by, inv_freq, kinds, 0, layers, False, "triton")
                for pairs, by in arguments
            ],
            "torch": [_with_torch(pool, pairs, by, inv_freq, in_place) for pairs, by in arguments],
        },
        error,
        tolerance=5e-3,
    )


def _with_torch(pool: Tensor, units: Tensor, deltas: Tensor, inv_freq: Tensor, in_place: bool) -> Callable[[], None]:
    """The same with torch's ops, in the arithmetic of transformers: cosine and sine in the pool's dtype."""
    layers = pool.shape[1]
    sides = pool.view(-1, KV_HEADS * UNIT, DIM)  # K and V of (unit, layer), in turn
    layer = torch.arange(layers, device=pool.device)
    source, target = ((unit.long()[:, None] * layers + layer).flatten() * 2 for unit in units.unbind(1))
    angles = (deltas.double()[:, None] * inv_freq[0].double()).repeat(1, 2).repeat_interleave(layers, 0)[:, None]
    cos, sin = angles.cos().to(pool.dtype), angles.sin().to(pool.dtype)

    def call() -> None:
        keys = sides.index_select(0, source)
        first, second = keys.chunk(2, -1)
        turned = keys * cos + torch.cat([-second, first], -1) * sin
        if not in_place:
            sides.index_copy_(0, target + 1, sides.index_select(0, source + 1))
        sides.index_copy_(0, target, turned)

    return call


def _build_shared(device: torch.device) -> Field:
    layers, dtype = 2, torch.bfloat16
    shape = {"rows": ROWS, "units": TOKENS // UNIT, "image_units": IMAGE_UNITS}
    if device.type == "cpu":
        dtype, shape = torch.float32, {"rows": 2, "units": 13, "image_units": 2}
    inv_freq = _frequencies(device)
    scores = (None, DIM**-0.5, 0, 0.0)
    kinds = torch.zeros(layers, dtype=torch.int32, device=device)

    def octavo(pages: _SharedPages, q: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return attend(q, pages.pool, layer, pages.virtual, inv_freq[0], *scores, False, "triton")

    def plain(pages: _SharedPages, table: Tensor, q: Tensor, layer: int) -> tuple[Tensor, ...]:
        where = (pages.pool, layer, table, pages.lengths, pages.q_pos)
        return ops.decode(q, *where, None, *scores, False, False, "triton")  # type: ignore[no-any-return]

    def queries() -> Tensor:
        return torch.randn((shape["rows"], 4 * KV_HEADS, DIM), device=device, dtype=dtype)

    def error() -> float:
        fresh, q = _SharedPages(**shape, layers=layers, device=device, dtype=dtype), queries()
        out, _ = octavo(fresh, q, 1)
        exact = fresh.pool.float()
        reference.rotate_keys(exact, fresh.moves, fresh.deltas, inv_freq, kinds, 0, layers, False)
        where = (exact, 1, fresh.copies, fresh.lengths, fresh.q_pos)
        want, _, _ = reference.decode(q.float(), *where, None, *scores, False, False)
        return relative_error(out, want)

    pages, q = _SharedPages(**shape, layers=layers, device=device, dtype=dtype), queries()
    return Field(
        {
            "octavo": [partial(octavo, pages, q, layer) for layer in range(layers)],
            "octavo, same pages, no rotation": [
                partial(plain, pages, pages.table, q, layer) for layer in range(layers)
            ],
            "octavo, a copy for each row": [partial(plain, pages, pages.copies, q, layer) for layer in range(layers)],
        },
        error,
        tolerance=8e-3,
    )


class _SharedPages:
    """Rows of text with images in between that all rows share, and a table of copies of the images for each row.

    table, copies   int32 [1, rows, 1, units]
    moves, deltas   int32 [n, 2], [n]   what ``rotate_keys`` makes the copies with
    virtual         the table, cut once a step
    """

    virtual: VirtualRows

    def __init__(self, rows: int, units: int, image_units: int, layers: int, device: torch.device, dtype: torch.dtype):
        images = IMAGES * image_units
        order = torch.randperm(rows * units + images) + 1  # all units lie in random order
        copies, shared = order[: rows * units].view(rows, units), order[rows * units :].view(IMAGES, image_units)
        table = copies.clone()
        gap = (units - images) // (IMAGES + 1)  # units of text before each image; the rest stands last
        parts, moves, deltas = [], [], []
        for row in range(rows):
            for image in range(IMAGES):
                first = image * (gap + image_units) + gap
                delta = 100 * row + image
                parts += [(row, first - gap, gap, 0), (row, first, image_units, delta)]
                here = slice(first, first + image_units)
                table[row, here] = shared[image]
                moves.append(torch.stack([shared[image], copies[row, here]], 1))
                deltas += [delta] * image_units
            text = IMAGES * (gap + image_units)
            parts.append((row, text, units - text, 0))
        size = pool_shape(rows * units + images, layers, KV_HEADS, UNIT, DIM)
        self.pool = torch.empty(size, device=device, dtype=dtype).normal_()
        self.table, self.copies = (pack_entries(x, UNIT)[None, :, None].to(device) for x in (table, copies))
        self.moves = torch.cat(moves).int().to(device)
        self.deltas = torch.tensor(deltas, dtype=torch.int32, device=device)
        self.lengths = torch.full((1, rows, 1), units * UNIT, dtype=torch.int32, device=device)
        self.q_pos = self.lengths.flatten() - 1
        cuts = torch.tensor(parts, dtype=torch.int32, device=device)
        self.virtual = cut(self.table, self.lengths, self.q_pos, None, cuts, UNIT)


def _frequencies(device: torch.device) -> Tensor:
    """fp32 [1, D/2], of base 500,000 (Llama 3)."""
    return (500_000.0 ** -(torch.arange(0, DIM, 2, device=device).float() / DIM))[None]
