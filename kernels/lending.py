"""Other code in place of a module's forward, for a while."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def lent(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Within the block each module runs its ``forward``, and afterwards what it ran before.

    It goes past ``nn.Module.__setattr__``, which is slow: a model has hundreds of layers, and a step is a block.
    """
    borrowers = []
    try:
        for module, forward in forwards:
            borrowers.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in borrowers:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own
