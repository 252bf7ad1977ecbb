"""Host tiers of a few tiny pages, and what can be done to them and seen of them."""

import numpy as np
import torch

from octavo.core.memory import host_tier
from octavo.core.memory.host_tier import HostTier
from octavo.core.memory.prefix_cache import PrefixCache, page_key, root_key
from octavo.kernels import ops

SHAPE = (2, 2, 1, 2, 3)  # layers, K and V, kv_heads, unit_tokens, head_dim
UNIT_BYTES = 2 * 2 * 1 * 2 * 3 * 4
ROOT = root_key()


class LowestFirst:
    """The smallest allocator there is: the lowest free units, wherever they lie."""

    def __init__(self, units):
        self.total_units = units
        self._free = list(range(1, units + 1))

    @property
    def free_units(self):
        return len(self._free)

    def allocate(self, units, near=None):
        assert units <= self.free_units
        taken, self._free = self._free[:units], self._free[units:]
        return np.array(taken, np.int32)

    def free(self, units):
        assert not set(units.tolist()) & set(self._free)
        self._free = sorted(self._free + units.tolist())

    def check(self):
        return np.array(self._free, np.int32)


def ids(*units):
    return np.array(units, np.int32)


def pool_of(units):
    """A device pool in which every unit holds its own number, with a different fraction in every place."""
    count = torch.Size(SHAPE).numel()
    return torch.arange(units + 1.0)[:, None].add(torch.arange(count) / count).view(units + 1, *SHAPE)


def tier_of(units, kv=None, backend="cpu", groups=1):
    tier = HostTier(units, pool_of(8) if kv is None else kv, backend, LowestFirst(units), PrefixCache(groups))
    tier.kv.fill_(torch.nan)
    return tier


def key_of(name, parent=ROOT):
    """Key and tokens of a page of one token: a number, or the code of a letter."""
    page = ids(ord(name) if isinstance(name, str) else name)
    return page_key(ROOT if parent == ROOT else parent.key, page), page


def node_of(tier, name, parent=ROOT):
    """The node of a name, made if it is new."""
    key, page = key_of(name, parent)
    return tier._index.enter(key, parent, page, "")


def store(tier, units, name, parent=ROOT):
    node = node_of(tier, name, parent)
    try:
        return tier.store(units, node)
    finally:
        tier._index.prune(node)


def find(tier, name):
    """The host page of a name; None if there is none."""
    key, page = key_of(name)
    node = tier._index.find(key, ROOT, page, "")
    return node.host[0] or None if node else None


def kept(tier, *names):
    """Which of some names can be found."""
    return [name for name in names if find(tier, name) is not None]


def stored(tier, kv, *names, units=(1,)):
    """Store pages and carry it out."""
    for name in names:
        assert store(tier, ids(*units), name)
    tier.copy_out(kv)


def restore(tier, page, units):
    tier.hold(page)
    tier.restore(page, units)


def carry_out(tier, kv):
    tier.copy_out(kv)
    tier.copy_in(kv)


def observed(tier):
    """Everything that can be seen of a tier."""
    pages = sorted(tier._pages)
    return (
        [(page, tier.state(page), tier.page_units(page), tier._pages[page].node.id) for page in pages],
        (tier.units_total, tier.units_free, tier.units_held, len(tier), len(tier._out), len(tier._in)),
        (tier.stored, tier.restored, tier.evicted, tier.bytes_out, tier.bytes_in),
        tier._allocator.check().tolist(),
    )


def check(tier):
    tier.check()
    tier._index.check()


class Spy:
    """The transfers of a tier, as (direction, pairs); ``fail`` names a direction that raises."""

    def __init__(self, tier, monkeypatch):
        self.calls, self.fail = [], None
        transfer = ops.transfer

        def spy(source, target, pairs, backend):
            way = "out" if target is tier.kv else "in"
            if way == self.fail:
                raise RuntimeError("the bus is gone")
            self.calls.append((way, pairs.tolist()))
            transfer(source, target, pairs, backend)

        monkeypatch.setattr(host_tier.ops, "transfer", spy)
