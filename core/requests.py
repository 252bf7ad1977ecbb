"""What can be wrong with a request, asked before anything is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core import interrupts, sizing
from octavo.core.config import SamplingParams
from octavo.core.encoding.reusing import extended, validate_reused
from octavo.core.interfaces import Hosting, SegmentReuse, SparseMethod
from octavo.core.memory.page_layout import PageLayout
from octavo.core.memory.prefix_cache import root_key
from octavo.core.sequence import Request, Sequence
from octavo.core.shared_list import SharedList
from octavo.kernels.layout import MAX_UNITS

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.prompts import ReadPrompt


def validate_method(method: SparseMethod, engine: Engine) -> None:
    """Refuse, with a ValueError, what is no sparse method or cannot serve this model or page size."""
    if not callable(getattr(method, "select", None)):
        raise ValueError(f"method={method!r} is no sparse method; octavo.scripts.build.method(name) makes one")
    method.validate(engine.spec, engine.config.text_page_tokens)
    if getattr(method, "compressor", None) is not None:
        engine._compaction.validate()
    hosting = hosting_of(method, engine)
    if hosting is None:
        return
    if engine._host is None:
        raise ValueError(
            f"{method.name} keeps its pages in host memory, and host_tokens=0 gives it none; set host_tokens to what "
            f"the requests that run at once have together, at least {engine._max_tokens} for the longest"
        )
    if any(engine.spec.windows) and not engine.config.layer_groups:
        raise ValueError(
            f"{method.name} keeps its pages in host memory, and layers of {engine.spec.name} with a window would miss "
            "them there; set layer_groups=True, so that those have tables of their own"
        )
    runs = engine._pool.most_units * engine._plan.unit_layers
    if hosting.whole_layers and runs >= MAX_UNITS:
        raise ValueError(
            f"{method.name} keeps dense layers apart from the others, so the pool counts as {runs} units of one layer, "
            f"more than the {MAX_UNITS - 1} that a table entry can name; set a smaller pool, or dense_layers=[]"
        )


def hosting_of(method: SparseMethod, engine: Engine) -> Hosting | None:
    """How a method's pages lie in the host tier; None if they stay in the pool."""
    ask = getattr(method, "hosting", None)
    hosting: Hosting | None = ask(engine.spec, engine.config.text_page_tokens) if ask is not None else None
    return hosting


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
        if not layout.uniform:
            raise ValueError(
                f"method {method.name!r} chooses among pages of one size, and this prompt has segments with "
                "pages of their own; sparse methods over several page sizes are not built yet"
            )
        if engine._host is not None and hosting_of(method, engine) is not None:
            pages = layout.full_pages(prompt_tokens + required - 1)
            units = pages * layout.page_entries(0) * engine._plan.groups[0].slices
            if units > engine._host.units_total:
                raise ValueError(
                    f"{method.name} keeps {pages} pages of a request of {prompt_tokens} + {required} tokens in host "
                    f"memory: {units} units, and the host tier has {engine._host.units_total}; raise host_tokens"
                )


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
        compressor=getattr(method, "compressor", None),
        unseen_tokens=unseen_tokens,
        hosting=None if method is None else hosting_of(method, engine),
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
    streamed: bool = True,
) -> str:
    """``Engine.submit`` of a prompt that is read. One that is not ``streamed`` gets no text."""
    tokens, layout = read.tokens, extended(engine, engine._text, 0, read.segments, reuse)
    request = new_request(engine, tokens, params, request_id, method, priority, salt, None, layout, unseen_tokens)
    request.streamed = streamed
    sequence = Sequence(request, 0, SharedList(request.prompt), engine._pool, engine._plan)
    with interrupts.held():
        engine._enter(request, sequence)
        engine._scheduler.add(sequence)
    return request.request_id
