"""Which page in the frames of a sequence makes room for another: the policies by the name that an experiment gives.

Belady's is not among them: it needs a recorded trace."""

from collections.abc import Callable

from octavo.sparse.replacement.clock import Clock
from octavo.sparse.replacement.decayed import DecayedShare
from octavo.sparse.replacement.fifo import FirstInFirstOut
from octavo.sparse.replacement.lfu import LeastFrequentlyUsed
from octavo.sparse.replacement.lru import LeastRecentlyUsed
from octavo.sparse.resident_sets import Replacement

REPLACEMENTS: dict[str, Callable[..., Replacement]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "decayed": DecayedShare,
    "clock": Clock,
    "fifo": FirstInFirstOut,
}
