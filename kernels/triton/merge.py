"""Merge: attention over a union of sets of keys, from the attention over each, in one launch.

    outs     [n, Hq, D], lses fp32 [n, Hq]     states: output and log-sum-exp (natural)
    bounds   int32 [B + 1]                     row b joins the states bounds[b] ... bounds[b + 1] - 1

A program joins the states of one row and head, BLOCK_S at a time, as the softmax of their log-sum-exps (Milakov and
Gimelshein, arXiv 1805.02867): a running maximum, the sum of the weights, and the weighted sum of the outputs. The join
is associative, so it does not matter how a row was cut, and a state may itself be the join of others.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.tiles import LN2, LOG2E, add_sink


@triton.jit
def _merge_kernel(
    outs,
    lses,
    bounds,
    sinks,
    out,
    lse,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr,
):
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    b = tl.program_id(1)
    begin = tl.load(bounds + b)
    end = tl.load(bounds + b + 1)

    d = tl.arange(0, BLOCK_D)
    top = tl.max(tl.full([BLOCK_S], float("-inf"), tl.float32))
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_S):
        state = start + tl.arange(0, BLOCK_S)
        live = state < end
        at = state.to(tl.int64) * heads + head  # [S]
        part = tl.load(lses + at, mask=live, other=float("-inf")) * LOG2E
        inside = live[:, None] & (d < D)[None, :]
        rows = tl.load(outs + at[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)  # [S, D]
        new_top = tl.maximum(top, tl.max(part))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part - pivot)
        decay = tl.exp2(top - pivot)
        total = total * decay + tl.sum(weight)
        acc = acc * decay + tl.sum(weight[:, None] * rows, 0)
        top = new_top

    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)
    row_lse = tl.where(nothing, float("-inf"), top + tl.log2(tl.where(nothing, 1.0, total)))
    if SINKS:
        row_lse, shrink = add_sink(row_lse, tl.load(sinks + head).to(tl.float32) * LOG2E)
        acc = acc * shrink
    at_row = b.to(tl.int64) * heads + head
    tl.store(out + at_row * D + d, acc, mask=d < D)
    tl.store(lse + at_row, row_lse * LN2)


def merge_states(outs: Tensor, lses: Tensor, bounds: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """See ``reference.merge_states``."""
    assert outs.is_contiguous() and lses.is_contiguous() and bounds.is_contiguous()
    heads, head_dim = outs.shape[1:]
    batch = len(bounds) - 1
    out = torch.empty((batch, heads, head_dim), dtype=outs.dtype, device=outs.device)
    lse = torch.empty((batch, heads), dtype=torch.float32, device=outs.device)
    _merge_kernel[heads, batch](
        outs,
        lses,
        bounds,
        lse if sinks is None else sinks,
        out,
        lse,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        SINKS=sinks is not None,
        **settings.launch("merge_states", "any", outs.device),
    )
    return out, lse
