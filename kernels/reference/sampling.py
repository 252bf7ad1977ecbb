"""Truth of the sampler: from logits to token ids, with a sort and in the open.

The draw is the Gumbel-max trick (Gumbel, 1954; Maddison et al., "A* Sampling", 2014): the arg-max of
``logit / temperature + G`` over the kept tokens, where ``G = -log(E)`` and E is exponential, is a draw from their
softmax. E is a hash of (seed, number of the draw, token id), so a token depends on its own row and on nothing else:
not on batch mates, chunks, preemption or device, up to the rounding of exp, log and sums.

The hash is made of integer operations alone, the same in every backend:

    seed, draw  -> 64-bit key    the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), in two stages
    key, token  -> 32 bits       token * golden + low word, then the mixer ``lowbias32`` (Wellons, 2018), with the high
                                 word of the key joined in before its last product, and without its last step, which
                                 would only stir the low half

For one key the second stage is a bijection of 32-bit integers. The bits w in (0, 1) become E = -log(1 - w): the winners
of a large vocabulary have a small E, and a small w keeps all its bits in fp32. So a token of less than about 2^-32 of
the mass is never drawn.
"""

import math

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
MAX_SCALE = 1e30
"""Largest 1 / temperature: logits of 1e8 still scale to finite numbers. Colder rows draw as at this temperature."""

_GOLDEN64, _MIX64 = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN32, _MIX32 = 0x9E3779B9, (0x7FEB352D, 0x846CA68B)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    draws: Tensor,
) -> Tensor:
    """One token a row: int64 [B].

    Tokens are ordered by logit, the largest first, equal ones by id, the lowest first. Of this order a row keeps, after
    the temperature: the first ``top_k``; of these, each token that has less than ``top_p`` of their mass before it; and
    of these, each whose probability is at least ``min_p`` of the first one's. The first token is always kept.

    Args:
        logits: fp32, fp16 or bf16 [B, V]. NaN counts as minus infinity. A row with plus infinity draws the first of
            those; a row of nothing but minus infinity gives token 0.
        temperature: fp32 [B]; 0 is the arg-max, the lowest id among equals.
        top_k: int32 [B]; 0 (or V and more) keeps all.
        top_p: fp32 [B]; 1 keeps all.
        min_p: fp32 [B]; 0 keeps all.
        seeds, draws: int64 [B]; the seed of each row's request and the number of the draw in its stream.
    """
    x = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    hot = (temperature > 0)[:, None]
    scale = scales(temperature)[:, None]
    kept = torch.zeros_like(x, dtype=torch.bool).scatter(1, *_kept(x, scale, top_k, top_p, min_p))
    tokens = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    scores = x * scale - exponentials(row_keys(seeds, draws), tokens).log2()
    return torch.where(hot, scores.where(kept, -torch.inf), x).argmax(1)


def _kept(x: Tensor, scale: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids int64 [B, V] in order, and which of them are kept, bool [B, V]."""
    ordered, ids = x.sort(dim=1, descending=True, stable=True)
    top = ordered[:, :1]
    in_k = torch.arange(x.shape[1], device=x.device) < torch.where(top_k > 0, top_k, x.shape[1])[:, None]
    weights = torch.exp2((ordered - top) * scale).double().where(in_k, 0.0)
    before = weights.cumsum(1) - weights
    p = top_p[:, None]
    keep = in_k & ((before < p * weights.sum(1, keepdim=True)) | (p >= 1))
    keep &= ordered >= top + min_p[:, None].log2() / scale
    keep[:, 0] = True
    return ids, keep


def scales(temperature: Tensor) -> Tensor:
    """What turns logits into exponents of two: fp32, log2(e) / temperature, bounded; 1 where the temperature is 0."""
    return torch.where(temperature > 0, (temperature.reciprocal() * LOG2E).clamp(max=MAX_SCALE), 1.0)


def row_keys(seeds: Tensor, draws: Tensor) -> Tensor:
    """The 64-bit key of each (seed, draw): int64 [B]."""
    golden = _signed(_GOLDEN64, 64)
    return _splitmix(_splitmix(seeds + golden) + (draws + 1) * golden)


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """E of each row and token, positive fp32 [B, T], from ``keys`` int64 [B] and ``tokens`` int32 [T]."""
    low, high = keys.int()[:, None], (keys >> 32).int()[:, None]  # a narrowing cast keeps the low bits
    bits = tokens * _signed(_GOLDEN32, 32) + low
    bits = (bits ^ _shifted(bits, 16)) * _signed(_MIX32[0], 32)
    bits = (bits ^ _shifted(bits, 15) ^ high) * _signed(_MIX32[1], 32)
    w = (bits.long() & 0xFFFFFFFF).float() * 2.0**-32 + 2.0**-33
    w = w.clamp(max=1 - 2.0**-24)  # what rounds to 1
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4))))  # 1 - w would lose the low bits of a small w
    return torch.where(w < 2.0**-6, series, -torch.log(1 - w))


def _splitmix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(_MIX64[0], 64)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX64[1], 64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right of a signed tensor's bits."""
    return (x >> by) & ((1 << (x.element_size() * 8 - by)) - 1)


def _signed(constant: int, bits: int) -> int:
    """The signed integer of the same bits."""
    return constant - (1 << bits) if constant >> (bits - 1) else constant
