"""Rows from samples, and how tables, figures and pages show them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rich.console import Console

from octavo.scripts import plots, report, summary


def sample(item: int, method: str, similarity: float, **more: Any) -> dict[str, Any]:
    return {
        "item": item,
        "method": method,
        "exact_match": 100.0 * (similarity == 100),
        "edit_similarity": similarity,
        "gold_logprobs": [-1.0, -3.0],
        "prompt_tokens": 1000 * (item + 1),
        "new_tokens": 5,
        "decode_steps": 4,
        "kv_bytes_read": 400,
        "digest_bytes_read": 40,
        "predicted_kv_bytes": 400,
        "predicted_digest_bytes": 40,
        "units_held_peak": 7 + item,
        "device_bytes_peak": 70,
        "seconds": 2.0,
        **more,
    }


SAMPLES = [
    *(sample(item, "dense", score) for item, score in enumerate([100.0, 50.0, 60.0])),
    *(sample(item, "quest", score, kv_bytes_read=100) for item, score in enumerate([90.0, 50.0, 40.0])),
    {"item": 3, "method": "quest", "error": "too long"},
]


def test_a_row_is_means_totals_and_peaks() -> None:
    dense, quest = summary.rows(SAMPLES, task="t")
    assert (dense["method"], dense["items"], dense["failed"]) == ("dense", 3, 0)
    assert (quest["method"], quest["items"], quest["failed"]) == ("quest", 3, 1)
    assert dense["edit_similarity"] == 70 and quest["edit_similarity"] == 60
    assert quest["edit_similarity_vs_dense"] == -10
    low, high = quest["edit_similarity_vs_dense_ci"]
    assert -20 <= low <= -10 <= high <= 0
    assert dense["exact_match"] == pytest.approx(100 / 3)
    assert dense["gold_log_likelihood_per_token"] == -2 and dense["perplexity"] == pytest.approx(math.e**2)
    assert dense["kv_bytes_per_token"] == 100 and quest["kv_bytes_per_token"] == 25
    assert dense["digest_bytes_per_token"] == 10 and dense["units_held_peak"] == 9
    assert dense["seconds"] == 6 and dense["tokens_per_s"] == 2.5


def test_rows_without_intervals_have_the_same_values() -> None:
    for short, full in zip(
        summary.rows(SAMPLES, task="t", intervals=False), summary.rows(SAMPLES, task="t"), strict=True
    ):
        assert short == {key: pytest.approx(full[key]) if isinstance(full[key], float) else full[key] for key in short}
        assert full.keys() - short.keys() == {key for key in full if key.endswith("_ci")}


def test_no_samples_are_no_rows() -> None:
    assert summary.rows([], task="t") == []
    assert summary.rows([{"item": 0, "method": "dense", "error": "e"}], task="t") == []


def test_a_likelihood_of_zero_is_an_infinite_perplexity() -> None:
    [row] = summary.rows([sample(0, "dense", 1.0, gold_logprobs=[-1e6])], task="t", intervals=False)
    assert row["perplexity"] == math.inf


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("kv_bytes_per_token", 24_117_248.0, "24.12 MB"),
        ("device_bytes_peak", 512, "512 B"),
        ("edit_similarity", 7.25, "7.2"),
        ("edit_similarity_vs_dense", 0.5, "+0.5"),
        ("perplexity", 3.14159, "3.14"),
        ("units_held_peak", 12345, "12,345"),
        ("operations_per_s", 8_712_345.6, "8,712,346"),
        ("tokens_per_s", 9876.54, "9876.5"),
        ("seconds", None, "-"),
        ("perplexity", math.inf, "inf"),
        ("method", "quest", "quest"),
    ],
)
def test_values_in_tables(key: str, value: Any, text: str) -> None:
    assert report.format_value(key, value) == text


def test_tables_leave_out_intervals_and_what_never_differs() -> None:
    rows = summary.rows(SAMPLES, task="t")
    keys = report.columns(rows)
    assert "method" in keys and "failed" in keys
    assert "task" not in keys and "items" not in keys and not [key for key in keys if key.endswith("_ci")]
    console = Console(width=250)
    with console.capture() as capture:
        console.print(report.terminal_table(rows))
    lines = capture.get().splitlines()
    assert "edit similarity" in lines[0] and "KV read a token" in lines[0]
    assert "60.0" in lines[2] and "-10.0" in lines[2] and "25 B" in lines[2]


def test_any_columns_can_be_asked_for() -> None:
    """As for block statistics, of which every column says something."""
    rows = [{"state": "free", "request": None, "bytes": 2048, "mean_run_units": 12.5}] * 2
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report.terminal_table(rows, list(rows[0])))
    assert [line.split() for line in capture.get().splitlines()] == [
        ["state", "request", "bytes", "mean_run_units"],
        *[["free", "-", "2.05", "kB", "12.5"]] * 2,
    ]


@pytest.mark.parametrize("figure", ["pareto", "by_length", "per_item"])
def test_figures_draw(figure: str, tmp_path: Any) -> None:
    good = [s for s in SAMPLES if "error" not in s]
    made = (
        plots.pareto(summary.rows(SAMPLES, task="t"))
        if figure == "pareto"
        else getattr(plots, figure)(good, ["dense", "quest"])
    )
    made.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_by_length_counts_its_items() -> None:
    [axes] = plots.by_length([s for s in SAMPLES if "error" not in s], ["dense", "quest"]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["under 2,000\n1 item", "2,000 to 4,000\n2 items"]
