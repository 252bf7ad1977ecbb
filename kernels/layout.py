"""The memory that every kernel sees: the pool, and the packed entry of a block table.

The pool is page-major, one tensor for all layers of a device::

    pool [units, layers, 2, kv_heads, unit_tokens, head_dim]

    unit 0      scratch: padding rows write here, nobody reads it
    unit 1...   | layer 0                                        | layer 1 ...
                | K: head 0 [unit_tokens, D] | head 1 ... | V: head 0 | ...
                  ^ a run: one contiguous piece of unit_tokens * head_dim elements

A unit is contiguous over layers, so a page moves to the host in one piece, and a (unit, layer, K or V, head) run is
contiguous, so a decode kernel streams it.

A block-table entry is one int32::

    bit   31            9 8      7 6            0
          | unit id      | format | valid count  |
            22 bits        2 bits   7 bits (0...64)

The valid count says how many leading slots of the unit hold tokens (a sealed, partly filled page has fewer than
``unit_tokens``). Format 0 is the pool's own dtype; 1-3 are kept for low-precision pages.
"""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VALID_BITS = 7
FORMAT_BITS = 2
ID_SHIFT = VALID_BITS + FORMAT_BITS
VALID_MASK = (1 << VALID_BITS) - 1
MAX_UNITS = 1 << (31 - ID_SHIFT)
MAX_UNIT_TOKENS = 64
TRITON_HEAD_DIM = 256
"""Largest head that the Triton kernels have launch settings for."""
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Pools that they have them for."""
SCRATCH_UNIT = 0

Ids = TypeVar("Ids", Tensor, NDArray[np.int64])


def pack_entries(unit_ids: Tensor, valid: Tensor | int) -> Tensor:
    """Table entries of 16-bit units: int32, the shape of ``unit_ids``."""
    return packed(unit_ids.to(torch.int64), valid).to(torch.int32)


def packed(unit_ids: Ids, valid: Ids | int) -> Ids:
    """The same of unit ids int64, as int64."""
    return (unit_ids << ID_SHIFT) | valid


def entry_units(entries: Tensor) -> Tensor:
    """Unit ids of packed entries, int64 (an id is about to meet a stride)."""
    return entries.to(torch.int64) >> ID_SHIFT


def entry_valid(entries: Tensor) -> Tensor:
    """Valid counts of packed entries, int32."""
    return entries & VALID_MASK


def unit_tokens_for(page_sizes: list[int]) -> int:
    """Largest power of two, at most 64, that divides every page size (8 for pages of 16 and 24)."""
    unit = MAX_UNIT_TOKENS
    while any(size % unit for size in page_sizes):
        unit //= 2
    return unit


def pool_shape(units: int, layers: int, kv_heads: int, unit_tokens: int, head_dim: int) -> tuple[int, ...]:
    """Shape of a pool of ``units`` usable units; the scratch unit comes on top."""
    return (units + 1, layers, 2, kv_heads, unit_tokens, head_dim)
