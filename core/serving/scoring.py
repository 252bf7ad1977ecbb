"""The log-likelihood of given targets: what an engine computes when it draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from octavo.core.config import SamplingParams
from octavo.core.encoding.reusing import extended
from octavo.core.errors import CapacityError
from octavo.core.execution.token_list import TokenList
from octavo.core.inspection import capacity_report
from octavo.core.interfaces import SegmentReuse, SparseMethod
from octavo.core.sequence import Sequence as TokenSequence
from octavo.core.serving.prompts import Prompt
from octavo.core.serving.requests import new_request

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def score_many(
    engine: Engine,
    items: Sequence[tuple[Prompt, str | list[int], SparseMethod | None]],
    unseen_tokens: int = 0,
    reuse: SegmentReuse | None = None,
    priors: Sequence[Sequence[float] | None] = (),
) -> list[list[float]]:
    """``Engine.score`` for several (prompt, target, method) at once, batched; ``unseen_tokens`` and ``reuse`` as for
    ``Engine.submit``, ``priors``: a token prior of each, or None."""
    requests = []
    params = SamplingParams(max_tokens=1, seed=engine.config.seed)
    for (prompt, target, method), prior in zip_longest(items, priors):
        prefix, segments = engine._prompts.read_segments(prompt)
        forced = engine._prompts.read(target, continues=True)
        layout = extended(engine, engine._text, 0, segments, reuse)
        request = new_request(engine, prefix, params, None, method, 0, None, len(forced), layout, unseen_tokens, prior)
        requests.append((request, forced))
    for request, forced in requests:
        sequence = TokenSequence(request, 0, TokenList(request.prompt, forced), engine._pool, engine._plan)
        sequence.forced = True
        sequence.logprobs_from = len(request.prompt)
        engine._enter(request, sequence)
        engine._scheduler.add(sequence)
    engine.finish([request.request_id for request, _ in requests])
    scores = []
    for request, forced in requests:
        if request.sequences[0].finish_reason != "stop":
            said = capacity_report.not_scored(len(request.prompt), len(forced), engine._pool)
            raise request.error or CapacityError(said)
        known = request.sequences[0].known_logprobs
        positions = range(len(request.prompt), len(request.prompt) + len(forced))
        scores.append([known[at][token] for at, token in zip(positions, forced, strict=True)])
    return scores
