"""Do two devices, or two sets of kernels, write the same tokens?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import benchmarks, budgets, build, report
from octavo.scripts.benchmarks import Item
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import one_of
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Config, Devices, TaskSettings

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod
    from octavo.core.outputs import TokenLogprobs

Row = dict[str, Any]

BACKENDS = ("auto", "reference", "cpu", "triton")
OUTCOMES = {"identical": "identical", "near_tie": "near_ties", "mismatch": "mismatches"}
"""What a sample is -> the key of a row that counts it."""


REFERENCE_PAIR = ["cpu:cpu", "cpu:reference"]
REFERENCE_PROMPT_TOKENS, REFERENCE_NEW_TOKENS = 800, 8
"""Most tokens of an item for that pair; all items that come with octavo can be shortened that far."""


class MismatchError(RuntimeError):
    """Two devices wrote different tokens where neither was in doubt."""


@dataclass(frozen=True)
class Place:
    """Where an engine runs, written "device" or "device:kernels"; "cuda:1" is a device."""

    device: str
    backend: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Place:
        """
        Raises:
            ConfigError: unknown kernels, or a device that is not there.
        """
        device, _, backend = text.rpartition(":")
        if not device or backend.isdigit():
            device, backend = text, "auto"
        one_of(f"kernels of devices: {text}", backend, BACKENDS)
        build.check_device("devices: ", device)
        return cls(device, backend)


def run(config: Devices, run: Run) -> None:
    """One sample an item and method; one row a method. Every method writes ``task.max_new_tokens`` tokens greedily.

    The tokens of an item are compared up to the first difference. There, both devices have read the same tokens, and
    the log-probabilities say how far apart the two candidates were on each: a *near tie* if less than
    ``near_tie_nats`` on both, else a *mismatch*. What comes later follows from it and is not compared.

    Raises:
        MismatchError: there was a mismatch; all rows are written before.
    """
    names = config.devices or _automatic()
    if sorted(names) == REFERENCE_PAIR:
        config = dataclasses.replace(config, task=_small(config.task))
    places = [Place.parse(name) for name in names]
    items = benchmarks.load(config.task, config.limit)
    methods = build.methods(config.sparse)
    with _no_tf32():
        with waiting(f"loading {config.model.path}"):
            engines, tokenizer = _engines(config, places)
            for engine in engines:
                methods = budgets.matched(methods, engine, config.sparse)
        # One of the two: their requests are the same, and no time is measured.
        engines[0].watch = PageWatch() if config.page_map else None
        done = run.done("item", "method")
        left = [(item, {n: m for n, m in methods.items() if (item.id, n) not in done}) for item in items]
        todo = [(item, missing) for item, missing in left if missing]
        with counting(config.experiment, len(items), len(items) - len(todo)) as advance:
            for item, missing in todo:
                samples = _compare_item(item, missing, engines, config, tokenizer)
                for sample in samples:
                    run.add(sample)
                run.write_rows(rows(run.samples, config.task.name, names))
                outcomes = "  ".join(f"{s['method']} {s.get('outcome', s.get('error'))}" for s in samples)
                advance(f"{Path(item.id).name}: {outcomes}")

    found = rows(run.samples, config.task.name, names)
    for row in found:
        counts = ", ".join(f"{row[key]} {key.replace('_', ' ')}" for key in OUTCOMES.values())
        console.print(f"{row['method']}: {row['items']} items, {counts}", markup=False, highlight=False)
    maps = [(f"all items, one after another, on {names[0]}", engines[0].watch)]
    report.publish(run, config, found, plots={}, notes=_notes(names, config.near_tie_nats), maps=maps)
    mismatches = sum(row["mismatches"] for row in found)
    if mismatches:
        raise MismatchError(f"{names[0]} and {names[1]} differ in {mismatches} cases that are no near ties")


def rows(samples: Sequence[Sample], task: str, names: Sequence[str]) -> list[Row]:
    """One row a method; ``logprob_difference_max`` is in nats, over the tokens that both devices agree on."""
    found = []
    for method in dict.fromkeys(sample["method"] for sample in samples):
        own = [sample for sample in samples if sample["method"] == method]
        good = [sample for sample in own if "error" not in sample]
        row: Row = {"name": "octavo", "method": method, "task": task, "devices": " and ".join(names)}
        row |= {"items": len(good), "failed": len(own) - len(good)}
        row |= {key: sum(s["outcome"] == outcome for s in good) for outcome, key in OUTCOMES.items()}
        row["equal_tokens"] = sum(s["equal_tokens"] for s in good)
        row["logprob_difference_max"] = max((s["logprob_difference_max"] for s in good), default=0.0)
        found.append(row)
    return found


def compare(
    tokens: Sequence[list[int]], logprobs: Sequence[list[TokenLogprobs]], near_tie_nats: float
) -> dict[str, Any]:
    """What two continuations of one prompt have in common, and what kind of difference ends it.

    Args:
        tokens: those of each side.
        logprobs: at least the two most likely of each position, on each side.
    """
    pairs = list(zip(*tokens, strict=True))
    equal = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    apart = [abs(logprobs[0][at][token] - logprobs[1][at][token]) for at, (token, _) in enumerate(pairs[:equal])]
    found: Row = {"outcome": "identical", "equal_tokens": equal, "logprob_difference_max": max(apart, default=0.0)}
    if equal < len(pairs):
        gaps = [_gap(side[equal]) for side in logprobs]
        found["outcome"] = "near_tie" if max(gaps) < near_tie_nats else "mismatch"
        found |= {"first_difference": equal, "top_two_gaps": gaps}
    return found


def _gap(entry: TokenLogprobs) -> float:
    """How much more likely the first token is than the second, in nats."""
    second, first = sorted(entry.values())[-2:]
    gap: float = first - second
    return gap


def _compare_item(
    item: Item, methods: Mapping[str, SparseMethod | None], engines: Sequence[Engine], config: Devices, tokenizer: Any
) -> list[Sample]:
    """One item under several methods, on both sides."""
    from octavo.core import SamplingParams

    most = min(engine.max_model_tokens for engine in engines) - config.task.max_new_tokens
    params = SamplingParams(max_tokens=config.task.max_new_tokens, logprobs=2, ignore_eos=True, seed=config.seed)
    try:
        prompt = item.prompt_ids(tokenizer, min(most, config.task.max_prompt_tokens or most))
        sides = []
        for engine in engines:
            ids = {name: engine.submit(prompt, params, method=method) for name, method in methods.items()}
            completions = engine.finish(list(ids.values()))
            sides.append({name: completions[request_id].samples[0] for name, request_id in ids.items()})
    except ValueError as error:
        return [{"item": item.id, "method": name, "error": str(error)} for name in methods]
    samples = []
    for name in methods:
        own = [side[name] for side in sides]
        tokens = [sample.token_ids for sample in own]
        verdict = compare(tokens, [sample.logprobs or [] for sample in own], config.near_tie_nats)
        samples.append({"item": item.id, "method": name, "prompt_tokens": len(prompt), **verdict, "token_ids": tokens})
    return samples


def _engines(config: Devices, places: Sequence[Place]) -> tuple[list[Engine], Any]:
    """An engine a place, and the tokenizer; places on one device share the model."""
    models: dict[str, Any] = {}
    engines = []
    for place in places:
        if place.device not in models:
            models[place.device] = build.load_model(dataclasses.replace(config.model, device=place.device))
        model, tokenizer = models[place.device]
        settings = dataclasses.replace(config.engine, backend=place.backend)
        # Not a changed copy of ``config``, which refuses a backend, as it is not the user's to set there.
        engines.append(build.engine(Config(config.experiment, engine=settings), model, tokenizer))
    return engines, tokenizer


def _automatic() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else REFERENCE_PAIR


def _small(task: TaskSettings) -> TaskSettings:
    """The task for the reference kernels on a CPU, which are slow; a prompt length that was given stays."""
    if task.max_prompt_tokens is not None:
        return task
    new = min(task.max_new_tokens, REFERENCE_NEW_TOKENS)
    return dataclasses.replace(task, max_prompt_tokens=REFERENCE_PROMPT_TOKENS, max_new_tokens=new)


def _notes(names: Sequence[str], near_tie_nats: float) -> list[str]:
    return [
        f"Compared: {names[0]} and {names[1]}, greedily, token by token up to an item's first difference.",
        f"A near tie: on both, the two most likely tokens are less than {near_tie_nats:g} nats apart there.",
    ]


@contextmanager
def _no_tf32() -> Iterator[None]:
    """fp32 products in full precision; a tensor core's TF32 keeps 10 bits of mantissa."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
