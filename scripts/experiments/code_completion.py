"""Complete lines of real code, dense and sparse: what does each method cost, and what does it lose?"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import benchmarks, budgets, build, instruments, long_context, plots, report, summary
from octavo.scripts.benchmarks import Item
from octavo.scripts.instruments import Instruments
from octavo.scripts.long_context import Methods
from octavo.scripts.progress import counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import CodeCompletion, Pareto, TaskSettings
from octavo.scripts.schema_groups import PROJECT_LINES

if TYPE_CHECKING:
    from octavo.core import Completion, Engine, SamplingParams
    from octavo.core.interfaces import SparseMethod

NOTES = (
    "Intervals: 95 %, bootstrap over items; vs dense: paired over the same items.",
    "The methods of an item run in one batch on one shared prompt: seconds overlap, and the peaks are the batch's.",
    "oracle reads all keys to choose and bounds the quality of any choice of pages; random is the lower bar.",
)


def run(config: CodeCompletion, run: Run) -> None:
    """One sample an item and method; one row a method.

    For each item: the prompt of every method enters one batch, where the first computes it and the others find its
    pages in the prefix cache; each ends as soon as its line is whole. Then the gold line is scored under every method.
    An item that cannot be served is recorded with its error, and the rest goes on.
    """
    made = config.task.name == PROJECT_LINES  # to fit a tokenizer
    items = [] if made else benchmarks.load(config.task, config.limit)
    methods = build.methods(config.sparse)
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
        engine = build.engine(config, model, tokenizer)
        methods = budgets.matched(methods, engine, config.sparse)
    if made:
        for length in config.task.lengths:
            long_context.refuse_longer("task.lengths", length, engine)
        items = benchmarks.load(config.task, config.limit, tokenizer, config.seed)
    engine.watch = PageWatch() if config.page_map else None
    tools = Instruments.of(engine, model, config.sparse)

    def rebuild(budget: int) -> Methods:
        return build.methods(dataclasses.replace(config.sparse, budget_tokens=budget))

    done = run.done("item", "method")
    left = [(item, {n: m for n, m in methods.items() if (item.id, n) not in done}) for item in items]
    todo = [(item, missing) for item, missing in left if missing]
    with counting(config.experiment, len(items), len(items) - len(todo)) as advance:
        for item, missing in todo:
            start = time.perf_counter()
            samples = complete(item, missing, engine, config, tokenizer, rebuild, tools.taken)
            for sample in samples:
                run.add(sample)
            run.write_rows(summary.rows(run.samples, task=config.task.name, intervals=False))
            run.tracker.log(len(run.done("item")) - 1, {s["method"]: _tracked(s) for s in samples})
            advance(_line(item, samples, time.perf_counter() - start))

    good = [sample for sample in run.samples if "error" not in sample]
    if not good:
        raise ConfigError(f"none of the {len(items)} items could be served: {run.samples[0]['error']}")
    rows = summary.rows(run.samples, task=config.task.name, seed=config.seed)
    if config.budget_share is None:  # else there is no one budget whose context could be told
        rows = tools.rows(rows, methods)
    cells = long_context.grouped_rows(good, ("class", "length"), config.seed, True) if made else []
    figures = {
        "pareto": plots.pareto(rows),
        "by_length": plots.by_length(good, list(methods)),
        "per_item": plots.per_item(good, list(methods)),
        **instruments.figures(good, list(methods)),
    }
    maps = [("all items, one after another", engine.watch)]
    report.publish(run, config, [*rows, *cells], plots=figures, notes=[*NOTES, *tools.notes()], maps=maps)


def complete(
    item: Item,
    methods: Methods,
    engine: Engine,
    config: CodeCompletion | Pareto,
    tokenizer: Any,
    rebuild: Callable[[int], Methods] | None = None,
    taken: Callable[[SparseMethod | None], Sample] | None = None,
) -> list[Sample]:
    """One item under several methods; ``rebuild`` gives them, and maybe others, with a budget in tokens, for a
    ``budget_share``, and ``taken`` what was seen of a method's choices meanwhile."""
    from octavo.core import SamplingParams
    from octavo.core.serving.scoring import score_many

    base = {"item": item.id, "gold": item.gold, **item.facts}
    try:
        prompt, gold = prompt_and_gold(item, engine, config.task, tokenizer)
        if rebuild is not None and config.budget_share is not None:
            methods = build.within_share(config.budget_share, methods, len(prompt), engine, rebuild)
        params = SamplingParams(max_tokens=config.task.max_new_tokens, seed=_seed(item, config.seed))
        said = code_prior(prompt, tokenizer) if any(map(build.has_prior, methods.values())) else None
        priors = {name: said if build.has_prior(method) else None for name, method in methods.items()}
        lines = _decode(item, prompt, methods, engine, params, priors)
        asked = [(prompt, gold, method) for method in methods.values()]
        likelihoods = score_many(engine, asked, priors=list(priors.values()))
    except ValueError as error:
        return [{**base, "method": name, "error": str(error)} for name in methods]

    stats = engine.stats()
    samples = []
    for (name, method), logprobs in zip(methods.items(), likelihoods, strict=True):
        line = lines[name]
        sample = line.completion.samples[0]
        predicted = build.predicted_cost(engine, method, len(prompt), len(sample.token_ids))
        samples.append(
            {
                **base,
                "method": name,
                "prompt_tokens": len(prompt),
                "cached_tokens": line.completion.cached_tokens,
                "output": sample.text,
                **item.score(sample.text),
                "gold_logprobs": logprobs,
                "new_tokens": len(sample.token_ids),
                "finish_reason": "line" if line.cut else sample.finish_reason,
                "decode_steps": sample.decode_steps,
                "kv_bytes_read": sample.kv_bytes_read,
                "digest_bytes_read": sample.digest_bytes_read,
                "extra_tokens": sample.extra_tokens,
                "predicted_kv_bytes": predicted.kv_bytes,
                "predicted_digest_bytes": predicted.digest_bytes,
                "kv_bytes_resident": sample.kv_bytes_resident,
                "digest_bytes_resident": build.digest_bytes(engine, method, len(prompt) + len(sample.token_ids) - 1),
                **build.budget_of(method),
                "units_held_peak": stats.units_held_peak,
                "device_bytes_peak": stats.device_bytes_peak,
                "seconds": line.seconds,
                **(taken(method) if taken else {}),
            }
        )
    return samples


def prompt_and_gold(item: Item, engine: Engine, task: TaskSettings, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of an item's prompt, cut to what it may have, and of its gold line.

    Raises:
        ValueError: the benchmark's rule cannot shorten it that far.
    """
    gold = tokenizer.encode(item.gold, add_special_tokens=False)
    most = engine.max_model_tokens - max(task.max_new_tokens, len(gold))
    return item.prompt_ids(tokenizer, min(most, task.max_prompt_tokens or most)), gold


def code_prior(prompt: list[int], tokenizer: Any) -> list[float]:
    """What the structure of its code says of each token of a prompt.

    Raises:
        ValueError: the tokenizer does not say which characters its tokens stand for.
    """
    from octavo.sparse.code_structure import token_prior

    text = tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
    again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if again["input_ids"] != prompt:
        raise ValueError("the prompt's tokens are not those of its own text, so nothing can be said of single tokens")
    return token_prior(text, again["offset_mapping"])


@dataclass
class _Line:
    """What one method wrote, ``seconds`` after the batch was handed in; ``cut`` if it was stopped at its line's end."""

    completion: Completion
    seconds: float
    cut: bool


def _decode(
    item: Item,
    prompt: list[int],
    methods: Mapping[str, SparseMethod | None],
    engine: Engine,
    params: SamplingParams,
    priors: Mapping[str, list[float] | None],
) -> dict[str, _Line]:
    start = time.perf_counter()
    names = {
        engine.submit(prompt, params, method=method, token_prior=priors[name]): name for name, method in methods.items()
    }
    texts = dict.fromkeys(names, "")
    cut: dict[str, float] = {}
    lines: dict[str, _Line] = {}
    try:
        while len(lines) < len(names):
            for news in engine.step():
                texts[news.request_id] += news.new_text
                now = time.perf_counter() - start
                if news.completion is not None:
                    seconds = cut.get(news.request_id, now)
                    lines[names[news.request_id]] = _Line(news.completion, seconds, news.request_id in cut)
                elif news.request_id not in cut and item.decided(texts[news.request_id]):
                    cut[news.request_id] = now
                    engine.abort(news.request_id)
    finally:
        for request_id in names:
            engine.abort(request_id)
    return lines


def _seed(item: Item, seed: int) -> int:
    """A seed for an item, whatever ran before it, so that a resumed run draws what an uninterrupted one would."""
    return int.from_bytes(hashlib.sha256(f"{seed} {item.id}".encode()).digest()[:6])


def _tracked(sample: Sample) -> dict[str, Any]:
    """Numbers of a sample that are worth a curve."""
    if "error" in sample:
        return {"failed": 1}
    likelihood = sum(sample["gold_logprobs"]) / len(sample["gold_logprobs"])
    qualities = {key: sample[key] for key in summary.QUALITIES if key in sample}
    return {**qualities, "gold_log_likelihood_per_token": likelihood, "seconds": sample["seconds"]}


def _line(item: Item, samples: list[Sample], seconds: float) -> str:
    name = Path(item.id).name
    if "error" in samples[0]:
        return f"{name}: {samples[0]['error']}"
    scores = "  ".join(f"{sample['method']} {sample['edit_similarity']:.0f}" for sample in samples)
    return f"{name} ({samples[0]['prompt_tokens']} tokens, {seconds:.1f} s)  {scores}"
