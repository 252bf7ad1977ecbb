"""Which tokens of images matter: for the question that was asked, and for the next one?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.scripts import build, report
from octavo.scripts.image_rows import divergence
from octavo.scripts.progress import counting, waiting
from octavo.scripts.refusal import ConfigError, nearest
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import VisualImportance
from octavo.scripts.schema_visual_importance import RECALL, VISUAL_METHODS
from octavo.scripts.tasks.statistics import bootstrap_mean, mcnemar_exact, paired_bootstrap
from octavo.scripts.tasks.two_questions import TwoQuestions, two_questions
from octavo.scripts.vision_models import VisionModel, load_vision_model
from octavo.scripts.watched_pass import watched_pass

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core import Completion, Engine
    from octavo.core.interfaces import SparseMethod

Row = dict[str, Any]

DENSE = "dense"
FIRST, AGAIN, OTHER = "first question", "asked again", "another image"
ASKED = (FIRST, AGAIN, OTHER)

NOTES = (
    f"{FIRST}: the method decides when the whole prompt is computed, so the answer's first token has seen all of every "
    f"image, and what follows it reads what is kept. {AGAIN}: the question stands in the prompt twice, and only its "
    f"first reading decides: the second one, and the whole answer, read what is kept. {OTHER}: the next turn of the "
    "session asks about another image: under drop it reads what the first question has left, under host it finds all "
    "of every image again and decides anew.",
    "recall: as host, in whole pages; a token of the answer, or of the question's second reading, asks pages back that "
    "its heads do not keep and would keep now, recall_share of them at once. Frames for them are in KV kept.",
    "Keys and values of text are kept whole, and they were computed with all of the images: that is in the cache, too.",
    "share: of each image's tokens, the mean over the layers that drop some. KV kept: units that the sequence holds on "
    "the device when its answer ends, against dense. KV read: a decoded token.",
    "Accuracy: whole answers, in points; 95 % intervals, bootstrap over items. same answer: answers that are dense's, "
    "right or wrong. KL: of the answer's first token, from dense.",
)


class Variant(NamedTuple):
    """A method with a share and a placement; dense has neither."""

    name: str
    share: float
    placement: str
    method: SparseMethod | None

    @property
    def label(self) -> str:
        return self.name if self.method is None else f"{self.name} {100 * self.share:g} % {self.placement}"


def run(config: VisualImportance, run: Run) -> None:
    """One sample an item, variant and way of asking; one row a variant and way of asking. Requests are alone in one
    engine, and images that were computed are found in its prefix cache, or in the host tier."""
    from octavo.core import CapacityError

    with waiting("loading the demo model"):
        vision = load_vision_model(config.model)
        engine = build.engine(config, vision.model, vision.tokenizer, encoders={"image": vision.encoder})
    if not vision.demo:
        raise ConfigError(f"model.path={config.model.path}: the scenes have a language of their own; give a demo model")
    variants = [Variant(DENSE, 1.0, "", None), *_variants(config)]
    build.fit({variant.label: variant.method for variant in variants}, engine)
    items = two_questions(config.seed, config.tasks, config.images, min(config.items, config.limit or config.items))
    _refuse_long(config, engine, vision)

    done = run.done("item", "variant", "asked")
    wanted = [(variant.label, asked) for variant in variants for asked in _ways(variant)]
    left = [item for item in items if any((item.item_id, *way) not in done for way in wanted)]
    with counting(config.experiment, len(items), len(items) - len(left)) as advance:
        for item in left:
            start = time.perf_counter()
            try:
                for sample in measure(engine, vision, item, variants, config.max_new_tokens):
                    if (item.item_id, sample["variant"], sample["asked"]) not in done:
                        run.add(sample)
            except CapacityError as error:
                raise ConfigError(f"engine: {error}") from error
            run.write_rows(rows(run.samples, config.seed, intervals=False))
            advance(f"{item.item_id}: {time.perf_counter() - start:.1f} s")
    engine.check()

    found = rows(run.samples, config.seed)
    shown = next((v for v in variants if v.placement == "host"), variants[-1])
    maps = []
    if config.page_map:
        watch = watched_pass(engine, lambda: [*measure(engine, vision, items[0], [shown], config.max_new_tokens)])
        maps = [(f"{items[0].item_id} under {shown.label}", watch)]
    plots = {"importance": figure(found)}
    report.publish(run, config, found, plots=plots, notes=NOTES, maps=maps, tables=tables(found))


def measure(
    engine: Engine, vision: VisionModel, item: TwoQuestions, variants: Sequence[Variant], max_new_tokens: int
) -> Iterator[Sample]:
    """An item under every variant; each sample is compared with that of the first variant, which is dense."""
    base: dict[str, tuple[Completion, int]] = {}
    for variant in variants:
        for asked, completion, recalled in _answers(engine, vision, item, variant, max_new_tokens):
            sample = completion.samples[0]
            dense, dense_units = base.setdefault(asked, (completion, _units(engine, completion)))
            assert sample.logprobs is not None and dense.samples[0].logprobs is not None
            gold = (item.other if asked == OTHER else item.first).answer
            units = _units(engine, completion)
            yield {
                "item": item.item_id,
                "variant": variant.label,
                "method": variant.name,
                "share": variant.share,
                "placement": variant.placement,
                "asked": asked,
                "accuracy": 100.0 * (completion.text.strip() == gold),
                "agrees": completion.text.strip() == dense.text.strip(),
                "kl_first_nats": divergence(dense.samples[0].logprobs[0], sample.logprobs[0]),
                "output": completion.text.strip(),
                "gold": gold,
                "decode_steps": sample.decode_steps,
                "kv_bytes_read": sample.kv_bytes_read,
                "kv_bytes_held": sample.kv_bytes_resident,
                "dense_bytes_held": dense.samples[0].kv_bytes_resident,
                "units_freed": dense_units - units,
                "host_bytes_recalled": recalled,
                "prompt_tokens": len(completion.prompt_token_ids),
                "found_tokens": completion.cached_tokens,
            }


def rows(samples: Sequence[Sample], seed: int, *, intervals: bool = True) -> list[Row]:
    """One row a way of asking and variant; bytes and units are means over items."""
    found: list[Row] = []
    for asked in [way for way in ASKED if any(sample["asked"] == way for sample in samples)]:
        of_way = [sample for sample in samples if sample["asked"] == asked]
        base = {sample["item"]: sample["accuracy"] for sample in of_way if sample["method"] == DENSE}
        for label in dict.fromkeys(sample["variant"] for sample in of_way):
            own = [sample for sample in of_way if sample["variant"] == label]
            points = [sample["accuracy"] for sample in own]
            row: Row = {"name": "octavo", "method": own[0]["method"], "task": asked}
            if own[0]["method"] != DENSE:
                row |= {"share_percent": 100 * own[0]["share"], "placement": own[0]["placement"]}
            row |= {"items": len(own), "accuracy": _mean(points)}
            if intervals:
                row["accuracy_ci"] = _ends(bootstrap_mean(points, seed=seed))
            if own[0]["method"] != DENSE:
                pair = points, [base[sample["item"]] for sample in own]
                row["accuracy_vs_dense"] = _mean(pair[0]) - _mean(pair[1])
                if intervals:
                    row["accuracy_vs_dense_ci"] = _ends(paired_bootstrap(*pair, seed=seed))
                    row["accuracy_p_value"] = mcnemar_exact(*pair).p_value
                row["same_answer_percent"] = 100 * _mean([sample["agrees"] for sample in own])
                row["kl_first_nats_mean"] = _mean([sample["kl_first_nats"] for sample in own])
                row["kl_first_nats_max"] = max(sample["kl_first_nats"] for sample in own)
            held, dense = (sum(sample[key] for sample in own) for key in ("kv_bytes_held", "dense_bytes_held"))
            steps = sum(sample["decode_steps"] for sample in own)
            row |= {
                "kv_kept_percent": 100 * held / dense,
                "kv_bytes_held": held / len(own),
                "units_freed": _mean([sample["units_freed"] for sample in own]),
                "kv_bytes_per_token": sum(sample["kv_bytes_read"] for sample in own) / steps if steps else 0.0,
                "host_bytes_recalled": _mean([sample["host_bytes_recalled"] for sample in own]),
                "found_tokens": _mean([sample["found_tokens"] for sample in own]),
            }
            found.append(row)
    return found


def tables(found: Sequence[Row]) -> list[report.Shown]:
    """One table a way of asking."""
    keys = ["method", "share_percent", "placement", "accuracy", "accuracy_vs_dense", "same_answer_percent",
            "kl_first_nats_mean", "kv_kept_percent", "units_freed", "kv_bytes_per_token",
            "host_bytes_recalled"]  # fmt: skip
    shown: list[report.Shown] = []
    for asked in dict.fromkeys(row["task"] for row in found):
        own = [row for row in found if row["task"] == asked]
        shown.append((own, ["task", *keys]))
    return shown


def figure(found: Sequence[Row]) -> Figure:
    """Accuracy by what is kept, a panel a way of asking: a line a method, dashed where pages are recalled between
    answers, dotted where also within one."""
    from matplotlib.figure import Figure

    ways = list(dict.fromkeys(row["task"] for row in found))
    methods = [name for name in dict.fromkeys(row["method"] for row in found) if name != DENSE]
    drawn = Figure(figsize=(4.6 * len(ways), 4.6), layout="constrained")
    for axes, asked in zip(drawn.subplots(1, len(ways), sharey=True, squeeze=False)[0], ways, strict=True):
        own = [row for row in found if row["task"] == asked]
        for row in own:
            if row["method"] == DENSE:
                axes.axhline(row["accuracy"], color="0.6", linewidth=3, label=DENSE)
        for number, method in enumerate(methods):
            for placement, style in (("drop", "o-"), ("host", "s--"), (RECALL, "^:")):
                line = [row for row in own if (row["method"], row.get("placement")) == (method, placement)]
                line.sort(key=lambda row: float(row["kv_kept_percent"]))
                if line:
                    x, y = [row["kv_kept_percent"] for row in line], [row["accuracy"] for row in line]
                    axes.plot(x, y, style, color=f"C{number}", markersize=4, label=f"{method}, {placement}")
        axes.set(title=asked, xlabel="KV kept on the device (%)", ylim=(-3, 103))
        axes.grid(alpha=0.3)
    drawn.axes[0].set_ylabel("accuracy (points)")
    lines = {line.get_label(): line for axes in drawn.axes for line in axes.get_lines()}
    drawn.legend(handles=[*lines.values()], ncols=5, loc="outside lower center", frameon=False, fontsize="small")
    return drawn


def _variants(config: VisualImportance) -> Iterator[Variant]:
    """Every method with every share and placement; composing YAML takes longer than asking, so each is composed once.

    Raises:
        ConfigError: one that does not rate images.
    """
    from octavo.sparse.visual_eviction import VisualEviction
    from octavo.sparse.visual_recall import Recall

    for entry in config.sparse.methods:
        made = build.method(entry, **config.sparse.overrides.get(entry, {}))
        if not isinstance(made, VisualEviction):
            raise ConfigError(
                f"sparse.methods: {entry} does not rate the tokens of images; {nearest(entry, VISUAL_METHODS)}those "
                f"that do: {', '.join(VISUAL_METHODS)}"
            )
        for share, placement in product(config.shares, config.placements):
            changes: dict[str, Any] = {"placement": placement}
            if placement == RECALL:
                changes = {"placement": "host", "grain": "page", "recall": Recall(config.recall_share)}
            budget: Any = replace(made.budget, share=share)  # type: ignore[type-var]  # budgets are dataclasses
            yield Variant(made.name, share, placement, replace(made, budget=budget, **changes))


def _ways(variant: Variant) -> tuple[str, ...]:
    """Within one request host recalls nothing, so there it does not differ from drop."""
    return (FIRST, OTHER) if variant.placement == "host" else ASKED


def _answers(
    engine: Engine, vision: VisionModel, item: TwoQuestions, variant: Variant, max_new_tokens: int
) -> Iterator[tuple[str, Completion, int]]:
    """Way of asking, answer, and bytes that came back from the host tier for it."""
    from octavo.core import SamplingParams
    from octavo.multimodal.demo_model import demo_prompt
    from octavo.multimodal.scenes_prompts import question_part
    from octavo.multimodal.scenes_render import draw

    params = SamplingParams(max_tokens=max_new_tokens, logprobs=engine.spec.vocab_size)
    images = draw(item.scenes)
    session = engine.session(demo_prompt(images, item.first.question), method=variant.method)
    completion = session.generate(params)
    yield FIRST, completion, completion.samples[0].host_bytes_read
    session.append(question_part(item.other.question))
    before = _recalled(engine)
    completion = session.generate(params)
    yield OTHER, completion, _recalled(engine) - before + completion.samples[0].host_bytes_read
    session.close()
    if AGAIN in _ways(variant):
        words = question_part(item.first.question)
        unseen = len(vision.tokenizer(words, add_special_tokens=False)["input_ids"])
        prompt = [*demo_prompt(images, item.first.question), words]
        request = engine.submit(
            prompt, params, method=variant.method, unseen_tokens=unseen if variant.method is not None else 0
        )
        completion = engine.finish([request])[request]
        yield AGAIN, completion, completion.samples[0].host_bytes_read


def _recalled(engine: Engine) -> int:
    return 0 if engine._host is None else engine._host.bytes_in


def _units(engine: Engine, completion: Completion) -> int:
    """Units of the device's pool that an answer's sequence held when it ended."""
    return completion.samples[0].kv_bytes_resident // engine._runner.kv[0].nbytes


def _refuse_long(config: VisualImportance, engine: Engine, vision: VisionModel) -> None:
    """Raises ConfigError unless the model has room for both questions and their answers."""
    tokens = config.images * (vision.encoder.n_tokens(None) + 3) + 2 * (30 + config.max_new_tokens)
    if tokens > engine.max_model_tokens:
        raise ConfigError(
            f"images={config.images}, max_new_tokens={config.max_new_tokens}: two questions and their answers take up "
            f"to {tokens} tokens, more than the {engine.max_model_tokens} that this model may have"
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ends(estimate: Any) -> list[float]:
    return [estimate.low, estimate.high]
