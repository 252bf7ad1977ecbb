"""What page policies waste on sequences of given lengths, without a model: counted in layouts, and predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.scripts.schema import PageSize

if TYPE_CHECKING:
    from octavo.core.interfaces import PagePolicy
    from octavo.core.memory.page_layout import Segment

Row = dict[str, Any]

TEXT_SIGMA = 1.0
"""Standard deviation of the logarithm of a text's length: the middle two thirds span a factor of seven."""
IMAGES_A_PROMPT = 4
TEXT_BETWEEN_IMAGES = 60
"""Mean tokens of the texts before, between and after a prompt's images; exponentially distributed."""
TEXT_PAGE = 16


def waste_rows(config: PageSize) -> list[Row]:
    """One row a kind of prompt and page policy: text under every fixed size, prompts with four images of one size under
    every policy for images."""
    from octavo.core.policies.page_policies import PAGE_POLICIES

    random = np.random.default_rng(config.seed)
    count = min(config.sequences, config.limit or config.sequences)
    fixed = PAGE_POLICIES["fixed"]
    texts = text_prompts(random, count, config.text_tokens)
    rows = [
        _row(f"text of {config.text_tokens} on average", "fixed", size, texts, {"text": fixed(size)})
        for size in config.page_sizes
    ]
    for tokens in config.images:
        prompts = image_prompts(random, count, tokens)
        policies = {
            "text's page": fixed(TEXT_PAGE),
            "ratio 1.5": PAGE_POLICIES["ratio"](1.5, TEXT_PAGE),
            "divisor up to 48": PAGE_POLICIES["divisor"](cap=48),
            "whole": PAGE_POLICIES["whole"](),
        }
        if int(tokens**0.5) ** 2 == tokens:
            policies["rows"] = PAGE_POLICIES["rows"]()
        for name, policy in policies.items():
            by_kind = {"text": fixed(TEXT_PAGE), "image": policy}
            rows.append(_row(f"4 images of {tokens}", name, policy.page_tokens(tokens), prompts, by_kind))
    return rows


def text_prompts(random: np.random.Generator, count: int, mean_tokens: int) -> list[list[Segment]]:
    """Texts of log-normal length with this mean, at least one token each."""
    from octavo.core.memory.page_layout import Segment

    logs = random.normal(np.log(mean_tokens) - TEXT_SIGMA**2 / 2, TEXT_SIGMA, count)
    return [[Segment("text", max(1, round(length)))] for length in np.exp(logs)]


def image_prompts(random: np.random.Generator, count: int, tokens: int) -> list[list[Segment]]:
    """Prompts of text and four images in turn, text at both ends."""
    from octavo.core.memory.page_layout import Segment

    prompts = []
    for _ in range(count):
        lengths = 1 + random.exponential(TEXT_BETWEEN_IMAGES - 1, IMAGES_A_PROMPT + 1).round().astype(int)
        first, *others = (Segment("text", int(length)) for length in lengths)
        prompts.append([first, *(part for text in others for part in (Segment("image", tokens), text))])
    return prompts


def _row(
    task: str, policy: str, page: int, prompts: Sequence[Sequence[Segment]], policies: Mapping[str, PagePolicy]
) -> Row:
    from octavo.core.memory.page_layout import PageLayout, predicted_waste
    from octavo.kernels.layout import unit_tokens_for

    unit = unit_tokens_for([policy.grain for policy in policies.values()])
    totals = [sum(segment.tokens for segment in segments) for segments in prompts]
    layouts = [PageLayout(segments, policies, unit) for segments in prompts]
    waste = sum(layout.waste(total) for layout, total in zip(layouts, totals, strict=True))
    predicted = sum(predicted_waste(segments, policies) for segments in prompts)
    slots = sum(totals) + waste
    return {
        "name": "layout",
        "task": task,
        "policy": policy,
        "page_tokens": page,
        "requests": len(prompts),
        "pages_per_sequence": mean(layout.pages_for(total) for layout, total in zip(layouts, totals, strict=True)),
        "waste_percent": 100 * waste / slots,
        "predicted_waste_percent": 100 * predicted / slots,
    }
