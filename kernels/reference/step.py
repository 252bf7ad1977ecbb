"""Truth of the ops that prepare and finish a decode step on the device.

They serve sequences of uniform pages, whose slots lie in logical order: a token at position p is in entry
``p // unit_tokens``. Sequences with sealed segments are prepared on the host.
"""

import torch
from torch import Tensor

from octavo.kernels.layout import SCRATCH_UNIT, entry_units


def step_decode(
    rows: Tensor, lengths: Tensor, tokens: Tensor, tables: Tensor, unit_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the forward pass of a decode step takes, from the state of the sequences; changes nothing.

    Args:
        rows: int32 [B], the state row of each batch row; -1: padding.
        lengths: int32 [rows of the state], tokens in the cache, which is the position of the next one.
        tokens: int64 [rows of the state], the last token, which is not in the cache yet.
        tables: int32 [slices, rows of the state, M], packed entries (layout.py). The unit that the token goes to must
            be listed.
        unit_tokens: slots of a unit.

    Returns:
        ids int64 [B]; positions int64 [B]; q_pos int32 [B], the same for the kernels; slots int64 [slices, B], where K
        and V go; slot counts int32 [1, B, 1], the token included. A padding row is token 0 at position 0 with slot 0,
        which is of the scratch unit, and sees 0 slots.
    """
    used = rows >= 0
    row = rows.clamp(min=0).long()
    position = torch.where(used, lengths[row], 0)
    units = torch.where(used, entry_units(tables[:, row, position.long() // unit_tokens]), SCRATCH_UNIT)
    return (
        torch.where(used, tokens[row], 0),
        position.long(),
        position,
        units * unit_tokens + position % unit_tokens,
        torch.where(used, position + 1, 0)[None, :, None],
    )


def scatter_tokens(rows: Tensor, ids: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    """Move the state on after a step: the drawn ``ids`` int64 [B] become the last tokens of ``rows`` int32 [B] (-1:
    padding; no row twice), and their lengths grow by the token that the step has put into the cache.

    ``tokens`` int64 and ``lengths`` int32 are the state, as in ``step_decode``.
    """
    used = rows >= 0
    row = rows[used].long()
    tokens[row] = ids[used]
    lengths[row] += 1
