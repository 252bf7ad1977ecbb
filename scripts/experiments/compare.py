"""Set runs side by side: what changed between them, item by item?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, cast

from octavo.scripts import compositions, report, settings, summary
from octavo.scripts.progress import counting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import FREE_KEYS, Run, Sample
from octavo.scripts.schema import Compare
from octavo.scripts.tasks.statistics import mcnemar_exact, paired_bootstrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

LIKELIHOOD = "gold_log_likelihood_per_token"
QUALITIES = (*summary.QUALITIES, LIKELIHOOD)
CONTENT = ("gold", "answers", "sha256", "prompt_sha256", "length", "depth")
"""What two samples of one item must agree in, where both have it."""

COLUMNS = (
    "task", "method", "name", "against", "items", "pairs", "edit_similarity", "edit_similarity_vs_first", "exact_match",
    "exact_match_vs_first", "accuracy", "accuracy_vs_first", "perplexity", f"{LIKELIHOOD}_vs_first",
    "kv_bytes_per_token", "digest_bytes_per_token",
)  # fmt: skip

NOTES = (
    "All figures are over the items that all runs have. vs first: mean paired difference to the run and method in the "
    "column against; 95 %, bootstrap over items.",
    "A row is compared with the same method of the first run, or with the first run's first method where it has no "
    "such one. mcnemar_p: exact two-sided p-value that both get as many items exactly right.",
)


@dataclass(frozen=True)
class Compared:
    """One of the runs: its letter, folder, settings by dotted key, and samples by (task, method, item), those with
    errors left out."""

    label: str
    folder: Path
    config: Mapping[str, Any]
    experiment: str
    complete: bool
    samples: Mapping[tuple[str, str, str], Sample]

    def of(self, task: str, method: str) -> dict[str, Sample]:
        return {item: s for (t, m, item), s in self.samples.items() if (t, m) == (task, method)}

    @property
    def items(self) -> set[tuple[str, str]]:
        """(task, item)."""
        return {(task, item) for task, _, item in self.samples}

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for _, method, _ in self.samples))


def run(config: Compare, run: Run) -> None:
    """One sample an item and method of every run but the first, with both scores; one row a task, method and run.

    Raises:
        ConfigError: the runs do not match, and why.
    """
    runs = [load(label, Path(folder)) for label, folder in zip(ascii_uppercase, config.runs, strict=False)]
    refuse_unlike(runs)
    kept = {task: items[: config.limit] for task, items in common_items(runs).items()}
    methods = sorted({method for one in runs for method in one.methods}, key=lambda method: order(runs, method))
    cells = [
        (task, method, one)
        for task, items in kept.items()
        for method in methods
        for one in runs
        if not one.of(task, method).keys().isdisjoint(items)
    ]
    done, found = run.done("item", "task", "method", "name"), []
    with counting(config.experiment, len(cells)) as advance:
        for task, method, one in cells:
            row, samples = compared(task, method, one, runs[0], kept[task], config.seed)
            for sample in samples:
                if tuple(sample[key] for key in ("item", "task", "method", "name")) not in done:
                    run.add(sample)
            found.append(row)
            run.write_rows(found)
            advance(f"{task}, {method}, {one.label}: {row['items']} items")
    differing = differences(runs)
    tables: list[report.Shown] = [(found, [key for key in COLUMNS if any(key in row for row in found)])]
    if differing:
        tables.append((differing, list(differing[0])))
    used = sum(map(len, kept.values()))
    notes = [f"{one.label}: {one.folder}{'' if one.complete else ' (not complete)'}" for one in runs] + [*NOTES]
    notes += [f"{one.label} has {len(one.items)} items, of which {used} are compared." for one in runs]
    report.publish(run, config, found, plots=figures(found), notes=notes, tables=tables)


def load(label: str, folder: Path) -> Compared:
    """A run from its folder.

    Raises:
        ConfigError: it is none, or has no qualities by item and method.
    """
    try:
        metrics = json.loads((folder / "metrics.json").read_text())
        lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        experiment, complete = metrics["experiment"], metrics["complete"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"runs={folder}: no run of octavo can be read there: {error}") from error
    # As it is: a model's folder need not be there any more.
    config = settings.flat(_yaml(folder / "config.yaml"))
    config |= {f"methods.{name}": made for name, made in compositions.read(folder).items()}
    samples: dict[tuple[str, str, str], Sample] = {}
    for line in lines:
        for sample in [{**line, **turn} for turn in line.get("turns", ())] or [line]:
            if "error" not in sample and {"item", "method"} <= sample.keys() and qualities(sample):
                task = str(sample.get("task", config.get("task.name", experiment)))
                samples[task, sample["method"], str(sample["item"])] = sample
    if not samples:
        raise ConfigError(
            f"runs={folder}: its samples have no quality by item and method, and experiment={experiment} cannot be "
            f"compared; what has them are runs of code_completion, ruler, perplexity, multi_turn and their like"
        )
    return Compared(label, folder, config, experiment, complete, samples)


def _yaml(file: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(file)))
    except (OSError, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"runs={file.parent}: its config.yaml cannot be read: {error}") from error


def qualities(sample: Sample) -> dict[str, float]:
    """What of ``QUALITIES`` a sample has."""
    found = {key: sample[key] for key in summary.QUALITIES if isinstance(sample.get(key), int | float)}
    if sample.get("gold_logprobs"):
        found[LIKELIHOOD] = sum(sample["gold_logprobs"]) / len(sample["gold_logprobs"])
    return found


def refuse_unlike(runs: Sequence[Compared]) -> None:
    """Raises ConfigError where runs are of different experiments, have no item in common, or items that differ."""
    first = runs[0]
    for other in runs[1:]:
        pair = f"runs={first.folder} and {other.folder}"
        if other.folder == first.folder:
            raise ConfigError(f"{pair}: that is one run; give two")
        if other.experiment != first.experiment:
            raise ConfigError(f"{pair}: experiment={first.experiment} and experiment={other.experiment} do not match")
        ours, theirs = ({(t, i): s for (t, _, i), s in one.samples.items()} for one in (first, other))
        both = [place for place in ours if place in theirs]
        if not both:
            raise ConfigError(
                f"{pair}: no item is in both, of {len(ours)} and {len(theirs)}; the first are {_first(ours)} and "
                f"{_first(theirs)}"
            )
        for place in both:
            for key in CONTENT:
                one, two = ours[place].get(key), theirs[place].get(key)
                if one is not None and two is not None and one != two:
                    raise ConfigError(
                        f"{pair}: item {place[1]} of {place[0]} is not the same in both: {key} is {_short(one)} in the "
                        f"first and {_short(two)} in the second; runs of other seeds or files are of other items"
                    )


def common_items(runs: Sequence[Compared]) -> dict[str, list[str]]:
    """By task, the items that every run has, in the first one's order."""
    others = [one.items for one in runs[1:]]
    found: dict[str, list[str]] = {}
    for task, item in dict.fromkeys((task, item) for task, _, item in runs[0].samples):
        if all((task, item) in there for there in others):
            found.setdefault(task, []).append(item)
    return found


def order(runs: Sequence[Compared], method: str) -> tuple[int, int]:
    """Methods of the first run come first, as it has them."""
    place = next(number for number, one in enumerate(runs) if method in one.methods)
    return place, runs[place].methods.index(method)


def compared(
    task: str, method: str, one: Compared, first: Compared, kept: Sequence[str], seed: int
) -> tuple[Row, list[Sample]]:
    """The row of one method of one run in a task, and the pairs that it is made of."""
    own = {item: sample for item, sample in one.of(task, method).items() if item in kept}
    [row] = summary.rows(list(own.values()), task=task, seed=seed) if _is_costed(own) else [_bare(own, task, seed)]
    row = {key: value for key, value in row.items() if "_vs_dense" not in key} | {"name": one.label, "method": method}
    if one is first:
        return row, []
    against = method if first.of(task, method) else first.methods[0]
    reference = first.of(task, against)
    pairs = [(item, qualities(own[item]), qualities(reference[item])) for item in own if item in reference]
    row["against"], row["pairs"] = f"{first.label} {against}", len(pairs)
    samples = [
        {"item": item, "task": task, "method": method, "name": one.label, "against": against, "scores": a, "first": b}
        for item, a, b in pairs
    ]
    for key in QUALITIES:
        both = [(a[key], b[key]) for _, a, b in pairs if key in a and key in b]
        if both and len(both) == len(pairs):
            estimate = paired_bootstrap(*zip(*both, strict=True), seed=seed)
            row[f"{key}_vs_first"], row[f"{key}_vs_first_ci"] = estimate.mean, [estimate.low, estimate.high]
            if key == "exact_match":
                row["mcnemar_p"] = mcnemar_exact(*zip(*both, strict=True)).p_value
    return row, samples


def _is_costed(own: Mapping[str, Sample]) -> bool:
    """Whether samples have what ``summary.rows`` adds up."""
    needed = {"decode_steps", "new_tokens", "seconds", "units_held_peak", "device_bytes_peak", "prompt_tokens"}
    return all(needed <= sample.keys() for sample in own.values())


def _bare(own: Mapping[str, Sample], task: str, seed: int) -> Row:
    """The row of samples that have qualities and nothing else in common."""
    filler = dict.fromkeys(
        ("decode_steps", "new_tokens", "seconds", "units_held_peak", "device_bytes_peak", "prompt_tokens"), 0
    )
    [row] = summary.rows([{**filler, **sample} for sample in own.values()], task=task, seed=seed)
    return {key: value for key, value in row.items() if key in ("items", "task") or key.startswith(QUALITIES)}


def differences(runs: Sequence[Compared]) -> list[Row]:
    """A row a setting in which the runs differ."""
    each = [one.config for one in runs]
    keys = [key for key in dict.fromkeys(key for one in each for key in one) if key.split(".")[0] not in FREE_KEYS]
    return [
        {"setting": key, **{one.label: str(flat.get(key)) for one, flat in zip(runs, each, strict=True)}}
        for key in keys
        if len({str(flat.get(key)) for flat in each}) > 1
    ]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """``differences``: a line a row with its difference and interval; nothing where nothing is paired."""
    from matplotlib.figure import Figure

    quality = next((key for key in QUALITIES if any(f"{key}_vs_first" in row for row in rows)), None)
    paired = [row for row in rows if f"{quality}_vs_first" in row]
    if quality is None:
        return {}
    figure = Figure(figsize=(7, 1.2 + 0.35 * len(paired)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(paired):
        value, (low, high) = row[f"{quality}_vs_first"], row[f"{quality}_vs_first_ci"]
        axes.errorbar(value, place, xerr=[[value - low], [high - value]], fmt="o", color="C0", capsize=3)
    names = [f"{row['task']}: {row['name']} {row['method']} - {row['against']}" for row in paired]
    axes.set_yticks(range(len(paired)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="0.5", linewidth=1)
    axes.set_xlabel(f"difference in {quality.replace('_', ' ')}, 95 % interval")
    axes.grid(alpha=0.3, axis="x")
    return {"differences": figure}


def _first(samples: Mapping[tuple[str, str], Sample]) -> str:
    task, item = next(iter(samples))
    return f"{item} of {task}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
