"""Requests: one prompt, what is asked of it, and its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.compression.interfaces import Compressor
from octavo.core.config import SamplingParams
from octavo.core.execution.drafts import DraftRule
from octavo.core.hosting.interfaces import Hosting
from octavo.core.interfaces import SparseMethod
from octavo.core.memory.page_layout import PageLayout
from octavo.core.memory.prefix_cache import PageKey
from octavo.core.outputs import Completion, StepOutput

if TYPE_CHECKING:
    from octavo.core.sequence import Sequence


@dataclass(eq=False)
class Request:
    """One prompt and its samples. ``unforked`` samples will branch off the first when the prompt is computed.

    ``method`` shapes its KV, ``drafting`` only drafts; it has one of them at most. ``layout`` says how its tokens fall
    into pages; ``prior`` fp32 is what is known of the prompt's pages beforehand.
    ``hosting`` says how its pages lie in the host tier, if the method reads them from there. ``keep``, if given, takes
    the ended sequence over with its pages (a session's turn), and may change the news of it.
    ``error`` ended it, if any. ``streamed``: its text is made as its tokens come. ``markers``, token ids and texts, end
    it where a session's producer is to be asked. No sequence of the engine has more than ``max_model_tokens`` tokens.
    A ``compressor`` has not seen the last ``unseen_tokens`` tokens of the prompt when it decides.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    method: SparseMethod | None
    priority: int
    arrival: int
    seed: int
    root: PageKey
    layout: PageLayout
    unforked: int
    max_model_tokens: int
    eos_token_ids: frozenset[int]
    compressor: Compressor | None = None
    unseen_tokens: int = 0
    drafting: DraftRule | None = None
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int | None = None
    keep: Callable[[Sequence, StepOutput], None] | None = None
    hosting: Hosting | None = None
    error: ValueError | None = None
    markers: frozenset[int | str] = frozenset()
    streamed: bool = True
    prior: NDArray[np.float32] | None = None

    @cached_property
    def limit(self) -> int:
        """Tokens of the prompt and the longest sample."""
        return min(len(self.prompt) + self.params.max_tokens, self.max_model_tokens)

    @cached_property
    def ending(self) -> frozenset[int]:
        """The tokens that end a sample."""
        return frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else self.eos_token_ids)

    @cached_property
    def shaped_by(self) -> str:
        """What shapes the KV of generated tokens: the method with all that it goes by, but for the seed."""
        if self.method is None or self.prior is None:
            return "" if self.method is None else self.method.provenance
        return f"{self.method.provenance} prior {hashlib.sha256(self.prior.tobytes()).hexdigest()}"

    @cached_property
    def draws_on_device(self) -> bool:
        """Whether nothing but the drawn tokens has to come to the host: no log-probabilities, no penalty that depends
        on what was drawn, all pages of one size and on the device, nothing that a method's choice of pages waits for,
        and no prior, which the device is not told."""
        params = self.params
        return params.logprobs is None and params.prompt_logprobs is None and self.drafts_on_device

    @cached_property
    def drafts_on_device(self) -> bool:
        """The same of its drafts, of which nobody asks for log-probabilities."""
        chooser = self.method if self.drafting is None else self.drafting.method
        return (
            self.params.repetition_penalty == 1.0
            and self.layout.uniform
            and self.hosting is None
            and not getattr(chooser, "waits", False)
            and self.prior is None
        )

    @property
    def finished(self) -> bool:
        return self.unforked == 0 and all(sequence.finish_reason for sequence in self.sequences)

    def completion(self) -> Completion:
        """What the user gets when the request has ended."""
        known, wanted = self.sequences[0].known_logprobs, self.params.prompt_logprobs is not None
        return Completion(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            samples=[sequence.result() for sequence in self.sequences],
            cached_tokens=self.cached_tokens or 0,
            prompt_logprobs=[known.get(at) for at in range(len(self.prompt))] if wanted else None,
            error=self.error,
        )
