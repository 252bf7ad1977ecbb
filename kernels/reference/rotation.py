"""Truth of the ops that move keys along the positions: slow, obvious, any device.

Rotary embeddings (Su et al., arXiv 2104.09864) turn the pair i of a key at position p by the angle ``p * inv_freq[i]``.
Turns add up, so a key that was stored for position p serves position p + delta once it is turned by
``delta * inv_freq``, or when the query is turned back by as much: ``q . R(delta) k = R(-delta) q . k``. A factor on the
embedding (YaRN's attention factor) is a number, commutes with the turn and needs no correction. What this holds for:
docs/kernels/rotation.md.

    pairs    of the first Dr <= D elements of a head: (i, i + Dr/2), as transformers' ``rotate_half`` has it, or
             (2i, 2i + 1) where ``interleaved``; the elements from Dr on carry no position
    angles   the product of a delta below 2^29 and an fp32 number is exact in fp64; in fp32 it would be off by up to
             0.004 rad below 131,072. Cosine and sine are rounded to fp32, like all arithmetic on the pairs
"""

import torch
from torch import Tensor


def rotate_keys(
    pool: Tensor,
    units: Tensor,
    deltas: Tensor,
    inv_freq: Tensor,
    kinds: Tensor,
    first_layer: int,
    end_layer: int,
    interleaved: bool,
) -> None:
    """Move the keys of whole units by some positions, in the layers ``first_layer ... end_layer - 1``.

    units      int32 [n, 2]        source and destination; K is turned in place where they are equal, else V goes along.
                                   No destination is another's source; a source may serve several destinations
    deltas     int32 [n]           positions to move by, of either sign
    inv_freq   fp32 [kinds, Dr/2]  of each kind of layer (Gemma 3 has two); zeros for a kind without rotary embedding
    kinds      int32 [layers]      the kind of each layer of the pool

    ``(0, 0)`` with delta 0 (scratch onto itself) is harmless padding.
    """
    layers = slice(first_layer, end_layer)
    source, target = units.long().unbind(1)
    moved = pool[source, layers]  # [n, L, 2, Hkv, u, D], a copy
    cos, sin = (x[:, kinds[layers].long(), None, None] for x in _cos_sin(deltas, inv_freq))  # [n, L, 1, 1, Dr/2]
    moved[:, :, 0] = _turned(moved[:, :, 0], cos, sin, interleaved)
    pool[target, layers] = moved


def rotate_queries(q: Tensor, rows: Tensor, deltas: Tensor, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """Queries for keys that are stored ``deltas`` positions before those that they stand for.

    ``q [B, Hq, D]``, ``rows, deltas`` int32 [n], ``inv_freq`` fp32 [Dr/2] of the layer. Returns [n, Hq, D] in q's
    dtype: row i is ``q[rows[i]]`` turned by ``-deltas[i]`` positions. A row may be asked for any number of times.
    """
    cos, sin = _cos_sin(-deltas, inv_freq[None])  # [n, 1, Dr/2], the same for all heads
    return _turned(q[rows.long()], cos, sin, interleaved)


def merge_states(outs: Tensor, lses: Tensor, bounds: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention over a union of disjoint sets of keys, from the attention over each.

    outs     [n, Hq, D]      normalised outputs
    lses     fp32 [n, Hq]    logs of their softmax denominators; over no key they are 0 and minus infinity
    bounds   int32 [B + 1]   row b joins the states ``bounds[b] ... bounds[b + 1] - 1``
    sinks    [Hq]            logits that join the softmax of each row once, with no value

    Returns ``out [B, Hq, D]`` in the dtype of ``outs`` and ``lse`` fp32 [B, Hq]. The union of nothing is again 0 and
    minus infinity (the sink, where there is one).
    """
    edges = bounds.tolist()
    out = outs.new_zeros((len(edges) - 1, *outs.shape[1:]))
    lse = lses.new_full((len(edges) - 1, lses.shape[1]), -torch.inf)
    for b in range(len(edges) - 1):
        parts = lses[edges[b] : edges[b + 1]]
        if sinks is not None:
            parts = torch.cat([parts, sinks.float()[None]])
        if len(parts) == 0:
            continue
        lse[b] = parts.logsumexp(0)
        weights = torch.exp(parts - torch.where(lse[b].isinf(), 0.0, lse[b]))[: edges[b + 1] - edges[b]]
        out[b] = (weights[..., None] * outs[edges[b] : edges[b + 1]].float()).sum(0).to(outs.dtype)
    return out, lse


def _cos_sin(deltas: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``deltas [n]`` times ``inv_freq [kinds, Dr/2]``: fp32 [n, kinds, Dr/2]."""
    angles = deltas.double()[:, None, None] * inv_freq.double()
    return angles.cos().float(), angles.sin().float()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Heads ``x [..., D]`` with the pairs of their first Dr elements turned; ``cos, sin`` broadcast as [..., Dr/2]."""
    rotary = 2 * cos.shape[-1]
    if interleaved:
        halves = (slice(0, rotary, 2), slice(1, rotary, 2))
    else:
        halves = (slice(0, rotary // 2), slice(rotary // 2, rotary))
    first, second = (x[..., half].float() for half in halves)
    turned = x.clone()
    turned[..., halves[0]] = (first * cos - second * sin).to(x.dtype)
    turned[..., halves[1]] = (second * cos + first * sin).to(x.dtype)
    return turned
