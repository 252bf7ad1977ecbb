"""From which context and batch on do decode steps under a sparse method pay, measured beside what their bytes say?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

from octavo.scripts import budgets, build, model_shapes, report
from octavo.scripts.break_even_plots import surfaces
from octavo.scripts.byte_model import ByteModel
from octavo.scripts.decode_floor import measure_rates
from octavo.scripts.decode_octavo import Octavo, most_tokens
from octavo.scripts.decode_shapes import StepShape
from octavo.scripts.machine_load import busy_rounds, watch
from octavo.scripts.progress import counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import BreakEven

Row = dict[str, Any]

GPU_CONTEXTS, GPU_BATCHES, GPU_NEW_TOKENS = [4096, 8192, 16384, 32768, 65536, 122880], [1, 4, 8, 16, 32], 64
CPU_CONTEXTS, CPU_BATCHES, CPU_NEW_TOKENS = [1024, 2048, 4096, 7680], [1, 4], 8
RATES = "rates"

COLUMNS = (
    "method", "batch", "context", "ms_dense", "ms_per_step", "floor_ms_dense", "floor_ms", "speedup",
    "predicted_speedup",
)  # fmt: skip
STARTS = ("method", "batch", "measured_from_tokens", "predicted_from_tokens")

NOTES = (
    "x dense: time of a dense decode step over that of the method's, medians over rounds in which all methods take "
    "turns. bytes say: the same of bytes: weights once, K and V that are read and what is read to choose of every "
    "sequence (the byte roofline). floor: those bytes over the device's plain read rate, as measured in this run.",
    "Contexts are pretended: pages hold random numbers that no prefill has computed. Time depends on shapes alone, but "
    "for budgets that adapt to scores, for which random numbers are the worst case.",
    "measured from: the shortest measured context from which on every longer one gains as much; bytes say from: the "
    "context at which bytes say so.",
)


def run(config: BreakEven, run: Run) -> None:
    """One sample a shape, method and round; one row a shape and method. Dense is always among the methods."""
    device = model_shapes.device_type(config.model)
    methods = {"dense": None, **build.methods(config.sparse)}
    with waiting("making the model, and measuring the device's read rate"):
        model = model_shapes.make(config.model)
        rates = measure_rates(model.device, model.dtype)
    shapes, left_out = _shapes(config, device, model)
    octavo = Octavo(config, model, config.engine.execution, shapes, None, pretended=True)
    methods = budgets.matched(methods, octavo.engine, config.sparse)
    bytes_of = ByteModel.of(octavo.engine, model)
    if not run.samples:
        run.add({"item": RATES, "method": "", "round": 0, "read_bytes_per_s": rates.read_bytes_per_s})
    rate = run.samples[0]["read_bytes_per_s"]
    run.environment.update(read_bytes_per_s=rate)
    done = run.done("item", "method", "round")
    places = [(shape, number, name) for shape in shapes for number in range(config.rounds) for name in methods]
    with counting(config.experiment, len(places), len(done) - 1) as advance:
        warm: set[tuple[str, str]] = set()
        for shape, number, name in places:
            if (shape.name, name, number) in done:
                continue
            if (shape.name, name) not in warm:
                octavo.warm_up(shape, methods[name])
                warm.add((shape.name, name))
            load = dataclasses.asdict(watch())
            step_s = octavo.stretch(shape, config.seed + number, methods[name]).step_s
            size = {"batch": shape.batch, "context": shape.context}
            run.add({"item": shape.name, "method": name, "round": number, **size, "step_s": step_s, **load})
            run.write_rows(rows(run.samples, bytes_of, methods, rate))
            advance(f"{shape.name}, {name}: {1e3 * step_s:.2f} ms a step")

    found = rows(run.samples, bytes_of, methods, rate)
    begins = starts(found, bytes_of, methods, config.gain)
    served = config.model.path or config.model.shape or model_shapes.default_shape(device)
    weights = "as loaded" if config.model.path else "random"
    notes = [f"Served: {served}, {bytes_of.weight_bytes / 1e9:.2f} GB of weights a step, {weights}.", *NOTES, *left_out]
    notes += busy_rounds(run.samples[1:], "item", "method", "round")
    tables: list[report.Shown] = [(begins, STARTS), (found, COLUMNS)]
    report.publish(run, config, [*found, *begins], plots=surfaces(found, config.gain), notes=notes, tables=tables)


def _shapes(config: BreakEven, device: str, model: Any) -> tuple[list[StepShape], list[str]]:
    """Those that were asked for, or the device's own, from small to large; without those of its own that its memory or
    the model's positions cannot hold, with a note on each.

    Raises:
        ConfigError: none is left; or one that was asked for is too long.
    """
    cuda = device == "cuda"
    contexts = config.contexts or (GPU_CONTEXTS if cuda else CPU_CONTEXTS)
    batches = config.batches or (GPU_BATCHES if cuda else CPU_BATCHES)
    new_tokens = config.new_tokens or (GPU_NEW_TOKENS if cuda else CPU_NEW_TOKENS)
    text = model.config.get_text_config()
    longest = config.engine.max_model_tokens or text.max_position_embeddings
    kept, notes = [], []
    for batch, context in product(batches, contexts):
        shape = StepShape(batch, context, new_tokens)
        tokens = context + most_tokens(config.engine, shape)
        if tokens > longest:
            if config.contexts:
                raise ConfigError(
                    f"contexts={context}: with the timed steps {tokens} tokens, and the model has {longest}"
                )
            notes.append(f"{shape.name} was left out: {tokens} tokens, and the model has {longest}.")
        elif config.engine.pool_tokens is None and batch * tokens > (room := _room(config, model)):
            notes.append(f"{shape.name} was left out: {batch * tokens} tokens, and the memory holds {room}.")
        else:
            kept.append(shape)
    if not kept:
        raise ConfigError("no shape is left: " + " ".join(notes))
    return kept[: config.limit], notes


def _room(config: BreakEven, model: Any) -> int:
    """Tokens whose K and V the memory holds beside the model, with a tenth for all else."""
    import torch

    text = model.config.get_text_config()
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
    free = torch.cuda.mem_get_info()[0] if model.device.type == "cuda" else 4 << 30
    return int(0.9 * config.engine.memory_fraction * free) // token


def rows(samples: Sequence[Sample], bytes_of: ByteModel, methods: budgets.Methods, rate: float) -> list[Row]:
    """A row a shape and method, dense first."""
    timed = [sample for sample in samples if sample["item"] != RATES]
    found = []
    for item in dict.fromkeys(sample["item"] for sample in timed):
        own = [sample for sample in timed if sample["item"] == item]
        times = {name: median(s["step_s"] for s in own if s["method"] == name) for name in _names(own)}
        batch, context = own[0]["batch"], own[0]["context"]
        for name, step_s in times.items():
            row = {"name": "octavo", "method": name, "task": item, "batch": batch, "context": context}
            row |= {"ms_per_step": 1e3 * step_s, "floor_ms": 1e3 * bytes_of.step(methods[name], context, batch) / rate}
            if name != "dense" and "dense" in times:
                row |= {
                    "ms_dense": 1e3 * times["dense"],
                    "floor_ms_dense": 1e3 * bytes_of.step(None, context, batch) / rate,
                    "speedup": times["dense"] / step_s,
                    "predicted_speedup": bytes_of.speedup(methods[name], context, batch),
                }
            found.append(row)
    return found


def starts(rows: Sequence[Row], bytes_of: ByteModel, methods: budgets.Methods, gain: float) -> list[Row]:
    """From which context each method gains ``gain`` at each batch, measured (None: at no measured one) and
    predicted."""
    found = []
    for name, batch in dict.fromkeys((row["method"], row["batch"]) for row in rows if "speedup" in row):
        own = sorted((r["context"], r["speedup"]) for r in rows if (r["method"], r["batch"]) == (name, batch))
        measured = None
        for context, speedup in reversed(own):
            if speedup < gain:
                break
            measured = context
        method = methods[name]
        assert method is not None
        found.append(
            {
                "name": "octavo",
                "method": name,
                "task": f"x {gain:g}",
                "batch": batch,
                "measured_from_tokens": measured,
                "predicted_from_tokens": bytes_of.pays_from(method, gain, batch),
            }
        )
    return found


def _names(samples: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(sample["method"] for sample in samples))
