"""Requests about images, and what their pages hold while they are served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo.core.inspection.page_census import HELD, IMAGE, SHARED, PageCensus

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.core import Completion, Engine, SamplingParams
    from octavo.core.interfaces import PagePolicy, SegmentEncoder
    from octavo.core.memory.page_layout import Segment


class TwoQuestions(NamedTuple):
    """Prompts that are alike up to their questions."""

    first: list[Any]
    second: list[Any]


def questions(seed: int, requests: int, images: int) -> list[TwoQuestions]:
    """Prompts in the demo model's language, with remarks here and there, each about ``images`` scenes of its own."""
    from octavo.multimodal.scenes_prompts import question_part, remarked_images
    from octavo.multimodal.scenes_questions import ask
    from octavo.multimodal.scenes_render import draw

    made = []
    for number in range(requests):
        rng = Random(f"two questions {seed} {number}")
        described = ask(rng, "indexed_describe", images)
        counted = f"in image {rng.randint(1, images)} , how many objects ?"
        shown = draw(described.scenes)
        about = [part if isinstance(part, str) else shown[part] for part in remarked_images(rng, images)]
        asked = ([*about, question_part(text)] for text in (described.question, counted))
        made.append(TwoQuestions(*asked))
    return made


class EncodedOnce:
    """An encoder whose images have been encoded before, so that a time is the language model's."""

    def __init__(self, encoder: SegmentEncoder, items: Sequence[Any]) -> None:
        reader: Any = encoder
        self._encoder = reader
        self.bidirectional = encoder.bidirectional
        read = [reader.read(item) for item in items]
        self._known: dict[bytes, Tensor] = {reader.identity(item): reader.encode([item])[0] for item in read}

    def read(self, item: Any) -> Any:
        return self._encoder.read(item)

    def identity(self, item: Any) -> bytes:
        return bytes(self._encoder.identity(item))

    def witness(self, item: Any) -> bytes:
        return bytes(self._encoder.witness(item))

    def n_tokens(self, item: Any) -> int:
        return int(self._encoder.n_tokens(item))

    def encode(self, items: Sequence[Any]) -> Tensor:
        import torch

        return torch.stack([self._known[self.identity(item)] for item in items])


@dataclass
class PagesSeen:
    """What requests held, once their prompts were computed: slots and empty ones summed over requests and steps, and
    ``pages`` and ``image_pages`` of each request at its last step. ``predicted`` is what the closed form says is empty,
    -n mod P a segment."""

    slots: int = 0
    empty: int = 0
    predicted: int = 0
    pages: dict[str, int] = field(default_factory=dict)
    image_pages: dict[str, int] = field(default_factory=dict)


def serve(
    engine: Engine,
    prompts: Sequence[Any],
    params: SamplingParams,
    salt: str,
    seen: PagesSeen | None = None,
) -> list[Completion]:
    """All prompts, in order, step by step; each shares pages with the one of the same number and salt before it.

    Args:
        seen: gets what is seen between steps, which takes time.
    """
    ids = [engine.submit(prompt, params, salt=f"{salt} {number}") for number, prompt in enumerate(prompts)]
    segments = {} if seen is None else dict(zip(ids, segments_of(engine, prompts), strict=True))
    census = PageCensus()
    done: dict[str, Completion] = {}
    while len(done) < len(ids):
        done |= {news.request_id: news.completion for news in engine.step() if news.completion is not None}
        if seen is not None:
            look(engine, census, segments, seen)
    return [done[request_id] for request_id in ids]


def look(engine: Engine, census: PageCensus, segments: Mapping[str, Sequence[Segment]], seen: PagesSeen) -> None:
    """Add what the pool holds now. Precondition: no two requests hold the same page."""
    cells = census.take(engine)
    assert not (cells["state"] == SHARED).any()
    for number, request_id in enumerate(census.requests, start=1):
        held = cells[(cells["request"] == number) & np.isin(cells["state"], (HELD, IMAGE))]
        tokens = int(held["tokens"].sum())
        own = segments[request_id]
        if tokens < sum(segment.tokens for segment in own):
            continue
        slots = len(held) * engine.config.unit_tokens
        seen.slots += slots
        seen.empty += slots - tokens
        seen.predicted += predicted_empty(own, tokens, engine.config.policies)
        seen.pages[request_id] = len(np.unique(held["page"]))
        seen.image_pages[request_id] = len(np.unique(held["page"][held["state"] == IMAGE]))


def predicted_empty(segments: Sequence[Segment], tokens: int, policies: Mapping[str, PagePolicy]) -> int:
    """Empty slots of a request of ``tokens`` tokens, of which those behind ``segments`` are text."""
    from octavo.core.memory.page_layout import TEXT, Segment, predicted_waste

    *closed, last = segments
    assert last.kind == TEXT
    text = tokens - sum(segment.tokens for segment in closed)
    return predicted_waste([*closed, Segment(TEXT, text)], policies)


def segments_of(engine: Engine, prompts: Sequence[Any]) -> list[list[Segment]]:
    """The segments that the engine makes of prompts."""
    return [engine._prompts.read_segments(prompt).segments for prompt in prompts]


def images_of(prompts: Sequence[Any]) -> list[Any]:
    return [part for prompt in prompts for part in prompt if not isinstance(part, str)]


class Difference(NamedTuple):
    """``same``: tokens up to the first that differs. ``most``: the largest difference of a log-probability up to there,
    over the tokens that both list, in nats."""

    same: int
    most: float


def difference(one: Completion, other: Completion) -> Difference:
    """How two completions of one prompt, with ``logprobs``, differ."""
    first, second = one.samples[0], other.samples[0]
    pairs = list(zip(first.token_ids, second.token_ids, strict=True))
    same = next((at for at, (token, twin) in enumerate(pairs) if token != twin), len(pairs))
    most = 0.0
    assert first.logprobs is not None and second.logprobs is not None
    for own, its in list(zip(first.logprobs, second.logprobs, strict=True))[: same + 1]:
        most = max(most, *(abs(own[token] - its[token]) for token in own.keys() & its.keys()))
    return Difference(same, most)
