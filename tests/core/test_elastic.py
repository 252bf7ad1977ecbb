"""The memory of a pool that grows: its address, its contents, what it really takes, and every way to fail."""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.memory.elastic import pool_memory
from octavo.core.memory.growth import Growth
from octavo.core.memory.virtual_memory import DeviceRange, DriverError, PlainRange

UNIT = (2, 2, 1, 4, 8)
UNIT_BYTES = 512  # of float32
MIB = 1 << 20
WIDE = (1, 2, 8, 64, 256)  # 1 MiB of float32


def pool(base=4, most=16, chunk=3, shape=UNIT, dtype=torch.float32, device="cpu"):
    return pool_memory(shape, dtype, device, base_units=base, max_units=most, chunk_units=chunk)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


class TestUnits:
    """Arithmetic that is the same on every device; 4, 7, 10, 13 and 16 units are what this pool can have."""

    @pytest.mark.parametrize(
        ("asked", "units"), [(0, 4), (4, 4), (5, 7), (7, 7), (8, 10), (13, 13), (14, 16), (16, 16), (99, 16)]
    )
    def test_growth_is_in_whole_chunks_up_to_the_maximum(self, asked, units):
        memory = pool()
        assert memory.grow(asked) == memory.units == units

    @pytest.mark.parametrize(("kept", "units"), [(16, 16), (14, 16), (13, 13), (8, 10), (5, 7), (4, 4), (0, 4)])
    def test_shrinking_keeps_whole_chunks_and_the_base(self, kept, units):
        memory = pool()
        memory.grow(16)
        assert memory.shrink(kept) == memory.units == units

    def test_the_last_chunk_may_be_short(self):
        memory = pool(base=4, most=15, chunk=10)
        assert [memory.grow(5), memory.grow(15), memory.shrink(14), memory.shrink(13)] == [14, 15, 14, 14]

    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=20))
    def test_any_order(self, calls):
        memory = pool()
        for grows, units in calls:
            before = memory.units
            after = memory.grow(units) if grows else memory.shrink(units)
            assert after >= min(units, before if not grows else 16)
            assert after in (4, 7, 10, 13, 16)
            assert after >= before if grows else after <= before

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"base": 0}, "base_units must be at least 1, got 0"),
            ({"most": -1}, "max_units must be at least 1, got -1"),
            ({"chunk": 0}, "chunk_units must be at least 1, got 0"),
            ({"base": 17}, "base_units=17 is more than max_units=16"),
            ({"chunk": 17}, "chunk_units=17 is a growth step larger than the pool, max_units=16"),
            ({"shape": (2, 0, 4)}, r"every size of a unit must be at least 1, got a unit of shape \[2, 0, 4\]"),
            ({"shape": ()}, "every size of a unit must be at least 1"),
        ],
    )
    @pytest.mark.parametrize("device", ["cpu", "cuda:0"])
    def test_bad_sizes_are_refused_before_anything_is_reserved(self, sizes, message, device, monkeypatch):
        monkeypatch.setattr(mmap, "mmap", lambda *args, **kwargs: pytest.fail("memory was reserved"))
        monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
        with pytest.raises(ValueError, match=message):
            pool(**sizes, device=device)


class TestHost:
    def test_the_tensor_is_the_whole_range_at_a_constant_address(self):
        memory = pool(dtype=torch.bfloat16)
        address = memory.tensor.data_ptr()
        assert memory.tensor.shape == (17, *UNIT) and memory.tensor.dtype == torch.bfloat16
        for units in (7, 16, 4, 16):
            memory.grow(units)
            memory.shrink(units)
            assert memory.tensor.data_ptr() == address
        assert address % mmap.PAGESIZE == 0 and memory.elastic and memory.reason is None

    def test_contents_survive_growth_and_shrinking_below_the_end(self):
        memory = pool()
        memory.tensor[:5] = 1.0
        memory.grow(16)
        memory.tensor[5:] = 2.0
        memory.shrink(7)
        assert (memory.tensor[:5] == 1.0).all() and (memory.tensor[5:8] == 2.0).all()

    def test_memory_is_committed_as_it_is_touched_and_goes_back(self):
        memory = pool(base=16, most=256, chunk=16, shape=WIDE)
        assert memory.committed_bytes <= 2 * MIB
        memory.grow(128)
        assert memory.committed_bytes <= 2 * MIB
        before = resident_bytes()
        memory.tensor[: 1 + 128] = 1.0
        full = memory.committed_bytes
        assert 129 * MIB <= full <= 132 * MIB and resident_bytes() - before > 120 * MIB
        memory.shrink(16)
        assert 17 * MIB <= memory.committed_bytes <= 19 * MIB
        assert resident_bytes() - before < 40 * MIB
        memory.close()
        assert resident_bytes() - before < 10 * MIB

    def test_a_unit_that_shares_a_system_page_with_the_end_keeps_its_contents(self):
        """A system page holds eight units here, and 1 + 4 of them are kept."""
        memory = pool()
        memory.grow(16)
        memory.tensor[:] = 3.0
        memory.shrink(4)
        assert (memory.tensor[:5] == 3.0).all()
        assert (memory.tensor[8:] == 0.0).all(), "pages above the end were not given back"

    def test_without_pagemap_everything_counts_as_committed(self, monkeypatch):
        memory = pool()
        monkeypatch.setattr("builtins.open", lambda *args, **kwargs: (_ for _ in ()).throw(FileNotFoundError()))
        assert memory.committed_bytes == 3 * mmap.PAGESIZE  # 17 units of 512 bytes

    def test_a_pool_that_the_system_refuses(self):
        with pytest.raises(ValueError, match=r"refuses to reserve \d+ bytes .*lower pool_tokens"):
            pool(base=1, most=1 << 50, chunk=1)

    def test_closing_gives_back_what_a_tensor_still_sees(self):
        memory = pool()
        kept = memory.tensor
        kept[:] = 1.0
        memory.close()
        memory.close()
        assert memory.units == 0 and memory.committed_bytes == 0
        assert (kept == 0.0).all()

    def test_a_tensor_keeps_the_memory_alive(self):
        kept = pool().tensor
        gc.collect()
        kept[:] = 1.0
        assert (kept == 1.0).all()

    def test_pools_side_by_side(self):
        one, other = pool(), pool()
        one.tensor[:] = 1.0
        other.tensor[:] = 2.0
        other.close()
        assert (one.tensor == 1.0).all()


class Code:
    """As the driver's CUresult."""

    def __init__(self, name):
        self.name = name


class FakeDriver:
    """The functions of ``cuda.bindings.driver`` over host memory: they keep books, refuse what the driver refuses, and
    fail where they are told to, with a code that is not a success.

    Granularity is 4 KiB; physical memory is counted, not held.
    """

    GRAIN = 4096

    def __init__(self, memory=1 << 30):
        success = Code("CUDA_SUCCESS")
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=success)
        self.CUmemLocation = self.CUmemAllocationProp = self.CUmemAccessDesc = SimpleNamespace
        self.CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
        self.CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
        self.CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")
        self.CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
        self.CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm")
        self.supported = 1
        self.calls = Counter()
        self.failing = {}  # name -> (how many calls go well before one fails, code)
        self.left = memory
        self.reserved = {}  # address -> (bytes, host memory)
        self.handles = {}  # handle -> bytes
        self.mapped = {}  # address -> (bytes, handle)
        self.accessible = set()  # addresses of mapped pieces

    def __getattr__(self, name):
        function = getattr(type(self), f"do_{name}")

        def call(*arguments):
            self.calls[name] += 1
            goes_well, code = self.failing.get(name, (None, ""))
            if goes_well == 0:
                del self.failing[name]
                return (Code(code),)
            if goes_well:
                self.failing[name] = (goes_well - 1, code)
            result = function(self, *arguments)
            if isinstance(result, Code):
                return (result,)
            return (self.CUresult.CUDA_SUCCESS,) if result is None else (self.CUresult.CUDA_SUCCESS, result)

        return call

    def do_cuGetErrorString(self, code):
        return f"text of {code.name}".encode()

    def do_cuDeviceGet(self, ordinal):
        return ordinal

    def do_cuDeviceGetAttribute(self, attribute, device):
        assert (attribute, device) == ("vmm", 0)
        return self.supported

    def do_cuMemGetAllocationGranularity(self, properties, option):
        assert (properties.type, properties.location.type, properties.location.id) == ("pinned", "device", 0)
        return self.GRAIN

    def do_cuMemAddressReserve(self, size, alignment, address, flags):
        assert size > 0 and size % self.GRAIN == 0
        memory = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.reserved[address] = size, memory
        return address

    def do_cuMemAddressFree(self, address, size):
        assert not [at for at in self.mapped if address <= at < address + size], "the range is still mapped"
        assert self.reserved.pop(address)[0] == size

    def do_cuMemCreate(self, size, properties, flags):
        assert size > 0 and size % self.GRAIN == 0 and properties.location.id == 0
        if size > self.left:
            return Code("CUDA_ERROR_OUT_OF_MEMORY")
        self.left -= size
        handle = object()
        self.handles[handle] = size
        return handle

    def do_cuMemMap(self, address, size, offset, handle, flags):
        assert self.handles[handle] == size and offset == flags == 0
        assert any(start <= address and address + size <= start + n for start, (n, _) in self.reserved.items())
        assert not any(at < address + size and address < at + n for at, (n, _) in self.mapped.items()), "mapped twice"
        self.mapped[address] = size, handle

    def do_cuMemSetAccess(self, address, size, descriptions, count):
        (description,) = descriptions
        assert (description.flags, description.location.id, count) == ("rw", 0, 1)
        inside = {at: n for at, (n, _) in self.mapped.items() if address <= at < address + size}
        assert sum(inside.values()) == size, "access to what is not mapped"
        self.accessible |= set(inside)

    def do_cuMemRelease(self, handle):
        size = self.handles.pop(handle)
        if (size, handle) not in self.mapped.values():
            self.left += size

    def do_cuMemUnmap(self, address, size):
        mapped, handle = self.mapped.pop(address)
        assert mapped == size, "a piece is unmapped as it was mapped"
        self.accessible.discard(address)
        if handle not in self.handles:
            self.left += size

    @property
    def committed(self):
        assert self.accessible == set(self.mapped), "mapped and not accessible"
        return sum(size for size, _ in self.mapped.values())

    def is_empty(self):
        return not self.reserved and not self.handles and not self.mapped


@pytest.fixture
def driver(monkeypatch):
    """The fake in the place of the package, torch's part over host memory."""
    fake = FakeDriver()
    real = importlib.import_module
    fakes = {"cuda.bindings.driver": fake}
    monkeypatch.setattr(importlib, "import_module", lambda name: fakes.get(name) or real(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.calls.update(["synchronize"]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fake.calls.update(["empty_cache"]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def tensor(self):
        interface = self.__cuda_array_interface__
        (length,), (address, read_only) = interface["shape"], interface["data"]
        assert address in fake.mapped, "torch asks where the first byte lives"
        assert interface["typestr"] == "|u1" and not read_only
        return torch.frombuffer((ctypes.c_char * length).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(DeviceRange, "bytes", tensor)
    return fake


@pytest.fixture
def no_card(monkeypatch):
    """An ordinary allocation "on the device" is one in host memory."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **options: empty(*sizes, **options))


def device_pool(**sizes):
    """Units of 4 KiB and half of it: a chunk of three is 18 KiB, mapped in pieces of 20, 16, 20 and 16 KiB."""
    return pool(shape=(3, 2, 1, 16, 16), device="cuda", **sizes)


CUDA_UNIT_BYTES = 3 * 2 * 16 * 16 * 4


def rounded(units):
    return -(-(units + 1) * CUDA_UNIT_BYTES // FakeDriver.GRAIN) * FakeDriver.GRAIN


class TestDevice:
    def test_only_the_base_is_mapped_at_first(self, driver):
        memory = device_pool()
        assert memory.elastic and memory.units == 4
        assert memory.tensor.shape == (17, 3, 2, 1, 16, 16)
        assert driver.committed == memory.committed_bytes == rounded(4)
        assert [size for size, _ in driver.reserved.values()] == [rounded(16)]

    def test_growth_maps_a_piece_a_chunk_and_nothing_is_left_over_by_rounding(self, driver):
        memory = device_pool()
        address = memory.tensor.data_ptr()
        for units in (7, 16):
            assert memory.grow(units) == units
            assert driver.committed == memory.committed_bytes == rounded(units)
        assert len(driver.mapped) == 5 and driver.calls["cuMemSetAccess"] == 3
        assert memory.tensor.data_ptr() == address and not driver.handles

    def test_chunks_below_the_granularity(self, driver):
        """512-byte units, 8 a grain: most chunks of one lie in what is mapped already."""
        memory = pool(base=1, most=30, chunk=1, device="cuda")
        committed = [memory.committed_bytes for units in range(1, 31) if memory.grow(units) == units]
        assert committed == [-(-(units + 1) * UNIT_BYTES // 4096) * 4096 for units in range(1, 31)]
        assert memory.shrink(9) == 9 and driver.committed == 2 * 4096

    def test_shrinking_unmaps_after_the_device_has_finished(self, driver):
        memory = device_pool()
        memory.grow(16)
        driver.calls.clear()
        assert memory.shrink(8) == 10
        assert driver.committed == rounded(10) and list(driver.calls) == ["synchronize", "cuMemUnmap"]
        assert memory.grow(11) == 13 and driver.committed == rounded(13)

    def test_closing_gives_back_all(self, driver):
        memory = device_pool()
        memory.grow(16)
        memory.close()
        memory.close()
        assert driver.is_empty() and driver.calls["cuMemAddressFree"] == 1 and memory.units == 0

    def test_collecting_gives_back_all_once_nobody_can_reach_it(self, driver):
        memory = device_pool()
        kept = memory._memory  # as the tensor does, through the array interface
        del memory
        gc.collect()
        assert driver.committed == rounded(4)
        del kept
        gc.collect()
        assert driver.is_empty()

    def test_nothing_is_called_when_the_interpreter_ends(self, driver):
        assert device_pool()._memory._finalizer.atexit is False

    def test_engines_side_by_side(self, driver):
        one, other = device_pool(), device_pool()
        one.grow(16)
        other.close()
        assert driver.committed == one.committed_bytes and one.grow(16) == 16


CALLS = (
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemRelease",
)
"""What making a pool calls, in order."""


class TestFailures:
    @pytest.mark.parametrize("name", CALLS)
    def test_a_pool_that_cannot_be_mapped_is_allocated_whole(self, name, driver, no_card, caplog, monkeypatch):
        def allocate(*arguments):
            assert not driver.mapped and not driver.reserved, "memory is held twice"
            return PlainRange(*arguments)

        monkeypatch.setattr("octavo.core.memory.elastic.PlainRange", allocate)
        driver.failing[name] = (0, "CUDA_ERROR_UNKNOWN")
        memory = device_pool()
        assert driver.calls[name] and not memory.elastic
        assert len(driver.handles) == (name == "cuMemRelease"), "only what could not be released is left"
        assert memory.reason == f"{name} failed: CUDA_ERROR_UNKNOWN (text of CUDA_ERROR_UNKNOWN)"
        assert memory.reason in caplog.text
        assert memory.units == memory.grow(5) == memory.shrink(0) == 16
        assert memory.committed_bytes == 17 * CUDA_UNIT_BYTES == memory.tensor.nbytes

    def test_a_device_that_cannot(self, driver, no_card):
        driver.supported = 0
        memory = device_pool()
        assert memory.reason == "cuda:0 has no virtual memory management" and driver.is_empty()

    def test_a_machine_without_the_package(self, no_card, monkeypatch):
        def missing(name):
            raise ModuleNotFoundError(f"No module named {name!r}")

        monkeypatch.setattr(importlib, "import_module", missing)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        memory = device_pool()
        assert memory.reason == (
            "the package cuda-bindings is missing (No module named 'cuda.bindings.driver'); install octavo[cuda]"
        )
        memory.close()
        assert memory.committed_bytes == 0 == memory.units

    @pytest.mark.parametrize("name", CALLS[4:])
    @pytest.mark.parametrize("after", [0, 1])
    def test_a_growth_that_fails_changes_nothing(self, name, after, driver):
        """Four chunks are asked for; the first or the second one fails, or the one setting of their access does."""
        memory = device_pool()
        driver.failing[name] = (0 if name == "cuMemSetAccess" else after, "CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match=f"^{name} failed: CUDA_ERROR_UNKNOWN") as caught:
            memory.grow(16)
        assert caught.value.code == "CUDA_ERROR_UNKNOWN"
        assert memory.units == 4 and driver.committed == memory.committed_bytes == rounded(4)
        assert memory.grow(16) == 16 and driver.committed == rounded(16)
        memory.close()
        assert not driver.mapped and not driver.reserved

    def test_torchs_cached_blocks_are_given_up_before_memory_is_out(self, driver):
        memory = device_pool()
        driver.failing["cuMemCreate"] = (0, "CUDA_ERROR_OUT_OF_MEMORY")
        assert memory.grow(5) == 7 and driver.calls["empty_cache"] == 1
        driver.left = 0
        with pytest.raises(DriverError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY") as caught:
            memory.grow(8)
        assert caught.value.code == "CUDA_ERROR_OUT_OF_MEMORY" and memory.units == 7
        memory.close()

    def test_a_failed_unmapping_can_be_done_again(self, driver):
        memory = device_pool()
        memory.grow(16)
        driver.failing["cuMemUnmap"] = (1, "CUDA_ERROR_UNKNOWN")
        with pytest.raises(DriverError, match="cuMemUnmap failed"):
            memory.shrink(4)
        assert memory.units == 4 and memory.committed_bytes == driver.committed == rounded(13)
        assert memory.grow(7) == 7 and memory.grow(16) == 16 and driver.committed == rounded(16)
        assert memory.shrink(4) == 4 and driver.committed == rounded(4)
        memory.close()


PAGE = {"page_units": 2, "page_tokens": 16, "page_bytes": MIB}


class TestGrowth:
    @pytest.mark.parametrize(
        ("growth", "pages", "steps"),
        [
            (Growth(), 1000, (1200, 512, 2000)),  # steps of 256 MiB
            (Growth(), 100, (120, 80, 200)),  # the rest is less than that
            (Growth(), 4, (6, 2, 8)),  # the base is rounded up
            (Growth(0.55), 100, (110, 90, 200)),  # 0.55 * 100 is a hair above 55, and means 55
            (Growth(), 1, (2, 2, 2)),
            (Growth(base_share=1.0), 7, (14, 2, 14)),
            (Growth(base_share=1e-9), 7, (2, 12, 14)),
            (Growth(chunk_tokens=1), 10, (12, 2, 20)),
            (Growth(chunk_tokens=17), 10, (12, 4, 20)),
            (Growth(0.5, 160), 10, (10, 20, 20)),
        ],
    )
    def test_steps_are_whole_pages(self, growth, pages, steps):
        assert growth.steps(pages, **PAGE) == steps

    def test_a_page_larger_than_the_usual_step(self):
        assert Growth().steps(10, page_units=1, page_tokens=16, page_bytes=1 << 30).chunk_units == 1

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"base_share": 0.0}, r"base_share must be in \(0, 1\], got 0.0"),
            ({"base_share": 1.5}, r"base_share must be in \(0, 1\], got 1.5"),
            ({"base_share": float("nan")}, r"base_share must be in \(0, 1\], got nan"),
            ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ],
    )
    def test_bad_values(self, values, message):
        with pytest.raises(ValueError, match=message):
            Growth(**values)

    def test_a_step_larger_than_the_pool(self):
        with pytest.raises(ValueError, match="chunk_tokens=161 is a growth step larger than the pool, which holds 160"):
            Growth(chunk_tokens=161).steps(10, **PAGE)


@pytest.mark.gpu
class TestCard:
    """Units of 1 MiB under the real driver."""

    def free_bytes(self):
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def test_contents_and_address_survive_and_memory_goes_back(self):
        memory = pool(base=64, most=2048, chunk=256, shape=WIDE, device="cuda")
        assert memory.elastic, memory.reason
        tensor = memory.tensor
        tensor[:65] = 1.0
        assert (tensor[:65] == 1.0).all()  # the code of these kernels takes memory too
        seen = []
        for _ in range(8):  # other processes may take and give memory of the same card meanwhile
            before = self.free_bytes()
            assert memory.grow(2048) == 2048
            tensor[65:] = 2.0
            assert memory.tensor.data_ptr() == tensor.data_ptr()
            taken = before - self.free_bytes()
            assert (tensor[:65] == 1.0).all() and (tensor[65:] == 2.0).all()
            assert memory.shrink(64) == 64
            seen.append((taken // MIB, (before - self.free_bytes()) // MIB))
            assert (tensor[:65] == 1.0).all()
        assert any(abs(taken - 1984) <= 128 and abs(kept) <= 128 for taken, kept in seen), seen
        before = self.free_bytes()
        memory.close()
        assert self.free_bytes() - before == 66 * MIB  # 65 units, rounded up to 2 MiB

    def test_a_captured_graph_stays_valid(self):
        memory = pool(base=2, most=64, chunk=2, shape=WIDE, device="cuda")
        total = torch.zeros((), device="cuda")
        memory.tensor[:3] = 1.0
        total.copy_(memory.tensor[:3].sum())  # loads the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total.copy_(memory.tensor[:3].sum())
        memory.grow(64)
        memory.tensor[:3] = 2.0
        graph.replay()
        assert total.item() == 2.0 * 3 * MIB / 4

    def test_a_pool_larger_than_the_memory_can_be_reserved_and_fails_cleanly(self):
        most = 2 * torch.cuda.mem_get_info()[1] // MIB
        memory = pool(base=2, most=most, chunk=most // 4, shape=WIDE, device="cuda")
        with pytest.raises(DriverError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
            memory.grow(most)
        assert memory.units == 2
        memory.tensor[:3] = 1.0
        assert (memory.tensor[:3] == 1.0).all()
