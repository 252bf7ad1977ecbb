"""A forward pass replayed in pieces, between which the step attends.

A step with prompts in it has other chunks every time, and its attention is launched by their lengths. All else depends
on the number of tokens alone, and launching it takes the host longer than the device needs for some hundred tokens. So
for each of a few numbers of tokens the pass is captured once, cut where a layer attends::

    piece 0                  piece 1                         piece L
    [ embed, norm, QKV,      [ o, MLP, norm, QKV,     ...    [ o, MLP, norm, head ]
      RoPE, append, q ]        RoPE, append, q ]
                     |        ^                |
                     + attend +                + attend ...

What goes into a piece and comes out of it lies in memory that all numbers of tokens share::

    ids, positions, slots [T | padding]   wanted [R | zeros]   q, attended [T | padding, Hq, D]   logits [R | rest]

Padding is token 0 at position 0, its K and V go to the scratch unit, and nobody reads what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.core.execution.attention import PagedStep
from octavo.core.hf_model import HFModel
from octavo.core.interfaces import LayerTraits
from octavo.core.memory.layer_groups import LayerPlan
from octavo.kernels import ops
from octavo.kernels.products.product import choosing

PADDED = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536)
"""Numbers of tokens that are captured. Beyond, the device takes longer than the host (8B shape, one H200)."""


@dataclass
class _Captured:
    graphs: list[Any] = field(default_factory=list)
    traits: list[LayerTraits] = field(default_factory=list)


class PiecewisePass:
    """Runs a model on steps of up to ``PADDED[-1]`` tokens of which up to ``most_rows`` want logits.

    A number of tokens is captured after the first step that pads to it, and after its products have been chosen.
    """

    def __init__(self, model: HFModel, kv: Tensor, plan: LayerPlan, backend: str, most_rows: int) -> None:
        most, device = PADDED[-1], kv.device
        self._model, self._kv, self._plan, self._backend = model, kv, plan, backend
        self._ids, self._positions = torch.zeros((2, most), dtype=torch.int64, device=device)
        self._slots = torch.zeros((plan.slices, most), dtype=torch.int64, device=device)
        self._wanted = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._q = self._attended = self._logits = torch.empty(0)
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None

    def serves(self, tokens: int, rows: int) -> bool:
        return tokens <= PADDED[-1] and rows <= len(self._wanted)

    def forward(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor, step: PagedStep) -> Tensor:
        """``HFModel.forward`` of a step that it ``serves``. The logits are written over by the next one."""
        tokens = len(input_ids)
        padded = next(size for size in PADDED if size >= tokens)
        with torch.inference_mode():
            self._fill(tokens, padded, input_ids, position_ids, rows, step)
            captured = self._captured.get(padded)
            if captured is None:
                with choosing():
                    self._pass(padded, _Through(self, padded, tokens, step))
                if self._kv.device.type == "cuda":
                    self._captured[padded] = self._capture(padded)
            else:
                for layer, traits in enumerate(captured.traits):
                    captured.graphs[layer].replay()
                    self._attended[:tokens] = step.read(layer, self._q[:tokens], traits)
                captured.graphs[-1].replay()
        return self._logits[: len(rows)]

    def _fill(self, tokens: int, padded: int, ids: Tensor, positions: Tensor, rows: Tensor, step: PagedStep) -> None:
        for shared, given in ((self._ids, ids), (self._positions, positions), (self._slots, step.slots)):
            shared[..., :tokens] = given
            shared[..., tokens:padded] = 0
        self._wanted.zero_()
        self._wanted[: len(rows)] = rows

    def _pass(self, padded: int, step: _Through | _Cut) -> None:
        """One pass over what has been filled in; its logits go to where all passes leave them."""
        rows = min(padded, len(self._wanted))
        logits = self._model.forward(self._ids[:padded], self._positions[:padded], self._wanted[:rows], step)
        if not len(self._logits):
            self._logits = logits.new_empty((len(self._wanted), logits.shape[1]))
        self._logits[:rows] = logits

    def _append(self, padded: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Store K and V, and leave the queries where attention finds them."""
        if not len(self._q):
            self._q, self._attended = q.new_zeros((2, PADDED[-1], *q.shape[1:]))
        place = self._plan.places[layer]
        ops.append(k, v, self._kv, place.unit_layer, self._slots[place.slice, :padded], self._backend)
        self._q[:padded] = q

    def _capture(self, padded: int) -> _Captured:
        """Precondition: a pass of as many tokens has compiled what it needs."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        self._slots[:, :padded] = 0
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            cut = _Cut(self, padded)
            cut.begin()
            self._pass(padded, cut)
            cut.end()
        torch.cuda.synchronize()
        return cut.captured


class _Through:
    """Serves a pass that is not cut: each layer stores and attends."""

    def __init__(self, whole: PiecewisePass, padded: int, tokens: int, step: PagedStep) -> None:
        self._whole, self._padded, self._tokens, self._step = whole, padded, tokens, step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
        whole, tokens = self._whole, self._tokens
        whole._append(self._padded, layer, q, k, v)
        whole._attended[:tokens] = self._step.read(layer, whole._q[:tokens], traits)
        return whole._attended[: self._padded]


class _Cut:
    """Ends a captured piece where a layer attends, and begins the next: the pass goes on as if it had attended."""

    def __init__(self, whole: PiecewisePass, padded: int) -> None:
        self._whole, self._padded = whole, padded
        self.captured = _Captured()

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads, which may be encoding images, are none of the capture's business.
        graph.capture_begin(pool=self._whole._pool, capture_error_mode="thread_local")
        self.captured.graphs.append(graph)

    def end(self) -> None:
        self.captured.graphs[-1].capture_end()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
        self._whole._append(self._padded, layer, q, k, v)
        self.captured.traits.append(traits)
        self.end()
        self.begin()
        return self._whole._attended[: self._padded]
