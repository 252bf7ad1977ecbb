"""A model's layers compiled by torch, with attention as one op that the compiler looks past.

All layers of a model run the same code on other weights. So that it is compiled once and not for each layer, it holds
nothing of a layer, nor of a step. The op ``octavo::attend_in_step`` gets what a layer computes, and finds in the step
that is being served which layer that is (they come in order), which tables, which kernels::

    layer 0                                                             layer 1
    [ compiled: norm, QKV, RoPE ] -> attend_in_step -> [ compiled ] ->  [ compiled: norm, ...
                                           |
                             the PagedStep of this forward pass

On a GPU products add the residual or gate (``layer_products.py``), every kernel is launched while the one before it
runs, and there are two versions of that code, of which the step says which it wants: the second is without RoPE
(``turning.py``), for steps that turn queries and keys themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import repeat
from types import FunctionType, MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from octavo.core.errors import UnsupportedModelError
from octavo.core.execution.layer_products import with_products
from octavo.core.execution.layer_replays import LayerReplays, Parts, noting
from octavo.core.execution.turning import without_turn
from octavo.core.interfaces import AttentionStep, LayerTraits
from octavo.kernels.cpu import decode_op
from octavo.kernels.cpu.linear import PackedLinears, linear_layers
from octavo.kernels.lending import lent
from octavo.kernels.products.product import product


@runtime_checkable
class TurningStep(AttentionStep, Protocol):
    """A step that may do what a rotary embedding does ("rotate half"), on the way to what it does anyway."""

    @property
    def turns(self) -> bool:
        """Whether it does."""
        ...

    def attend_turning(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, traits: LayerTraits
    ) -> Tensor:
        """``attend`` of what ``cos, sin [T, D]`` make of ``q`` and ``k``."""
        ...


TURNED, UNTURNED = range(2)
"""Versions of a layer's code."""

_step: AttentionStep | None = None
_version = TURNED
_layer = 0


@contextmanager
def _serving(step: AttentionStep, on_cpu: bool) -> Iterator[None]:
    """Within the block, one forward pass, the compiled attention is served by ``step``, layer after layer."""
    global _step, _version, _layer
    _step, _version, _layer = step, _version_for(step), 0
    if on_cpu:
        decode_op.begin(None)
    try:
        with getattr(step, "in_c", nullcontext)() if on_cpu else nullcontext():
            yield
    finally:
        _step = None
        if on_cpu:
            decode_op.begin(None)


def _version_for(step: AttentionStep) -> int:
    return UNTURNED if isinstance(step, TurningStep) and step.turns else TURNED


def _attend_layer(
    layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int, cap: float
) -> Tensor:
    assert _step is not None, "compiled attention runs within CompiledLayers.used()"
    return _step.attend(layer, q, k, v, LayerTraits(scale, window, cap, sinks)).contiguous()


def _attend(*args: Any) -> Tensor:
    global _layer
    layer, _layer = _layer, _layer + 1
    return _attend_layer(layer, *args)


def _attend_turning(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, sinks: Tensor | None, scale: float, window: int,
    cap: float,
) -> Tensor:  # fmt: skip
    global _layer
    assert isinstance(_step, TurningStep), "compiled code without RoPE is for steps that turn"
    layer, _layer = _layer, _layer + 1
    return _step.attend_turning(layer, q, k, v, cos, sin, LayerTraits(scale, window, cap, sinks)).contiguous()


_library: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_GIVEN, _TRAITS = "Tensor q, Tensor k, Tensor v", "Tensor? sinks, float scale, int window, float softcap) -> Tensor"
_library.define(f"attend_layer(int layer, {_GIVEN}, {_TRAITS}")
_library.define(f"attend_in_step({_GIVEN}, {_TRAITS}")
_library.define(f"attend_turning_in_step({_GIVEN}, Tensor cos, Tensor sin, {_TRAITS}")
_library.impl("attend_layer", _attend_layer, "CPU")
_library.impl("attend_in_step", _attend, "CUDA")
for _device in ("CPU", "CUDA"):
    _library.impl("attend_turning_in_step", _attend_turning, _device)
for _name in ("attend_in_step", "attend_turning_in_step"):
    torch.library.register_fake(f"octavo::{_name}", lambda q, *_: q.new_empty(q.shape), lib=_library)


@cache
def _attend_on_cpu() -> None:
    """Let the op be C, which counts layers too and calls ``attend_layer`` for what it does not serve; or Python, where
    there is no compiler."""
    if decode_op.served() is None:
        _library.impl("attend_in_step", _attend, "CPU")


def attend_in_step(q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
    """``AttentionStep.attend`` for the next layer of the step that is being served, as an op of a compiled graph."""
    out: Tensor = torch.ops.octavo.attend_in_step(q, k, v, traits.sinks, traits.scale, traits.window, traits.softcap)
    return out


def _options() -> dict[str, Any]:
    """For torch's compiler: programmatic dependent launch (since Hopper), where that torch has it."""
    from torch._inductor import config

    return {"triton.enable_pdl": True} if hasattr(config.triton, "enable_pdl") else {}


def versions(graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """A backend of ``torch.compile``: inductor, with both versions of a layer's code."""
    options = _options()
    turned = with_products(GraphModule(graph, copy.deepcopy(graph.graph)))
    unturned = without_turn(turned, torch.ops.octavo.attend_in_step, torch.ops.octavo.attend_turning_in_step)
    codes: dict[int, Callable[..., Any]] = {TURNED: torch._inductor.compile(turned, examples, options=options)}
    codes[UNTURNED] = codes[TURNED]
    if unturned is not None:
        codes[UNTURNED] = torch._inductor.compile(unturned, examples, options=options)
    return lambda *inputs: codes[_version](*inputs)


CPU_OPTIONS = {"cpp_wrapper": True}
"""For torch's compiler on a CPU: C++ between the kernels of a layer. On a GPU nobody waits for what is there."""


class CompiledLayers:
    """A model's layers with compiled code in place of their forward, inside ``used()`` only.

    What is compiled serves all lengths but 1, which torch takes for a constant and compiles by itself. It is the code
    of a module's class: what stands beside the layers and has a forward of its own runs that.

    Args:
        name: of the model, for errors.
        beside: what the model calls once a pass, before or behind its layers. A rotary embedding and a norm are a dozen
            launches, in which a GPU does next to nothing. Where torch finds parts that it cannot compile, they stay.
        head: the output layer, which may choose how it multiplies.
        linears: packed, of a model on a CPU, whose layers they are lent for as long as those are no replays.

    Raises:
        UnsupportedModelError: a layer has a forward of its own, on being made and in ``used()``.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        name: str,
        beside: Sequence[nn.Module] = (),
        head: nn.Linear | None = None,
        linears: PackedLinears | None = None,
    ) -> None:
        self._layers = layers
        self._name = name
        self._refuse_own_forwards()
        self._replays: list[LayerReplays] = []
        self._parts = Parts(layers)
        calls: list[Any] = []
        backend = noting(calls, CPU_OPTIONS) if linears is not None else versions
        compiled = {kind: _compiled(kind.forward, backend) for kind in {type(layer) for layer in layers}}
        forwards: list[Any] = [MethodType(compiled[type(layer)], layer) for layer in layers]
        self._beside: list[tuple[nn.Module, Any]] = []
        if linears is not None:
            _attend_on_cpu()
            lends = [partial(linears.lent, linear_layers(layer)) for layer in layers]
            forwards = self._replays = list(map(LayerReplays, forwards, repeat(calls), lends))
        else:
            self._beside = [
                (module, MethodType(_compiled(type(module).forward, "inductor", fullgraph=False), module))
                for module in beside
            ]
            if head is not None:
                self._beside.append((head, lambda x: product(x, head.weight, None)))
        self._forwards = list(zip(layers, forwards, strict=True))
        self._weights = 0
        # A model whose layers differ in more than their weights is compiled as often as that.
        self._often = torch._dynamo.config.patch(recompile_limit=2 * len(layers) + 8)

    @contextmanager
    def used(self, step: AttentionStep, weights: int) -> Iterator[None]:
        """Within the block, one forward pass, the layers run compiled code, and ``step`` serves their attention.

        ``weights``: another number than in the last pass says that some were laid out anew.
        """
        self._refuse_own_forwards()
        if self._replays and (self._parts.have_changed() or weights != self._weights):
            for replays in self._replays:
                replays.forget()
            self._weights = weights
        try:
            beside = [(module, forward) for module, forward in self._beside if not _has_own_forward(module)]
            with lent([*self._forwards, *beside]), self._often, _serving(step, on_cpu=bool(self._replays)):
                yield
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UnsupportedModelError(
                f"the layers of {self._name} cannot be compiled ({type(error).__name__}: {error}); "
                "use execution='graph'"
            ) from error

    def _refuse_own_forwards(self) -> None:
        if any(map(_has_own_forward, self._layers)):
            raise UnsupportedModelError(
                f"a layer of {self._name} has a forward of its own, which compiled code would pass over; "
                "use execution='graph'"
            )


def _has_own_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__


def _compiled(forward: Any, backend: Any, fullgraph: bool = True) -> Any:
    """torch keeps what it has compiled by code object, for all models alike; a copy of the code is this model's own."""
    own = FunctionType(
        forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return torch.compile(own, backend=backend, fullgraph=fullgraph, dynamic=True)
