"""What can be wrong with a request, asked before anything is held."""

from __future__ import annotations

from collections.abc import Sequence as Sequential
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core import interrupts, sizing
from octavo.core.compression.refusals import compressor_of, require_compression, require_pages
from octavo.core.config import SamplingParams
from octavo.core.encoding.reusing import extended, validate_reused
from octavo.core.execution.drafts import DraftRule
from octavo.core.execution.token_list import TokenList
from octavo.core.hosting.refusals import hosting_of, require_host_room, require_host_tier
from octavo.core.interfaces import Drafter, SegmentReuse, SparseMethod
from octavo.core.memory.page_layout import PageLayout
from octavo.core.memory.prefix_cache import root_key
from octavo.core.request import Request
from octavo.core.sequence import Sequence

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.serving.prompts import ReadPrompt


def validate_method(method: SparseMethod, engine: Engine) -> None:
    """Refuse, with a ValueError, what is no sparse method or cannot serve this model or page size."""
    if not callable(getattr(method, "select", None)):
        raise ValueError(f"method={method!r} is no sparse method; octavo.scripts.build.method(name) makes one")
    method.validate(engine.spec, engine.config.text_page_tokens)
    require_compression(method, engine)
    require_host_tier(method, engine)
    pattern = getattr(method, "prefill", None)
    if pattern is not None and compressor_of(method) is not None:
        raise ValueError(f"method {method.name!r} drops tokens and has a prefill pattern; they do not go together yet")
    if pattern is not None and pattern.block_tokens > engine.config.step_tokens:
        raise ValueError(
            f"method {method.name!r} computes prompts in blocks of {pattern.block_tokens} tokens, but a step has "
            f"at most step_tokens={engine.config.step_tokens}; raise it, or take smaller blocks"
        )


def require_room(
    engine: Engine,
    layout: PageLayout,
    prompt_tokens: int,
    params: SamplingParams,
    method: SparseMethod | None,
    required_tokens: int | None = None,
) -> None:
    """Refuse, with a ValueError, a prompt that can never fit with what must follow it, or that ``method`` cannot
    serve."""
    must = params.max_tokens if params.ignore_eos else max(1, params.min_tokens)
    required = must if required_tokens is None else required_tokens
    sizing.check_fits(layout, engine._plan, prompt_tokens, required, engine._max_tokens, engine._pool)
    validate_reused(layout, prompt_tokens)
    if method is not None:
        validate_method(method, engine)
        require_pages(method, layout, prompt_tokens, engine.spec)
        require_host_room(method, engine, layout, prompt_tokens, required)
        if (compressor := compressor_of(method)) is not None:
            last = min(prompt_tokens + params.max_tokens, engine._max_tokens) if compressor.every else prompt_tokens
            engine._compaction.require_positions(compressor, last)


def new_request(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams | None,
    request_id: str | None,
    method: SparseMethod | None,
    priority: int,
    salt: str | None,
    required_tokens: int | None = None,
    layout: PageLayout | None = None,
    unseen_tokens: int = 0,
    token_prior: Sequential[float] | None = None,
) -> Request:
    """Check everything that can be wrong with a request; changes nothing but the count of arrivals."""
    params = params or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
    for name, value in (("request_id", request_id), ("salt", salt)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be a string, got {value!r}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    if params.stop and engine.tokenizer is None:
        raise ValueError(f"stop strings {params.stop!r} need a tokenizer, and the engine has none")
    if bad := [token for token in params.stop_token_ids if token >= engine.spec.vocab_size]:
        raise ValueError(f"stop_token_ids {bad} are outside the vocabulary of {engine.spec.vocab_size} tokens")
    if request_id is not None and (request_id in engine._requests or request_id in engine._productions):
        raise ValueError(f"request id {request_id!r} is in use; wait for it to end, abort it, or choose another")
    if params.n > engine.config.max_seqs:
        raise ValueError(f"n={params.n} samples are more than max_seqs={engine.config.max_seqs} sequences at once")
    layout = layout or engine._text
    method = method or engine._method
    require_room(engine, layout, len(prompt), params, method, required_tokens)
    if isinstance(unseen_tokens, bool) or not isinstance(unseen_tokens, int) or not 0 <= unseen_tokens < len(prompt):
        raise ValueError(
            f"unseen_tokens={unseen_tokens!r} must be 0 or more, and fewer than the prompt's {len(prompt)}"
        )
    prior = None if token_prior is None else _page_prior(token_prior, len(prompt), method, engine)
    rule = None
    if method is not None and isinstance(method, Drafter):  # a protocol: asking takes as long as all else
        most = min(method.drafts, engine.config.step_tokens - 1)  # they are verified in one step
        beyond = engine._runner.choosers.whole_tokens(method.draft)
        rule = DraftRule(method.draft, most, beyond, method.forced_acceptance)
        method = None
    arrival = engine._arrivals
    while request_id is None and f"request-{arrival}" in engine._requests:
        arrival += 1
    engine._arrivals = arrival + 1
    return Request(
        request_id=f"request-{arrival}" if request_id is None else request_id,
        prompt=prompt,
        params=params,
        method=method,
        priority=priority,
        arrival=arrival,
        seed=(engine.config.seed * 1_000_003 + arrival) * 1_000_003 if params.seed is None else params.seed,
        root=root_key([] if salt is None else [("salt", salt)]),
        layout=layout,
        unforked=params.n - 1,
        max_model_tokens=engine._max_tokens,
        eos_token_ids=engine._eos,
        compressor=None if method is None else compressor_of(method),
        unseen_tokens=unseen_tokens,
        hosting=None if method is None else hosting_of(method, engine),
        drafting=rule,
        prior=prior,
    )


def accept(
    engine: Engine,
    read: ReadPrompt,
    params: SamplingParams | None,
    request_id: str | None = None,
    method: SparseMethod | None = None,
    priority: int = 0,
    salt: str | None = None,
    unseen_tokens: int = 0,
    reuse: SegmentReuse | None = None,
    *,
    token_prior: Sequential[float] | None = None,
    streamed: bool = True,
) -> str:
    """``Engine.submit`` of a prompt that is read. One that is not ``streamed`` gets no text."""
    tokens, layout = read.tokens, extended(engine, engine._text, 0, read.segments, reuse)
    request = new_request(
        engine, tokens, params, request_id, method, priority, salt, None, layout, unseen_tokens, token_prior
    )
    request.streamed = streamed
    sequence = Sequence(request, 0, TokenList(request.prompt), engine._pool, engine._plan)
    with interrupts.held():
        engine._enter(request, sequence)
        engine._scheduler.add(sequence)
    return request.request_id


def _page_prior(
    given: Sequential[float], tokens: int, method: SparseMethod | None, engine: Engine
) -> NDArray[np.float32]:
    """The largest value of each page's tokens."""
    if getattr(method, "prior", None) is None:
        name = "dense" if method is None else method.name
        raise ValueError(f"token_prior goes with a method that has a prior, and {name} has none")
    values = np.asarray(given, np.float32)
    if values.shape != (tokens,):
        raise ValueError(f"token_prior has the shape {list(values.shape)}, but the prompt has {tokens} tokens")
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"token_prior must be 0 to 1, got {values.min()} to {values.max()}")
    page = engine.config.text_page_tokens
    pages: NDArray[np.float32] = np.pad(values, (0, -tokens % page)).reshape(-1, page).max(1)
    return pages
