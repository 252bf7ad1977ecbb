"""Races of K9's fused forms: append with RoPE and digests, at decode and in a prompt (8 KV heads, D = 128, bf16).

The plain append races in ``pages.py``. Two rivals do the same in separate steps: "torch" in torch alone, "unfused" with
torch's RoPE and digests around the plain append. Both are given the list of full pages, which the kernel finds itself.
What is written is nearly as much as what is read, so the floor is the bytes over the copy rate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.layout import pack_entries, pool_shape
from octavo.scripts.kernel_races.checking import relative_error
from octavo.scripts.kernel_races.race import Field, Race, Target

KV_HEADS, DIM, PAGE = 8, 128, 16
DTYPE = torch.bfloat16
TOKEN_BYTES = 2 * KV_HEADS * DIM * DTYPE.itemsize
COLD_BYTES = 150e6
CPU_TOKENS, CPU_ROWS, CPU_LAYERS = 40, 3, 2
"""What shapes are cut to in Triton's interpreter, where a race checks its own code and nothing else."""


@dataclass(frozen=True)
class Shape:
    """Sequences that have ``starts`` tokens in the cache and append ``count`` each, a page a unit."""

    name: str
    starts: tuple[int, ...]
    count: int
    digests: bool

    @property
    def tokens(self) -> int:
        return len(self.starts) * self.count

    @property
    def moved_bytes(self) -> float:
        """K and V, angles and slots; of a full page the keys that are not in this call, and its digest."""
        count = self.tokens * (2 * TOKEN_BYTES + 2 * DIM * DTYPE.itemsize + 8)
        if self.digests:
            count += self.tokens * (4 + 4)
            for start in self.starts:
                full = (start + self.count) // PAGE - start // PAGE
                count += full * TOKEN_BYTES  # min and max: two vectors a head
                count += (start % PAGE if full else 0) * TOKEN_BYTES // 2
        return count

    def fitting(self, device: torch.device) -> "Shape":
        """The shape, or on a CPU a small part of it."""
        if device.type != "cpu":
            return self
        return replace(self, starts=self.starts[-CPU_ROWS:], count=min(self.count, CPU_TOKENS))


class Step:
    """A step's tensors: one K and V a layer, and a pool whose layers take turns, with units in random order."""

    def __init__(self, shape: Shape, layers: int, device: torch.device) -> None:
        entries = math.ceil((max(shape.starts) + shape.count) / PAGE)
        units = torch.randperm(len(shape.starts) * entries, device=device).view(len(shape.starts), entries) + 1
        starts = torch.tensor(shape.starts, device=device)
        position = (starts[:, None] + torch.arange(shape.count, device=device)).flatten()
        row = torch.arange(len(shape.starts), device=device).repeat_interleave(shape.count)
        # Triton's interpreter cuts fp32 off at bf16 where a GPU rounds.
        dtype = torch.float32 if device.type == "cpu" else DTYPE
        self.shape = shape
        self.pool = torch.empty(pool_shape(units.numel(), layers, KV_HEADS, PAGE, DIM), device=device, dtype=dtype)
        self.pool.normal_()
        self.digests = torch.full(
            (len(self.pool), layers, KV_HEADS, 2, DIM), torch.nan, device=device, dtype=dtype
        )  # poisoned: a check wants every one that is due
        self.tables = pack_entries(units, PAGE)[None]
        self.unit, self.offset = units[row, position // PAGE], position % PAGE
        self.slots = self.unit * PAGE + self.offset
        self.rows, self.q_pos = row.int(), position.int()
        self.full = self.unit[self.offset == PAGE - 1]
        angles = position[:, None] * 10000 ** -(torch.arange(0, DIM, 2, device=device) / DIM)
        self.cos, self.sin = (x.repeat(1, 2).to(dtype) for x in (angles.cos(), angles.sin()))
        self.k, self.v = torch.randn((2, layers, shape.tokens, KV_HEADS, DIM), device=device, dtype=dtype)

    def fused(self, layer: int, backend: str) -> None:
        digests = self.digests if self.shape.digests else None
        ops.append_fused(
            self.k[layer], self.v[layer], self.pool, layer, self.slots, self.cos, self.sin, digests, layer, self.tables,
            0, self.rows, self.q_pos, PAGE, backend,
        )  # fmt: skip

    def turned(self, layer: int) -> Tensor:
        """Keys after RoPE, as a Hugging Face model computes them."""
        first, second = self.k[layer].chunk(2, dim=-1)
        half = torch.cat([-second, first], dim=-1)
        return self.k[layer] * self.cos[:, None] + half * self.sin[:, None]

    def seal(self, layer: int) -> None:
        if self.shape.digests:
            keys = self.pool[self.full, layer, 0]  # [n, Hkv, page, D]
            self.digests[self.full, layer, :, 0] = keys.amin(2)
            self.digests[self.full, layer, :, 1] = keys.amax(2)

    def unfused(self, layer: int) -> None:
        ops.append(self.turned(layer), self.v[layer], self.pool, layer, self.slots, "triton")
        self.seal(layer)

    def by_torch(self, layer: int) -> None:
        self.pool[self.unit, layer, 0, :, self.offset] = self.turned(layer)
        self.pool[self.unit, layer, 1, :, self.offset] = self.v[layer]
        self.seal(layer)

    def written(self) -> Tensor:
        """What a call on layer 0 has written, fp32: K and V of the tokens, and the digests of full pages."""
        kv = self.pool[self.unit, 0, :, :, self.offset].flatten()
        digests = self.digests[self.full, 0].flatten() if self.shape.digests else kv[:0]
        return torch.cat([kv, digests]).float()


def _build(shape: Shape) -> Callable[[torch.device], Field]:
    def build(device: torch.device) -> Field:
        fitting = shape.fitting(device)
        layers = max(math.ceil(COLD_BYTES / (2 * shape.tokens * TOKEN_BYTES)), 4)
        if device.type == "cpu":
            layers = CPU_LAYERS
        step = Step(fitting, layers, device)

        def error() -> float:
            fresh = Step(fitting, 1, device)
            fresh.pool[fresh.unit, 0, :, :, fresh.offset] = torch.nan
            results = []
            for backend in ("triton", "reference"):
                fresh.fused(0, backend)
                results.append(fresh.written())
                fresh.pool[fresh.unit, 0, :, :, fresh.offset] = torch.nan
                fresh.digests.fill_(torch.nan)
            got, want = results
            return relative_error(got, want)

        return Field(
            contenders={
                "octavo": [lambda i=i: step.fused(i, "triton") for i in range(layers)],
                "unfused": [lambda i=i: step.unfused(i) for i in range(layers)],
                "torch": [lambda i=i: step.by_torch(i) for i in range(layers)],
            },
            error=error,
            tolerance=5e-3,
        )

    return build


def races() -> list[Race]:
    decode = Target("at most 4 µs", lambda times: times.us["octavo"] <= 4)
    prompt = Target("80 % of the copy rate", lambda times: times.us["octavo"] <= times.floor_us / 0.8)
    staggered, in_step = tuple(PAGE + i % PAGE for i in range(256)), (2 * PAGE - 1,) * 256
    return [
        Race("K9 append_fused", shape.name, shape.moved_bytes, 0, _build(shape), target, bound="copy")
        for shape, target in (
            (Shape("256 tokens, RoPE", staggered, 1, digests=False), decode),
            (Shape("256 tokens, RoPE, digests, 16 full pages", staggered, 1, digests=True), decode),
            (Shape("256 tokens, RoPE, digests, 256 full pages", in_step, 1, digests=True), None),
            (Shape("8,192 tokens, RoPE", (0,), 8192, digests=False), prompt),
            (Shape("8,192 tokens, RoPE, digests", (0,), 8192, digests=True), prompt),
        )
    ]
