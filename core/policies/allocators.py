"""Allocators by the name that a config gives."""

from collections.abc import Callable

from octavo.core.interfaces import Allocator
from octavo.core.policies.best_fit import BestFitAllocator
from octavo.core.policies.buddy import BuddyAllocator
from octavo.core.policies.first_fit import FirstFitAllocator
from octavo.core.policies.linear import LinearAllocator
from octavo.core.policies.next_fit import NextFitAllocator
from octavo.core.policies.stack import StackAllocator

ALLOCATORS: dict[str, Callable[[int], Allocator]] = {
    "stack": StackAllocator,
    "first_fit": FirstFitAllocator,
    "next_fit": NextFitAllocator,
    "best_fit": BestFitAllocator,
    "buddy": BuddyAllocator,
    "linear": LinearAllocator,
}
