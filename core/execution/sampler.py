"""From logits to tokens: log-probabilities, penalties, and seeded draws that do not depend on batch mates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.execution.decode_state import signed
from octavo.core.outputs import TokenLogprobs
from octavo.core.sequence import Sequence
from octavo.kernels import ops


@dataclass(frozen=True)
class Draw:
    """The next token of a sequence, behind the first ``drafts`` of its drafts. ``draft``: it is one itself."""

    sequence: Sequence
    drafts: int = 0
    draft: bool = False

    @property
    def generated(self) -> int:
        return self.sequence.generated + self.drafts

    @property
    def logprobs(self) -> int | None:
        return None if self.draft else self.sequence.request.params.logprobs

    def seen(self) -> set[int]:
        """The tokens in front of it."""
        return {*self.sequence.tokens, *self.sequence.drafts.tokens[: self.drafts]}


@dataclass
class Drawn:
    """One token a draw, and its log-probability entries where they were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Tensor, draws: list[Draw], eos_token_ids: frozenset[int], backend: str = "reference") -> Drawn:
    """Draw tokens, each from its row of ``logits`` [R, V].

    Raw log-probabilities are taken first. Then, row by row: repetition penalty, end-of-sequence tokens masked below
    the minimum length, and either the arg-max or a seeded draw after temperature, top-k, top-p and min-p
    (``octavo.kernels.reference.sampling``). The number of the draw is how many tokens the sequence has generated.
    """
    wanted = [draw.logprobs for draw in draws]
    raw = logits if any(k is not None for k in wanted) else None
    logits = _penalised(logits, draws, eos_token_ids)
    tokens = ops.sample(logits, *_filters(draws, logits), backend).tolist()
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


def record_known(logits: Tensor, rows: list[tuple[Sequence, int]]) -> None:
    """Note the log-probabilities of tokens that are known already: row i of ``logits`` [R, V] is what comes behind a
    position of a sequence."""
    tokens = [sequence.tokens[position + 1] for sequence, position in rows]
    counts = [sequence.request.params.prompt_logprobs or 0 for sequence, _ in rows]
    for (sequence, position), entry in zip(rows, token_logprobs(logits, tokens, counts), strict=True):
        sequence.known_logprobs[position + 1] = entry


def _penalised(logits: Tensor, draws: list[Draw], eos_token_ids: frozenset[int]) -> Tensor:
    """Logits after the repetition penalty and the minimum length; the input is left alone."""
    changed = logits
    for row, draw in enumerate(draws):
        params = draw.sequence.request.params
        ending = sorted(eos_token_ids | set(params.stop_token_ids)) if draw.generated < params.min_tokens else []
        if params.repetition_penalty == 1.0 and not ending:
            continue
        if changed is logits:
            changed = logits.clone()
        if params.repetition_penalty != 1.0:
            ids = {token for token in draw.seen() if token < logits.shape[1]}  # and no placeholders of images
            seen = torch.tensor(sorted(ids), dtype=torch.int64, device=logits.device)
            scores = changed[row, seen]
            changed[row, seen] = torch.where(
                scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
            )
        if ending:
            changed[row, torch.tensor(ending, device=logits.device)] = -torch.inf
    return changed


def _filters(draws: list[Draw], logits: Tensor) -> tuple[Tensor, ...]:
    """Temperature, top-k, top-p, min-p, seed and draw of each row, where the logits are."""
    rows = [(draw.sequence.request.params, draw) for draw in draws]
    shares = torch.tensor([[p.temperature, p.top_p, p.min_p] for p, _ in rows], dtype=torch.float32)
    numbers = torch.tensor([[min(p.top_k, logits.shape[1]), signed(d.sequence.seed), d.generated] for p, d in rows])
    temperature, top_p, min_p = shares.T.contiguous().to(logits.device)
    top_k, seeds, numbers_drawn = numbers.T.contiguous().to(logits.device)
    return temperature, top_k.int(), top_p, min_p, seeds, numbers_drawn
