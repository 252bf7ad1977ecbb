"""The newest token of each row of a step, which is not in the pool yet."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Fresh:
    """What ``reference.append_decode`` stores and attends to, by its names."""

    k: Tensor
    v: Tensor
    slots: Tensor
    cos: Tensor | None
    sin: Tensor | None
