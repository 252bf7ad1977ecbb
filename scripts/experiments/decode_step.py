"""How near to the floor of the hardware is one decode step, and how much of its ceiling does a whole batch reach?"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from octavo.scripts import build, model_shapes, report, workloads
from octavo.scripts.decode_floor import Floor, measure_rates
from octavo.scripts.decode_line_up import Entrant, Models, free, line_up
from octavo.scripts.decode_rows import MIXED, bars, floor_of, rows
from octavo.scripts.decode_shapes import Server, Stepper, StepShape
from octavo.scripts.machine_load import busy_rounds, watch
from octavo.scripts.progress import counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema_decode import DecodeStep
from octavo.scripts.workloads import Workload

log = logging.getLogger(__name__)

GPU_SHAPES = ([1, 1024], [32, 1024], [32, 8192], [128, 1024], [256, 1024])
CPU_SHAPES = ([1, 256], [4, 256])
GPU_NEW_TOKENS, CPU_NEW_TOKENS = 128, 16
CPU_REQUESTS = 4  # of the batch ``mixed``, cut short
WARM_TOKENS = 4  # of each of its requests
FLOOR = "floor"

STEP_COLUMNS = (
    "task",
    "name",
    "execution",
    "floor_ms",
    "percent_of_floor",
    "ms_per_step",
    "tokens_per_s",
    "prefill_tokens_per_s",
    "host_ms_per_step",
    "wait_ms_per_step",
    "device_bytes_peak",
)
MIXED_COLUMNS = ("task", "name", "execution", "ceiling_tokens_per_s", "percent_of_ceiling", "tokens_per_s", "seconds")

NOTES = (
    "Floor of a step: bytes of all weights that it reads (every parameter but an untied input embedding) over the "
    "device's plain read rate, or their products over the rate of a large one if that takes longer, and K and V of all "
    "tokens over the read rate. Rates were measured in this run (environment). byte_floor_ms leaves the products out.",
    "Ceiling of mixed: all prompts, then the floors of all steps one after the other, all requests decoding together.",
    "Contenders do not fit into memory together: they take turns by contender, all rounds of one before the next, and "
    "not round by round. Figures are medians over the rounds.",
    "octavo's steps are timed between device synchronisations, once all prompts are computed. A rival's step is the "
    "slope between a short and a long generation, which leaves out whatever a generation costs once.",
    "host ms a step: wall time in Engine.step() outside of waiting for tokens, where steps are replayed on CUDA; wait "
    "ms a step: that waiting. While the wait is not near 0, the host's part is hidden behind the device's.",
)


def run(config: DecodeStep, run: Run) -> None:
    """One sample a shape, round and contender, and one a round and contender of the batch ``mixed``; one row each.

    1. The device's own rates are measured, and with them the floor; a resumed run keeps those that it began with.
    2. Contender after contender: it is made, and for each shape warmed up and then measured in all rounds; then it
       serves ``mixed``; then its memory is given back.

    Raises:
        ConfigError: a shape that the model or the engine cannot hold.
    """
    device = model_shapes.device_type(config.model)
    text = model_shapes.configuration(config.model).get_text_config()
    shapes = _shapes(config, device)
    mixed = _mixed(config, device, text.vocab_size)
    _refuse_too_long(config, text, shapes, mixed)
    models = Models(config)
    floor = _floor(run, models)
    entrants, absent = line_up(config, device, models, shapes, mixed)
    done = run.done("item", "round", "name", "execution")
    places = [(entrant, place) for entrant in entrants for place in _places(config, entrant, shapes, mixed)]
    left = [(e, place) for e, place in places if (*place, e.name, e.execution) not in done]
    with counting(config.experiment, len(places), len(places) - len(left)) as advance:
        for entrant in entrants:
            own = [place for e, place in left if e is entrant]
            if not own:
                continue
            with waiting(f"{entrant.label}: getting ready"):
                contender = entrant.make()
            for sample in chain(_stretches(contender, config.seed, shapes, own), _batches(contender, mixed, own)):
                run.add({**sample, "name": entrant.name, "execution": entrant.execution})
                run.write_rows(rows(run.samples))
                advance(f"{entrant.label}: {_line(sample)}")
            del contender
            free()

    _publish(config, run, floor, device, absent)


def _publish(config: DecodeStep, run: Run, floor: Floor, device: str, absent: Sequence[str]) -> None:
    found = rows(run.samples)
    steps, batches = ([row for row in found if (row["task"] == MIXED) is wanted] for wanted in (False, True))
    served = f"Served: {config.model.path or config.model.shape or model_shapes.default_shape(device)}"
    weights = "as loaded" if config.model.path else "random, which says nothing of quality"
    notes = [f"{served}, {floor.weight_bytes / 1e9:.2f} GB of weights a step, {weights}.", *NOTES, *absent]
    notes += busy_rounds(run.samples[1:], "item", "round", "name", "execution")
    tables = [(steps, STEP_COLUMNS), (batches, MIXED_COLUMNS)]
    plots = {"decode_step": bars(steps)}
    report.publish(run, config, found, plots=plots, notes=notes, tables=[table for table in tables if table[0]])


def _places(
    config: DecodeStep, entrant: Entrant, shapes: Sequence[StepShape], mixed: Workload | None
) -> list[tuple[str, int]]:
    """Item and round of all samples that a contender is to give."""
    items = [shape.name for shape in shapes] + ([MIXED] if mixed is not None and entrant.serves else [])
    return [(item, number) for item in items for number in range(config.rounds)]


def _stretches(
    contender: Stepper, seed: int, shapes: Sequence[StepShape], left: Sequence[tuple[str, int]]
) -> Iterator[Sample]:
    for shape in shapes:
        rounds = [number for item, number in left if item == shape.name]
        if rounds:
            with waiting(f"{shape.name}: warming up"):
                contender.warm_up(shape)
        for number in rounds:
            load = _load()
            stretch = contender.stretch(shape, seed + number)
            facts = dataclasses.asdict(shape) | dataclasses.asdict(stretch)
            yield {"item": shape.name, "round": number, **facts, **load}


def _batches(contender: Server, mixed: Workload | None, left: Sequence[tuple[str, int]]) -> Iterator[Sample]:
    rounds = [number for item, number in left if item == MIXED]
    if mixed is None or not rounds:
        return
    with waiting(f"{MIXED}: warming up"):
        contender.serve(mixed.cut(len(mixed.prompts), mixed.longest, WARM_TOKENS))
        build.spare_collections()
    for number in rounds:
        load = _load()
        facts = {
            "prompt_lengths": list(map(len, mixed.prompts)),
            "new_lengths": list(mixed.new_tokens),
            "seconds": contender.serve(mixed),
        }
        yield {"item": MIXED, "round": number, **facts, **load}


def _load() -> dict[str, Any]:
    load = watch()
    if not load.quiet:
        log.warning("the machine is not quiet: %.1f of %d cores are free", load.free_cores, load.cores)
    return dataclasses.asdict(load)


def _floor(run: Run, models: Models) -> Floor:
    """That of this run, from rates measured when it began; its first sample."""
    if not run.samples:
        with waiting("making the model, and measuring the device's own rates"):
            model = models.get()
            floor = Floor.of(model, measure_rates(model.device, model.dtype))
        run.add({"item": FLOOR, "round": 0, "name": "device", "execution": "", **dataclasses.asdict(floor)})
    floor = floor_of(run.samples)
    run.environment.update(read_bytes_per_s=floor.read_bytes_per_s, product_flop_per_s=floor.product_flop_per_s)
    return floor


def _shapes(config: DecodeStep, device: str) -> list[StepShape]:
    """Those that were asked for, or the device's own; with ``limit`` the first so many."""
    cuda = device == "cuda"
    new_tokens = config.new_tokens or (GPU_NEW_TOKENS if cuda else CPU_NEW_TOKENS)
    pairs = config.shapes or (GPU_SHAPES if cuda else CPU_SHAPES)
    return [StepShape(batch, context, new_tokens) for batch, context in pairs[: config.limit]]


def _mixed(config: DecodeStep, device: str, vocab_size: int) -> Workload | None:
    """The batch ``mixed``, of random tokens; elsewhere than on CUDA, and with ``limit``, a few of its requests, cut
    short."""
    if not config.mixed:
        return None
    whole = workloads.random_ids(MIXED, vocab_size, config.seed)
    if device == "cuda" and config.limit is None:
        return whole
    return whole.cut(config.limit or CPU_REQUESTS, workloads.SMOKE_PROMPT, workloads.SMOKE_NEW)


def _refuse_too_long(config: DecodeStep, text: Any, shapes: Sequence[StepShape], mixed: Workload | None) -> None:
    """Raises ConfigError for what the model has no positions for, or the engine no places."""
    from octavo.scripts.decode_octavo import most_tokens

    for shape in shapes:
        for key in ("max_seqs", "step_tokens"):
            most = getattr(config.engine, key) - (key == "step_tokens")  # prompts want a token of a step, too
            if shape.batch > most:
                raise ConfigError(
                    f"shapes=[{shape.batch},{shape.context}]: with engine.{key}={getattr(config.engine, key)} at most "
                    f"{most} sequences decode in one step beside prompts; give a larger engine.{key}"
                )
    longest = [(shape.name, shape.context + most_tokens(config.engine, shape)) for shape in shapes]
    longest += [] if mixed is None else [(MIXED, mixed.longest)]
    most = config.engine.max_model_tokens or text.max_position_embeddings
    for name, tokens in longest:
        if tokens > most:
            raise ConfigError(
                f"{name} has sequences of up to {tokens} tokens, and the model at most {most}; take other shapes or "
                "another model, or mixed=false"
            )


def _line(sample: Sample) -> str:
    """What a reader wants to know first of a sample."""
    if sample["item"] == MIXED:
        return f"{MIXED}: {sum(sample['new_lengths']) / sample['seconds']:.0f} tokens/s"
    return f"{sample['item']}: {1e3 * sample['step_s']:.2f} ms a step"
