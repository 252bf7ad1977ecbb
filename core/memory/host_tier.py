"""The second level of the prefix cache: pages that the device gave up, in host memory, found again by their key."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.interfaces import Allocator
from octavo.core.memory.prefix_cache import Node, Parent, PrefixCache
from octavo.kernels import ops

Units = NDArray[np.int32]
PageState = Literal["dirty", "clean", "reclaimable"]


@dataclass
class _HostPage:
    """A page of k host units: whose it is, for which group of layers, how many restores of it are wanted, how many live
    sequences read it where it is, and which of all pages that were ever stored it is."""

    node: Node
    group: int
    units: Units
    serial: int
    restores: int = 0
    pins: int = 0


class HostTier:
    """A pool of ``units`` units in host memory (pinned if the device is a GPU), and which pages lie in it.

    A page is named by its first host unit; its k units may lie anywhere, and k may differ from page to page. Copies are
    queued while a step is planned, and carried out together before the step computes, one launch each way::

        device pool                        host pool
        unit  1  2  3  4  5  6             unit  1  2  3  4  5        page 4 has units 4 and 1
             [A][A][ ][ ][B][B]  store B ->     [B][ ][C][B][ ]       page 3 has unit 3
             [A][A][C][ ][ ][ ]  <- restore C

    States of a host page::

                 store           copy_out                       hold
        (none) ---------> dirty ------------> reclaimable ----------------> clean
                          queued to be        complete, nobody <----------- complete,
                          copied out          restores from it   copy_in    being restored

    A page may be pinned, whatever its state: a sequence reads it from here (``octavo.core.hosting``). Then it is clean
    as well, until nobody pins it.

    Only a reclaimable page is evicted. Reclaimable pages go in the order of their last use, which is their store, a
    store of the same contents, or a restore: the least recent first. Pages are stored in the order in which the device
    gives them up, the tail of a chain first, and the restores of one step count in reverse, so that the head of a chain
    is always used later than its tail, and outlives it.

    Pages that are restored stay here too: giving them up once more costs no copy. A page that has no room is not kept.

    Everything runs in the order of the one stream that also runs the model: ``copy_out``, the engine's copies on write,
    ``copy_in``, the forward pass. That is right for every mixture:

    - A unit of the device may be promised to somebody else as soon as ``store`` returns: whoever writes it comes after
      the copy out. The content of a unit that waits for its restore is not needed: it is here.
    - A page that is stored in a step may be restored in it: it is written before it is read.
    - No copy out overwrites what a copy in will read: host units of new pages were free or reclaimable, and a page with
      a queued restore is neither.
    - A copy on write may read a unit that was given up after it was planned, or write to one, if its sequence was
      preempted. Where such a unit is restored into, that comes later and holds.
    - A page that is given up before its restore was carried out is not restored: its units may be somebody else's.

    A node of the prefix index knows its host pages (``Node.host``), so a prefix is found here as it is on the device.

    Args:
        units: usable units of the host pool; a scratch unit comes on top, so that both pools count from 1.
        kv: the device's pool ``[units, layers, 2, kv_heads, unit_tokens, head_dim]``, for its shape, dtype and device.
        backend: whose kernels copy.
        allocator: of exactly ``units`` units, all free.
        index: whose nodes the pages belong to.

    Raises:
        ValueError: ``units`` is less than 1, or the machine does not have the memory.
    """

    def __init__(self, units: int, kv: Tensor, backend: str, allocator: Allocator, index: PrefixCache) -> None:
        if units < 1:
            raise ValueError(f"a host tier of {units} units holds nothing; it needs at least 1, or set host_tokens=0")
        assert allocator.total_units == allocator.free_units == units
        self.kv = _allocate(units, kv)
        self.stored = 0
        self.restored = 0
        self.evicted = 0
        self.bytes_out = 0
        self.bytes_in = 0
        self._made = 0
        self._backend = backend
        self._allocator = allocator
        self._index = index
        self._pages: dict[int, _HostPage] = {}
        self._reclaimable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._reclaimable_units = 0
        self._out: OrderedDict[int, Units] = OrderedDict()  # host page -> device units, in the order of last use
        self._in: list[tuple[int, Units]] = []  # (host page, device units), in the order asked for
        self._arriving: set[int] = set()  # device units that wait for a restore
        self._behind: Counter[tuple[Parent, int]] = Counter()  # (node, group) -> pages of nodes right behind it

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    @property
    def units_total(self) -> int:
        return self._allocator.total_units

    @property
    def units_free(self) -> int:
        return self._allocator.free_units

    @property
    def units_held(self) -> int:
        return self.units_total - self.units_free

    def page_units(self, page: int) -> int:
        """How many units the page takes, k."""
        return len(self._pages[page].units)

    @property
    def pins(self) -> Counter[int]:
        """How many live sequences read each page from here."""
        return Counter({number: page.pins for number, page in self._pages.items() if page.pins})

    @property
    def units_pinned(self) -> int:
        return sum(map(self.page_units, self.pins))

    @property
    def restoring(self) -> bool:
        """Whether restores are queued."""
        return bool(self._in)

    def units_of(self, page: int) -> Units:
        """The page's units int32 [k], in order."""
        return self._pages[page].units

    def serial(self, page: int) -> int:
        """A number that no other page has had: a page's id may be another's later, with other contents."""
        return self._pages[page].serial

    def state(self, page: int) -> PageState:
        if page in self._out:
            return "dirty"
        held = self._pages[page]
        return "clean" if held.restores or held.pins else "reclaimable"

    def leads_on(self, node: Node, group: int) -> bool:
        """Whether pages are here that stand right behind a node's page of a group."""
        return (node, group) in self._behind

    def store(self, units: Units, node: Node, group: int = 0) -> bool:
        """Keep a node's page that the device is giving up; ``units`` int32 [k] are its units there, in order.

        They must keep their contents until the next ``copy_out``. A page that is here already is only marked as used;
        its restore into these units, if that is queued still, is dropped. Gives False, and changes nothing, if dirty
        pages and pages being restored leave too little room.
        """
        assert len(units) > 0
        page = node.host[group]
        if page:
            self._drop_restore(page, units)
            for queue in (self._out, self._reclaimable):
                if page in queue:
                    queue.move_to_end(page)
            return True
        assert self._arriving.isdisjoint(units.tolist()), "a unit that waits for its restore holds nothing to store"
        missing = len(units) - self.units_free
        if missing > self._reclaimable_units:
            return False
        self._evict(missing)
        host_units = self._allocator.allocate(len(units))
        page = node.host[group] = int(host_units[0])
        self._made += 1
        self._pages[page] = _HostPage(node, group, host_units, self._made)
        self._behind[node.parent, group] += 1
        self._out[page] = units.copy()
        return True

    def hold(self, page: int) -> None:
        """Keep a page, because it will be restored: it is not evicted before its copy was carried out."""
        if page in self._reclaimable:
            self._take_from_reclaimable(page)
        self._pages[page].restores += 1

    def pin(self, page: int) -> None:
        """Keep a page that a live sequence reads from here."""
        if page in self._reclaimable:
            self._take_from_reclaimable(page)
        self._pages[page].pins += 1

    def unpin(self, page: int) -> None:
        """One sequence less reads the page from here, which is a use of it."""
        assert self._pages[page].pins, f"host page {page} is not pinned"
        self._pages[page].pins -= 1
        self._add_if_reclaimable(page)

    def restore(self, page: int, units: Units) -> None:
        """Queue the copy of a page that is held into ``units`` int32 [k] of the device, in order, that nobody reads
        before it is carried out. They may have been given up in this very step."""
        held = self._pages[page]
        assert held.restores, f"host page {page} is restored and not held"
        assert len(units) == len(held.units), f"a page of {len(held.units)} units does not fit {len(units)}"
        assert len(np.unique(units)) == len(units), "a page is restored into distinct units"
        assert self._arriving.isdisjoint(units.tolist()), "a unit waits for one restore at a time"
        self._in.append((page, units.copy()))
        self._arriving.update(units.tolist())

    def copy_out(self, kv: Tensor) -> None:
        """Carry out the copies of pages stored, out of ``kv``, the device's pool; before the step writes to it.

        If the launch raises, everything stays queued.
        """
        assert kv[0].shape == self.kv[0].shape and kv.dtype == self.kv.dtype, "a pool with units of another shape"
        if not self._out:
            return
        pairs = [np.stack([units, self._pages[page].units], 1) for page, units in self._out.items()]
        self.bytes_out += self._transfer(kv, self.kv, np.concatenate(pairs))
        self.stored += len(self._out)
        complete, self._out = self._out, OrderedDict()
        for page in complete:
            self._add_if_reclaimable(page)

    def copy_in(self, kv: Tensor) -> None:
        """Carry out the restores, into ``kv``; after ``copy_out`` and the step's copies on write.

        If the launch raises, everything stays queued.
        """
        assert not self._out, f"{len(self._out)} pages are still to be copied out; that comes first"
        if not self._in:
            return
        pairs = [np.stack([self._pages[page].units, units], 1) for page, units in self._in]
        self.bytes_in += self._transfer(self.kv, kv, np.concatenate(pairs))
        self.restored += len(self._in)
        carried_out, self._in = self._in, []
        self._arriving.clear()
        for page, _ in reversed(carried_out):
            self._pages[page].restores -= 1
            self._add_if_reclaimable(page)

    def forget(self, page: int) -> None:
        """Drop a page, and its copy out if that is still queued. Precondition: no restore of it is queued."""
        held = self._pages[page]
        assert held.restores == 0, f"host page {page} is being restored; copy in first"
        assert held.pins == 0, f"host page {page} is read by {held.pins} sequences"
        if self._out.pop(page, None) is None:
            self._take_from_reclaimable(page)
        held.node.host[held.group] = 0
        behind = held.node.parent, held.group
        self._behind[behind] -= 1
        if not self._behind[behind]:
            del self._behind[behind]
        self._index.prune(held.node)
        del self._pages[page]
        self._allocator.free(held.units)

    def clear(self) -> None:
        """Drop every page. Precondition: no restore is queued."""
        assert not self._in, f"{len(self._in)} restores are queued; copy in first"
        for page in list(self._pages):
            self.forget(page)

    def check(self) -> None:
        """Every unit is free or of one page, every page is in one state, and the queues name pages that exist."""
        held = [page.units for page in self._pages.values()]
        listed = np.sort(np.concatenate([self._allocator.check(), *held]))
        if not np.array_equal(listed, np.arange(1, 1 + self.units_total)):
            raise AssertionError(f"free and held host units do not partition 1...{self.units_total}: {listed.tolist()}")
        restores = Counter(page for page, _ in self._in)
        for page, host_page in self._pages.items():
            if page != host_page.units[0] or page != host_page.node.host[host_page.group]:
                raise AssertionError(f"host page {page} is not where its units or its node say")
            if host_page.restores != restores[page]:
                raise AssertionError(f"host page {page} counts {host_page.restores} restores, {restores[page]} queued")
            if (self.state(page) == "reclaimable") != (page in self._reclaimable):
                raise AssertionError(f"host page {page} is {self.state(page)}; to be evicted: {[*self._reclaimable]}")
        foreign = (self._out.keys() | self._reclaimable.keys() | restores.keys()) - self._pages.keys()
        if foreign:
            raise AssertionError(f"host pages {sorted(foreign)} are queued and do not exist")
        if self._reclaimable_units != sum(map(self.page_units, self._reclaimable)):
            raise AssertionError(f"{self._reclaimable_units} host units are counted reclaimable, wrongly")
        behind = Counter((page.node.parent, page.group) for page in self._pages.values())
        if self._behind != behind:
            raise AssertionError(f"{self._behind.total()} host pages are counted behind others, {behind.total()} are")
        if self._arriving != {unit for _, units in self._in for unit in units.tolist()}:
            raise AssertionError(f"device units {sorted(self._arriving)} wait for a restore, the queue says otherwise")

    def _drop_restore(self, page: int, units: Units) -> None:
        """Forget the restore of a page into ``units``, if there is one."""
        if int(units[0]) not in self._arriving:
            return
        self._in = [(other, into) for other, into in self._in if not np.array_equal(into, units)]
        self._arriving.difference_update(units.tolist())
        self._pages[page].restores -= 1
        self._add_if_reclaimable(page)

    def _transfer(self, source: Tensor, target: Tensor, pairs: Units) -> int:
        """Copy units ``pairs`` int32 [n, 2] in one launch; gives the bytes of the copied units."""
        device = source.device if source.is_cuda else target.device
        ops.transfer(source, target, torch.from_numpy(pairs).to(device), self._backend)
        return len(pairs) * source[0].nbytes

    # Which page goes first: these three know the order, the rest of the tier does not.

    def _add_if_reclaimable(self, page: int) -> None:
        if self.state(page) == "reclaimable":
            self._reclaimable[page] = None
            self._reclaimable_units += self.page_units(page)

    def _take_from_reclaimable(self, page: int) -> None:
        del self._reclaimable[page]
        self._reclaimable_units -= self.page_units(page)

    def _evict(self, units: int) -> None:
        """Forget reclaimable pages, least recently used first, until at least ``units`` units are freed."""
        target = self.units_free + units
        while self.units_free < target:
            self.forget(next(iter(self._reclaimable)))
            self.evicted += 1


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping: the kernel's own estimate."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _allocate(units: int, kv: Tensor) -> Tensor:
    """The host pool's memory, uninitialised."""
    message = require_memory(units, kv)
    try:
        return torch.empty((units + 1, *kv.shape[1:]), dtype=kv.dtype, pin_memory=kv.is_cuda)
    except RuntimeError as error:
        raise ValueError(f"{message} ({error})") from error


def require_memory(units: int, kv: Tensor) -> str:
    """Refuse a host tier of units like those of ``kv`` that is larger than the memory; gives what there is to say if
    it is refused later on.

    Raises:
        ValueError: with the bytes that it takes and those there are.
    """
    nbytes = math.prod((units + 1, *kv.shape[1:])) * kv.element_size()
    if kv.is_cuda:
        nbytes = 1 << (nbytes - 1).bit_length()  # torch rounds pinned memory up to a power of two
    available = available_memory()
    message = (
        f"a host tier of {units} units takes {nbytes} bytes of host memory, and {available} are available; "
        f"lower host_tokens"
    )
    if nbytes > available:
        raise ValueError(message)
    return message
