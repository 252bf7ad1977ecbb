"""What do n samples of one prompt take, next to one sample?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo.scripts import build, report
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Config, Sharing
from octavo.scripts.watched_pass import watched_pass

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core import Engine
    from octavo.core.inspection.page_watch import PageWatch

Row = dict[str, Any]

RANDOM = "random weights"
VOCABULARY = 256
CLAIMED_PERCENT = 15.0
"""What 100 samples are claimed to take more than one."""

NOTES = (
    "Pages held at the peak, counted by the engine's pool; predicted: full prompt pages once, and what comes after "
    "them once a sample. Copies: of the partly filled last prompt page, for all samples but the one that keeps it.",
    f"{RANDOM}: a model of one layer, since memory in pages depends on lengths alone. Every sample gets all its new "
    "tokens.",
)


class Cell(NamedTuple):
    """So many samples, of so many new tokens each, of one prompt."""

    samples: int
    prompt_tokens: int
    new_tokens: int


def run(config: Sharing, run: Run) -> None:
    """One sample and one row a cell. Every cell has an engine of its own, so that the peak is its own:

        the prompt is computed once; its first sample then forks into all (``fork_samples``)
        every sample draws its tokens, by nucleus sampling, one a step, all in the same steps
        the peak of the pages held, and the number of pages copied, are compared with ``predicted_pages`` and ``copies``

    The larger grid is served by a tiny model with random weights, the smaller one by ``config.model``.
    """
    page_tokens = build.engine_config(config.engine).text_page_tokens
    random_cells = _cells(config.samples, config.prompt_tokens, config.new_tokens)[: config.limit]
    model_cells = _cells(config.model_samples, config.model_prompt_tokens, config.model_new_tokens)[: config.limit]
    served = {RANDOM: (_random_model(max(c.prompt_tokens + c.new_tokens for c in random_cells)), random_cells)}
    if model_cells:
        with waiting(f"loading {config.model.path}"):
            model, _ = build.load_model(config.model)
        served[Path(config.model.path).name] = (model, model_cells)
    for model, cells in served.values():
        _refuse(config, model, cells)

    done = run.done("item", *Cell._fields)
    with counting(config.experiment, len(random_cells) + len(model_cells), len(done)) as advance:
        for name, (model, cells) in served.items():
            for cell in cells:
                if (name, *cell) in done:
                    continue
                counted = _serve(config, _engine(config, model, cell, page_tokens), cell, page_tokens)
                run.add({"item": name, **cell._asdict(), **counted})
                found = rows(run.samples)
                run.write_rows(found)
                advance(_said(found[-1]))

    found = rows(run.samples)
    for line in _findings(found):
        console.print(line, style="bold", markup=False, highlight=False)
    plots = {"sharing": surface(found, page_tokens, config.surface_tokens)}
    maps = [_map(config, *served[RANDOM], page_tokens)] if config.page_map else []
    report.publish(run, config, found, plots=plots, notes=(*_findings(found), *NOTES), maps=maps)


def predicted_pages(cell: Cell, page_tokens: int) -> int:
    """Pages that all samples of a prompt hold at their peak, in the last step.

    With a prompt of L tokens, m new ones a sample, n samples and pages of P, a sample stores L + m - 1 tokens, since
    the KV of the last one is never needed::

        page     0 ... floor(L / P) - 1 | floor(L / P)            | ... ceil((L + m - 1) / P) - 1
        filled   by the prompt          | by its rest, if any,    | by the sample
                                        | and then by the sample  |
        held     once                   | n times                 | n times

    A fork shares every page (``BlockTable.fork``). Full prompt pages are never written again. The partly filled one is
    written next, so every sample takes a copy of it first, but for the last of them, which is alone with it by then
    (``BlockTable.copy_needed``). With m = 1 nothing is written after the prompt, and nothing comes on top of it.
    """
    samples, prompt, new = cell
    if new == 1:
        return -(-prompt // page_tokens)
    shared = prompt // page_tokens
    return shared + samples * (-(-(prompt + new - 1) // page_tokens) - shared)


def predicted_copies(cell: Cell, page_tokens: int) -> int:
    """Pages copied on write: the partly filled last prompt page, for all samples but one."""
    return cell.samples - 1 if cell.prompt_tokens % page_tokens and cell.new_tokens > 1 else 0


def extra_percent(cell: Cell, pages: int, page_tokens: int) -> float:
    """How much more than one sample of the same lengths ``pages`` are."""
    return 100 * (pages / predicted_pages(cell._replace(samples=1), page_tokens) - 1)


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a cell, in the order served."""
    found = []
    for sample in samples:
        cell = Cell(*(sample[key] for key in Cell._fields))
        page_tokens = sample["page_tokens"]
        pages = predicted_pages(cell, page_tokens)
        found.append(
            {
                "name": "octavo",
                "task": f"{cell.prompt_tokens:,} + {cell.new_tokens}",
                "weights": sample["item"],
                **cell._asdict(),
                "page_tokens": page_tokens,
                "pages_held_peak": sample["pages_held_peak"],
                "predicted_pages": pages,
                "copies": sample["copies"],
                "predicted_copies": predicted_copies(cell, page_tokens),
                "extra_percent": extra_percent(cell, sample["pages_held_peak"], page_tokens),
                "preemptions": sample["preemptions"],
            }
        )
    return found


def _cells(samples: Sequence[int], prompts: Sequence[int], new_tokens: Sequence[int]) -> list[Cell]:
    return [Cell(n, prompt, new) for prompt in prompts for new in new_tokens for n in samples]


def _serve(config: Sharing, engine: Engine, cell: Cell, page_tokens: int) -> dict[str, Any]:
    from octavo.core import SamplingParams

    prompt = np.random.default_rng(config.seed).integers(0, engine.spec.vocab_size, cell.prompt_tokens).tolist()
    params = SamplingParams(
        n=cell.samples, max_tokens=cell.new_tokens, temperature=1.0, top_p=config.top_p, seed=config.seed,
        ignore_eos=True,
    )  # fmt: skip
    start = time.perf_counter()
    engine.submit(prompt, params)
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    return {
        "page_tokens": page_tokens,
        "pages_held_peak": stats.units_held_peak * engine.config.unit_tokens // page_tokens,
        "copies": stats.copies,
        "preemptions": stats.preemptions,
        "seconds": time.perf_counter() - start,
    }


def _map(config: Sharing, model: Any, cells: Sequence[Cell], page_tokens: int) -> tuple[str, PageWatch]:
    """The pool while the cell with most samples, and of those the one with the longest prompt, is served."""
    cell = max(cells)
    engine = _engine(config, model, cell, page_tokens)
    shows = f"{RANDOM}, {cell.samples} samples of {cell.prompt_tokens:,} + {cell.new_tokens} tokens"
    return shows, watched_pass(engine, lambda: _serve(config, engine, cell, page_tokens))


def _engine(config: Sharing, model: Any, cell: Cell, page_tokens: int) -> Engine:
    """An engine with room for twice the prediction, so that a wrong one would show."""
    pool_tokens = 2 * predicted_pages(cell, page_tokens) * page_tokens
    # Not a changed copy of ``config``, which refuses a pool, as it is not the user's to set there.
    sized = Config(config.experiment, engine=dataclasses.replace(config.engine, pool_tokens=pool_tokens))
    return build.engine(sized, model, None)


def _random_model(longest: int) -> Any:
    """The smallest Llama that the kernels serve: one layer, one head of 16, random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=longest, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(shape).eval()


def _refuse(config: Sharing, model: Any, cells: Sequence[Cell]) -> None:
    """What the closed form does not cover, or the model cannot hold."""
    text = model.config.get_text_config()
    most, longest = text.max_position_embeddings, max(c.prompt_tokens + c.new_tokens for c in cells)
    if longest > most:
        raise ConfigError(
            f"the longest of the model's cells has {longest} tokens, and the model at most {most}; "
            "lower model_prompt_tokens or model_new_tokens"
        )
    if config.engine.layer_groups and getattr(text, "sliding_window", None):
        raise ConfigError(
            f"engine.layer_groups=true: layers with a window of {text.sliding_window} let go of pages, which the "
            "closed form does not count; set engine.layer_groups=false"
        )


def _said(row: Row) -> str:
    return (
        f"{row['weights']}, {row['samples']} x ({row['task']}): {row['pages_held_peak']:,} pages, predicted "
        f"{row['predicted_pages']:,}, {row['extra_percent']:+.1f} % over one sample"
    )


def _findings(found: Sequence[Row]) -> list[str]:
    """What a reader wants to know first."""
    wrong = [
        row
        for row in found
        if (row["pages_held_peak"], row["copies"]) != (row["predicted_pages"], row["predicted_copies"])
    ]
    most = max(row["samples"] for row in found)
    largest = {row["task"]: row for row in found if row["samples"] == most}
    cheap = [task for task, row in largest.items() if row["extra_percent"] <= CLAIMED_PERCENT]
    return [
        f"pages and copies are as predicted in {len(found) - len(wrong)} of {len(found)} cells",
        *(f"NOT as predicted: {_said(row)}" for row in wrong),
        f"{most} samples take at most {CLAIMED_PERCENT:.0f} % more than one for {len(cheap)} of {len(largest)} lengths "
        f"(prompt + new): {'; '.join(cheap) or 'none'}",
    ]


def surface(found: Sequence[Row], page_tokens: int, longest: int) -> Figure:
    """What n samples take more than one, in percent, by the lengths of prompt and outputs: the closed form as colour,
    a panel for each n; the line is at 15 %. Dots were measured, white where they are at 15 % or less."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    counts = sorted({row["samples"] for row in found} - {1}) or [1]
    prompts = np.unique(np.geomspace(256, max(longest, 512), 120).astype(int))
    outputs = np.unique(np.geomspace(2, 1024, 90).astype(int))
    columns = min(3, len(counts))
    lines = -(-len(counts) // columns)
    figure = Figure(figsize=(1 + 4.2 * columns, 0.6 + 3.4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axes, count in zip(panels.flat, counts, strict=False):
        percent = np.array(
            [
                [extra_percent(cell, predicted_pages(cell, page_tokens), page_tokens) for cell in line]
                for line in ([Cell(count, int(prompt), int(new)) for prompt in prompts] for new in outputs)
            ]
        )
        norm = LogNorm(1, 10_000, clip=True)
        colours = axes.pcolormesh(prompts, outputs, np.maximum(percent, 1), norm=norm, cmap="viridis", rasterized=True)
        if percent.min() < CLAIMED_PERCENT < percent.max():
            axes.contour(prompts, outputs, percent, levels=[CLAIMED_PERCENT], colors="white")
        for row in (row for row in found if row["samples"] == count):
            fill = "white" if row["extra_percent"] <= CLAIMED_PERCENT else "black"
            axes.plot(row["prompt_tokens"], row["new_tokens"], "o", color=fill, markeredgecolor="0.5", markersize=5)
        axes.set(xscale="log", yscale="log", title=f"{count} samples")
    for axes in list(panels.flat)[len(counts) :]:
        axes.set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("tokens of the prompt")
    for axes in panels[:, 0]:
        axes.set_ylabel("new tokens a sample")
    figure.colorbar(colours, ax=panels, label="more than one sample (%)")
    return figure
