"""Compiled layers called again without torch's guards, for passes of few tokens, of which guards are a good part.

torch checks before each call of compiled code that all it was compiled for still holds, and gathers the weights that
the code is given, on the host. For a pass of as many tokens as an earlier one, with the same kinds
of arguments, the answer is known and so are the weights::

    first pass of T tokens    layer(x, ...) -> guards -> code(w1, w2, T, x, cos)    noted: code, (w1, w2, T, -, -)
    the next ones             layer(x, ...) ->           code(w1, w2, T, x, cos)

Other weights and other modules are seen (``Parts``); a number that is an attribute of a module, as a norm's epsilon, is
taken to stay what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from octavo.core.execution.block_products import with_block_products

MOST_TOKENS = 64
"""Of a pass that is noted; a longer one spends its time elsewhere."""

PLAIN = bool | int | float | str | None
"""Arguments that are told apart by value."""

Code = Callable[..., Any]
Leaf = tuple[tuple[object, ...], Any]


class LayerReplays:
    """What one layer has called, by the tokens of the pass.

    Args:
        guarded: the layer's compiled forward.
        calls: to which what torch has compiled adds, on each of its calls, itself and its arguments.
        lent: within which the layer is as it was when it was compiled.
    """

    def __init__(
        self,
        guarded: Callable[..., Any],
        calls: list[tuple[Code, tuple[Any, ...]]],
        lent: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._guarded = guarded
        self._calls = calls
        self._lent = lent
        self._noted: dict[int, _Call | None] = {}

    def forget(self) -> None:
        """The weights are others."""
        self._noted.clear()

    def __call__(self, *args: Any, **named: Any) -> Any:
        tokens = args[0].shape[1] if args and isinstance(args[0], Tensor) and args[0].dim() == 3 else 0
        call = self._noted.get(tokens)
        if call is not None:
            inputs = call.inputs(args, named)
            if inputs is not None:
                return call.code(*inputs)[0]
        self._calls.clear()
        with self._lent():
            result = self._guarded(*args, **named)
        if 0 < tokens <= MOST_TOKENS and tokens not in self._noted:
            self._noted[tokens] = _Call.noted(self._calls, args, named, result)
        self._calls.clear()  # it would hold what the layer has multiplied
        return result


class _Call:
    """One call of compiled code: the arguments that stay, and where the others come from."""

    def __init__(self, code: Code, fixed: list[Any], given: list[tuple[int, int]], leaves: list[Leaf]) -> None:
        self.code = code
        self._fixed = fixed
        self._given = given  # (place among the arguments of the code, place among the leaves)
        self._paths = [path for path, _ in leaves]
        self._kinds = _kinds(leaves)
        self._others = [value for _, value in leaves if not isinstance(value, Tensor | PLAIN)]  # kept, as ``id`` tells

    @classmethod
    def noted(
        cls, calls: list[tuple[Code, tuple[Any, ...]]], args: tuple[Any, ...], named: dict[str, Any], result: Any
    ) -> _Call | None:
        """None for a layer that cannot be called so: it has called more than one code, or gives more than a tensor."""
        if len(calls) != 1 or not isinstance(result, Tensor):
            return None
        code, inputs = calls[0]
        leaves = _leaves(args, named)
        places = {id(value): number for number, (_, value) in enumerate(leaves) if isinstance(value, Tensor)}
        given = [(place, places[id(value)]) for place, value in enumerate(inputs) if id(value) in places]
        # Code with C++ between its kernels would make its tensors of numbers anew on each call.
        fixed = [torch.tensor(value) if type(value) is int else value for value in inputs]
        for place, _ in given:
            fixed[place] = None
        return cls(code, fixed, given, leaves)

    def inputs(self, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any] | None:
        """What to call the code with; None where the arguments are of another kind."""
        leaves = _leaves(args, named)
        if [path for path, _ in leaves] != self._paths or _kinds(leaves) != self._kinds:
            return None
        inputs = self._fixed.copy()
        for place, leaf in self._given:
            inputs[place] = leaves[leaf][1]
        return inputs


class Parts:
    """The modules, parameters and buffers that some layers consist of.

    Every step asks whether they are the same objects as before, so it looks into the dictionaries that hold them, past
    ``nn.Module.__getattr__``, which is slow.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._holders: list[dict[str, Any]] = []
        self._parts: list[object] = []

    def have_changed(self) -> bool:
        """Since the last call; True of the first one."""
        parts = self._held()
        if parts and len(parts) == len(self._parts) and all(map(is_, parts, self._parts)):
            return False
        modules = [module for layer in self._layers for module in layer.modules()]
        holders = [holder for m in modules for holder in (m._modules, m._parameters, m._buffers)]
        self._holders = [holder for holder in holders if holder]
        self._parts = self._held()  # kept, so that none comes in the place of another
        return True

    def _held(self) -> list[object]:
        return list(chain.from_iterable(map(dict.values, self._holders)))


def _leaves(args: tuple[Any, ...], named: dict[str, Any]) -> list[Leaf]:
    """All values among the arguments and where they stand; those of tuples one by one."""
    leaves: list[Leaf] = []
    for name, value in (*enumerate(args), *named.items()):
        if type(value) is tuple:
            leaves += [((name, number), part) for number, part in enumerate(value)]
        else:
            leaves.append(((name,), value))
    return leaves


def _kinds(leaves: list[Leaf]) -> list[object]:
    """What must be alike for the same code to serve: of a tensor all but its numbers, and where it stands first, as
    code takes one that is given twice once; of all else the value, or which object it is."""
    first: dict[int, int] = {}
    kinds: list[object] = []
    for number, (_, value) in enumerate(leaves):
        if isinstance(value, Tensor):
            kinds.append((value.dtype, value.shape, value.stride(), first.setdefault(id(value), number)))
        else:
            kinds.append(value if isinstance(value, PLAIN) else id(value))
    return kinds


def noting(calls: list[tuple[Code, tuple[Any, ...]]], options: dict[str, Any]) -> Callable[..., Any]:
    """A backend of ``torch.compile``: inductor with ``options``, whose code adds its calls to ``calls``."""

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        code: Code = torch._inductor.compile(with_block_products(graph), examples, options=options)

        def noted(*inputs: Any) -> Any:
            calls.append((code, inputs))
            return code(*inputs)

        return noted

    return backend
