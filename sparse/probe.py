"""What a choice of pages leaves out, measured against dense attention on some decode steps.

For a query head with output o of dense attention, a page p of softmax mass m_p and output o_p by itself, and the pages
S that the method reads:

    captured mass    sum of m_p over S
    output error     |o' - o| / |o|, o' being the method's output
    removal error    the largest m_p / (1 - m_p) |o - o_p| / |o| of a page that is not in S: what leaving out that
                     page alone would change, exactly, since o without p is o + m_p / (1 - m_p) (o - o_p)

Each is the mean over the query heads of a KV head. And, a KV head,

    page recall      how many of the pages that exact mass would have chosen from, with the same number of pages and the
                     same kept ones, are in S; 1 where nothing was free to choose
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.core.interfaces import PageView, Selection, SparseMethod
from octavo.sparse.keep import Keep

METRICS = ("page_recall", "captured_mass", "removal_error", "output_error")


@dataclass
class _Sums:
    """Of one method: ``rows`` int64 [L] measured queries a layer, and ``sums`` fp64 [4, L, Hkv], in the order of
    ``METRICS``, with what measuring took."""

    rows: Tensor
    sums: Tensor
    seconds: float = 0.0
    bytes_read: int = 0


@dataclass
class Probe:
    """Measures the choices of all methods at a request's first decode step and every ``every``-th after it
    (``octavo.core.inspection.probing.attach``). Sequences that are read whole are passed over."""

    every: int
    _found: dict[str, _Sums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1 decode step")

    def observe(
        self, method: SparseMethod, q: Tensor, out: Tensor, selection: Selection, pages: PageView, rows: Sequence[int]
    ) -> None:
        began = _now(q)
        if method.provenance not in self._found:
            shape = pages.layers, pages.kv_heads
            self._found[method.provenance] = _Sums(
                torch.zeros(shape[0], dtype=torch.int64), torch.zeros((len(METRICS), *shape), dtype=torch.float64)
            )
        found = self._found[method.provenance]
        keep = getattr(method, "keep", Keep()).mask(pages)
        for row in rows:
            n = int(pages.n_pages[row])
            chosen = _chosen(selection, row, n)
            if bool(chosen.all()):
                continue
            chosen = chosen.expand(pages.kv_heads, n)
            outs, lse = pages.apart(q, row)
            found.sums[:, pages.layer] += _measure(out[row], outs, lse, chosen, keep[row, :n], pages).cpu()
            found.rows[pages.layer] += 1
            found.bytes_read += int(pages.lengths[row]) * 2 * pages.kv_heads * q.shape[2] * outs.element_size()
        found.seconds += _now(q) - began

    def take(self, method: SparseMethod | None) -> dict[str, Any] | None:
        """What was measured of a method since it was last asked for, and forgets it; None if nothing was.

        Means: ``rows`` [L] queries that were measured, by layer; each of ``METRICS`` [L][Hkv], a share, None in layers
        where nothing was chosen. ``seconds`` and ``bytes_read`` are those of the measuring.
        """
        found = None if method is None else self._found.pop(method.provenance, None)
        if found is None or not found.rows.any():
            return None
        means = (found.sums / found.rows.clamp(min=1)[:, None]).tolist()
        rows = found.rows.tolist()
        shown = {
            name: [heads if count else None for heads, count in zip(layers, rows, strict=True)]
            for name, layers in zip(METRICS, means, strict=True)
        }
        return {"rows": rows, **shown, "seconds": found.seconds, "bytes_read": found.bytes_read}


def _chosen(selection: Selection, row: int, n: int) -> Tensor:
    """bool [H, n]: the pages that a row's heads read. What stands past a count is taken for the open page, which all
    read."""
    listed, counts = selection.pages[row].long(), selection.counts[row]
    meant = torch.arange(listed.shape[1], device=listed.device) < counts[:, None]
    chosen = torch.zeros((len(listed), n), dtype=torch.bool, device=listed.device)
    return chosen.scatter_(1, listed.where(meant, n - 1), True)


def _measure(out: Tensor, outs: Tensor, lse: Tensor, chosen: Tensor, keep: Tensor, pages: PageView) -> Tensor:
    """``METRICS`` fp64 [4, Hkv] of one query: ``out [Hq, D]`` from the pages ``chosen`` bool [Hkv, n], and attention to
    each page apart, ``outs [n, Hq, D]`` and ``lse [n, Hq]``; ``keep`` bool [n].

    Computed in fp64, since without a page that holds nearly all of the mass little is left."""
    heads, group = len(chosen), len(out) // len(chosen)
    out, outs, lse = out.double(), outs.double(), lse.double()
    total = lse.logsumexp(0)
    if pages.traits.sinks is not None:
        total = torch.logaddexp(total, pages.traits.sinks.double())
    mass = (lse - total).exp()  # [n, Hq]
    dense = torch.einsum("nh,nhd->hd", mass, outs)
    size = dense.norm(dim=-1)
    read = chosen.repeat_interleave(group, 0).T  # [n, Hq]
    captured = mass.where(read, 0.0).sum(0) / mass.sum(0)
    removal = mass / (1 - mass).clamp(min=1e-15) * (dense - outs).norm(dim=-1) / size
    removal = removal.where(~read, 0.0).amax(0)
    error = (out - dense).norm(dim=-1) / size
    exact = mass.unflatten(1, (heads, group)).mean(2).T  # [Hkv, n]
    means = (x.view(heads, group).mean(1) for x in (captured, removal, error))
    return torch.stack([_recall(exact, chosen, keep), *means])


def _recall(exact: Tensor, chosen: Tensor, keep: Tensor) -> Tensor:
    """fp64 [Hkv], of ``exact`` mass [Hkv, n] and the pages ``chosen`` bool [Hkv, n]; ``keep`` bool [n]."""
    kept = keep.clone()
    kept[-1] = True  # the open page
    order = exact.masked_fill(kept, torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(len(kept), device=order.device).expand_as(order))
    best = (rank < chosen.sum(1, keepdim=True)) & ~kept
    wanted = best.sum(1)
    return torch.where(wanted > 0, (best & chosen).sum(1).double() / wanted.clamp(min=1), 1.0)


def _now(q: Tensor) -> float:
    """Seconds since any moment, once the device has no work left."""
    if q.is_cuda:
        torch.cuda.synchronize(q.device)
    return time.perf_counter()
