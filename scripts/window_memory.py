"""What a request holds where layers have windows: predicted in closed form, and counted on a running engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.scripts.run import Sample

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.core.memory.layer_groups import LayerPlan
    from octavo.core.memory.page_layout import PageLayout

WARM_UP_TOKENS = 64


def steps(prompt: int, new: int, step_tokens: int) -> list[tuple[int, int]]:
    """The tokens (start, end) that each step of a request computes when it is alone: chunks, then one at a time."""
    chunks = [(start, min(start + step_tokens, prompt)) for start in range(0, prompt, step_tokens)]
    return chunks + [(at, at + 1) for at in range(prompt, prompt + new - 1)]


def held_units(plan: LayerPlan, layout: PageLayout, start: int, end: int) -> int:
    """Units that a sequence holds while its tokens ``start`` to ``end`` are computed: in each group of layers the pages
    from the first token that ``start`` sees to ``end``."""
    last = layout.first_entry(layout.pages_for(end))
    firsts = [layout.first_entry(layout.page_of(group.first_seen(start))) for group in plan.groups]
    return sum((last - first) * group.slices for first, group in zip(firsts, plan.groups, strict=True))


def fitting(pool_bytes: int, peak_bytes: int, decoding_bytes: int) -> int:
    """Requests that fit a pool, of which one holds ``peak_bytes`` and the others ``decoding_bytes``."""
    return 0 if peak_bytes > pool_bytes else 1 + (pool_bytes - peak_bytes) // decoding_bytes


class Answer(NamedTuple):
    """A request's output. ``margins`` are nats between the two most likely tokens at each position; ``first_seconds``
    and ``seconds`` end with the first and the last token; ``units_held`` is the pool's count after every step but the
    last, when the request has ended."""

    tokens: list[int]
    margins: list[float]
    cached_tokens: int
    first_seconds: float
    seconds: float
    units_held: list[int]


def measure(engine: Engine, prompt: list[int], new: int) -> Sample:
    """One prompt three times, from which the engine always writes ``new`` tokens, greedily: from nothing, on a prefix
    hit, and in a session that is forked halfway through the output."""
    from octavo.core.memory.layer_groups import LayerPlan
    from octavo.core.memory.page_layout import PageLayout
    from octavo.core.sizing import kv_dtype

    complete(engine, prompt[: min(WARM_UP_TOKENS, len(prompt) // 2)], 2, salt="warm-up")
    cold = complete(engine, prompt, new)
    peak = engine.stats().units_held_peak
    hit = complete(engine, prompt, new)

    spec, config = engine.spec, engine.config
    plan = LayerPlan.of(spec.windows, config.layer_groups)
    layout = PageLayout([], config.policies, config.unit_tokens)
    forked = fork(engine, prompt, new, plan, layout)
    unit_tokens_bytes = config.unit_tokens * spec.kv_bytes_per_token(kv_dtype(config, spec).itemsize)
    return {
        "prompt_tokens": len(prompt),
        "new_tokens": new,
        "unit_bytes": unit_tokens_bytes // plan.slices,
        "table_slices": plan.slices,
        "tokens": cold.tokens,
        "margins": cold.margins,
        "units_held": cold.units_held,
        "units_held_peak": peak,
        "predicted_units_held": [
            held_units(plan, layout, *step) for step in steps(len(prompt), new, config.step_tokens)
        ],
        "prefill_seconds": cold.first_seconds,
        "decode_seconds": cold.seconds - cold.first_seconds,
        "hit": {
            "cached_tokens": hit.cached_tokens,
            "seconds": hit.first_seconds,
            "tokens": hit.tokens,
            "margins": hit.margins,
        },
        "fork": forked,
    }


def complete(engine: Engine, prompt: list[int], new: int, salt: str | None = None) -> Answer:
    """One request, alone in the engine, to its end. Those with different salts find no pages of one another."""
    from octavo.core import SamplingParams

    started = time.perf_counter()
    engine.submit(prompt, SamplingParams(max_tokens=new, ignore_eos=True, logprobs=2), salt=salt)
    token_seconds = []
    held = []
    while engine.has_work():
        news = engine.step()
        if news:
            token_seconds.append(time.perf_counter() - started)
        held.append(engine.stats().units_held)
    completion = news[-1].completion
    assert completion is not None
    sample = completion.samples[0]
    margins = [_margin(entry) for entry in sample.logprobs or []]
    return Answer(sample.token_ids, margins, completion.cached_tokens, token_seconds[0], token_seconds[-1], held[:-1])


def fork(engine: Engine, prompt: list[int], new: int, plan: LayerPlan, layout: PageLayout) -> dict[str, Any]:
    """A session that is forked halfway through its output. Both sides share every page, and when they write on, the
    first to write into the open page copies it, once a group of layers."""
    from octavo.core import SamplingParams

    half = new // 2
    session = engine.session(prompt)
    begun = session.generate(SamplingParams(max_tokens=half, ignore_eos=True, logprobs=2)).samples[0]
    before = engine.stats()
    started = time.perf_counter()
    twin = session.fork()
    fork_us = (time.perf_counter() - started) * 1e6
    forked = engine.stats()
    rest = SamplingParams(max_tokens=new - half, ignore_eos=True, logprobs=2)
    ends = [side.generate(rest).samples[0] for side in (twin, session)]
    after = engine.stats()
    session.close()
    twin.close()

    shared, stored = len(prompt) + half - 1, len(prompt) + new - 1  # the KV of the last token is not stored
    own = layout.first_entry(layout.pages_for(stored)) - layout.first_entry(layout.full_pages(shared))
    return {
        "fork_us": fork_us,
        "fork_units": forked.units_held - before.units_held,
        "copies": after.copies - before.copies,
        "predicted_copies": len(plan.groups) if layout.full_pages(shared) < layout.pages_for(shared) else 0,
        "units_held": after.units_held,
        "predicted_units_held": held_units(plan, layout, stored - 1, stored) + own * plan.slices,
        "sides": [
            {
                "tokens": begun.token_ids + end.token_ids,
                "margins": [_margin(entry) for entry in [*(begun.logprobs or []), *(end.logprobs or [])]],
            }
            for end in ends
        ],
    }


def _margin(entry: dict[int, float]) -> float:
    second, first = sorted(entry.values())[-2:]
    return first - second
