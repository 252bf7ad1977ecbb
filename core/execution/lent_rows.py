"""Attention over tables with lent pages: which part of which table meets which queries, turned by how much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.step_plan import Chunk
from octavo.core.uploads import upload
from octavo.kernels.zero_copy import VirtualRows


def lent_rows(chunks: Sequence[Chunk], entries: Tensor, rows: Tensor, unit_tokens: int) -> VirtualRows:
    """The virtual rows of some chunks, whose sequences have the ``rows`` int64 [b] of the device's tables ``entries``
    int32 [slices, rows, M].

    A run of a table, text or an image, is stored in the order of its tokens, so a virtual row is one run and needs no
    positions of its entries: its queries stand at their distance from the run's first token::

        table of a chunk   | text, 20 | image, 25, lent | text, 9: the chunk, at 45 ... 53 |
        virtual row        0          1                 2
        length             20         25                9
        q_pos              45 ...     25 ...            0 ...
        deltas             0          20                0

    A chunk of one token has one state a run, in order; the states of longer chunks are brought together by query.
    """
    runs = [(at, chunk, run) for at, chunk in enumerate(chunks) for run in chunk.sequence.layout.runs(chunk.end)]
    first = np.cumsum([0, *(chunk.count for chunk in chunks)])
    counts = np.array([chunk.count for _, chunk, _ in runs])
    step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # within a virtual row
    deltas = np.array([run.delta for *_, run in runs])
    q_rows = np.repeat([first[at] for at, *_ in runs], counts) + step
    q_pos = np.repeat([chunk.start - run.start for _, chunk, run in runs], counts) + step
    device = entries.device

    def int32(values: object) -> Tensor:
        return upload(np.asarray(values, np.int32), device)

    width = max(-(-(run.end - run.start) // unit_tokens) for *_, run in runs)
    table_row = rows[upload(np.array([at for at, *_ in runs], np.int64), device)]
    entry = upload(np.array([run.entry for *_, run in runs], np.int64), device)[:, None]
    entry = (entry + torch.arange(width, device=device)).clamp(max=entries.shape[2] - 1)
    states = np.bincount(q_rows, minlength=first[-1])
    ragged = bool((counts > 1).any())
    return VirtualRows(
        table=entries[:, table_row[:, None], entry][:, :, None],
        lengths=int32([run.end - run.start for *_, run in runs])[None, :, None],
        unit_pos=None,
        q_rows=int32(q_rows),
        q_pos=int32(q_pos),
        deltas=int32(np.repeat(deltas, counts)),
        cu_q=int32(np.cumsum([0, *counts])),
        bounds=int32(np.cumsum([0, *states])),
        order=upload(np.argsort(q_rows, kind="stable").astype(np.int64), device) if ragged else None,
        max_q=int(counts.max()),
    )
