"""RoPE on the way from memory into a kernel: rows are loaded turned, "rotate half".

The partner of an element is a second load of the row that the program has just read, so it comes out of L1. The turn is
one multiplication and one fused multiply-add, written out, so that whoever turns the same row rounds alike.

RoFormer (arXiv 2104.09864, section 3.4.2) with the pairs as Hugging Face lays them out: of the first ROTARY dimensions,
d and d + ROTARY / 2 are a pair.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl


@triton.jit
def load_turned(
    x, cos, sin, row, listed, x_row, angle_row, D: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The ``listed`` rows of ``x``, each turned by its own row of ``cos, sin`` (all by the first, if ``angle_row`` is
    0): [N, BLOCK_D] in the dtype of ``x``, fp32 if turned; 0 where not listed and past D. ROTARY 0: not turned."""
    d = tl.arange(0, BLOCK_D)
    row = row.to(tl.int64)[:, None]
    inside = listed[:, None] & (d < D)[None, :]
    rows = tl.load(x + row * x_row + d[None, :], mask=inside, other=0.0)
    if ROTARY > 0:
        rows = rows.to(tl.float32)
        first = d < ROTARY // 2
        partner = tl.where(first, d + ROTARY // 2, d - ROTARY // 2)
        turning = listed[:, None] & (d < ROTARY)[None, :]
        partners = tl.load(x + row * x_row + partner[None, :], mask=turning, other=0.0).to(tl.float32)
        c = tl.load(cos + row * angle_row + d[None, :], mask=turning, other=0.0).to(tl.float32)
        s = tl.load(sin + row * angle_row + d[None, :], mask=turning, other=0.0).to(tl.float32)
        turned = tl.fma(rows, c, partners * tl.where(first[None, :], -s, s))
        rows = tl.where((d < ROTARY)[None, :], turned, rows)  # what is not turned passes bit by bit
    return rows
