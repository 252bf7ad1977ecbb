"""Batches of requests whose throughput is measured: real text, fixed lengths, the same for every contender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from octavo.scripts.refusal import ConfigError

SMOKE_PROMPT, SMOKE_NEW = 48, 8  # tokens a request has at most if only some requests are run

Lengths = tuple[int, int]


@dataclass(frozen=True)
class Workload:
    """Requests that are all there from the start. Request i has ``prompts[i]`` and gets ``new_tokens[i]`` tokens, no
    fewer and no more."""

    name: str
    prompts: tuple[list[int], ...]
    new_tokens: tuple[int, ...]

    @property
    def total_new(self) -> int:
        return sum(self.new_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.new_tokens, strict=True))

    def slots(self, page_tokens: int, at_once: int | None = None) -> int:
        """Pool slots that hold all requests, each in whole pages, or any ``at_once`` of them."""
        sizes = sorted(
            (len(prompt) + new for prompt, new in zip(self.prompts, self.new_tokens, strict=True)), reverse=True
        )
        return sum(-(-size // page_tokens) * page_tokens for size in sizes[:at_once])

    def cut(self, requests: int, prompt: int, new: int) -> Workload:
        """The first requests, with at most so many tokens each."""
        return Workload(
            name=self.name,
            prompts=tuple(ids[:prompt] for ids in self.prompts[:requests]),
            new_tokens=tuple(min(count, new) for count in self.new_tokens[:requests]),
        )


@dataclass(frozen=True)
class Shape:
    """How many requests a workload has, and the lengths (prompt, new) of each as ``draw`` finds them."""

    requests: int
    draw: Callable[[Random], Lengths]


SHAPES = {
    "uniform": Shape(16, lambda random: (256, 64)),
    "ragged": Shape(32, lambda random: (random.randint(32, 1024), random.randint(16, 256))),
    "mixed": Shape(256, lambda random: (random.randint(100, 1024), random.randint(100, 1024))),
    "long": Shape(32, lambda random: (random.randint(16_384, 32_768), random.randint(128, 512))),
}
"""By name. Every length is drawn with equal probability, ends included."""


def build(
    name: str,
    tokenizer: Any,
    seed: int,
    limit: int | None = None,
    *,
    requests: int | None = None,
    last: Lengths | None = None,
) -> Workload:
    """A workload by name. Prompts are consecutive pieces of the committed code items' text, in an order drawn by
    ``seed``; the same name, tokenizer and seed give the same requests.

    Args:
        limit: take the first so many requests and cut them short, for a smoke test.
        requests: so many, drawn like the others; None is the workload's own number.
        last: lengths (prompt, new) of one request more, which comes last.
    """
    from octavo.scripts.tasks.items import load_items, prompt_text

    random = Random(seed)
    lengths = _lengths(name, random, limit, requests, last)
    items = load_items()
    random.shuffle(items)
    needed = sum(prompt for prompt, _ in lengths)
    text: list[int] = []
    while len(text) < needed:
        for item in items:
            text += tokenizer.encode(prompt_text(item), add_special_tokens=False)
            if len(text) >= needed:
                break
    return _cut_up(name, text, lengths, limit)


def random_ids(
    name: str,
    vocab_size: int,
    seed: int,
    limit: int | None = None,
    *,
    requests: int | None = None,
    last: Lengths | None = None,
) -> Workload:
    """As ``build``, for a model without a tokenizer: token ids are drawn with equal probability."""
    random = Random(seed)
    lengths = _lengths(name, random, limit, requests, last)
    ids = random.choices(range(vocab_size), k=sum(prompt for prompt, _ in lengths))
    return _cut_up(name, ids, lengths, limit)


def _lengths(name: str, random: Random, limit: int | None, requests: int | None, last: Lengths | None) -> list[Lengths]:
    shape = SHAPES[name]
    drawn = [shape.draw(random) for _ in range(shape.requests if requests is None else requests)]
    return drawn[:limit] + ([] if last is None else [last])


def _cut_up(name: str, ids: list[int], lengths: list[Lengths], limit: int | None) -> Workload:
    """Consecutive pieces of ``ids`` as prompts; with ``limit``, all requests are short ones."""
    ends = list(accumulate(prompt for prompt, _ in lengths))
    prompts = tuple(ids[end - prompt : end] for end, (prompt, _) in zip(ends, lengths, strict=True))
    whole = Workload(name, prompts, tuple(new for _, new in lengths))
    return whole if limit is None else whole.cut(len(lengths), SMOKE_PROMPT, SMOKE_NEW)


def refuse_too_long(workload: Workload, model: Any) -> None:
    """Raises ConfigError if a request has more tokens than the model has positions."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and workload.longest > most:
        raise ConfigError(
            f"workload {workload.name} has a request of {workload.longest} tokens, and the model at most {most}; "
            "take another model or workload, a smaller long_prompt_tokens if there is one, or limit=2 for a smoke test"
        )


def warm_up(workload: Workload, model: Any) -> Workload:
    """Enough to load, allocate and compile: on a GPU every shape, elsewhere two short requests, of which the last
    decodes on alone, since one row has compiled code of its own."""
    if model.device.type == "cuda":
        return workload
    short = workload.cut(requests=2, prompt=64, new=4)
    *others, last = short.new_tokens
    return replace(short, new_tokens=(*others, last + 4))
