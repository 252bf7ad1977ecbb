"""Transfer units between the pool of a device and a pool in pinned host memory, over the bus, in one launch.

    source, target   [units, layers, 2, kv_heads, unit_tokens, head_dim]; a unit is one contiguous piece
    pairs            int32 [n, 2], on the device: the list may have been made there, and with it its length,
                     ``counted``

The device addresses pinned memory directly, so that one kernel replaces n calls of ``copy_``, each of which costs more
than a small unit takes. A tile is a piece of some units, ``TILE_BYTES`` in all whatever the size of a unit::

    unit <= tile   [ unit of pair 0 | unit of pair 1 | ... ]      several pairs a tile
    unit >  tile   [ first piece of a unit ], [ second piece ]    several tiles a pair

What hides the latency of the bus are bytes in flight, ``PROGRAMS * TILE_BYTES`` of them (settings.py): few
programs suffice, and the other multiprocessors stay free for the model.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton import settings


@triton.jit(do_not_specialize=["count"])
def _transfer_kernel(
    source,
    target,
    pairs,
    count,
    counted,
    unit_stride,
    COUNTED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if COUNTED:
        count = tl.load(counted)
    blocks = tl.cdiv(unit_stride, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(count, PAIRS) * blocks, tl.num_programs(0)):
        pair = tile // blocks * PAIRS + tl.arange(0, PAIRS)
        at = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        listed = pair < count
        source_unit = tl.load(pairs + 2 * pair, mask=listed, other=0).to(tl.int64) * unit_stride
        target_unit = tl.load(pairs + 2 * pair + 1, mask=listed, other=0).to(tl.int64) * unit_stride
        inside = listed[:, None] & (at < unit_stride)[None, :]
        piece = tl.load(source + source_unit[:, None] + at[None, :], mask=inside)
        tl.store(target + target_unit[:, None] + at[None, :], piece, mask=inside)


def transfer(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """See ``reference.transfer``. Host memory must be pinned."""
    _launch(source, target, pairs, None)


def transfer_counted(source: Tensor, target: Tensor, pairs: Tensor, count: Tensor) -> None:
    """See ``reference.transfer_counted``. The launch depends on neither the list nor its length."""
    assert count.dtype == torch.int32
    _launch(source, target, pairs, count)


def _launch(source: Tensor, target: Tensor, pairs: Tensor, count: Tensor | None) -> None:
    assert source.shape[1:] == target.shape[1:] and source.dtype == target.dtype
    assert source.is_contiguous() and target.is_contiguous() and pairs.is_contiguous()
    unit = source.stride(0)
    tuned = settings.launch("transfer", "any", pairs.device)
    tile = tuned["TILE_BYTES"] // source.element_size()
    block = min(tile, triton.next_power_of_2(unit))
    _transfer_kernel[(tuned["PROGRAMS"],)](
        source,
        target,
        pairs,
        len(pairs),
        pairs if count is None else count,
        unit,
        COUNTED=count is not None,
        PAIRS=tile // block,
        BLOCK=block,
        num_warps=tuned["num_warps"],
    )
