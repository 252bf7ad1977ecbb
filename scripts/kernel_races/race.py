"""A race: one kernel at one shape, against its floor and its rivals. What a module of races is made of.

A module exports ``races()``, cheap to call: tensors are made by ``Race.build`` when the race starts, so that one race
at a time holds memory. ``registry.py`` lists the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Bound = Literal["read", "copy", "to_device", "to_host"]
"""Rates over which bytes become a floor: of reading device memory; of copying in it, bytes read and written counted
together; of one large copy from pinned host memory, and to it."""


@dataclass(frozen=True)
class Race:
    """One kernel at one shape.

    Attributes:
        kernel: number and name, as ``"K13 sample"``; rows, ``only=`` and the search spaces go by it.
        shape: as ``"256 x 128k bf16"``; unique within the kernel.
        moved_bytes: the fewest bytes that a call must move through device memory, or over the bus where ``bound`` says.
        flops: the fewest tensor-core floating-point operations of a call; 0 if the bytes decide.
        build: makes the tensors, on the device given.
        target: what the kernel should reach at this shape.
        bound: the measured rate that ``moved_bytes`` are held against.
        fit: ``"point"`` for the uniform decode shapes, over which t0 + bytes / rate is fitted; ``"judged"`` for shapes
            whose target needs that fit, which run after all others.
    """

    kernel: str
    shape: str
    moved_bytes: float
    flops: float
    build: Callable[[torch.device], Field]
    target: Target | None = None
    bound: Bound = "read"
    fit: Literal["point", "judged"] | None = None

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.shape}"


@dataclass
class Field:
    """The tensors of a race and who runs on them.

    Attributes:
        contenders: name -> calls that take turns; the inputs of one round exceed twice the L2 (60 MB), so that each
            call finds its own cold. "octavo" comes first, variants are "octavo ...", then rivals as "sdpa flash". A
            call can be captured in a CUDA graph once it has run. A rival that cannot be imported is left out; one that
            raises is reported and does not stop the run.
        error: largest relative error, in norm, of octavo against the reference on fresh inputs. The frame runs it while
            uninitialised memory is NaN.
        tolerance: the largest error that is right.
    """

    contenders: dict[str, list[Callable[[], object]]]
    error: Callable[[], float]
    tolerance: float


@dataclass(frozen=True)
class Target:
    """What a kernel should reach, in words, and whether some times do."""

    text: str
    reached: Callable[[Times], bool]


@dataclass(frozen=True)
class Times:
    """What a race measured.

    Attributes:
        us: median microseconds a call, by contender; whoever was left out or failed is not in it.
        floor_us: the shortest time that the card allows a call.
        read_bytes_per_s, copy_bytes_per_s: rates measured in the same run; a copy counts what it reads and writes.
        fit: bytes -> microseconds of a decode, as fitted over the uniform shapes of the same run; None without them.
    """

    us: Mapping[str, float]
    floor_us: float
    read_bytes_per_s: float
    copy_bytes_per_s: float
    fit: Callable[[float], float] | None = None
