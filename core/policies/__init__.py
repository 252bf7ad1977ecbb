"""Interchangeable policies, one a file, found by the name that a config gives."""

from octavo.core.policies.allocators import ALLOCATORS
from octavo.core.policies.cost import RecomputeCost
from octavo.core.policies.evictions import EVICTIONS
from octavo.core.policies.fifo import FirstInFirstOut
from octavo.core.policies.lfu import LeastFrequentlyUsed
from octavo.core.policies.lru import LeastRecentlyUsed
from octavo.core.policies.lru_k import LruK
from octavo.core.policies.page_divisors import DivisorPages, RowPages, WholePages
from octavo.core.policies.page_policies import PAGE_POLICIES
from octavo.core.policies.page_size import FixedPages, RatioPages
from octavo.core.policies.page_sqrt import QuotedPages, SqrtPages
from octavo.core.policies.priority import PriorityClasses

__all__ = [
    "ALLOCATORS",
    "EVICTIONS",
    "PAGE_POLICIES",
    "DivisorPages",
    "FirstInFirstOut",
    "FixedPages",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "LruK",
    "PriorityClasses",
    "QuotedPages",
    "RatioPages",
    "RecomputeCost",
    "RowPages",
    "SqrtPages",
    "WholePages",
]
