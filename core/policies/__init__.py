"""Interchangeable policies, one a file, found by the name that a config gives."""

from octavo.core.policies.allocators import ALLOCATORS
from octavo.core.policies.evictions import EVICTIONS
from octavo.core.policies.page_policies import PAGE_POLICIES
from octavo.core.policies.page_size import FixedPages

__all__ = ["ALLOCATORS", "EVICTIONS", "PAGE_POLICIES", "FixedPages"]
