"""How many requests run at once when more are waiting than fit: with pages, and without."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.core.interfaces import Allocator
from octavo.core.memory.block_table import BlockTable
from octavo.core.memory.page_pool import PagePool
from octavo.core.memory.prefix_cache import PrefixCache
from octavo.core.policies import EVICTIONS
from octavo.scripts.reservations import RULES, Regions


@dataclass(frozen=True)
class Asked:
    """Tokens of a prompt and of its answer."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        return self.prompt + self.answer


class Memory(Protocol):
    """Room for the tokens of requests, by the requests' numbers."""

    slots: int

    def admit(self, number: int, request: Asked, tokens: int) -> bool:
        """Take room for a request that has ``tokens`` tokens now; False, and no change, if there is none."""
        ...

    def grow(self, number: int, tokens: int) -> bool:
        """Room for ``tokens`` tokens of a request, all told; False, and no change, if there is none."""
        ...

    def release(self, number: int) -> None: ...


class Reservations:
    """Memory without pages (``octavo.scripts.reservations``)."""

    def __init__(self, slots: int, rule: str, longest: int) -> None:
        self.slots = slots
        self._rule, self._longest = RULES[rule], longest
        self._regions = Regions(slots)
        self._held: dict[int, tuple[int, int]] = {}

    def admit(self, number: int, request: Asked, tokens: int) -> bool:
        size = self._rule(request.total, self._longest)
        start = self._regions.allocate(size)
        if start is not None:
            self._held[number] = start, size
        return start is not None

    def grow(self, number: int, tokens: int) -> bool:
        assert tokens <= self._held[number][1], f"{tokens} tokens in a reservation of {self._held[number][1]}"
        return True

    def release(self, number: int) -> None:
        self._regions.free(*self._held.pop(number))


class Pages:
    """Pages of ``page_tokens`` slots, one unit each, in octavo's own pool and block tables."""

    def __init__(self, allocator: Allocator, page_tokens: int) -> None:
        self.slots = allocator.total_units * page_tokens
        self._page_tokens = page_tokens
        self._pool = PagePool(allocator, EVICTIONS["lru"](), PrefixCache())
        self._tables: dict[int, BlockTable] = {}

    def admit(self, number: int, request: Asked, tokens: int) -> bool:
        self._tables[number] = BlockTable(self._pool)
        if self.grow(number, tokens):
            return True
        del self._tables[number]
        return False

    def grow(self, number: int, tokens: int) -> bool:
        table = self._tables[number]
        missing = -(-tokens // self._page_tokens) - table.n_pages
        if missing > self._pool.available:
            return False
        if missing > 0:
            table.append(self._pool.allocate(missing, near=table.near))
        return True

    def release(self, number: int) -> None:
        self._tables.pop(number).release()


@dataclass(frozen=True)
class Served:
    """While requests were waiting: how many ran, and the share of the slots that tokens were in, as means over the
    steps. ``preemptions`` and ``steps`` are of the whole backlog."""

    running_mean: float
    running_peak: int
    used_share: float
    preemptions: int
    steps: int


def serve(requests: Sequence[Asked], memory: Memory, max_seqs: int) -> Served:
    """Work a backlog off. In each step:

    1. every running request gets one more token, the oldest first; one that finds no room takes that of the request
       that began last, which goes back to the head of the queue and keeps its tokens, to be computed again;
    2. requests are admitted in their order, until one does not fit; none if somebody was preempted in this step;
    3. what is complete leaves.

    Raises:
        ValueError: a request that does not fit into the empty memory.
    """
    waiting = deque(enumerate(requests))
    tokens = [request.prompt for request in requests]
    running: list[int] = []
    ran: list[int] = []
    used: list[int] = []
    preemptions = steps = 0
    while waiting or running:
        before = preemptions
        for number in list(running):
            while number in running and not memory.grow(number, tokens[number] + 1):
                victim = running.pop()
                memory.release(victim)
                waiting.appendleft((victim, requests[victim]))
                preemptions += 1
            if number in running:
                tokens[number] += 1
        while waiting and len(running) < max_seqs and preemptions == before:
            number, request = waiting[0]
            if not memory.admit(number, request, tokens[number]):
                if not running:
                    raise ValueError(f"a request of {tokens[number]} tokens does not fit into {memory.slots} slots")
                break
            running.append(number)
            waiting.popleft()
        if waiting:
            ran.append(len(running))
            used.append(sum(tokens[number] for number in running))
        for number in [number for number in running if tokens[number] >= requests[number].total]:
            running.remove(number)
            memory.release(number)
        steps += 1
    if not ran:
        raise ValueError(f"all {len(requests)} requests fit at once into {memory.slots} slots; give more")
    return Served(float(np.mean(ran)), max(ran), float(np.mean(used)) / memory.slots, preemptions, steps)
