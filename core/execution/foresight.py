"""The queries that a layer is going to ask, as the input of the layer in front of it tells them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from octavo.core.execution.attention import PagedStep
from octavo.core.execution.deviations import Enough
from octavo.core.hosting.interfaces import Foretold
from octavo.core.interfaces import LayerTraits


class Foresight:
    """Asks a model's layers for their queries one layer early. What a layer adds to the residual stream is little
    beside what is in it, so from the input of layer l, layer l + 1 makes nearly the queries that it makes from its own
    (InfiniGen, Lee et al., OSDI 2024, arXiv 2406.19707)::

        input of l ---+--- layer l --------------------- + ---- input of l + 1 --- layer l + 1 ...
                      |                                              norm, QKV, RoPE -> q
                      +--> layer l + 1, up to its attention -> q'         q' ~ q

    It is the layer's own code that runs, norm, projection and rotation as the model has them, and it is left where it
    calls attention; so this serves whatever model the engine serves, and costs one more norm and QKV product a layer,
    for the rows that look ahead.

    Deviation from the paper: it multiplies by a part of the query's channels, chosen offline after a rotation of the
    weights; here the whole product is computed.

    Args:
        layers: of the model, in order.
        windows: of each of them (0: none).
    """

    def __init__(self, layers: list[nn.Module], windows: tuple[int, ...]) -> None:
        self._layers = layers
        self._windows = windows

    @contextmanager
    def used(self, step: PagedStep) -> Iterator[None]:
        """Around a forward pass that ``step`` serves: ``step.foretold`` holds the next layer's queries while a layer
        attends. Layers of several kinds are called with different arguments, so the first of a kind is not foretold.
        Precondition: some group of the step ``foresees``."""
        groups = [group for group in step.decodes if group.foresees]
        start, stop = min(group.start for group in groups), max(group.stop for group in groups)
        layers = {layer for group in groups for layer in group.pages.away.framed}  # type: ignore[union-attr]
        called: dict[int, Mapping[str, Any]] = {}  # by window

        def before(layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                hidden, *others = args or (kwargs["hidden_states"],)
                named = {key: value for key, value in kwargs.items() if key not in ("hidden_states", "octavo_step")}
                called[self._windows[layer]] = {"args": others, "kwargs": named}
                step.foretold, following = None, layer + 1
                if following in layers and self._windows[following] in called:
                    given = _narrowed(called[self._windows[following]], hidden.shape[1], start, stop)
                    step.foretold = self._ask(following, hidden[:, start:stop], start, given)

            return hook

        handles = [
            layer.register_forward_pre_hook(before(number), with_kwargs=True)
            for number, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            step.foretold = None

    def _ask(self, layer: int, hidden: Tensor, start: int, given: Mapping[str, Any]) -> Foretold:
        module, asking = self._layers[layer], _Asking()
        with suppress(Enough):  # the class's own forward: what is compiled counts its layers, and hooks would ask again
            type(module).forward(module, hidden, *given["args"], **given["kwargs"], octavo_step=asking)
        assert asking.q is not None and asking.traits is not None, f"layer {layer} does not attend"
        return Foretold(layer, start, asking.q, asking.traits)


class _Asking:
    """Serves a layer up to its attention, and leaves it there with the queries."""

    def __init__(self) -> None:
        self.q: Tensor | None = None
        self.traits: LayerTraits | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
        self.q, self.traits = q, traits
        raise Enough


def _narrowed(value: Any, tokens: int, start: int, stop: int) -> Any:
    """What a layer is called with for tokens ``start`` to ``stop`` alone: of tensors ``[1, T, ...]`` those rows."""
    if isinstance(value, Tensor):
        whole = stop - start == tokens or value.dim() < 2 or value.shape[:2] != torch.Size((1, tokens))
        return value if whole else value[:, start:stop]
    if isinstance(value, dict):
        return {key: _narrowed(each, tokens, start, stop) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_narrowed(each, tokens, start, stop) for each in value)
    return value
