"""What a replayed step reads of the host's and writes for it, in pinned memory that it addresses directly.

A copy of a few numbers costs the host a launch, and so does whatever brings them to their places. These two kernels are
part of the replayed graph, and find the turn that it is on the device, where the second moves it on::

    turn       int64 [1], on the device
    numbers    int64 [TURNS, 2]      whose turn it was written for, and how many numbers there are
    places     int64 [TURNS, most]   of a flat int32 target        values  int32 [TURNS, most]
    news       int64 [TURNS, most]   what the step has drawn

What was written for another turn is passed over. Everything is asked for at once, since each answer crosses the bus.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _receive_kernel(turn, numbers, places, values, target, most, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    now = tl.load(turn)
    at, n = now % TURNS, tl.arange(0, BLOCK)
    inside = n < most
    written_for, count = tl.load(numbers + 2 * at), tl.load(numbers + 2 * at + 1)
    place = tl.load(places + at * most + n, mask=inside, other=0)
    value = tl.load(values + at * most + n, mask=inside, other=0)
    tl.store(target + place, value, mask=inside & (n < count) & (written_for == now))


@triton.jit
def _send_kernel(turn, drawn, news, count, most, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    now, n = tl.load(turn), tl.arange(0, BLOCK)
    tl.store(news + now % TURNS * most + n, tl.load(drawn + n, mask=n < count, other=0), mask=n < count)
    tl.debug_barrier()  # all have read it
    tl.store(turn, now + 1)


def receive(turn: Tensor, numbers: Tensor, places: Tensor, values: Tensor, target: Tensor) -> None:
    """``target.view(-1)[places] = values``, if there is something for this turn."""
    turns, most = places.shape
    assert target.is_contiguous() and values.shape == places.shape
    _receive_kernel[(1,)](
        turn, numbers, places, values, target, most, TURNS=turns, BLOCK=triton.next_power_of_2(most)
    )  # fmt: skip


def send(turn: Tensor, drawn: Tensor | None, news: Tensor) -> None:
    """Write ``drawn`` int64 [n], if anything, to this turn's ``news``, and go on to the next turn."""
    turns, most = news.shape
    count = 0 if drawn is None else len(drawn)
    assert count <= most and (drawn is None or drawn.is_contiguous())
    _send_kernel[(1,)](
        turn, turn if drawn is None else drawn, news, count, most, TURNS=turns, BLOCK=triton.next_power_of_2(most)
    )  # fmt: skip
