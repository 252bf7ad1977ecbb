"""What a reader gets of a run: a table on the terminal, and one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from octavo.scripts import page_map, settings
from octavo.scripts.progress import console
from octavo.scripts.run import Run
from octavo.scripts.schema import Config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core.inspection.page_watch import PageWatch

Row = Mapping[str, Any]
Shown = tuple[Sequence[Row], Sequence[str]]
"""A table: its rows and its columns, in order."""

HEADINGS = {
    "value": "value",
    "weights": "weights",
    "samples": "samples",
    "pages_held_peak": "pages held",
    "predicted_pages": "predicted",
    "copies": "copies",
    "predicted_copies": "predicted",
    "extra_percent": "% over one sample",
    "exact_match": "exact match",
    "edit_similarity": "edit similarity",
    "edit_similarity_vs_dense": "vs dense",
    "length": "length",
    "accuracy": "accuracy",
    "drafts": "drafts",
    "forced_acceptance": "forced",
    "acceptance": "drafts right %",
    "tokens_per_round": "tokens a round",
    "tokens_equal_percent": "as dense %",
    "speed_up": "x dense",
    "predicted_speed_up": "predicted",
    "bytes_ratio": "x fewer bytes",
    "accuracy_vs_dense": "vs dense",
    "accuracy_vs_uncached": "vs uncached",
    "soft_accuracy": "soft accuracy",
    "soft_accuracy_vs_uncached": "vs uncached",
    "consistency": "consistency",
    "rouge_l": "ROUGE-L",
    "rouge_l_vs_uncached": "vs uncached",
    "things_f1": "F1 of things",
    "things_f1_vs_uncached": "vs uncached",
    "agreement_percent": "same tokens %",
    "kl_nats_max": "KL at most, nats",
    "blank_accuracy": "blank images",
    "wrong_accuracy": "wrong images",
    "verdict_accuracy": "verdict",
    "hit_tokens": "tokens found",
    "same_tokens_percent": "dense turn as dense %",
    "margin_nats_max": "margin, nats",
    "equal_percent": "equal sets %",
    "jaccard_percent": "Jaccard %",
    "within_percent": "within %",
    "differing_tokens_max": "differ in at most",
    "kept_tokens": "kept",
    "kvpress_kept_tokens": "kept by kvpress",
    "kept_percent": "kept %",
    "kept_percent_min": "at least",
    "file_bytes": "file",
    "perplexity": "perplexity",
    "page_tokens": "page",
    "formula_tokens": "formula",
    "pages_per_sequence": "pages a sequence",
    "waste_percent": "waste %",
    "predicted_waste_percent": "predicted %",
    "utilisation_percent": "utilisation %",
    "largest_batch": "largest batch",
    "batch_ratio": "x the batch",
    "cache_percent": "idle kept %",
    "pool_tokens": "pool",
    "lru_hit_rate_percent": "lru %",
    "lru_k_hit_rate_percent": "lru_k %",
    "fifo_hit_rate_percent": "fifo %",
    "lfu_hit_rate_percent": "lfu %",
    "priority_hit_rate_percent": "priority %",
    "cost_hit_rate_percent": "cost %",
    "hit_rate_percent": "hits %",
    "replayed_hit_rate_percent": "replayed %",
    "belady_hit_rate_percent": "belady %",
    "first_percent": "first %",
    "prefetched_percent": "ahead %",
    "prefetch_accuracy_percent": "of use %",
    "fetched_bytes_per_token": "fetched a token",
    "useless_bytes_per_token": "in vain",
    "prefetch_scoring_bytes_per_token": "scored ahead",
    "waited_percent": "waited %",
    "running_peak": "at once",
    "same_requests": "same tokens",
    "agreeing_percent": "same tokens %",
    "host_bytes_held_decoding": "in host memory",
    "memory_tokens": "slots",
    "running_mean": "at once",
    "decoding_peak": "decode at once",
    "admission_ratio": "x dense",
    "units_per_request": "units a request",
    "runs_used_percent": "runs used %",
    "running_ratio": "x as many",
    "used_percent": "memory used %",
    "preemptions": "preemptions",
    "budget_tokens": "budget",
    "read_percent": "% of dense read",
    "as_anew_percent": "same tokens %",
    "computed_tokens": "computed",
    "images_encoded": "encoded",
    "inserted": "inserted",
    "fork_units": "fork units",
    "own_units": "own units",
    "kv_bytes_per_token": "KV read a token",
    "predicted_kv_bytes_per_token": "predicted",
    "digest_bytes_per_token": "to choose",
    "page_recall_percent": "recall %",
    "captured_mass_percent": "mass %",
    "output_error_percent": "output error %",
    "break_even_tokens": "pays from",
    "units_held_peak": "units held",
    "device_bytes_peak": "device peak",
    "seconds": "seconds",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_ratio": "x default",
    "host_ms_per_step": "host ms a step",
    "wait_ms_per_step": "wait ms a step",
    "step_p99_ms": "p99 step ms",
    "step_p99_ratio": "x default",
    "slots_held_peak": "slots held",
    "slots_held_ratio": "x default",
    "hit_percent": "hits %",
    "served_per_s": "served/s",
    "goodput_per_s": "within limits/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
    "itl_max_ms": "ITL max ms",
    "itl_p99_while_prefill_ms": "ITL p99 ms, long prompt",
    "queue_p99_ms": "queue p99 ms",
    "device_busy_percent": "device busy %",
    "text_tokens_per_s": "texts: tokens/s",
    "text_threads_ratio": "x one thread",
    "tokenise_percent": "tokenise %",
    "plan_percent": "plan %",
    "compute_percent": "compute %",
    "wait_percent": "wait %",
    "detokenise_percent": "detokenise %",
    "operations_per_s": "pages/s",
    "p99_us": "p99 µs",
    "vllm_ratio": "x vLLM",
    "linear_ratio": "x linear",
    "split_pages_percent": "split pages %",
    "split_calls_percent": "split calls %",
    "run_units_mean": "units a run",
    "external_waste_percent": "external waste %",
    "octavo_ratio": "octavo is x times as fast",
    "moved_bytes": "bytes",
    "floor_ms": "floor ms",
    "floor_us": "floor µs",
    "percent_of_floor": "% of floor",
    "ms_per_step": "ms a step",
    "ms_dense": "ms dense",
    "floor_ms_dense": "floor dense",
    "speedup": "x dense",
    "predicted_speedup": "bytes say",
    "measured_from_tokens": "measured from",
    "predicted_from_tokens": "bytes say from",
    "prefill_tokens_per_s": "prefill tokens/s",
    "ceiling_tokens_per_s": "ceiling tokens/s",
    "percent_of_ceiling": "% of ceiling",
    "us": "µs",
    "flashinfer_us": "FlashInfer µs",
    "fastest_rival": "fastest rival",
    "fastest_rival_us": "its µs",
    "bytes_per_s": "bytes/s",
    "us_mean": "mean µs",
    "reached": "reached",
    "correct": "right",
    "chosen": "chosen",
    "problem": "problem",
    "identical": "identical",
    "near_ties": "near ties",
    "mismatches": "mismatches",
    "logprob_difference_max": "log-prob. difference",
    "chunk_bytes": "growth step",
    "grow_us": "µs to grow",
    "grow_us_max": "at most",
    "shrink_us": "µs to shrink",
    "committed_bytes_mean": "committed",
    "committed_bytes_min": "at least",
    "committed_ratio": "committed / needed",
    "kv_bytes_held_peak": "KV held at the peak",
    "kv_bytes_held_decoding": "while decoding",
    "kv_ratio": "peak on / off",
    "kv_decoding_ratio": "decoding on / off",
    "unpredicted_steps": "steps not as predicted",
    "same_tokens": "same tokens",
    "requests_fit": "requests in one pool",
    "prefill_seconds": "prefill s",
    "hit_seconds": "on a prefix hit",
    "fork_us": "µs to fork",
    "share_percent": "share %",
    "same_answer_percent": "same answer %",
    "kl_first_nats_mean": "KL, nats",
    "kv_kept_percent": "KV kept %",
    "units_freed": "units freed",
    "host_bytes_recalled": "recalled",
}
"""The columns that a reader looks at first, and what they are called there; all others keep their key."""

LABELS = (
    "name",
    "method",
    "same",
    "execution",
    "task",
    "policy",
    "placement",
    "replacement",
    "prefetch",
    "knob",
    "kernel",
    "shape",
    "key",
    "settings",
)

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .3rem .7rem; border-bottom: 1px solid #8884 }
th { text-align: left; font-weight: 600 } td { font-variant-numeric: tabular-nums }
td { white-space: nowrap } td.number { text-align: right }
small, .interval { color: #808080 } img { max-width: 100%; margin: 1rem 0 } pre { background: #8881; padding: 1rem;
overflow-x: auto } .wide { overflow-x: auto } .incomplete { color: #c22 }
"""


def publish(
    run: Run,
    config: Config,
    rows: Sequence[Row],
    *,
    plots: Mapping[str, Figure],
    notes: Sequence[str] = (),
    maps: Sequence[tuple[str, PageWatch | None]] = (),
    tables: Sequence[Shown] = (),
    sections: Sequence[str] = (),
) -> None:
    """End a run: final metrics, plots, report, tracked results, and the table on the terminal.

    Args:
        notes: what a reader must know to read the table, one sentence each.
        maps: page maps, each as what it shows and the watch that saw it; None is no map.
        tables: what a reader looks at first, where one table of all rows is not it.
        sections: HTML of an experiment's own, behind tables and notes.
    """
    tables = tables or [(rows, main_columns(rows))]
    files = {name: run.save_plot(name, figure) for name, figure in plots.items()}
    run.write("report.html", page(run, config, rows, notes, maps, tables, sections))
    run.tracker.log_results(rows, files)
    run.write_rows(rows, complete=True)
    for own, keys in tables:
        console.print(terminal_table(own, keys))
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False)


def columns(rows: Sequence[Row]) -> list[str]:
    """Keys that a table shows: those of all rows in order, without intervals, and without what never differs."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if not key.endswith("_ci")]
    shared = {key for key in keys if key not in HEADINGS and len({str(row.get(key)) for row in rows}) == 1}
    return [key for key in keys if len(rows) == 1 or key not in shared]


def main_columns(rows: Sequence[Row]) -> list[str]:
    """Those of ``columns`` that a reader looks at first, in the order of ``HEADINGS``."""
    keys = columns(rows)
    return [key for key in (*LABELS, *HEADINGS) if key in keys]


def terminal_table(rows: Sequence[Row], keys: Sequence[str] | None = None) -> Table:
    """Rows as a table: the columns that a reader looks at first, or ``keys``."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    keys = main_columns(rows) if keys is None else keys
    for key in keys:
        table.add_column(HEADINGS.get(key, key), justify="left" if key in LABELS else "right")
    for row in rows:
        table.add_row(*(_with_interval(row, key, "{} [dim]{}[/]") for key in keys))
    return table


def page(
    run: Run,
    config: Config,
    rows: Sequence[Row],
    notes: Sequence[str],
    maps: Sequence[tuple[str, PageWatch | None]],
    tables: Sequence[Shown],
    sections: Sequence[str] = (),
) -> str:
    """The HTML report; images and page maps are inside it."""
    environment = run.environment
    title = f"octavo: {config.experiment}"
    images = "".join(map(_image, sorted((run.folder / "plots").glob("*.png"), key=_when)))
    facts = {**environment, "folder": run.folder}
    made = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in facts.items())
    keys_used = "\n".join(f"{key}: {value}" for key, value in settings.flat(settings.plain(config)).items())
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        f"{''.join(_table(own, keys) for own, keys in tables)}"
        f"{''.join(f'<p>{html.escape(note)}</p>' for note in notes)}{''.join(sections)}{images}"
        f"{''.join(page_map.section(watch, shows) for shows, watch in maps if watch is not None)}"
        f"<details><summary>All columns</summary>{_table(rows, columns(rows))}</details>"
        f"<h2>Settings</h2><pre>{html.escape(keys_used)}</pre>"
        f"<h2>Environment</h2><table>{made}</table></html>\n"
    )


def _table(rows: Sequence[Row], keys: Sequence[str]) -> str:
    head = "".join(f"<th>{html.escape(HEADINGS.get(key, key))}</th>" for key in keys)
    body = "".join(f"<tr>{''.join(_cell(row, key) for key in keys)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _when(file: Path) -> int:
    """The order in which an experiment saved its figures, the main one first."""
    return file.stat().st_mtime_ns


def _image(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="{html.escape(file.stem)}" src="data:image/png;base64,{data}">'


def _cell(row: Row, key: str) -> str:
    number = isinstance(row.get(key), int | float)
    return (
        f"<td{' class=number' if number else ''}>{_with_interval(row, key, '{} <span class=interval>{}</span>')}</td>"
    )


def _with_interval(row: Row, key: str, template: str) -> str:
    interval = row.get(f"{key}_ci")
    value = html.escape(format_value(key, row.get(key))) if "<" in template else format_value(key, row.get(key))
    if interval is None:
        return value
    low, high = (format_value(key, end) for end in interval)
    return template.format(value, f"{low} to {high}")


def format_value(key: str, value: Any) -> str:
    """A value as a table shows it: bytes with their unit, a difference with its sign, numbers to what they can say."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if "bytes" in key and not key.endswith("_ratio"):
        return format_bytes(value)
    sign = "+" if key.endswith(("_vs_dense", "_vs_first", "_vs_uncached", "_vs_base")) else ""
    if isinstance(value, int) or abs(value) >= 10_000:
        return f"{round(value):{sign},}"
    return (
        f"{value:{sign}.1f}"
        if abs(value) >= 10 or key.startswith(("exact", "edit", "accuracy"))
        else f"{value:{sign}.2f}"
    )


def format_bytes(count: float) -> str:
    """Bytes in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
