"""Races of prefill, K3: whole prompts, chunks on a context, and a ragged batch, over pages of 16 and of 64.

``K3 prefill`` is the op as the engine calls it, which chooses; ``K3 native`` is the paged kernel for everything. A race
counts the two products of each pair of a query and a key that it sees: for a whole prompt of T tokens 2 T^2 Hq D.

The rival that decides is SDPA over pages gathered by our own kernel, in the fastest form known to us: causal where
there is no context, and otherwise the context without a mask and the own tokens causal, merged by their log-sum-exp,
all in cuDNN; ``sdpa flash gathered`` is one call of FlashAttention 2, aligned bottom-right. SDPA on contiguous K and V
is what no paged kernel can do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.kernels import ops
from octavo.scripts.kernel_races import rivals
from octavo.scripts.kernel_races.checking import relative_error
from octavo.scripts.kernel_races.paged import Paged, Shape
from octavo.scripts.kernel_races.race import Field, Race, Target, Times

K = 1024
CHOSEN, NATIVE = "K3 prefill", "K3 native"
TOLERANCE = 8e-3
"""Relative error in norm: in bf16 the probabilities are rounded before they meet the values."""

SLACK = 1.02
"""Where octavo does what the rival does, two medians of it differ by less."""

Batch = tuple[tuple[int, int], ...]
"""(queries, tokens in all) of each sequence."""

WHOLE: Batch = ((16 * K, 16 * K),)
SHAPES: dict[str, tuple[Batch, int]] = {  # and tokens of a page
    "16k causal, page 16": (WHOLE, 16),
    "16k causal, page 64": (WHOLE, 64),
    "4k causal": (((4 * K, 4 * K),), 16),
    "512 on 32k": (((512, 32 * K),), 16),
    "2048 on 32k": (((2 * K, 32 * K),), 16),
    "ragged, 6 chunks": (((5000, 5000), (37, 9037), (1024, 6000), (300, 300), (1500, 1500), (331, 21000)), 16),
}
NATIVE_TFLOPS = {"16k causal, page 16": 330, "16k causal, page 64": 380, "512 on 32k": 400}


def races() -> list[Race]:
    return [_race(kernel, name, *shape) for kernel in (CHOSEN, NATIVE) for name, shape in SHAPES.items()]


def _race(kernel: str, name: str, batch: Batch, unit: int) -> Race:
    shape = Shape(tuple(tokens for _, tokens in batch), unit=unit, pages=(unit,))
    queries = [count for count, _ in batch]
    pairs = sum(count * tokens - count * (count - 1) // 2 for count, tokens in batch)
    flops = 4.0 * pairs * shape.heads * shape.head_dim
    moved = shape.kv_bytes + 2 * sum(queries) * shape.heads * shape.head_dim * 2
    target = _never_slower() if kernel == CHOSEN else None
    if kernel == NATIVE and name in NATIVE_TFLOPS:
        target = _rate(flops, NATIVE_TFLOPS[name])
    return Race(kernel, name, moved, flops, partial(_build, shape, queries, kernel == CHOSEN), target)


def _never_slower() -> Target:
    def reached(times: Times) -> bool:
        return all(times.us["octavo"] <= SLACK * us for name, us in times.us.items() if name.endswith("gathered"))

    return Target("never slower than gather and SDPA", reached)


def _rate(flops: float, tflops: float) -> Target:
    return Target(f"at least {tflops} TFLOP/s", lambda times: flops / times.us["octavo"] >= tflops * 1e6)


class _Chunks:
    """The tensors of a race: the last queries of each sequence, and its tokens in pages."""

    def __init__(self, shape: Shape, queries: list[int], device: torch.device) -> None:
        self.paged = Paged(shape, device)
        lengths = self.paged.shape.lengths  # fewer and shorter in the interpreter
        self.counts = [min(count, length) for count, length in zip(queries, lengths, strict=False)]
        self.contexts = [length - count for count, length in zip(self.counts, lengths, strict=True)]
        size = (sum(self.counts), shape.heads, shape.head_dim)
        self.q = torch.randn(size, device=device, dtype=self.paged.pool.dtype)
        positions = [torch.arange(n - count, n) for count, n in zip(self.counts, lengths, strict=True)]
        self.q_pos = torch.cat(positions).to(device, torch.int32)
        self.cu_q = torch.tensor([0, *self.counts]).cumsum(0).to(device, torch.int32)

    def octavo(self, layer: int, backend: str, *, choose: bool) -> Tensor:
        paged = self.paged
        where = (self.q, paged.pool, layer, paged.table, paged.lengths, self.cu_q, self.q_pos)
        known: dict[str, Any] = {"counts": self.counts, "contexts": self.contexts} if choose else {}
        scores = (None, None, paged.scale, 0, 0.0)
        out: Tensor = ops.prefill(*where, *scores, max(self.counts), False, backend, **known)[0]
        return out

    def gathered(self, layer: int, attend: Callable[..., Tensor]) -> list[Tensor]:
        """``attend`` over each sequence's pages, gathered."""
        return [attend(q, *kv, self.paged.scale) for q, kv in zip(self.rows(), self.contiguous(layer), strict=True)]

    def rows(self) -> list[Tensor]:
        """The queries of each sequence as SDPA has them, [1, Hq, count, D]."""
        return [q.transpose(0, 1)[None] for q in self.q.split(self.counts)]

    def contiguous(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """K and V of each sequence, [1, Hkv, tokens, D]."""
        paged = self.paged
        found = []
        for b, tokens in enumerate(paged.shape.lengths):
            row = slice(b, b + 1)
            table, lengths = paged.table[:, row], paged.lengths[:, row]
            found.append(ops.gather(paged.pool, layer, table, lengths, tokens, "triton"))
        return found


def _build(shape: Shape, queries: list[int], choose: bool, device: torch.device) -> Field:
    chunks = _Chunks(shape, queries, device)
    paged, layers = chunks.paged, range(chunks.paged.layers)
    contenders: dict[str, rivals.Calls] = {
        "octavo": [partial(chunks.octavo, layer, "triton", choose=choose) for layer in layers]
    }
    if choose:
        contenders["sdpa gathered"] = [partial(chunks.gathered, layer, _split) for layer in layers]
        if any(chunks.contexts):
            contenders["sdpa flash gathered"] = [partial(chunks.gathered, layer, _flash) for layer in layers]

    def contiguous() -> rivals.Calls:
        return [partial(_all, chunks.rows(), chunks.contiguous(layer), paged.scale) for layer in layers]

    contenders["sdpa contiguous"] = rivals.lazily(contiguous, paged.layers)
    if rivals.installed("flashinfer"):
        args = (chunks.q, paged.pool, paged.table, paged.lengths, paged.scale, chunks.cu_q)
        contenders["flashinfer"] = rivals.lazily(partial(rivals.flashinfer_attention, *args), paged.layers)
    return Field(contenders, partial(_error, chunks, choose), TOLERANCE)


def _error(chunks: _Chunks, choose: bool) -> float:
    last = chunks.paged.layers - 1
    want = chunks.octavo(last, "reference", choose=False)
    return relative_error(chunks.octavo(last, "triton", choose=choose), want)


def _all(rows: list[Tensor], kv: list[tuple[Tensor, Tensor]], scale: float) -> list[Tensor]:
    return [_split(q, k, v, scale) for q, (k, v) in zip(rows, kv, strict=True)]


def _split(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The context without a mask, the own tokens causal, merged."""
    from octavo.kernels.triton.prefill_dense import sdpa

    own = q.shape[2]
    context = k.shape[2] - own
    if context == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    before, before_lse = sdpa(q, k[:, :, :context], v[:, :, :context], False, scale)
    among, among_lse = sdpa(q, k[:, :, context:], v[:, :, context:], True, scale)
    share = torch.sigmoid(before_lse - among_lse).reshape(1, q.shape[1], own, 1)
    return torch.lerp(among.float(), before.float(), share).to(q.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """FlashAttention 2, aligned bottom-right."""
    from torch.nn.attention.bias import causal_lower_right

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
