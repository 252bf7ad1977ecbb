"""Decoding with shared prefixes on a CPU (semantics and shapes as in ``reference/shared.py``).

Compiled decoding finds a run of a few thousand slots in the cache of the processor and is bound by arithmetic, so it
reads each table by itself. The gathered path copies what it reads, and copies a run once for its group. The keys of the
run and those behind it are disjoint, so each set has a softmax of its own, and the two are joined by their log-sum-exps
(Hydragen, Juravsky et al., 2024, arXiv 2402.05099, section 3)::

    lse = log(exp(lse_run) + exp(lse_own))        out = exp(lse_run - lse) out_run + exp(lse_own - lse) out_own

To the run, a group's queries are a chunk of a prompt that comes after it: one prefill a group gathers its K and V once
and multiplies them with all queries. What is each row's own is a decode over a table that begins behind the run. The
sink joins the second softmax alone.
"""

import torch
from torch import Tensor

from octavo.kernels import log
from octavo.kernels.cpu import native
from octavo.kernels.cpu.attention import decode_gathered, prefill


def decode_shared(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    groups: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    scores = sinks, scale, 0, softcap
    done = native.decode(q, pool, layer, table, lengths, q_pos, None, *scores, want_mass=False, want_lse=False)
    if log.KERNELS:
        kernel = "gathered, a run once, torch" if done is None else "compiled C, each row by itself"
        log.chosen("decode_shared", "cpu", kernel, pool, query_heads=q.shape[1], rows=len(q))
    if done is not None:
        return done[0]
    return decode_shared_gathered(q, pool, layer, table, lengths, q_pos, groups, sinks, scale, softcap)


def decode_shared_gathered(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    groups: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    batch, unit_tokens = len(q), pool.shape[4]
    members, bounds, shared, own = groups[0, :batch].long(), groups[1], groups[2, :batch], groups[3, :batch]
    table, lengths = table[min(layer, len(table) - 1)][None], lengths[min(layer, len(lengths) - 1)][None]
    filled = bounds.diff() > 0
    runs = shared[filled]
    first_rows = members[bounds[:-1][filled].long()]
    behind = torch.arange(batch, dtype=torch.int32) + (runs.max() if len(runs) else 0)  # every run: nothing is hidden
    out_run, lse_run = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    out_run[members], lse_run[members] = prefill(
        q[members], pool, layer, table[:, first_rows], runs[None, :, None], torch.cat([bounds[:1], bounds[1:][filled]]),
        behind, None, None, scale, 0, softcap, max_q=int(bounds.diff().max()), want_lse=True,
    )  # fmt: skip

    entries = own[:, None] // unit_tokens + torch.arange(table.shape[3])  # [B, M]; past the end nobody looks
    rest = table.gather(3, entries.clamp(max=table.shape[3] - 1)[None, :, None].expand_as(table))
    out_own, lse_own, _ = decode_gathered(
        q, pool, layer, rest, lengths - own[None, :, None], q_pos - own, None, sinks, scale, 0, softcap,
        want_mass=False, want_lse=True,
    )  # fmt: skip
    lse = torch.logaddexp(lse_run, lse_own)
    lse = torch.where(lse.isinf(), 0.0, lse)  # a row that sees nothing, and has no sink, gives 0
    return ((lse_run - lse).exp()[..., None] * out_run + (lse_own - lse).exp()[..., None] * out_own).to(q.dtype)
