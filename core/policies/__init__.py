"""Interchangeable policies, one a file, found by the name that a config gives."""

from octavo.core.policies.evictions import EVICTIONS
from octavo.core.policies.page_size import FixedPages
from octavo.core.policies.stack import StackAllocator

ALLOCATORS = {"stack": StackAllocator}

__all__ = ["ALLOCATORS", "EVICTIONS", "FixedPages"]
