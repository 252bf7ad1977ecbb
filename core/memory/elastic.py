"""The memory of a pool: a fixed address, and as many units behind it as are needed."""

from __future__ import annotations

import importlib
import logging
import math

import torch
from torch import Tensor

from octavo.core.memory.growth import PoolSteps
from octavo.core.memory.virtual_memory import AddressRange, DeviceRange, DriverError, HostRange, PlainRange

log = logging.getLogger(__name__)


class PoolMemory:
    """A pool whose first ``units`` units are usable, and which grows and shrinks in chunks at a constant address.

    ::

        tensor [max_units + 1, *unit_shape]

        | scratch | base_units          | chunk_units | chunk_units | ... | rest   |
        |         |                     |             |             |     |        |
        row 0     1                     usable up to row ``units``; rows above it may not be touched

    The base is never given back. A unit boundary need not be a boundary of the memory behind it, which is rounded up to
    what the system or the device deals in. Made by ``pool_memory``.

    Attributes:
        tensor: the whole reserved range; its ``data_ptr()`` never changes.
        units: usable units, the scratch unit not counted.
        base_units, chunk_units, max_units: as drawn.
        reason: why the memory could not be elastic, or None.
    """

    def __init__(
        self,
        memory: AddressRange,
        unit_shape: tuple[int, ...],
        dtype: torch.dtype,
        steps: PoolSteps,
        reason: str | None = None,
    ) -> None:
        self.base_units, self.chunk_units, self.max_units = steps
        self.units = self.base_units
        self.reason = reason
        self._memory = memory
        self._unit_bytes = _unit_bytes(unit_shape, dtype)
        memory.grow([self._end(self.base_units)])
        self.tensor: Tensor = memory.bytes().view(dtype).view(self.max_units + 1, *unit_shape)

    @property
    def elastic(self) -> bool:
        """Whether memory really comes and goes."""
        return self.reason is None

    @property
    def committed_bytes(self) -> int:
        """Bytes really taken now: mapped ones on CUDA, resident and swapped ones on a CPU."""
        return self._memory.committed_bytes

    @property
    def last_step(self) -> int:
        """Units of the last growth step, 0 if nothing but the base is there."""
        grown = self.units - self.base_units
        return (grown - 1) % self.chunk_units + 1 if grown else 0

    def grow(self, units: int) -> int:
        """Make at least ``units`` units usable, in whole chunks and never above ``max_units``; says how many are.

        New units are uninitialised, the others keep their contents.

        Raises:
            DriverError: the device has no such memory left, or the driver failed; nothing has changed.
        """
        counts = []
        count = self.units
        while count < min(units, self.max_units):
            count = min(count + self.chunk_units, self.max_units)
            counts.append(count)
        if counts:
            self._memory.grow([self._end(count) for count in counts])
            self.units = count
        return self.units

    def shrink(self, units: int) -> int:
        """Give back the chunks that lie wholly above ``units``; says how many units are usable now.

        Precondition: nobody uses a unit above ``units``, nor will read what was in it.

        Raises:
            DriverError: the driver failed; the units are not usable, though some of their memory may still be held.
        """
        chunks = -(-max(units - self.base_units, 0) // self.chunk_units)
        count = self.base_units + chunks * self.chunk_units
        if count < self.units:
            self.units = count
            self._memory.shrink(self._end(count))
        return self.units

    def close(self) -> None:
        """Give everything back; tensors over it must not be used any more. Otherwise it ends with the last of them."""
        self.units = 0
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)
        self._memory.close()

    def _end(self, units: int) -> int:
        """Bytes of so many units and the scratch unit."""
        return (units + 1) * self._unit_bytes


def pool_memory(
    unit_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    base_units: int,
    max_units: int,
    chunk_units: int,
) -> PoolMemory:
    """Memory for ``max_units`` units and the scratch unit, of which ``base_units`` are usable at once; uninitialised.

    On CUDA the memory is mapped piece by piece under one reservation (package ``cuda-bindings``, extra ``cuda``). Where
    that cannot be had, everything is allocated at once, and ``PoolMemory.reason`` and a warning say why. On a CPU the
    system commits memory as it is touched.

    Args:
        unit_shape: [layers, 2, kv_heads, unit_tokens, head_dim].

    Raises:
        ValueError: sizes that are not positive or do not fit each other, before anything is reserved.
    """
    for name, size in (("base_units", base_units), ("max_units", max_units), ("chunk_units", chunk_units)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if min(unit_shape, default=0) < 1:
        raise ValueError(f"every size of a unit must be at least 1, got a unit of shape {list(unit_shape)}")
    if base_units > max_units:
        raise ValueError(f"base_units={base_units} is more than max_units={max_units}; lower it to at most {max_units}")
    if chunk_units > max_units:
        raise ValueError(
            f"chunk_units={chunk_units} is a growth step larger than the pool, max_units={max_units}; lower it to at "
            f"most {max_units}"
        )
    device = torch.device(device)
    length = (max_units + 1) * _unit_bytes(unit_shape, dtype)
    steps = PoolSteps(base_units, chunk_units, max_units)
    if device.type == "cpu":
        return PoolMemory(HostRange(length), unit_shape, dtype, steps)
    if base_units == max_units:
        return PoolMemory(PlainRange(length, device), unit_shape, dtype, steps, "it takes everything from the start")
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        memory = DeviceRange(length, device, driver)
        try:
            return PoolMemory(memory, unit_shape, dtype, steps)
        except DriverError:
            memory.close()
            raise
    except ImportError as error:
        reason = f"the package cuda-bindings is missing ({error}); install octavo[cuda]"
    except DriverError as error:
        reason = str(error)
    log.warning("the pool takes all of its %d bytes at once and cannot grow: %s", length, reason)
    everything = PoolSteps(max_units, max_units, max_units)
    return PoolMemory(PlainRange(length, device), unit_shape, dtype, everything, reason)


def _unit_bytes(unit_shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(unit_shape) * dtype.itemsize
