"""Configuration of the engine and of sampling: frozen dataclasses that refuse bad values when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo.core.errors import closest
from octavo.core.interfaces import EvictionPolicy, PagePolicy
from octavo.core.policies import ALLOCATORS, EVICTIONS, FixedPages
from octavo.kernels.layout import unit_tokens_for

KV_DTYPES = {"auto": None, "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
KV_DTYPES_LATER = ("fp8", "int4")
BACKENDS = ("auto", "reference", "cpu", "triton")
EXECUTIONS = ("auto", "eager", "graph", "compiled")

DEFAULT_PAGE_TOKENS = 16


@dataclass(frozen=True)
class EngineConfig:
    """How an engine lays out and spends its memory. Every token count is in tokens of one sequence or of the pool.

    Attributes:
        page_tokens: tokens of a text page; short for ``page_policies={"text": page_tokens}``.
        page_policies: page size by segment kind, a number or a ``PagePolicy``; kinds are "text" and "image".
        pool_tokens: usable slots of the pool, rounded up to whole pages; None sizes it from ``memory_fraction``.
        base_share: share of the pool that is there from the start; less than 1.0 makes an elastic pool, which grows
            when pages are asked for, before any cached page is evicted.
        growth_tokens: slots by which it grows at a time; None takes 256 MiB.
        memory_fraction: share of the device's free memory for the pool; on a CPU at most 4 GiB.
        max_seqs: sequences that may run at once.
        step_tokens: tokens of one forward pass; may be smaller than ``max_seqs``.
        encode_tokens: tokens of images that are encoded for one step at most, so that decoding is not held up; None is
            what the step computes. Where an encoder works beside the engine, tokens of images that it has at work, or
            that are encoded and not computed yet, at any time; None is ``step_tokens``. One image is always possible.
        max_model_tokens: longest sequence, prompt and output together; None takes the model's own limit.
        prefix_cache: keep idle pages findable by their key.
        layer_groups: layers with a sliding window have block tables of their own, and pages that the window has passed
            go back to the pool while the request lives; False keeps every token in every layer.
        shared_decode: sequences whose block tables begin alike (samples of one prompt, forks, prefix hits) read what
            they share once for all of them when they decode. Tokens are the same, up to rounding.
        shared_decode_bytes: what a group of such sequences must spare, and more, to be worth its cost: bytes of K and V
            in one layer, of (n - 1) * P tokens where n sequences share P.
        allocator, eviction: names of policies in ``octavo.core.policies``, or for ``eviction`` an ``EvictionPolicy``.
        host_tokens: slots of the host tier, where pages go that the device gives up; 0 is none.
        kv_dtype: element type of the pool; "auto" is the type in which the model produces its keys.
        backend: kernels to use; "auto" is "triton" on CUDA, with CUDA kernels for Hopper, and the CPU path elsewhere.
        execution: how a step is launched. "eager" calls the model's modules one by one. "graph" replays a step that
            only decodes as one CUDA graph, and plans the next step while the device works on this one, so that tokens
            come a step later (elsewhere than on CUDA the same program runs as plain calls). "compiled" does so with
            the model compiled by ``torch.compile``, which also serves prompts. "auto" is "graph" on CUDA and else
            "eager". All give the same tokens, up to rounding.
        join_linears: where steps are replayed on CUDA, or compiled, layers that multiply the same input (Q, K and V;
            gate and up) do so as one product. Their weights move into one piece of memory, values as they are; a
            model that is to be saved afterwards as it was in memory is better served with False.
        host_threads: threads that read the prompts of a large batch (tokenise, decode images) and write its texts while
            steps are computed; 0 does all of it in the caller's thread. Outputs are the same, up to rounding.
        seed: where unseeded requests draw their randomness from.

    Raises:
        ValueError: a value out of range, or a feature that is not built yet.
    """

    page_tokens: int = DEFAULT_PAGE_TOKENS
    page_policies: Mapping[str, int | PagePolicy] | None = None
    pool_tokens: int | None = None
    memory_fraction: float = 0.9
    base_share: float = 1.0
    growth_tokens: int | None = None
    max_seqs: int = 256
    step_tokens: int = 8192
    encode_tokens: int | None = None
    max_model_tokens: int | None = None
    prefix_cache: bool = True
    layer_groups: bool = True
    shared_decode: bool = True
    shared_decode_bytes: int = 8 << 20
    allocator: str = "stack"
    eviction: str | EvictionPolicy = "lru"
    host_tokens: int = 0
    kv_dtype: str = "auto"
    backend: str = "auto"
    execution: str = "auto"
    join_linears: bool = True
    host_threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("page_tokens", "max_seqs", "step_tokens"):
            _positive_int(name, getattr(self, name))
        for name in ("pool_tokens", "growth_tokens", "encode_tokens", "max_model_tokens"):
            _positive_int(name, getattr(self, name), optional=True)
        for name in ("memory_fraction", "base_share"):
            value = getattr(self, name)
            if not _is_number(value) or not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must be in (0, 1], got {value!r}")
        for name in ("host_tokens", "shared_decode_bytes", "host_threads"):
            value = getattr(self, name)
            if not _is_int(value) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        if self.host_tokens and not self.prefix_cache:
            raise ValueError(
                f"host_tokens={self.host_tokens} needs prefix_cache=True: pages in host memory are found by their keys"
            )
        if not _is_int(self.seed):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        for name in ("prefix_cache", "layer_groups", "shared_decode", "join_linears"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.page_policies, Mapping | None):
            raise ValueError(f"page_policies must map segment kinds to page sizes, got {self.page_policies!r}")
        if self.page_tokens != DEFAULT_PAGE_TOKENS and "text" in (self.page_policies or {}):
            raise ValueError(
                f'page_tokens={self.page_tokens} and page_policies["text"] both set the text page; give one'
            )
        for kind, policy in (self.page_policies or {}).items():
            if kind not in ("text", "image"):
                near = closest(str(kind), ["text", "image"])
                raise ValueError(f"page_policies: unknown segment kind {kind!r}; {near}")
            if isinstance(policy, type):
                raise ValueError(f"page_policies[{kind!r}]={policy.__name__} is a class; give {policy.__name__}(...)")
            if not isinstance(policy, PagePolicy):
                _positive_int(f"page_policies[{kind!r}]", policy)
            elif kind == "text":
                _pages_growing_text(policy)
        _known("allocator", self.allocator, tuple(ALLOCATORS))
        if isinstance(self.eviction, str):
            _known("eviction", self.eviction, tuple(EVICTIONS))
        elif isinstance(self.eviction, type):
            raise ValueError(f"eviction={self.eviction.__name__} is a class; give {self.eviction.__name__}(...)")
        elif not callable(getattr(self.eviction, "rank", None)):
            raise ValueError(f"eviction must be a name or an EvictionPolicy, got {self.eviction!r}")
        else:
            _positive_int(f"history of the eviction policy {self.eviction!r}", getattr(self.eviction, "history", None))
        _known("kv_dtype", self.kv_dtype, tuple(KV_DTYPES), KV_DTYPES_LATER)
        _known("backend", self.backend, BACKENDS)
        _known("execution", self.execution, EXECUTIONS)

    @property
    def eviction_policy(self) -> EvictionPolicy:
        """A policy of this engine's own, if it goes by name."""
        return EVICTIONS[self.eviction]() if isinstance(self.eviction, str) else self.eviction

    @cached_property
    def policies(self) -> dict[str, PagePolicy]:
        """The page policy of every segment kind in use."""
        sizes: dict[str, int | PagePolicy] = {"text": self.page_tokens, **(self.page_policies or {})}
        return {kind: size if isinstance(size, PagePolicy) else FixedPages(size) for kind, size in sizes.items()}

    @property
    def text_page_tokens(self) -> int:
        return self.policies["text"].page_tokens(None)

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit: the largest power of two that divides every page size in use, at most 64."""
        return unit_tokens_for([policy.grain for policy in self.policies.values()])


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends.

    Order of the transforms: repetition penalty, minimum length, temperature, top-k, top-p, min-p. ``temperature=0``
    is the arg-max. Reported log-probabilities are the raw log-softmax of the model's logits, before any transform.

    Attributes:
        n: samples; sample i with seed s draws what a single run with seed s + i draws.
        max_tokens, min_tokens: bounds on new tokens. An end-of-sequence token counts against the first; it may not
            be drawn before there are ``min_tokens`` others.
        top_k: 0 is off. top_p: 1.0 is off. min_p: share of the largest probability, 0.0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen before; 1.0 is off.
        seed: None draws one from the engine's seed and the request's order of arrival.
        stop: strings that end the text; the text is cut in front of them unless ``include_stop``.
        stop_token_ids: ids that end the request like the model's own end-of-sequence ids.
        ignore_eos: go on past the model's end-of-sequence ids.
        logprobs: entries a new token: the k most likely, and the drawn token if it is not among them.
        prompt_logprobs: the same for each prompt token but the first; such a request reuses no cached page.

    Raises:
        ValueError: a value out of range.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("n", "max_tokens"):
            _positive_int(name, getattr(self, name))
        for name in ("min_tokens", "top_k", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is None and name.endswith("logprobs"):
                continue
            if not _is_int(value) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        if not _is_number(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature!r}")
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if not _is_number(self.min_p) or not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p!r}")
        if not _is_number(self.repetition_penalty) or self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be a finite number above 0, got {self.repetition_penalty!r}")
        if self.seed is not None and not _is_int(self.seed):
            raise ValueError(f"seed must be an integer or None, got {self.seed!r}")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or any(not isinstance(text, str) or not text for text in stop):
            raise ValueError(f"stop must hold non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        ids = self.stop_token_ids
        if not isinstance(ids, list | tuple) or any(not _is_int(token) or token < 0 for token in ids):
            raise ValueError(f"stop_token_ids must hold token ids of at least 0, got {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(ids))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive_int(name: str, value: Any, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _pages_growing_text(policy: PagePolicy) -> None:
    """Text is decoded token by token: its page must be known before its length is."""
    try:
        policy.page_tokens(None)
    except ValueError as error:
        raise ValueError(f"page_policies['text']={policy}: text grows while it is decoded, but {error}") from error


def _known(field: str, value: str, built: tuple[str, ...], later: tuple[str, ...] = ()) -> None:
    if value in later:
        raise ValueError(f"{field}={value!r} is not built yet; use one of: {', '.join(built)}")
    if value not in built:
        raise ValueError(f"{field}={value!r} is unknown; {closest(str(value), list(built))}")
