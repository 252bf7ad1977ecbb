"""From logits to tokens: log-probabilities, penalties, and seeded draws that do not depend on batch mates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.outputs import TokenLogprobs
from octavo.core.sequence import Sequence

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: NDArray[np.uint64], draws: NDArray[np.uint64]) -> NDArray[np.floating]:
    """The ``draws``-th number in [0, 1) of each seed's stream.

    Counter-based (the finaliser of SplitMix64, Steele et al., OOPSLA 2014, applied to the seed and then to the
    counter), so a draw depends on the request's seed and on how many tokens it has, and on nothing else: not on
    batch mates, chunks or preemption.
    """
    with np.errstate(over="ignore"):
        return (_mix(_mix(seeds + _GOLDEN) + (draws + np.uint64(1)) * _GOLDEN) >> np.uint64(11)) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


@dataclass
class Drawn:
    """One token a sequence, and its log-probability entries where they were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> Drawn:
    """Draw the next token of each sequence from its row of ``logits`` fp32 [R, V].

    Raw log-probabilities are taken first. Then, row by row: repetition penalty, end-of-sequence tokens masked below
    the minimum length, and either the arg-max or a seeded draw after temperature, top-k, top-p and min-p.
    """
    wanted = [sequence.request.params.logprobs for sequence in sequences]
    raw = logits if any(k is not None for k in wanted) else None
    logits = _penalised(logits, sequences, eos_token_ids)
    chosen = logits.argmax(1)
    hot = [row for row, sequence in enumerate(sequences) if sequence.request.params.temperature > 0]
    if hot:
        rows = torch.tensor(hot, device=logits.device)
        chosen[rows] = _draw(logits[rows], [sequences[row] for row in hot])
    tokens = chosen.tolist()
    if raw is None:
        return Drawn(tokens, [None] * len(tokens))
    rows_wanted = [row for row, k in enumerate(wanted) if k is not None]
    entries = token_logprobs(
        raw[rows_wanted], [tokens[row] for row in rows_wanted], [wanted[r] or 0 for r in rows_wanted]
    )
    by_row = dict(zip(rows_wanted, entries, strict=True))
    return Drawn(tokens, [by_row.get(row) for row in range(len(tokens))])


def token_logprobs(logits: Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """Raw log-softmax of each row's ``tokens`` and of its ``counts`` most likely tokens, best first."""
    logprobs = logits.log_softmax(1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = min(max(counts, default=0), logits.shape[1])
    top = logprobs.topk(best, 1) if best else None
    values = top.values.tolist() if top else [[]] * len(tokens)
    ids = top.indices.tolist() if top else [[]] * len(tokens)
    return [
        {**dict(zip(ids[row][:count], values[row][:count], strict=True)), token: own[row]}
        for row, (token, count) in enumerate(zip(tokens, counts, strict=True))
    ]


def _penalised(logits: Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> Tensor:
    """Logits after the repetition penalty and the minimum length; the input is left alone."""
    changed = logits
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        ending = sorted(eos_token_ids | set(params.stop_token_ids)) if sequence.generated < params.min_tokens else []
        if params.repetition_penalty == 1.0 and not ending:
            continue
        if changed is logits:
            changed = logits.clone()
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(sequence.tokens)), device=logits.device)
            scores = changed[row, seen]
            changed[row, seen] = torch.where(
                scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
            )
        if ending:
            changed[row, torch.tensor(ending, device=logits.device)] = -torch.inf
    return changed


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Inverse transform sampling over the sorted, filtered distribution of each row."""
    params = [sequence.request.params for sequence in sequences]
    device = logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32)[:, None]

    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    probs = (ordered / column([p.temperature for p in params])).softmax(1)
    rank = torch.arange(probs.shape[1], device=device)
    keep = rank < column([p.top_k or probs.shape[1] for p in params])
    probs = probs.where(keep, 0.0)
    probs = probs / probs.sum(1, keepdim=True)
    keep = (probs.cumsum(1) - probs) < column([p.top_p for p in params])
    keep &= probs >= column([p.min_p for p in params]) * probs[:, :1]
    keep[:, 0] = True
    cumulative = probs.where(keep, 0.0).double().cumsum(1)
    seeds = np.array([sequence.seed & (2**64 - 1) for sequence in sequences], np.uint64)
    draws = np.array([sequence.generated for sequence in sequences], np.uint64)
    points = torch.from_numpy(uniform(seeds, draws)).to(device)[:, None] * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, points, right=True)
    last_kept = keep.sum(1, keepdim=True) - 1
    return ids.gather(1, torch.minimum(picked, last_kept))[:, 0]
