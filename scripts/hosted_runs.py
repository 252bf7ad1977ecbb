"""What the experiments on placements share: prompts, methods, engines of a size, and a batch that is served and
counted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.scripts import build
from octavo.scripts.decode_shapes import StepShape
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Sample
from octavo.scripts.schema_groups import Config
from octavo.scripts.schema_placements import HostTier, Placements
from octavo.scripts.tasks import documents

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod
    from octavo.sparse.host_placement import Host
    from octavo.sparse.method import Method


def prompts(config: HostTier | Placements, tokenizer: Any) -> list[list[int]]:
    """The ends of documents, kinds in turn, as many as there are requests; the same ones again where they are too
    few."""
    opening = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    each = -(-config.requests // len(config.kinds))
    found = []
    for kind in config.kinds:
        try:
            listed = documents.long_enough(kind, config.seed, tokenizer, config.context_tokens, each)
        except ValueError as error:
            raise ConfigError(f"context_tokens={config.context_tokens} is too much: {error}") from error
        found.append([opening + ids[len(opening) - config.context_tokens :] for _, ids in listed])
    turns = [texts[at % len(texts)] for at in range(each) for texts in found]
    return turns[: config.requests][: config.limit]


def random_prompts(config: Placements, vocab_size: int) -> list[list[int]]:
    """As many, and as long, of random tokens."""
    shape = StepShape(config.requests, config.context_tokens, config.new_tokens)
    return shape.prompts(vocab_size, config.seed)[: config.limit]


def resident(config: HostTier | Placements) -> Method:
    """The method whose pages all stay in the pool.

    Raises:
        ConfigError: it is none that a placement can be given to.
    """
    from octavo.sparse.method import Method

    ((name, made),) = build.methods(config.sparse).items()
    if not isinstance(made, Method):
        raise ConfigError(f"method {name}: it has no placement; give one that octavo.sparse.method.Method joins")
    return made


def host(config: HostTier | Placements, replacement: str, prefetch: str) -> Host:
    from octavo.sparse.host_placement import Host
    from octavo.sparse.replacement.policies import REPLACEMENTS

    return Host(config.slack_tokens, REPLACEMENTS[replacement](), prefetch)


def engine(
    config: HostTier | Placements, model: Any, page_tokens: int, requests: int, room: float, *, hosted: bool
) -> Engine:
    """An engine whose pool holds ``room`` whole requests, with a host tier for all of them if it is to be ``hosted``.

    Raises:
        ConfigError: settings that the engine, the model or the machine cannot have.
    """
    pages = -(-(config.context_tokens + config.new_tokens) // page_tokens)
    settings = dataclasses.replace(
        config.engine,
        page_tokens=page_tokens,
        pool_tokens=round(room * pages) * page_tokens,
        host_tokens=requests * pages * page_tokens if hosted else 0,
        max_seqs=max(requests, 1),
    )
    # Not a changed copy of ``config``, which refuses what is the experiment's own to set.
    return build.engine(Config(config.experiment, engine=settings), model, None)


def unit_bytes(engine: Engine) -> int:
    """Bytes of a unit of the engine's pools."""
    from octavo.core import sizing
    from octavo.core.memory.layer_groups import LayerPlan

    spec, itemsize = engine.spec, sizing.kv_dtype(engine.config, engine.spec).itemsize
    layers = LayerPlan.of(spec.windows, engine.config.layer_groups).unit_layers
    return layers * 2 * spec.kv_heads * spec.head_dim * engine.config.unit_tokens * itemsize


def serve(engine: Engine, asked: Sequence[list[int]], method: SparseMethod, new_tokens: int) -> Sample:
    """Decode ``new_tokens`` after each prompt, greedily, all at once.

    Steps count as decoding, and are timed, while every request that has not ended has its first token.
    ``units_held_decoding`` is what is held in the step before the first of them ends.
    """
    from octavo.core import SamplingParams

    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    build.fit({method.name: method}, engine)
    try:
        ids = [engine.submit(prompt, params, method=method) for prompt in asked]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    before, began = engine.stats(), time.perf_counter()
    decoding_s = waited_s = 0.0
    decoded = held = pinned = 0
    counts = dict.fromkeys(ids, 0)
    completions = {}
    while engine.has_work():
        start, waits = time.perf_counter(), engine.stats().host_wait_s
        outputs = engine.step()
        seconds = time.perf_counter() - start
        alive = [request_id for request_id in ids if request_id not in completions]
        if all(counts[request_id] for request_id in alive) and outputs:
            decoding_s += seconds
            waited_s += engine.stats().host_wait_s - waits
            decoded += sum(len(output.new_token_ids) for output in outputs)
        for output in outputs:
            counts[output.request_id] += len(output.new_token_ids)
            if output.completion is not None:
                completions[output.request_id] = output.completion
        if not completions:
            held, pinned = engine.stats().units_held, engine.stats().host_units_pinned
    engine.check()
    after = engine.stats()
    samples = [completions[request_id].samples[0] for request_id in ids]
    return {
        "tokens": [sample.token_ids for sample in samples],
        "decode_steps": sum(sample.decode_steps for sample in samples),
        "lookups": sum(sample.resident_lookups for sample in samples),
        "misses": sum(sample.resident_misses for sample in samples),
        "prefetched": sum(sample.pages_prefetched for sample in samples),
        "prefetched_read": sum(sample.prefetched_read for sample in samples),
        "prefetch_scoring_bytes_read": sum(sample.prefetch_scoring_bytes_read for sample in samples),
        "host_bytes_read": sum(sample.host_bytes_read for sample in samples),
        "kv_bytes_read": sum(sample.kv_bytes_read for sample in samples),
        "units_held_decoding": held,
        "host_units_pinned": pinned,
        "unit_bytes": unit_bytes(engine),
        "running_peak": after.running_peak,
        "preemptions": after.preemptions - before.preemptions,
        "seconds": time.perf_counter() - began,
        "decoding_seconds": decoding_s,
        "decoded_tokens": decoded,
        "waited_seconds": waited_s,
    }
