"""What the engine hands back: completions, the news of a step, and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TokenLogprobs = dict[int, float]


@dataclass
class DraftCounts:
    """What became of a sample's drafts (``octavo.core.execution.drafts``).

    Each of ``verifications`` dense passes looks at its drafts in order, up to the first wrong one: ``accepted`` and
    ``rejected`` are those that were looked at, and ``drafted`` are all.
    """

    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    verifications: int = 0


@dataclass
class Sample:
    """One continuation of a prompt.

    Attributes:
        token_ids: the new tokens; an end-of-sequence token that ended the sample is the last.
        text: the decoded text, without special tokens and cut at a stop string.
        finish_reason: "stop", "length", "abort" or "capacity" (the pool could not hold one more token of it alone).
        logprobs: one ``{token_id: log-probability}`` a new token, if asked for.
        decode_steps: tokens after the prompt that were computed, one a forward pass; or, where drafts are verified,
            several.
        kv_bytes_read: bytes of K and V in the pool behind the table entries that the kernels of those passes, and of
            those for drafts, were given, over all layers and KV heads.
        digest_bytes_read: bytes of page digests (and, for an oracle, of K) that were read to choose those entries.
        inserted: what a session's producers added, each behind how many of ``token_ids``, which hold none of it.
        kv_bytes_resident: bytes of the units of the device's pool that it held when it ended, whoever else holds them.
        host_bytes_read: bytes of K and V that came from the host tier for them, under a method whose pages lie there.
        resident_lookups: pages, one a layer and KV head, that such a method chose among those that lie there.
        resident_misses: those of them that were not on the device.
        pages_prefetched: pages, one a layer and KV head, that came from there before anybody had chosen them.
        prefetched_read: those of them that were chosen before they had to make room; the others came for nothing.
        prefetch_scoring_bytes_read: bytes of page digests that were read to tell what to fetch ahead.
        drafts: what became of its drafts, under a method that drafts.
        prefill_bytes_read: bytes of K and V behind the table entries that blocks of the prompt's queries were given
            where a prefill pattern chose them; 0 without one.
        prefill_scoring_bytes_read: bytes of K that were read to choose those.
        extra_tokens: tokens that were computed for nothing but a method's decision which tokens are kept.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None
    decode_steps: int = 0
    kv_bytes_read: int = 0
    digest_bytes_read: int = 0
    inserted: list[tuple[int, Any]] = field(default_factory=list)
    kv_bytes_resident: int = 0
    host_bytes_read: int = 0
    resident_lookups: int = 0
    resident_misses: int = 0
    pages_prefetched: int = 0
    prefetched_read: int = 0
    prefetch_scoring_bytes_read: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    prefill_bytes_read: int = 0
    prefill_scoring_bytes_read: int = 0
    extra_tokens: int = 0


@dataclass
class Completion:
    """All samples of one request.

    Attributes:
        prompt_token_ids: where the prompt held an image, as many ids as it has tokens, past the vocabulary and equal
            for equal images: they stand for it, and no tokenizer knows them.
        cached_tokens: prompt tokens whose KV was found in the prefix cache at the first admission.
        prompt_logprobs: one entry a prompt token, if asked for; None for the first, and for those of images.
        error: an image that the prompt held could not be encoded, or a producer failed, and this is why; the samples
            then end with "abort".
    """

    request_id: str
    prompt_token_ids: list[int]
    samples: list[Sample]
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: ValueError | None = None

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text


@dataclass(slots=True)
class StepOutput:
    """News of one sample from one step. Text that was given out is never taken back.

    ``completion`` comes with the last news of the last sample of a request. ``inserted`` is what a session's producer
    has added behind all text so far.
    """

    request_id: str
    sample: int
    new_token_ids: list[int]
    new_text: str
    finish_reason: str | None = None
    completion: Completion | None = None
    inserted: Any = None


@dataclass(frozen=True)
class EngineStats:
    """Counters since construction, and the state now. Always units_held + units_cached + units_free = units_total.

    ``pages_*`` count text pages. ``hit_tokens`` of ``query_tokens`` prompt tokens were found in the prefix cache,
    counted once an admission. ``host_units_pinned`` are those of pages that live sequences read from the host, and
    ``host_wait_s`` the seconds for which layers waited for such pages.
    ``evictions`` are pages, ``copies`` are copy-on-write copies of a page.
    """

    units_total: int
    units_free: int
    units_cached: int
    units_held: int
    units_held_peak: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    host_units_total: int = 0
    host_units_free: int = 0
    host_units_held: int = 0
    host_units_pinned: int = 0
    host_wait_s: float = 0.0
    hit_tokens: int = 0
    query_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    copies: int = 0
    steps: int = 0
    running: int = 0
    waiting: int = 0
    running_peak: int = 0
    device_bytes_peak: int = 0
