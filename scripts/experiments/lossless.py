"""Let sparse methods draft and the full cache verify: how many drafts are right, and what is that worth?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import build, long_context, lossless_plots, lossless_timing, report
from octavo.scripts.long_context import Methods
from octavo.scripts.progress import waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema_lossless import Lossless
from octavo.scripts.tasks import documents

if TYPE_CHECKING:
    from octavo.core.outputs import Sample as Generated

NOTES = (
    "Acceptance: drafts that were right of those that were looked at, each behind drafts that were; per document, then "
    "their mean, with 95 % bootstrap intervals over documents. It needs no task and no right answer.",
    "Bytes are those of drafts and of one dense read a round, a token that stands; x fewer bytes is how often they go "
    "into those of dense decoding, digests included.",
    "Continuations are greedy. Drafters take turns on a document; all but the first find its pages.",
)


def run(config: Lossless, run: Run) -> None:
    """A real model: one sample a document, context and drafter; one row a context, drafter and number of drafts. Random
    weights: ``lossless_timing``.

    Every document is continued densely and under each drafter, one after the other, so that nobody's rounds end with
    those of others; the first computes its context and the others find its pages.
    """
    drafters = {name: method for name, method in build.methods(config.sparse).items() if method is not None}
    methods: dict[str, Any] = {"dense": None}
    for drafts in config.drafts:
        methods |= {f"{name} x {drafts}": build.drafting(method, drafts) for name, method in drafters.items()}
    if config.model.path is None:
        lossless_timing.run(config, run, drafters)
        return
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
        engine = build.engine(config, model, tokenizer)
        build.fit(methods, engine)
    long_context.refuse_longer("contexts + new_tokens", max(config.contexts) + config.new_tokens, engine)
    engine.watch = PageWatch() if config.page_map else None
    items = dict(list(_items(config, tokenizer))[: config.limit])

    def measure(item: str, missing: Methods) -> list[Sample]:
        from octavo.core import SamplingParams

        _, ids = items[item]
        params = SamplingParams(max_tokens=config.new_tokens, ignore_eos=True, logprobs=2)
        found, dense = [], None
        for name, method in {"dense": None, **missing}.items():
            began = time.perf_counter()
            asked = engine.submit(ids, params, method=method)
            completion = engine.finish([asked])[asked]
            seconds = time.perf_counter() - began
            dense = dense or completion.samples[0]
            if name in missing:
                compared = {} if name == "dense" else _compared(completion.samples[0], dense)
                found.append({"method": name, **long_context.generated(engine, completion, seconds), **compared})
        return found

    def rows(samples: Sequence[Sample], intervals: bool) -> list[dict[str, Any]]:
        return _rows(samples, config.seed, intervals)

    about = {item: facts for item, (facts, _) in items.items()}
    final = long_context.work_through(config, run, about, methods, measure, rows)
    figures = {"acceptance": lossless_plots.acceptance_by_context(final)}
    maps = [("all documents, one after another", engine.watch)]
    report.publish(run, config, final, plots=figures, notes=NOTES, maps=maps)


def _items(config: Lossless, tokenizer: Any) -> Iterator[tuple[str, tuple[Sample, list[int]]]]:
    """Contexts by document; kinds and contexts take turns, so that any first few are of all."""
    opening = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    found: list[list[tuple[str, tuple[Sample, list[int]]]]] = []
    for kind in config.kinds:
        for context in config.contexts:
            try:
                texts = documents.long_enough(kind, config.seed, tokenizer, context, config.documents)
            except ValueError as error:
                raise ConfigError(f"contexts={context} is too much: {error}") from error
            cell = []
            for document, ids in texts:
                facts = {"task": kind, "length": context, "source": document.source, "sha256": document.sha256}
                cell.append((f"{kind}/{document.name}/{context}", (facts, opening + ids[: context - len(opening)])))
            found.append(cell)
    yield from (item for turn in zip_longest(*found) for item in turn if item is not None)


def _compared(own: Generated, dense: Generated) -> Sample:
    """What became of the drafts of a continuation, and whether it is dense decoding's."""
    counts = own.drafts
    judged = counts.accepted + counts.rejected
    return {
        **dataclasses.asdict(counts),
        **({"acceptance": 100 * counts.accepted / judged} if judged else {}),
        "tokens_equal": own.token_ids == dense.token_ids,
        "margin_nats": _margin(own.token_ids, dense),
    }


def _margin(own: Sequence[int], dense: Generated) -> float | None:
    """How far ahead of the second, in nats, dense decoding's token was where another was taken; None if nowhere."""
    for token, other, entry in zip(own, dense.token_ids, dense.logprobs or (), strict=True):
        if token != other:
            best = sorted(entry.values(), reverse=True)
            return float(best[0] - best[1])
    return None


def _rows(samples: Sequence[Sample], seed: int, intervals: bool) -> list[dict[str, Any]]:
    """Those of ``long_context.grouped_rows`` by kind and context, with what drafting adds."""
    rows = long_context.grouped_rows(samples, ("task", "length"), seed, intervals)
    for row in rows:
        own = [s for s in samples if all(s.get(key) == row[key] for key in ("method", "task", "length"))]
        own = [sample for sample in own if "error" not in sample]
        if row["method"] == "dense":
            continue
        dense = [r for r in rows if r["method"] == "dense" and (r["task"], r["length"]) == (row["task"], row["length"])]
        total = {key: sum(s[key] for s in own) for key in ("drafted", "accepted", "verifications")}
        row |= {
            **total,
            "tokens_per_round": 1 + total["accepted"] / total["verifications"] if total["verifications"] else None,
            "tokens_equal_percent": 100 * sum(s["tokens_equal"] for s in own) / len(own),
            "margin_nats_max": max((s["margin_nats"] for s in own if s["margin_nats"] is not None), default=None),
        }
        if dense:
            row["bytes_ratio"] = _bytes(dense[0]) / _bytes(row)
    return rows


def _bytes(row: Sample) -> float:
    return float(row["kv_bytes_per_token"] + row["digest_bytes_per_token"])
