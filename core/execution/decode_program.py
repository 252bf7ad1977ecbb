"""A decode step as one program that the device replays, without the host in between.

::

    step_decode -> embedding -> layers, with attention over the tables -> logits -> sample -> scatter_tokens
         ^                                                                                        |
         +------------------------------- DecodeState, on the device -----------------------------+

Nothing in it depends on a length: lengths, tables, tokens and filters are read on the device. So one CUDA graph a
bucket of rows, captured once, serves every batch of at most so many. All graphs share one memory pool; the largest is
captured first, so that the others find room in what it needed. Where there are no CUDA graphs the same program runs as
plain calls.

A batch row is a row of the state. Rows where nobody decodes are padding: token 0, into the scratch unit, which sees
nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Sequential
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.execution.attention import DecodeGroup, PagedStep
from octavo.core.execution.decode_state import DecodeState
from octavo.core.execution.device_tables import DeviceTables
from octavo.core.hf_model import HFModel
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.uploads import upload
from octavo.kernels import ops

log = logging.getLogger(__name__)


def buckets(rows: int) -> list[int]:
    """Batch sizes to prepare for at most ``rows``, ascending: as many rows as in the next one are padding at most.

    1, 2, 4, 8, then four to each doubling: a matrix product costs the same for a few rows more, a graph costs memory
    and start-up time.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < rows:
        step = 1 << (sizes[-1].bit_length() - 3)
        sizes.append(sizes[-1] + max(step, 8))
    return [size for size in sizes if size < rows] + [rows]


class DecodeProgram:
    """Replays decode steps of up to ``max_seqs`` sequences. ``state`` is moved on by every replay."""

    def __init__(
        self, model: HFModel, kv: Tensor, plan: LayerPlan, backend: str, tables: DeviceTables, max_seqs: int
    ) -> None:
        self._model = model
        self._kv = kv
        self._plan = plan
        self._backend = backend
        self._tables = tables
        self._buckets = buckets(max_seqs)
        self.state = DecodeState(max_seqs, model.spec.vocab_size, kv.device)
        self._groups = torch.zeros((4, max_seqs + 1), dtype=torch.int32, device=kv.device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._drawn: dict[tuple[int, bool], Tensor] = {}
        self._captured: Tensor | None = None
        self._pool: Any = None

    def bucket(self, rows: int) -> int:
        """The smallest prepared batch of at least ``rows``."""
        return next(size for size in self._buckets if size >= rows)

    def step(self, rows: Sequential[int], runs: NDArray[np.int32] | None) -> Tensor:
        """Decode one token in each of the ``rows`` that the state has been told of; the drawn tokens int64 [bucket], a
        row of the state each. They are written over by the next step.

        ``runs``: the groups of ``ops.decode_shared``, by place in ``rows``, where there are any.
        """
        bucket = self.bucket(max(rows) + 1)
        key = bucket, runs is not None
        graphs = self._kv.device.type == "cuda"
        if graphs and self._captured is not self._tables.entries:  # the first time, or the tables have been widened
            self._graphs.clear()
            self._captured = self._tables.entries
            self._capture([(size, False) for size in reversed(self._buckets)])
        if graphs and key not in self._graphs:
            self._capture([key])
        if runs is not None:
            self._groups[:, : bucket + 1] = upload(spread_groups(runs, rows, bucket), self._kv.device)
        if not graphs:
            with torch.inference_mode():
                return self._run(*key)
        self._graphs[key].replay()
        return self._drawn[key]

    def _run(self, bucket: int, shared: bool) -> Tensor:
        state, fields, entries = self.state, self.state.fields, self._tables.entries
        rows = state.rows[:bucket]
        ids, positions, q_pos, slots, slot_counts = ops.step_decode(
            rows, fields["lengths"], fields["tokens"], entries, self._kv.shape[4], self._backend
        )
        group = DecodeGroup(0, bucket, entries[:, :bucket], slot_counts, q_pos)
        if shared:
            # Contiguous, as the op wants them: a view of the first columns is not.
            group.runs = self._groups[:, : bucket + 1].contiguous()
        step = PagedStep(self._kv, self._plan, self._backend, slots, [group])
        logits = self._model.forward(ids, positions, None, step)
        drawn: Tensor = ops.sample(logits, *state.filters(bucket), self._backend)
        ops.scatter_tokens(rows, drawn, fields["tokens"], fields["lengths"], self._backend)
        fields["draws"][:bucket] += rows >= 0
        return drawn

    def _capture(self, keys: Sequential[tuple[int, bool]]) -> None:
        """Capture graphs, each after one pass that compiles what it needs. No row decodes meanwhile."""
        began = time.perf_counter()
        decoding = self.state.rows.clone()
        self.state.rows.fill_(-1)
        self._groups.zero_()
        self._groups[0] = torch.arange(self._groups.shape[1], device=self._groups.device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for key in keys:
                self._run(*key)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    self._drawn[key] = self._run(*key)
                self._graphs[key] = graph
        self.state.rows.copy_(decoding)
        seconds = time.perf_counter() - began
        log.info("%d decode graphs for up to %d rows captured in %.1f s", len(keys), keys[0][0], seconds)


def spread_groups(groups: NDArray[np.int32], rows: Sequential[int], bucket: int) -> NDArray[np.int32]:
    """``groups`` int32 [4, n + 1] of n sequences, as int32 [4, bucket + 1] where sequence i is batch row ``rows[i]``
    and all others are of no group (``kernels/reference/shared.py``)."""
    count = len(rows)
    row = np.asarray(rows, np.int32)
    spread = np.zeros((4, bucket + 1), np.int32)
    members, bounds, shared, own = spread
    members[:count] = row[groups[0, :count]]
    members[count:bucket] = np.setdiff1d(np.arange(bucket), row)
    bounds[: count + 1] = groups[1]
    bounds[count + 1 :] = groups[1, -1]
    shared[: count + 1] = groups[2]
    own[row] = groups[3, :count]
    return spread
