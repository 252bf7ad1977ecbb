"""Go on in long real documents, dense and sparse: how much less likely does each method find what comes?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from octavo.core.inspection.page_watch import PageWatch
from octavo.core.inspection.pattern_watch import PatternWatch
from octavo.scripts import budgets, build, instruments, long_context, quality_plots, report
from octavo.scripts.instruments import Instruments
from octavo.scripts.long_context import Methods
from octavo.scripts.progress import waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Perplexity
from octavo.scripts.tasks import documents

NOTES = (
    "Perplexity of the last tokens of documents, each computed under the method after a context that is dense, or "
    "under the method's prefill pattern. "
    "Intervals: 95 %, bootstrap over documents; vs dense: paired over the same documents.",
    "prefill_captured_mass, prefill_output_error: of what a prefill pattern read of the context, against all "
    "of it, exactly; seconds then include a second, dense pass.",
    "Documents are those of this machine's Python and packages; samples.jsonl has their hashes. Bytes are predicted.",
)


def run(config: Perplexity, run: Run) -> None:
    """One sample a document and method; one row a kind of document and method.

    A window slides over the end of each document: ``context_tokens`` are computed densely, and the ``scored_tokens``
    after them are fed one at a time under each method, in one batch of all methods.
    """
    methods = build.methods(config.sparse)
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
        engine = build.engine(config, model, tokenizer)
        methods = budgets.matched(methods, engine, config.sparse)
    length = config.context_tokens + config.scored_tokens
    long_context.refuse_longer("context_tokens + scored_tokens", length, engine)
    texts = {f"{text.kind}/{text.document.name}": text for text in _texts(config, tokenizer)[: config.limit]}
    opening = [token for token in tokenizer.encode("") if token == tokenizer.bos_token_id]
    engine.watch = PageWatch() if config.page_map else None
    tools = Instruments.of(engine, model, config.sparse)

    def measure(item: str, missing: Methods) -> list[Sample]:
        ids = texts[item].ids
        watch = PatternWatch(engine)
        logprobs: dict[str, list[float]] = {name: [] for name in missing}
        began = time.perf_counter()
        for window in range(config.windows):
            start = window * config.scored_tokens
            middle = start + config.context_tokens
            # A window is a text of its own: it begins as the tokenizer begins one.
            context, target = opening + ids[start + len(opening) : middle], ids[middle : middle + config.scored_tokens]
            scored = engine.score_many([(context, target, method) for method in missing.values()])
            for name, found in zip(missing, scored, strict=True):
                logprobs[name] += found
        seconds = time.perf_counter() - began
        watch.close()
        shape = config.context_tokens, config.scored_tokens, config.windows
        return [
            {
                "method": name,
                "gold_logprobs": logprobs[name],
                **long_context.forced(engine, method, *shape, seconds=seconds),
                **long_context.prefilled(engine, method, watch, config.context_tokens),
            }
            for name, method in missing.items()
        ]

    def rows(samples: Sequence[Sample], intervals: bool) -> list[dict[str, Any]]:
        return long_context.grouped_rows(samples, ("task",), config.seed, intervals)

    about = {
        item: {
            "task": text.kind,
            "source": text.document.source,
            "licence": text.document.licence,
            "sha256": text.document.sha256,
        }
        for item, text in texts.items()
    }
    final = long_context.work_through(config, run, about, methods, measure, rows, tools)
    figures = {"perplexity": quality_plots.perplexity_over_bytes(final)}
    figures |= instruments.figures(run.samples, list(methods))
    maps = [("all documents, one after another", engine.watch)]
    report.publish(run, config, final, plots=figures, notes=[*NOTES, *tools.notes()], maps=maps)


@dataclass(frozen=True)
class _Text:
    """The end of a document, as long as all windows need."""

    kind: str
    document: documents.Document
    ids: list[int]


def _texts(config: Perplexity, tokenizer: Any) -> list[_Text]:
    """Kinds take turns, so that any first few are of all kinds."""
    tokens = config.context_tokens + config.windows * config.scored_tokens
    found: list[list[_Text]] = []
    for kind in config.kinds:
        try:
            documents_found = documents.long_enough(kind, config.seed, tokenizer, tokens, config.documents)
        except ValueError as error:
            raise ConfigError(f"context_tokens={config.context_tokens} is too much: {error}") from error
        found.append([_Text(kind, document, ids[-tokens:]) for document, ids in documents_found])
    return [text for turn in zip_longest(*found) for text in turn if text is not None]
