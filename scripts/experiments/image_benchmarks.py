"""Benchmarks of text and images: what does a feature of the engine change, against a run that caches nothing?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import build, report
from octavo.scripts.image_rows import QUALITIES, divergence, rows
from octavo.scripts.paths import absolute
from octavo.scripts.progress import counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Config, ImageBenchmarks
from octavo.scripts.schema_groups import EngineSettings
from octavo.scripts.schema_multimodal import UNCACHED
from octavo.scripts.tasks.image_benchmarks import make
from octavo.scripts.tasks.image_items import PLACEHOLDER, ImageItem, load
from octavo.scripts.vision_models import VisionModel, load_vision_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core import Completion, Engine
    from octavo.core.interfaces import SegmentEncoder, SegmentReuse

Row = dict[str, Any]

MOST_LOGPROBS = 128

NOTES = (
    f"{UNCACHED}: without a prefix cache, all else as engine says. Under a feature every prompt is served twice, and "
    "the second time counts, so that whatever it keeps is used. Under a way of reuse another text stands in "
    "front the first time, so that images are found behind another text.",
    "Intervals: 95 %, bootstrap over items; vs uncached: paired over the same items. Consistency: groups of items that "
    "are right as a whole, the pairs of a sentence or a question and its unanswerable twin.",
    "same tokens: of the uncached answers, up to the first that differs; KL: of next tokens, from the uncached ones, "
    f"up to there, a lower bound where the vocabulary has more than {MOST_LOGPROBS} tokens.",
    "Captions have ROUGE-L, a score of one caption without statistics of a corpus, so that runs can be paired; those "
    "of scenes also F1 of the things in them.",
)
EARLIER = "this one comes next . "
"""Stands in front of everything where images are seen first. The demo model knows the words, and they mean nothing."""

BESIDE = ("agreement_percent", "kl_nats_max", "hit_percent")


def run(config: ImageBenchmarks, run: Run) -> None:
    """One sample an item and method, where methods are the uncached engine and one for each feature and each way of
    reuse; one row a task and method. Every engine lives through the whole run, and they take turns at each item; all
    have one encoder cache, so an image is encoded once."""
    from octavo.multimodal import CachedEncoder

    reuses = _reuses(config)
    with waiting("loading the vision model"):
        vision = load_vision_model(config.model)
        encoder = CachedEncoder(vision.encoder, config.encoder_cache_mib << 20)
    items = _items(config, vision)
    engines = {
        name: _engine(config, vision, encoder, changes, reuses.get(name)) for name, changes in _methods(config).items()
    }
    first = next(name for name in engines if name != UNCACHED)
    engines[first].watch = PageWatch() if config.page_map else None

    done = run.done("item", "method")
    left = [item for item in items if any((item.item_id, name) not in done for name in engines)]
    with counting(config.experiment, len(items), len(items) - len(left)) as advance:
        for item in left:
            start = time.perf_counter()
            samples = ask(item, engines, reuses, vision, config)
            for sample in samples:
                if (item.item_id, sample["method"]) not in done:
                    run.add(sample)
            run.write_rows(rows(run.samples, config.seed, intervals=False))
            shown = "  ".join(f"{s['method']} {_quality(s):.0f}" for s in samples)
            advance(f"{item.item_id}: {shown}, {time.perf_counter() - start:.1f} s")
    for engine in engines.values():
        engine.check()

    found = rows(run.samples, config.seed)
    maps = [(f"{first}, all items, one after another", engines[first].watch)]
    plots = {"benchmarks": figure(found)}
    report.publish(run, config, found, plots=plots, notes=NOTES, maps=maps, tables=tables(found))


def ask(
    item: ImageItem, engines: Mapping[str, Engine], reuses: Container[str], vision: VisionModel, config: ImageBenchmarks
) -> list[Sample]:
    """An item under every method; the uncached engine comes first, and the others are compared with it."""
    from octavo.multimodal.scenes_tasks import verdict

    prompts = [prompt_of(item, question, vision) for question in item.questions]
    elsewhere = dataclasses.replace(item, context=f"{EARLIER}{item.context}")
    earlier = [prompt_of(elsewhere, question, vision) for question in item.questions]
    samples: list[Sample] = []
    base: list[Completion] = []
    for name, engine in engines.items():
        if name != UNCACHED:
            _answers(engine, earlier if name in reuses else prompts, 1)
        before = engine.stats()
        answers = _answers(engine, prompts, config.max_new_tokens)
        after = engine.stats()
        base = base or answers
        outputs = [answer.text.strip() for answer in answers]
        sample: Sample = {
            "item": item.item_id,
            "method": name,
            "task": item.task,
            "group": item.group,
            "depth": item.depth,
            "images": len(item.images),
            "output": outputs,
            "gold": item.gold,
            **item.score([verdict(output) for output in outputs] if vision.demo else outputs),
            "prompt_tokens": sum(len(answer.prompt_token_ids) for answer in answers),
            "hit_tokens": after.hit_tokens - before.hit_tokens,
            "query_tokens": max(1, after.query_tokens - before.query_tokens),
        }
        samples.append({**sample, **_against(base, answers)})
    return samples


def prompt_of(item: ImageItem, question: str, vision: VisionModel) -> list[Any]:
    """The demo model's own form; for others their chat template, or plain text where they have none."""
    from octavo.multimodal.image_prompts import chat_prompt, image_prompt
    from octavo.multimodal.scenes_prompts import question_part

    if vision.demo:
        return image_prompt(vision.tokenizer, f"{item.context} {question_part(question)}", item.images)
    text = f"{item.context}\n{question}".strip()
    if not getattr(vision.tokenizer, "chat_template", None):
        return image_prompt(vision.tokenizer, f"{text}\n", item.images)
    images = iter(item.images)
    content: list[dict[str, Any]] = []
    for number, part in enumerate(text.split(PLACEHOLDER)):
        content += [{"type": "image", "image": next(images)}] if number else []
        content += [{"type": "text", "text": part}] if part else []
    return chat_prompt(vision.tokenizer, [{"role": "user", "content": content}])


def tables(found: Sequence[Row]) -> list[report.Shown]:
    """A table for the tasks of each quality, with what is specific to it."""
    shown: list[report.Shown] = []
    for main, others in (("accuracy", ("consistency",)), ("soft_accuracy", ()), ("rouge_l", ("things_f1",))):
        own = [row for row in found if main in row]
        if own:
            beside = [key for key in others if any(key in row for row in own)]
            shown.append((own, ["method", "task", main, f"{main}_vs_uncached", *beside, *BESIDE]))
    return shown


def figure(found: Sequence[Row]) -> Figure:
    """The main quality of every task, methods side by side, with intervals."""
    from matplotlib.figure import Figure

    tasks, methods = (list(dict.fromkeys(row[key] for row in found)) for key in ("task", "method"))
    drawn = Figure(figsize=(max(7.0, 0.9 * len(tasks)), 4.5), layout="constrained")
    axes = drawn.add_subplot()
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        own = [row for row in found if row["method"] == method]
        keys = [next(key for key in QUALITIES if key in row) for row in own]
        bars = [row[key] for row, key in zip(own, keys, strict=True)]
        ends = [row[f"{key}_ci"] for row, key in zip(own, keys, strict=True)]
        error = [[bar - low for bar, (low, _) in zip(bars, ends, strict=True)],
                 [high - bar for bar, (_, high) in zip(bars, ends, strict=True)]]  # fmt: skip
        places = [tasks.index(row["task"]) + (number - (len(methods) - 1) / 2) * width for row in own]
        axes.bar(places, bars, width, yerr=error, capsize=2, label=method)
    axes.set_xticks(range(len(tasks)), tasks, rotation=35, ha="right")
    axes.set(ylabel="points (95 % interval)", ylim=(0, 105))
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return drawn


def _items(config: ImageBenchmarks, vision: VisionModel) -> list[ImageItem]:
    """All items, in an order in which any first few are of different benchmarks."""
    if config.format is not None:
        assert config.path is not None and config.images is not None
        try:
            return load(
                config.format, absolute(config.path), absolute(config.images), config.limit, instruct=not vision.demo
            )
        except ValueError as error:
            raise ConfigError(f"path={config.path}: {error}") from error
    count = min(config.items, config.limit or config.items)
    made = [make(name, config.seed, count).items() for name in config.benchmarks]
    return [items[place] for place in range(max(map(len, made))) for items in made if place < len(items)]


def _methods(config: ImageBenchmarks) -> dict[str, Mapping[str, Any]]:
    """Settings of the engine of every method."""
    return {UNCACHED: {"prefix_cache": False}, **config.features, **{name: {} for name in _reuses(config)}}


def _reuses(config: ImageBenchmarks) -> dict[str, SegmentReuse]:
    """The ways of reuse by method, one for each context where they are not exact.

    Raises:
        ConfigError: an unknown one, or one that is called like another method.
    """
    found: dict[str, SegmentReuse] = {}
    for name in config.modes:
        reuse = build.reuse(name)
        contexts = {} if reuse.exact else {f"{name}, context {tokens}": tokens for tokens in config.contexts}
        made = {key: dataclasses.replace(cast("Any", reuse), context_tokens=tokens) for key, tokens in contexts.items()}
        found |= made or {name: reuse}
    for name in found:
        if name in config.features or name == UNCACHED:
            raise ConfigError(f"modes={name}: another method is called so, too; rename the feature")
    return found


def _engine(
    config: ImageBenchmarks,
    vision: VisionModel,
    encoder: SegmentEncoder,
    changes: Mapping[str, Any],
    reuse: SegmentReuse | None,
) -> Engine:
    settings: EngineSettings = dataclasses.replace(config.engine, **changes)
    plain = Config(config.experiment, engine=settings)
    return build.engine(plain, vision.model, vision.tokenizer, encoders={"image": encoder}, reuse=reuse)


def _answers(engine: Engine, prompts: Sequence[Any], tokens: int) -> list[Completion]:
    from octavo.core import SamplingParams

    entries = min(engine.spec.vocab_size, MOST_LOGPROBS)
    return engine.generate(prompts, SamplingParams(max_tokens=tokens, logprobs=entries))


def _against(base: Sequence[Completion], answers: Sequence[Completion]) -> Sample:
    """How answers differ from the uncached ones, token by token up to the first that does."""
    same = total = 0
    diverged: list[float] = []
    for own, its in zip((a.samples[0] for a in answers), (b.samples[0] for b in base), strict=True):
        pairs = list(zip(own.token_ids, its.token_ids, strict=False))
        equal = next((at for at, (token, twin) in enumerate(pairs) if token != twin), len(pairs))
        same, total = same + equal, total + len(its.token_ids)
        assert own.logprobs is not None and its.logprobs is not None
        steps = list(zip(its.logprobs, own.logprobs, strict=False))[: equal + 1]
        diverged += [divergence(uncached, other) for uncached, other in steps]
    return {
        "same_tokens": same,
        "uncached_tokens": total,
        "kl_nats": sum(diverged) / len(diverged),
        "kl_nats_max": max(diverged),
    }


def _quality(sample: Sample) -> float:
    return float(next(sample[key] for key in QUALITIES if key in sample))
