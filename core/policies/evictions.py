"""Eviction policies by the name that a config gives. Belady's is not among them: it needs a recorded trace."""

from collections.abc import Callable

from octavo.core.interfaces import EvictionPolicy
from octavo.core.policies.cost import RecomputeCost
from octavo.core.policies.fifo import FirstInFirstOut
from octavo.core.policies.lfu import LeastFrequentlyUsed
from octavo.core.policies.lru import LeastRecentlyUsed
from octavo.core.policies.lru_k import LruK
from octavo.core.policies.priority import PriorityClasses

EVICTIONS: dict[str, Callable[..., EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lru_k": LruK,
    "fifo": FirstInFirstOut,
    "lfu": LeastFrequentlyUsed,
    "priority": PriorityClasses,
    "cost": RecomputeCost,
}
