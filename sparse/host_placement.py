"""The placement in which cold pages lie in host memory, and come to the device when a head chooses them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from octavo.core.hosting.interfaces import AwayPages, Hosting
from octavo.core.interfaces import PageView, Selection
from octavo.sparse.checks import check_integer
from octavo.sparse.replacement.lru import LeastRecentlyUsed
from octavo.sparse.resident_sets import ChoiceRecorder, FrameMaps, Replacement

PREFETCHES = ("none", "previous_step", "previous_layer", "next_query")


@dataclass(frozen=True)
class Host:
    """Once its prompt is computed, a sequence's pages lie in pinned host memory, but for the last ones, which are read
    in any case, and layers that read everything. A page that a KV head of a layer chooses is fetched into one of the
    frames that the sequence has on the device, unless it is in one already; one that was not chosen for long makes
    room (ArkVale, NeurIPS 2024, section 4.3). The kernel reads the same elements in the same order as without, so bits
    are the same.

    Attributes:
        slack_tokens: frames beyond the budget, in tokens, rounded up to whole pages. With none, what a step does not
            choose is gone in the next.
        replacement: which page makes room.
        prefetch: what is fetched beside the model's work, in the hope that it will be chosen: "none", or
            "previous_step": with the chosen pages come the next best by this step's scores, up to the slack, of which
            the next step may choose some;
            "previous_layer": for the next layer that chooses, the pages that this one has just chosen, the best first,
            as many as the slack has frames;
            "next_query": for the next layer, those that it would choose if its queries were those that its weights make
            of this layer's input (InfiniGen, OSDI 2024: ``octavo.core.execution.foresight``).
        recorder: sees what is chosen, on engines that first meet the method with it; no part of its identity.

    Deviations from the paper: pages go to the host when the prompt is computed and not as they fill; who makes room is
    a policy, where the paper takes the page of lowest score.
    """

    slack_tokens: int = 512
    replacement: Replacement = field(default_factory=LeastRecentlyUsed)
    prefetch: str = "none"
    recorder: ChoiceRecorder | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("placement.slack_tokens", self.slack_tokens, 0)
        if self.prefetch not in PREFETCHES:
            raise ValueError(f"placement.prefetch={self.prefetch!r} is none of: {', '.join(PREFETCHES)}")
        if self.prefetch in ("previous_step", "previous_layer") and not self.slack_tokens:
            raise ValueError(
                f"placement.prefetch={self.prefetch!r} fetches into the slack, and slack_tokens=0 leaves none"
            )

    def hosting(self, budget: int, tail: int, whole_layers: tuple[int, ...], page_tokens: int) -> Hosting:
        """For a method whose heads read at most ``budget`` pages each."""
        frames = budget + self._slack(page_tokens)
        maps = partial(_maps, frames, self.replacement, self.recorder)
        return Hosting(frames, tail, whole_layers, maps, self.prefetch == "next_query")

    def resolve(self, selection: Selection, pages: PageView) -> tuple[Tensor, Tensor]:
        """1. A batch of which nothing is away reads its block tables.
        2. Chosen pages that are away get frames; those that were not in one are fetched.
        3. With them come the next best, which this step does not read.
        4. In the table that the kernel reads, frames stand where the block table has holes.
        """
        table, slots = pages.gather(selection)
        away = pages.away
        if away is None:
            return table, slots
        heads, listed = pages.kv_heads, selection.pages.shape[2]
        chosen, is_read = _away(selection, pages, away)
        wanted, shares = is_read, None
        if self.replacement.reads_shares or self.recorder is not None:
            shares = _shares(chosen, is_read, pages)
        extra = self._slack(pages.page_tokens) if self.prefetch == "previous_step" else 0
        if extra:
            chosen, wanted = _with_runners_up(chosen, is_read, extra, pages, away)
            is_read = torch.nn.functional.pad(is_read, (0, extra))
            shares = None if shares is None else torch.nn.functional.pad(shares, (0, extra))
        frames, missing, came_ahead = away.sets.take(pages.group_layer, away.rows, chosen, wanted, is_read, shares)
        now = missing & is_read
        away.fetch(pages.layer, chosen, frames, now)
        away.counted(is_read.sum((1, 2)), now.sum((1, 2)), came_ahead.sum((1, 2)))
        if extra:
            away.fetch(pages.layer, chosen, frames, missing & ~is_read, ahead=True)
        framed = away.entries(pages.layer, frames[..., :listed])
        is_framed = is_read[..., :listed].repeat_interleave(pages.page_units, 2)
        return framed.where(is_framed, table[0].expand(-1, heads, -1))[None], slots.expand(-1, -1, heads)

    def fetch_ahead(self, selection: Selection, pages: PageView) -> None:
        """Bring into frames what a layer of this step, that of ``pages``, is expected to choose. A selection of its own
        may have all frames; one of another layer no more than the slack, since it is wrong so often that what the layer
        chose in the last step is worth more."""
        away = pages.away
        assert away is not None
        chosen, is_expected = _away(selection, pages, away)
        most = None
        if self.prefetch == "previous_layer":
            most = self._slack(pages.page_tokens)
            chosen, is_expected = _best_first(chosen, is_expected, pages)
        frames, missing, _ = away.sets.take(pages.group_layer, away.rows, chosen, is_expected, None, most=most)
        away.fetch(pages.layer, chosen, frames, missing, ahead=True)

    def _slack(self, page_tokens: int) -> int:
        return -(-self.slack_tokens // page_tokens)


def _maps(
    frames: int,
    replacement: Replacement,
    recorder: ChoiceRecorder | None,
    layers: int,
    heads: int,
    device: torch.device,
) -> FrameMaps:
    maps = FrameMaps(frames, layers, heads, replacement, device)
    maps.recorder = recorder
    return maps


def _away(selection: Selection, pages: PageView, away: AwayPages) -> tuple[Tensor, Tensor]:
    """The selected pages of each KV head, int64 [b, Hkv, S], and which of them are meant and away."""
    chosen = selection.pages.long().expand(-1, pages.kv_heads, -1)
    counts = selection.counts.expand(-1, pages.kv_heads)
    is_meant = torch.arange(chosen.shape[2], device=chosen.device) < counts[..., None]
    return chosen, is_meant & (chosen < away.count[:, None, None])


def _shares(chosen: Tensor, is_read: Tensor, pages: PageView) -> Tensor:
    """fp32 [b, Hkv, S], each page's part of the scores of those that are read from frames."""
    scores = pages.scores.expand(-1, chosen.shape[1], -1).gather(2, chosen)
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max)
    return scores.masked_fill(~is_read, -torch.inf).softmax(2).nan_to_num(0.0)


def _best_first(chosen: Tensor, is_meant: Tensor, pages: PageView) -> tuple[Tensor, Tensor]:
    scores = pages.scores.expand(-1, chosen.shape[1], -1).gather(2, chosen)
    scores = scores.nan_to_num(nan=-torch.inf).masked_fill(~is_meant, -torch.inf)
    order = scores.argsort(dim=2, descending=True, stable=True)
    return chosen.gather(2, order), is_meant.gather(2, order)


def _with_runners_up(
    chosen: Tensor, is_read: Tensor, extra: int, pages: PageView, away: AwayPages
) -> tuple[Tensor, Tensor]:
    """``chosen`` [b, Hkv, S] with the ``extra`` best pages after them, and which of all of them are wanted in
    frames."""
    heads, width = chosen.shape[1], pages.max_pages
    page = torch.arange(width, device=chosen.device)
    taken = torch.zeros((*chosen.shape[:2], width + 1), dtype=torch.bool, device=chosen.device)
    taken = taken.scatter_(2, chosen.where(is_read, width), True)[..., :width]
    is_left = (page < away.count[:, None, None]) & ~taken
    scores = pages.scores.expand(-1, heads, -1).nan_to_num(nan=-torch.inf).masked_fill(~is_left, -torch.inf)
    best = scores.topk(min(extra, width), 2).indices
    is_left = is_left.gather(2, best)
    missing = extra - best.shape[2]
    best, is_left = (torch.nn.functional.pad(tensor, (0, missing)) for tensor in (best, is_left))
    return torch.cat([chosen, best], 2), torch.cat([is_read, is_left], 2)
