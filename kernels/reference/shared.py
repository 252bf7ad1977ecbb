"""Truth of decoding with shared prefixes, and what its groups mean (shapes and semantics as in ``attention.py``).

    groups int32 [4, B + 1]

    row 0  members  batch rows in group order; those of no group come last (one place is unused)
    row 1  bounds   group i owns members[bounds[i] : bounds[i + 1]]; the last bound repeats, so that the rest are empty
    row 2  shared   slots at the head of group i's tables that are the same in all of them: whole units, all full
    row 3  own      for batch row b: how many slots its group serves, which is where its own begin; 0 without a group

Two groups, of rows 3 and 0 and of rows 4, 1 and 2, and row 5 by itself::

    members  3 0 4 1 2 5 -        row 3  [ ---- run of 64 ---- ][ own ..... ]
    bounds   0 2 5 5 5 5 5        row 0  [   the same units    ][ own . ]
    shared   64 16 0 0 0 0 0      row 4  [ 16 ][ own ............. ]
    own      64 16 16 64 16 0 -   row 1  [ == ][ own .. ] ...
"""

import torch
from torch import Tensor

from octavo.kernels.layout import entry_valid
from octavo.kernels.reference.attention import decode


def decode_shared(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    groups: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """``out [B, Hq, D]`` of ``decode`` without a window, over tables in logical order of which ``groups`` says what
    they share; every row sees the whole run of its group. What is shared changes what is read, never what is meant.
    """
    check_groups(pool, table, lengths, q_pos, groups)
    return decode(
        q, pool, layer, table, lengths, q_pos, None, sinks, scale, 0, softcap, want_mass=False, want_lse=False
    )[0]


def check_groups(pool: Tensor, table: Tensor, lengths: Tensor, q_pos: Tensor, groups: Tensor) -> None:
    """Assert that ``groups`` says nothing about the tables that is not so."""
    batch, unit_tokens = table.shape[1], pool.shape[4]
    assert groups.shape == (4, batch + 1) and groups.dtype == torch.int32
    members, bounds, shared, own = groups.tolist()
    assert sorted(members[:batch]) == list(range(batch)), f"{members[:batch]} do not list {batch} rows once"
    assert bounds[0] == 0 and bounds == sorted(bounds) and bounds[-1] <= batch, f"bounds {bounds} of {batch} rows"
    for group in range(batch):
        rows, run = members[bounds[group] : bounds[group + 1]], shared[group]
        assert run % unit_tokens == 0, f"a run of {run} slots is not of whole units of {unit_tokens}"
        assert all(own[b] == run for b in rows), f"rows {rows} of a run of {run} own {[own[b] for b in rows]}"
        if rows:
            head = table[:, rows, :, : run // unit_tokens]
            assert bool((head == head[:, :1]).all()), f"the tables of rows {rows} differ in their first {run} slots"
            assert bool((entry_valid(head) == unit_tokens).all()), f"the run of rows {rows} is not full"
            assert int(lengths[:, rows].min()) >= run and int(q_pos[rows].min()) >= run, f"rows {rows} end in their run"
    assert all(own[b] == 0 for b in members[bounds[-1] : batch]), "a row without a group has a run"
