"""Which page is in which frame, for each sequence, layer and KV head, and which page makes room for another."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo.core.execution.captured_calls import CapturedCalls


class Replacement(Protocol):
    """Which of the frames of a (sequence, layer, KV head) gives its page up. F frames each; all arguments fp64
    [b, Hkv, F] if nothing else is said. Frames of pages that the present step reads are never given up, whatever the
    policy says, and empty ones come first.

    ``reads_shares``: it wants to know what part of the scores a page has. Chosen on the device for all heads at once,
    without the host: so a policy has one number a frame, its *credit*, and ``distance``, how far the frame lies behind
    the clock's hand, 0 to F - 1. The hand stands behind the last frame that was given up.
    """

    @property
    def reads_shares(self) -> bool: ...

    def rank(self, credit: Tensor, distance: Tensor) -> Tensor:
        """Lower goes first; equal ones by the frame's number."""
        ...

    def swept(self, credit: Tensor, distance: Tensor, last: Tensor) -> Tensor:
        """Credits once the frames are chosen. ``last`` [b, Hkv, 1] is the rank of the last of them that held a page,
        minus infinity where none did."""
        ...

    def touched(self, credit: Tensor, now: Tensor, shares: Tensor) -> Tensor:
        """Credits of frames whose pages are read now. A page that has just come has credit 0. ``now`` [b, 1, 1] counts
        the steps of a sequence's layer; ``shares`` are a page's part of the scores of those that were chosen."""
        ...


class ChoiceRecorder(Protocol):
    """Sees what is chosen (``octavo.sparse.resident_trace``)."""

    def opened(self, row: int) -> None: ...
    def chose(self, layer: int, rows: Tensor, pages: Tensor, is_read: Tensor, shares: Tensor | None) -> None: ...


class FrameMaps:
    """The maps of all sequences of a method, on the device (interfaces.ResidentSets)::

        frame_of  int32 [rows, layers, Hkv, P + 1]    page -> frame, -1: in none
        page_in   int32 [rows, layers, Hkv, F + 1]    frame -> page, -1: empty
        credit    fp64  [rows, layers, Hkv, F]        what the policy knows of a frame
        is_ahead  bool  [rows, layers, Hkv, F + 1]    the page came ahead, and nobody has read it since
        hand      int64 [rows, layers, Hkv]           where the clock stands
        now       int64 [rows, layers]                steps

    The last column of those with one more than there are pages or frames takes what is not meant.
    Row 0 is nobody's. ``recorder``, if set, sees every choice. All shapes of ``take`` follow from its arguments' and
    nothing is read back, so that a GPU replays it.
    """

    def __init__(self, frames: int, layers: int, heads: int, replacement: Replacement, device: torch.device) -> None:
        self.frames = frames
        self._shape = layers, heads
        self._replacement = replacement
        self._free: list[int] = []
        self.recorder: ChoiceRecorder | None = None
        self.frame_of = torch.full((1, layers, heads, 1), -1, dtype=torch.int32, device=device)
        self.page_in = torch.full((1, layers, heads, frames + 1), -1, dtype=torch.int32, device=device)
        self.credit = torch.zeros((1, layers, heads, frames), dtype=torch.float64, device=device)
        self.is_ahead = torch.zeros((1, layers, heads, frames + 1), dtype=torch.bool, device=device)
        self.hand = torch.zeros((1, layers, heads), dtype=torch.int64, device=device)
        self.now = torch.zeros((1, layers), dtype=torch.int64, device=device)
        self._calls = CapturedCalls(device)

    def open(self) -> int:
        """A row of empty frames."""
        if not self._free:
            row = len(self.now)
            self._calls.clear()  # first, for it may fail half way
            for name in ("frame_of", "page_in", "credit", "is_ahead", "hand", "now"):
                tensor = getattr(self, name)
                setattr(self, name, torch.cat([tensor, torch.empty_like(tensor[:1])]))
            self._free.append(row)
        row = self._free.pop()
        self.forget(row)
        if self.recorder is not None:
            self.recorder.opened(row)
        return row

    def close(self, row: int) -> None:
        self._free.append(row)

    def forget(self, row: int) -> None:
        """A row's frames are empty."""
        self.frame_of[row], self.page_in[row] = -1, -1
        for tensor in (self.credit, self.is_ahead, self.hand, self.now):
            tensor[row] = 0

    def widen(self, pages: int) -> None:
        """Room for pages 0 to ``pages`` (exclusive)."""
        missing = pages + 1 - self.frame_of.shape[3]
        if missing > 0:
            self.frame_of[..., -1] = -1  # it was nobody's, and is a page's now
            self._calls.clear()
            self.frame_of = torch.nn.functional.pad(self.frame_of, (0, missing), value=-1)

    def take(
        self,
        layer: int,
        rows: Tensor,
        pages: Tensor,
        wanted: Tensor,
        read: Tensor | None,
        shares: Tensor | None = None,
        most: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Let pages have frames: ``pages`` int64 [b, Hkv, S], where ``wanted`` bool says so, distinct in a row and at
        most as many as there are frames. ``layer`` counts the layers of the maps. Gives the frames int64 [b, Hkv, S],
        arbitrary where nothing is wanted; which of the wanted ones do not hold their page yet; and which of those that
        are read now came ahead, and are read for the first time.

        1. Pages that have a frame keep it.
        2. The others get the frames of lowest rank among those that nobody wants now, in order.
        3. Their former pages have none any more; the hand moves on; credits are brought up to date.

        ``read`` bool [b, Hkv, S]: of the wanted ones those that this step reads; the others, and with None all, are
        fetched ahead, and get no credit for that. ``shares`` [b, Hkv, S] go to the policy. No more than ``most`` pages
        that have no frame get one, the first in a row.

        On a GPU the results lie where the next call for the layer, with as many pages, leaves its own.
        """
        if self.recorder is not None and read is not None:
            self.recorder.chose(layer, rows, pages, read, shares)
        given = {"read": read, "shares": shares}
        some = {name: tensor for name, tensor in given.items() if tensor is not None}

        def function(rows: Tensor, pages: Tensor, wanted: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            return self._take(layer, rows, pages, wanted, most=most, **dict(zip(some, others, strict=True)))

        key = layer, pages.shape, most, *some
        frames, missing, unread = self._calls(key, function, rows, pages, wanted, *some.values())
        return frames, missing, unread

    def _take(
        self,
        layer: int,
        rows: Tensor,
        pages: Tensor,
        wanted: Tensor,
        read: Tensor | None = None,
        shares: Tensor | None = None,
        most: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``take``, as operations of the device."""
        heads, frames = torch.arange(pages.shape[1], device=pages.device)[:, None], self.frames
        at = rows[:, None, None], layer, heads  # [b, Hkv, 1]
        of = rows, layer  # [b, Hkv, ...]
        found = self.frame_of[(*at, pages)].long()
        is_here = wanted & (found >= 0)
        missing = wanted & ~is_here
        if most is not None:
            missing = missing & (missing.cumsum(2) <= most)
            wanted = is_here | missing

        held, credit, hand = self.page_in[of], self.credit[of], self.hand[of][..., None]
        frame = torch.arange(frames, device=pages.device)
        used = _marked(found.where(is_here, frames), frames)
        distance = ((frame - hand) % frames).double()
        rank = self._replacement.rank(credit, distance)
        rank = rank.masked_fill(held[..., :frames] < 0, -torch.inf).masked_fill(used, torch.inf)
        ranks, order = rank.sort(dim=2, stable=True)
        place = (missing.cumsum(2) - 1).clamp(min=0, max=frames - 1)
        chosen = found.where(is_here, order.gather(2, place))

        taken = chosen.where(missing, frames)
        former = self.page_in[(*at, taken)].long()
        nowhere = self.frame_of.shape[3] - 1
        gone = former.where(missing & (former >= 0), nowhere)
        self.frame_of[(*at, gone)] = torch.full_like(gone, -1, dtype=torch.int32)  # a number would come from the host
        self.frame_of[(*at, pages.where(missing, nowhere))] = chosen.int()
        self.page_in[(*at, taken)] = pages.where(missing, -1).int()

        is_read = torch.zeros_like(wanted) if read is None else read
        unread = is_here & self.is_ahead[(*at, found.clamp(min=0))]
        self.is_ahead[(*at, chosen.where(wanted, frames))] = ~is_read & (missing | unread)

        number = missing.sum(2, keepdim=True)
        last_place = (number - 1).clamp(min=0)
        last = ranks.gather(2, last_place).masked_fill(number == 0, -torch.inf)
        gave = torch.isfinite(last)
        self.hand[of] = ((order.gather(2, last_place) + 1) % frames).where(gave, hand)[..., 0]
        credit = self._replacement.swept(credit, distance, last)
        fresh = _marked(taken, frames)
        credit = credit.masked_fill(fresh, 0.0)
        if read is not None:
            self.now[of] += 1
            share = torch.zeros((*credit.shape[:2], frames + 1), dtype=torch.float64, device=credit.device)
            if shares is not None:
                share.scatter_(2, chosen.where(read, frames), shares.double())
            touched = self._replacement.touched(credit, self.now[of][:, None, None].double(), share[..., :frames])
            credit = touched.where(_marked(chosen.where(read, frames), frames), credit)
        self.credit[of] = credit
        return chosen, missing, unread & is_read

    def check(self, row: int, pages: int) -> None:
        """Raises AssertionError where a row's two maps disagree, or a frame has a page of ``pages`` or more."""
        frame_of, page_in = self.frame_of[row, :, :, :-1].cpu(), self.page_in[row, :, :, :-1].cpu()
        for layer, head in torch.cartesian_prod(*map(torch.arange, self._shape)).tolist():
            by_page = {page: int(f) for page, f in enumerate(frame_of[layer, head].tolist()) if f >= 0}
            by_frame = {int(page): f for f, page in enumerate(page_in[layer, head].tolist()) if page >= 0}
            if by_page != by_frame or any(page >= pages for page in by_page):
                raise AssertionError(
                    f"layer {layer}, head {head} of row {row}: pages are in frames {by_page}, frames hold {by_frame}, "
                    f"and {pages} pages are away"
                )


def _marked(index: Tensor, size: int) -> Tensor:
    """bool [b, H, size], true at ``index`` [b, H, n]; an index of ``size`` marks nothing."""
    marks = torch.zeros((*index.shape[:2], size + 1), dtype=torch.bool, device=index.device)
    return marks.scatter_(2, index, True)[..., :size]
