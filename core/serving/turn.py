"""A session's turn that is generated in legs, with something new between any two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.core.config import SamplingParams
from octavo.core.outputs import Completion, Sample, TokenLogprobs
from octavo.core.request import Request

MARKER = "marker"
"""Why a leg ends that another follows. No user sees it."""


class Turn:
    """What the legs of a turn have given so far. To its user they are one request::

        prompt  | leg: tokens, marker | inserted | leg: tokens, marker | inserted | leg
                  samples[0].token_ids             go on                            and end

    Attributes:
        params: of the whole turn.
        request: of the leg that is generated now.
        inserted: what producers added, and behind how many new tokens.
    """

    def __init__(self, request: Request) -> None:
        self.params = request.params
        self.request = request
        self.inserted: list[tuple[int, Any]] = []
        self._prompt = request.prompt
        self._cached: int | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._legs: list[Sample] = []

    @property
    def generated(self) -> int:
        return sum(len(leg.token_ids) for leg in self._legs)

    @property
    def text(self) -> str:
        return "".join(leg.text for leg in self._legs)

    def end_leg(self, completion: Completion) -> None:
        """Take up what a leg has given."""
        if not self._legs:
            self._cached, self._prompt_logprobs = completion.cached_tokens, completion.prompt_logprobs
        self._legs += completion.samples

    def next_params(self) -> SamplingParams:
        """What is left of the turn's bounds. Log-probabilities of the prompt are the first leg's."""
        left, least = (max(0, n - self.generated) for n in (self.params.max_tokens, self.params.min_tokens))
        return replace(self.params, max_tokens=left, min_tokens=least, prompt_logprobs=None)

    def completion(self, reason: str, error: ValueError | None) -> Completion:
        """All legs as one."""
        logprobs = [leg.logprobs for leg in self._legs]
        sample = Sample(
            token_ids=[token for leg in self._legs for token in leg.token_ids],
            text=self.text,
            finish_reason=reason,
            logprobs=None if None in logprobs else [entry for leg in logprobs for entry in leg or ()],
            inserted=self.inserted,
            decode_steps=sum(leg.decode_steps for leg in self._legs),
            kv_bytes_read=sum(leg.kv_bytes_read for leg in self._legs),
            digest_bytes_read=sum(leg.digest_bytes_read for leg in self._legs),
            extra_tokens=sum(leg.extra_tokens for leg in self._legs),
            kv_bytes_resident=self._legs[-1].kv_bytes_resident if self._legs else 0,
            host_bytes_read=sum(leg.host_bytes_read for leg in self._legs),
            resident_lookups=sum(leg.resident_lookups for leg in self._legs),
            resident_misses=sum(leg.resident_misses for leg in self._legs),
            pages_prefetched=sum(leg.pages_prefetched for leg in self._legs),
            prefetched_read=sum(leg.prefetched_read for leg in self._legs),
            prefetch_scoring_bytes_read=sum(leg.prefetch_scoring_bytes_read for leg in self._legs),
        )
        return Completion(
            request_id=self.request.request_id,
            prompt_token_ids=self._prompt,
            samples=[sample],
            cached_tokens=self._cached or 0,
            prompt_logprobs=self._prompt_logprobs,
            error=error,
        )
