"""Page policies that weigh waste against overhead: the square-root rule, and the form in which it is often quoted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.core.policies.page_size import check_positive, check_size, round_up, rounded


@dataclass(frozen=True)
class SqrtPages:
    """The page that costs least if every page costs the same: ``P* = sqrt(2 L m / b)`` tokens.

    A sequence of L tokens, b bytes each, on pages of P tokens leaves half a page empty on average and keeps account
    of L / P pages, each at a cost of m bytes (its metadata, and its time times the bandwidth that the time is worth).
    N such sequences cost::

        W(P) = N [ (P / 2) b + (L / P) m ]       bytes
        W'(P) = N [ b / 2 - L m / P^2 ] = 0      P* = sqrt(2 L m / b)

    N cancels, and larger tokens want smaller pages. This is the operating systems' rule for page tables,
    ``p* = sqrt(2 s e)`` bytes for processes of s bytes and table entries of e bytes, with s = L b, e = m and
    P* = p* / b. Half a page is right for lengths that vary by more than a page, as text's do; for images of one length
    ``DivisorPages`` wastes less.

    Args:
        overhead_tokens: m / b, what a page costs in tokens' worth of bytes.
        mean_tokens: L of a segment whose length is not known; one that is known takes its own.
        grain: the result is rounded to its multiples.
        largest: no page is larger, nor larger than its segment takes.

    Raises:
        ValueError: a number that is not positive, or ``largest`` below ``grain``. ``page_tokens`` raises it for a
            segment of unknown length if ``mean_tokens`` is None.
    """

    overhead_tokens: float
    mean_tokens: float | None = None
    grain: int = 8
    largest: int = 256

    def __post_init__(self) -> None:
        check_positive("overhead_tokens of SqrtPages", self.overhead_tokens)
        _check_range("SqrtPages", self.mean_tokens, self.grain, self.largest)

    @classmethod
    def from_bytes(
        cls,
        page_bytes: float,
        token_bytes: float,
        mean_tokens: float | None = None,
        grain: int = 8,
        largest: int = 256,
    ) -> SqrtPages:
        """The rule for m = ``page_bytes`` a page and b = ``token_bytes`` a token."""
        check_positive("page_bytes of SqrtPages", page_bytes)
        check_positive("token_bytes of SqrtPages", token_bytes)
        return cls(page_bytes / token_bytes, mean_tokens, grain, largest)

    def optimum(self, tokens: float) -> float:
        """P* for segments of so many tokens, as it comes out of the formula."""
        return math.sqrt(2 * tokens * self.overhead_tokens)

    def page_tokens(self, segment_tokens: int | None) -> int:
        tokens = _length("SqrtPages", segment_tokens, self.mean_tokens)
        return _clamped(self.optimum(tokens), tokens, self.grain, self.largest)


@dataclass(frozen=True)
class QuotedPages:
    """The rule as it is quoted: ``calibration * sqrt(2 L b N)`` for mean length L, b bytes a token, concurrency N.

    Its dimensions do not fit: ``L b N`` is tokens x bytes (N is a count), so the root is no number of tokens, and with
    ``calibration=1`` it is in the ten thousands for any real model. To give tokens, the calibration would have to be
    in sqrt(tokens / bytes), and these are the choices that make sense:

    - ``1 / b`` reads the root as a page in bytes and N as the bytes of a table entry, the operating systems' rule in
      other letters: ``sqrt(2 L N / b)`` tokens. b is then in the denominator, where ``SqrtPages`` has it.
    - ``sqrt(m / N) / b`` gives ``SqrtPages`` with m bytes a page. N cancels, as it must: every further sequence adds
      the same waste and the same overhead.

    A calibration that is a plain number is right for one model at one concurrency: the page then grows with b, where
    the best one shrinks, and with N, which does not matter.

    Args:
        token_bytes: b. concurrency: N, sequences at once.
        mean_tokens, grain, largest: as ``SqrtPages``.

    Raises:
        ValueError: as ``SqrtPages``.
    """

    token_bytes: float
    concurrency: float
    calibration: float = 1.0
    mean_tokens: float | None = None
    grain: int = 8
    largest: int = 256

    def __post_init__(self) -> None:
        for name in ("token_bytes", "concurrency", "calibration"):
            check_positive(f"{name} of QuotedPages", getattr(self, name))
        _check_range("QuotedPages", self.mean_tokens, self.grain, self.largest)

    def optimum(self, tokens: float) -> float:
        """The page for segments of so many tokens, as it comes out of the formula."""
        return self.calibration * math.sqrt(2 * tokens * self.token_bytes * self.concurrency)

    def page_tokens(self, segment_tokens: int | None) -> int:
        tokens = _length("QuotedPages", segment_tokens, self.mean_tokens)
        return _clamped(self.optimum(tokens), tokens, self.grain, self.largest)


def _check_range(policy: str, mean_tokens: float | None, grain: int, largest: int) -> None:
    if mean_tokens is not None:
        check_positive(f"mean_tokens of {policy}", mean_tokens)
    check_size(f"grain of {policy}", grain)
    check_size(f"largest of {policy}", largest)
    if largest < grain:
        raise ValueError(f"{policy}: largest={largest} is below grain={grain}; no page lies between")


def _length(policy: str, segment_tokens: int | None, mean_tokens: float | None) -> float:
    if segment_tokens is not None:
        assert segment_tokens >= 1, f"a segment of {segment_tokens} tokens"
        return segment_tokens
    if mean_tokens is None:
        raise ValueError(f"{policy} needs a length, and growing text has none; give mean_tokens")
    return mean_tokens


def _clamped(page: float, tokens: float, grain: int, largest: int) -> int:
    most = min(largest // grain * grain, round_up(math.ceil(tokens), grain))
    return min(rounded(page, grain), most)
