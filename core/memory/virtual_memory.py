"""Address ranges that are reserved once, and whose memory comes and goes underneath."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class AddressRange(Protocol):
    """``length`` bytes at a fixed address; those below some end are backed by memory, the rest is not to be touched."""

    @property
    def committed_bytes(self) -> int:
        """Bytes that are really taken from the system or the device."""
        ...

    def bytes(self) -> Tensor:
        """The whole range, uint8 [length]. The tensor keeps the range alive."""
        ...

    def grow(self, ends: Sequence[int]) -> None:
        """Back all bytes below ``ends[-1]``, a piece an end, in ascending order. All of it or nothing."""
        ...

    def shrink(self, end: int) -> None:
        """Give the memory of the bytes from ``end`` back; their contents are lost."""
        ...

    def close(self) -> None:
        """Give everything back. Tensors over the range must not be used any more. Closing twice is allowed."""
        ...


class PlainRange:
    """One ordinary allocation, for where memory cannot come and go: it never grows and gives nothing back."""

    def __init__(self, length: int, device: torch.device) -> None:
        self._bytes = torch.empty(length, dtype=torch.uint8, device=device)

    @property
    def committed_bytes(self) -> int:
        return self._bytes.nbytes

    def bytes(self) -> Tensor:
        return self._bytes

    def grow(self, ends: Sequence[int]) -> None:
        assert ends[-1] <= self._bytes.nbytes

    def shrink(self, end: int) -> None:
        pass

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)


class HostRange:
    """Anonymous private memory: the system commits a page when it is first touched, in huge pages where it has them.

    Growing therefore does nothing. Shrinking gives back the system pages that lie wholly above the end.

    Raises:
        ValueError: the system refuses to reserve so much.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        try:
            self._mapping = mmap.mmap(-1, _round_up(length, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"the system refuses to reserve {length} bytes for the pool ({error}); lower pool_tokens or "
                "memory_fraction"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without huge pages
                self._mapping.madvise(mmap.MADV_HUGEPAGE)

    @property
    def committed_bytes(self) -> int:
        """Resident and swapped pages, from ``/proc/self/pagemap``: exact, about a millisecond a GiB. A page that was
        only ever read counts too. Where the kernel has no such file: the whole length, an upper bound."""
        pages = len(self._mapping) // mmap.PAGESIZE
        first = self.bytes().data_ptr() // mmap.PAGESIZE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                file.seek(first * 8)
                entries = np.frombuffer(file.read(pages * 8), np.uint64)
        except OSError:
            return len(self._mapping)
        # Bit 63 of an entry: present; bit 62: swapped.
        return int(np.count_nonzero(entries >> np.uint64(62))) * mmap.PAGESIZE

    def bytes(self) -> Tensor:
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=self._length)

    def grow(self, ends: Sequence[int]) -> None:
        assert ends[-1] <= self._length

    def shrink(self, end: int) -> None:
        start = _round_up(end, mmap.PAGESIZE)
        if start < len(self._mapping):
            self._mapping.madvise(mmap.MADV_DONTNEED, start, len(self._mapping) - start)

    def close(self) -> None:
        """The addresses stay reserved as long as a tensor over them lives; without memory they cost nothing."""
        self.shrink(0)


class DriverError(RuntimeError):
    """A call of the CUDA driver failed, or the driver lacks what is needed.

    Attributes:
        code: name of the driver's error, for instance "CUDA_ERROR_OUT_OF_MEMORY".
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class DeviceRange:
    """CUDA memory under one reservation of virtual addresses.

    ::

        address                                   address + mapped            address + reserved
        | piece 0 (scratch, base) | piece 1 | ... | reserved: touching it is an illegal access |

    A piece is one physical allocation, a multiple of the device's granularity (2 MiB on an H200); memory is given back
    by the piece. Pieces end where the caller's ends are, rounded up; what rounding adds to one piece the next
    one has less, so it never sums up. Mapping changes no address: kernels, captured graphs and tensors stay valid.

    Args:
        length: bytes.
        device: with an index.
        driver: the module ``cuda.bindings.driver``.

    Raises:
        DriverError: naming the call; nothing stays reserved.

    Source: CUDA driver API, "Virtual Memory Management".
    """

    def __init__(self, length: int, device: torch.device, driver: ModuleType) -> None:
        torch.cuda.synchronize(device)  # starts the driver and the device's context, if nobody has
        self._driver = driver
        self._device = device
        self._length = length
        self._location = _location(driver, device.index)
        if not self._is_supported():
            raise DriverError(f"{device} has no virtual memory management", "CUDA_ERROR_NOT_SUPPORTED")
        self._grain = int(
            _call(
                driver,
                "cuMemGetAllocationGranularity",
                self._properties(),
                driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )
        self._pieces: list[tuple[int, int]] = []  # (offset, bytes), ascending without gaps
        reserved = _round_up(length, self._grain)
        self._address = int(_call(driver, "cuMemAddressReserve", reserved, 0, 0, 0))
        self._finalizer = weakref.finalize(self, _release, driver, device, self._address, reserved, self._pieces)
        # At the interpreter's exit the driver may be gone, and the end of the process frees everything anyway.
        self._finalizer.atexit = False

    @property
    def committed_bytes(self) -> int:
        return sum(self._pieces[-1]) if self._pieces else 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._length,), "typestr": "|u1", "data": (self._address, False), "version": 2}

    def bytes(self) -> Tensor:
        """uint8 [length]; made once something is mapped, since torch asks the driver where the first byte lives."""
        return torch.as_tensor(self, device=self._device)

    def grow(self, ends: Sequence[int]) -> None:
        """
        Raises:
            DriverError: naming the call; the range is backed as far as before.
        """
        before = self.committed_bytes
        try:
            for end in ends:
                size = _round_up(end, self._grain) - self.committed_bytes
                if size > 0:
                    self._map(size)
            added = self.committed_bytes - before
            if added:
                self._allow_access(before, added)
        except DriverError:
            self.shrink(before)
            raise

    def shrink(self, end: int) -> None:
        """Waits for the device first: a kernel in flight may still read what is about to be unmapped.

        Raises:
            DriverError: naming the call; what was not unmapped stays counted as committed.
        """
        keep = _round_up(end, self._grain)
        if self.committed_bytes > keep:
            torch.cuda.synchronize(self._device)
            _unmap(self._driver, self._address, self._pieces, keep)

    def close(self) -> None:
        self._finalizer()

    def _map(self, size: int) -> None:
        """A new piece of ``size`` bytes after the last one, not accessible yet."""
        offset = self.committed_bytes
        handle = self._create(size)
        try:
            _call(self._driver, "cuMemMap", self._address + offset, size, 0, handle, 0)
            self._pieces.append((offset, size))
        finally:
            # The mapping keeps the memory from now on; unmapping it will free it.
            _call(self._driver, "cuMemRelease", handle)

    def _create(self, size: int) -> Any:
        """Physical memory. If there is none, torch's cached blocks that nobody uses are given up for it, as torch
        itself does before it says that memory is out."""
        try:
            return _call(self._driver, "cuMemCreate", size, self._properties(), 0)
        except DriverError as error:
            if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
        torch.cuda.empty_cache()
        return _call(self._driver, "cuMemCreate", size, self._properties(), 0)

    def _allow_access(self, offset: int, size: int) -> None:
        access = self._driver.CUmemAccessDesc()
        access.location = self._location
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(self._driver, "cuMemSetAccess", self._address + offset, size, [access], 1)

    def _properties(self) -> Any:
        properties = self._driver.CUmemAllocationProp()
        properties.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location
        return properties

    def _is_supported(self) -> bool:
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        device = _call(self._driver, "cuDeviceGet", self._device.index)
        return bool(_call(self._driver, "cuDeviceGetAttribute", attribute, device))


def _location(driver: ModuleType, index: int) -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = index
    return location


def _release(
    driver: ModuleType, device: torch.device, address: int, reserved: int, pieces: list[tuple[int, int]]
) -> None:
    """Undo a reservation. A function, as a finalizer must not hold the object that it is about."""
    torch.cuda.synchronize(device)
    _unmap(driver, address, pieces, 0)
    _call(driver, "cuMemAddressFree", address, reserved)


def _unmap(driver: ModuleType, address: int, pieces: list[tuple[int, int]], keep: int) -> None:
    """Unmap the pieces that begin at ``keep`` bytes or later, the last one first."""
    while pieces and pieces[-1][0] >= keep:
        offset, size = pieces[-1]
        _call(driver, "cuMemUnmap", address + offset, size)
        pieces.pop()


def _call(driver: ModuleType, name: str, *arguments: Any) -> Any:
    """What a driver function returns besides its error code.

    Raises:
        DriverError: the code is an error.
    """
    code, *results = getattr(driver, name)(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(code)
        raise DriverError(f"{name} failed: {code.name} ({text.decode() if text else 'no description'})", code.name)
    return results[0] if results else None


def _round_up(size: int, grain: int) -> int:
    return -(-size // grain) * grain
