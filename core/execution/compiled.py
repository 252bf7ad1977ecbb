"""A model's forward pass compiled by torch, with the attention of each layer as one op that the compiler looks past.

The compiled code must not depend on a step: how many groups it has, which tables, which kernels. So it holds nothing of
it. The op ``octavo::attend_in_step`` gets what a layer computes, and asks the step that is being served for the rest::

    ids, positions -> [ compiled: embedding, norms, products, RoPE ] -> attend_in_step(q, k, v) -> [ compiled ] ...
                                                                              |
                                                             the PagedStep of this forward pass
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.core.errors import UnsupportedModelError
from octavo.core.interfaces import AttentionStep, LayerTraits

_serving: AttentionStep | None = None


@contextmanager
def serving(step: AttentionStep) -> Iterator[None]:
    """Within the block the compiled attention is served by ``step``."""
    global _serving
    before, _serving = _serving, step
    try:
        yield
    finally:
        _serving = before


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: int, scale: float, window: int, softcap: float
) -> Tensor:
    assert _serving is not None, "compiled attention runs within serving()"
    return _serving.attend(layer, q, k, v, LayerTraits(scale, window, softcap, sinks)).contiguous()


_library: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "attend_in_step(Tensor q, Tensor k, Tensor v, Tensor? sinks, int layer, float scale, int window, float softcap) "
    "-> Tensor"
)
for _device in ("CPU", "CUDA"):
    _library.impl("attend_in_step", _attend, _device)
torch.library.register_fake("octavo::attend_in_step", lambda q, *_: q.new_empty(q.shape), lib=_library)


def attend_in_step(layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
    """``AttentionStep.attend`` of the step that is being served, as an op of a compiled graph."""
    out: Tensor = torch.ops.octavo.attend_in_step(
        q, k, v, traits.sinks, layer, traits.scale, traits.window, traits.softcap
    )
    return out


class CompiledModel:
    """Logits of a packed row, from one compiled graph for all lengths.

    A length of 1 would be compiled as a constant, so only a single token with a single row of logits takes that form;
    everything else has at least two of each.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # torch keeps what it has compiled by code object, and only so many versions of it: each model has its own.
        code = _logits.__code__
        own = FunctionType(code.replace(co_name=f"logits_{id(model)}"), globals(), "logits")
        self._compiled: Any = torch.compile(own, fullgraph=True, dynamic=True)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        """Logits [R, vocabulary], in the model's dtype, of the ``rows`` int64 [R] among T tokens; call within
        ``serving``."""
        wanted = len(rows)
        if len(input_ids) > 1 and wanted < 2:
            rows = torch.cat([rows, rows.new_zeros(2 - wanted)])
        try:
            logits: Tensor = self._compiled(self._model, input_ids, position_ids, rows)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} cannot be compiled ({type(error).__name__}: {error}); "
                "use execution='graph'"
            ) from error
        return logits[:wanted]


def _logits(model: Any, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
    output = model(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, logits_to_keep=rows)
    logits: Tensor = output.logits[0]
    return logits
