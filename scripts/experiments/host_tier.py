"""Pages in host memory: how often is what a head chooses on the device already, by page size, prefetch and policy?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.scripts import build, hosted_runs, report
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import HostTier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

RECORDED = "recorded"

NOTES = (
    "hit rate: chosen pages that were on the device, a layer and KV head each, of those that lie in host memory; the "
    "first choice of a page always misses (first %).",
    "belady: the same choices replayed with the policy that knows the future, the bound for whoever fetches on demand. "
    "replayed: with the row's own policy, which must be its hit rate where nothing is fetched ahead.",
    "ahead: of the pages that came, those that came before anybody had chosen them. Of use: of those, the ones that "
    "were chosen before they had to make room. In vain: bytes of the others, which are among those fetched.",
    "scored ahead: bytes of digests that were read to tell what to fetch ahead, besides those that are read to choose.",
    "waited: seconds of decode steps in which a layer waited for pages, of all seconds of decode steps. On a CPU both "
    "pools are ordinary memory, and a wait is a copy.",
    "same tokens: equal to those of the method with all pages in the pool.",
)


def run(config: HostTier, run: Run) -> None:
    """One sample and one row a page size, way to fetch ahead and policy, and a sample a page size of what was chosen.

    1. A page size's choices are recorded in a run of their own, and replayed under every policy and under Belady's.
    2. The same prompts are served with all pages in the pool, for the tokens to compare with.
    3. Then every policy and way to fetch ahead serves them on an engine of its own.
    """
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
    asked = hosted_runs.prompts(config, tokenizer)
    done = run.done("item", "prefetch", "replacement")
    turns = [(size, p, r) for size in config.page_sizes for p in config.prefetches for r in config.replacements]
    total = len(turns) + len(config.page_sizes)
    with counting(config.experiment, total, len(done)) as advance:
        for size in config.page_sizes:
            if (str(size), RECORDED, RECORDED) not in done:
                about = {"item": str(size), "prefetch": RECORDED, "replacement": RECORDED}
                run.add({**about, **record(config, model, size, asked)})
                advance(f"pages of {size}: recorded")
            for _, prefetch, replacement in (turn for turn in turns if turn[0] == size):
                if (str(size), prefetch, replacement) in done:
                    continue
                served = measure(config, model, size, asked, prefetch, replacement)
                run.add({"item": str(size), "prefetch": prefetch, "replacement": replacement, **served})
                run.write_rows(rows(run.samples))
                hits = 100 * (1 - served["misses"] / max(served["lookups"], 1))
                advance(f"pages of {size}, {replacement}, prefetch {prefetch}: {hits:.1f} % hits")

    found = rows(run.samples)
    for line in findings(found):
        console.print(line, style="bold", markup=False, highlight=False)
    report.publish(run, config, found, plots={"host_tier": figure(found)}, notes=NOTES)


def record(config: HostTier, model: Any, page_tokens: int, asked: Sequence[list[int]]) -> Sample:
    """What was chosen, replayed under every policy, and the tokens with all pages in the pool."""
    from octavo.sparse.replacement.belady import Belady
    from octavo.sparse.replacement.policies import REPLACEMENTS
    from octavo.sparse.resident_trace import Recorder, replay

    method, recorder = hosted_runs.resident(config), Recorder()
    placement = dataclasses.replace(hosted_runs.host(config, "lru", "none"), recorder=recorder)
    hosted = dataclasses.replace(method, placement=placement)
    watched = _engine(config, model, page_tokens, len(asked))
    hosted_runs.serve(watched, asked, hosted, config.new_tokens)
    hosting = hosted.hosting(watched.spec, page_tokens)
    if hosting is None or not recorder.choices:
        raise ConfigError(
            f"context_tokens={config.context_tokens}: no page of these prompts leaves the device under "
            f"sparse.budget_tokens={config.sparse.budget_tokens} and slack_tokens={config.slack_tokens}; give longer "
            "prompts, or less of both"
        )
    policies = {name: REPLACEMENTS[name]() for name in config.replacements}
    replayed = {name: replay(recorder.choices, hosting.frames, policy) for name, policy in policies.items()}
    bound = replay(recorder.choices, hosting.frames, Belady())
    dense = hosted_runs.serve(_engine(config, model, page_tokens, len(asked)), asked, method, config.new_tokens)
    return {
        "frames": hosting.frames,
        "lookups": bound.lookups,
        "first": bound.first,
        "belady_misses": bound.misses,
        "replayed_misses": {name: found.misses for name, found in replayed.items()},
        "tokens": dense["tokens"],
    }


def measure(
    config: HostTier, model: Any, page_tokens: int, asked: Sequence[list[int]], prefetch: str, replacement: str
) -> Sample:
    placement = hosted_runs.host(config, replacement, prefetch)
    method = dataclasses.replace(hosted_runs.resident(config), placement=placement)
    return hosted_runs.serve(_engine(config, model, page_tokens, len(asked)), asked, method, config.new_tokens)


def _engine(config: HostTier, model: Any, page_tokens: int, requests: int) -> Any:
    """All requests, and as much again: prompts and their frames are on the device at once for a moment."""
    return hosted_runs.engine(config, model, page_tokens, requests, 2 * requests, hosted=True)


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a sample that was served, beside what its page size's recorded choices say."""
    recorded = {sample["item"]: sample for sample in samples if sample["prefetch"] == RECORDED}
    found = []
    for sample in samples:
        if sample["prefetch"] == RECORDED:
            continue
        known = recorded[sample["item"]]
        pairs = [
            (one, other)
            for own, theirs in zip(sample["tokens"], known["tokens"], strict=True)
            for one, other in zip(own, theirs, strict=True)
        ]
        read, came = sample["prefetched_read"], sample["misses"] + sample["prefetched"]
        useless = sample["host_bytes_read"] * (sample["prefetched"] - read) / max(came, 1)
        row: Row = {
            "name": "octavo",
            "page_tokens": int(sample["item"]),
            "replacement": sample["replacement"],
            "prefetch": sample["prefetch"],
            "frames": known["frames"],
            "hit_rate_percent": _hits(sample["misses"], sample["lookups"]),
            "replayed_hit_rate_percent": _hits(known["replayed_misses"][sample["replacement"]], known["lookups"]),
            "belady_hit_rate_percent": _hits(known["belady_misses"], known["lookups"]),
            "first_percent": 100 * known["first"] / known["lookups"],
            "lookups": sample["lookups"],
            "misses": sample["misses"],
            "prefetched_percent": 100 * sample["prefetched"] / max(came, 1),
            "useless_bytes_per_token": useless / sample["decode_steps"],
            "prefetch_scoring_bytes_per_token": sample["prefetch_scoring_bytes_read"] / sample["decode_steps"],
            "fetched_bytes_per_token": sample["host_bytes_read"] / sample["decode_steps"],
            "kv_bytes_per_token": sample["kv_bytes_read"] / sample["decode_steps"],
            "waited_percent": 100 * sample["waited_seconds"] / max(sample["decoding_seconds"], 1e-9),
            "agreeing_percent": 100 * sum(one == other for one, other in pairs) / len(pairs),
            "kv_bytes_held_decoding": sample["units_held_decoding"] * sample["unit_bytes"],
            "host_bytes_held_decoding": sample["host_units_pinned"] * sample["unit_bytes"],
            "seconds": sample["seconds"],
        }
        if sample["prefetched"]:
            row["prefetch_accuracy_percent"] = 100 * read / sample["prefetched"]
        found.append(row)
    return found


def findings(found: Sequence[Row]) -> list[str]:
    lines = []
    for size in dict.fromkeys(row["page_tokens"] for row in found):
        own = [row for row in found if row["page_tokens"] == size]
        best = max(own, key=lambda row: row["hit_rate_percent"])
        lines.append(
            f"pages of {size}: {best['replacement']} with prefetch {best['prefetch']} finds "
            f"{best['hit_rate_percent']:.1f} % on the device and fetches "
            f"{report.format_bytes(best['fetched_bytes_per_token'])} a token, "
            f"{report.format_bytes(best['useless_bytes_per_token'])} of them in vain; the bound on demand is "
            f"{best['belady_hit_rate_percent']:.1f} %"
        )
    return lines


def figure(found: Sequence[Row]) -> Figure:
    """Hit rates, a panel a page size, a group of bars a policy and a bar a way to fetch ahead, with Belady's bound."""
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(row["page_tokens"] for row in found))
    drawn = Figure(figsize=(4.5 * len(sizes), 4), layout="constrained")
    for axes, size in zip(drawn.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        own = [row for row in found if row["page_tokens"] == size]
        names = list(dict.fromkeys(row["replacement"] for row in own))
        ways = list(dict.fromkeys(row["prefetch"] for row in own))
        for number, way in enumerate(ways):
            bars = [row for row in own if row["prefetch"] == way]
            at = [names.index(row["replacement"]) + 0.8 * (number + 0.5) / len(ways) - 0.4 for row in bars]
            axes.bar(at, [row["hit_rate_percent"] for row in bars], 0.8 / len(ways), label=f"prefetch {way}")
        axes.axhline(own[0]["belady_hit_rate_percent"], color="black", linestyle="--", label="belady, on demand")
        axes.set(title=f"pages of {size} tokens", ylabel="chosen pages on the device (%)", ylim=(0, 100))
        axes.set_xticks(range(len(names)), names)
    drawn.axes[0].legend(fontsize="small", loc="lower right")
    return drawn


def _hits(misses: int, lookups: int) -> float:
    return 100 * (1 - misses / lookups) if lookups else 0.0
