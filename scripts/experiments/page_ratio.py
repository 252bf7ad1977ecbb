"""How large should an image's page be, next to a page of text?"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo.scripts import build, report
from octavo.scripts.image_traffic import EncodedOnce, PagesSeen, difference, images_of, questions, serve
from octavo.scripts.machine_load import busy_rounds, watch
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Config, PageRatio
from octavo.scripts.schema_multimodal import LLAVA_TOKENS, ROWS
from octavo.scripts.vision_models import VisionModel, load_vision_model
from octavo.scripts.watched_pass import watched_pass

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core import Completion, Engine
    from octavo.core.inspection.page_watch import PageWatch
    from octavo.core.interfaces import PagePolicy

Row = dict[str, Any]

BASE = "1"
CLAIMED = "1.5"
"""The ratio that interleaved text and images are claimed to want."""
MOST_LOGPROBS = 128
LONGEST_TEXT = 32
"""Tokens between two images, or behind them: two remarks and a number, or a question."""

NOTES = (
    "waste: empty slots in % of slots held, over all steps after a request's prompt is computed, counted unit by unit; "
    "predicted by the closed form, -n mod P a segment.",
    "hits: prompt tokens of the second questions that are found in pages, in % of all that are looked up.",
    "same tokens, log-prob. difference: against ratio 1, in both questions; nats, the largest over all new tokens and "
    f"the vocabulary (at most the {MOST_LOGPROBS} likeliest tokens).",
    "tokens/s: prompt and new tokens of the first questions; images were encoded before.",
)


def run(config: PageRatio, run: Run) -> None:
    """For every size of an image, all policies serve the same prompts of text and images in turn:

    1. What each holds: first questions, then a second one about the images of each. Pages, waste, hits, and how far
       tokens and log-probabilities are from those of ratio 1, whose pass comes first and is made again on resuming.
    2. Rounds, back and forth, in which the first questions are timed.

    One sample a size and policy for 1, and one for each of its rounds.
    """
    done = run.done("item", "policy", "round")
    turns = [
        (size, policy, number)
        for size in config.images
        for number in range(-1, _rounds(config))
        for policy in config.policies[:: -1 if number > 0 and number % 2 else 1]
    ]
    with counting(config.experiment, len(turns), len(done)) as advance:
        for size in config.images:
            if all((_item(size), policy, number) in done for at, policy, number in turns if at == size):
                continue
            bench = Bench(config, size)
            reference = bench.answers(BASE)[0]
            for number in range(-1, _rounds(config)):
                load = dataclasses.asdict(watch()) if number >= 0 else {}
                for policy in [policy for at, policy, n in turns if (at, n) == (size, number)]:
                    if (_item(size), policy, number) in done:
                        continue
                    seen = bench.time(policy) if number >= 0 else bench.count(policy, reference)
                    run.add({"item": _item(size), "policy": policy, "round": number, "image": size, **seen, **load})
                    run.write_rows(rows(run.samples))
                    advance(_line(run.samples[-1]))

    found = rows(run.samples)
    said = findings(found)
    for line in said:
        console.print(line, style="bold", markup=False, highlight=False)
    maps = [Bench(config, max(config.images)).map()] if config.page_map else []
    timed = [sample for sample in run.samples if sample["round"] >= 0]
    notes = (*said, *NOTES, *busy_rounds(timed, "item", "round"))
    report.publish(run, config, found, plots={"page_ratio": figure(found)}, notes=notes, maps=maps)


class Bench:
    """Prompts with images of one size, the model that reads them, and engines that differ in image pages alone."""

    def __init__(self, config: PageRatio, image_tokens: int) -> None:
        from octavo.core import SamplingParams

        self.config, self.image_tokens = config, image_tokens
        self.vision = _vision(config, image_tokens)
        requests = min(config.requests, config.limit or config.requests)
        self.prompts = questions(config.seed, requests, config.images_a_prompt)
        first = [pair.first for pair in self.prompts]
        with waiting(f"encoding {len(first) * config.images_a_prompt} images of {image_tokens} tokens"):
            self.encoder = EncodedOnce(self.vision.encoder, images_of(first))
        entries = min(self.vision.model.config.get_text_config().vocab_size, MOST_LOGPROBS)
        self.params = SamplingParams(max_tokens=config.new_tokens, ignore_eos=True, logprobs=entries)
        self.plain = dataclasses.replace(self.params, logprobs=None)

    def engine(self, policy: str) -> Engine:
        """With room for all requests at once, both questions."""
        settings, images = self.config.engine, self.config.images_a_prompt
        page = image_page(policy, settings.page_tokens, self.image_tokens)
        size = page.page_tokens(self.image_tokens)
        text = (images + 1) * (LONGEST_TEXT + settings.page_tokens) + self.config.new_tokens
        slots = 2 * len(self.prompts) * (images * -(-self.image_tokens // size) * size + text)
        sized = dataclasses.replace(settings, page_policies={"image": page}, pool_tokens=slots)
        # Not a changed copy of ``config``, which refuses page policies, as they are not the user's to set there.
        plain = Config(self.config.experiment, engine=sized)
        return build.engine(plain, self.vision.model, self.vision.tokenizer, encoders={"image": self.encoder})

    def answers(self, policy: str) -> tuple[list[Completion], PagesSeen, float]:
        """Both rounds of questions; what the first held; and the share of the second's tokens that were found."""
        engine, seen = self.engine(policy), PagesSeen()
        first = serve(engine, [pair.first for pair in self.prompts], self.params, "count", seen)
        before = engine.stats()
        second = serve(engine, [pair.second for pair in self.prompts], self.params, "count")
        after = engine.stats()
        engine.check()
        hits = (after.hit_tokens - before.hit_tokens) / (after.query_tokens - before.query_tokens)
        return [*first, *second], seen, hits

    def count(self, policy: str, reference: Sequence[Completion]) -> Sample:
        page = image_page(policy, self.config.engine.page_tokens, self.image_tokens)
        answers, seen, hits = self.answers(policy)
        differences = [difference(own, its) for own, its in zip(answers, reference, strict=True)]
        return {
            "page_tokens": page.page_tokens(self.image_tokens),
            "requests": len(self.prompts),
            "pages": sum(seen.pages.values()),
            "image_pages": sum(seen.image_pages.values()),
            "slots": seen.slots,
            "empty": seen.empty,
            "predicted_empty": seen.predicted,
            "hit_percent": 100 * hits,
            "new_tokens": len(answers) * self.config.new_tokens,
            "same_tokens": sum(found.same for found in differences),
            "logprob_difference_max": max(found.most for found in differences),
        }

    def time(self, policy: str) -> Sample:
        engine = self.engine(policy)
        prompts = [pair.first for pair in self.prompts]
        serve(engine, prompts[:1], self.plain, "warm-up")  # loads, allocates and compiles
        start = time.perf_counter()
        served = serve(engine, prompts, self.plain, "timed")
        seconds = time.perf_counter() - start
        tokens = sum(len(one.prompt_token_ids) + len(one.samples[0].token_ids) for one in served)
        return {"tokens": tokens, "seconds": seconds}

    def map(self) -> tuple[str, PageWatch]:
        """The pool under the ratio that is claimed to be right, or the first policy where that is not tried."""
        policy = CLAIMED if CLAIMED in self.config.policies else self.config.policies[0]
        engine = self.engine(policy)
        shows = f"images of {self.image_tokens} tokens, {policy_name(policy)}"
        return shows, watched_pass(engine, lambda: self._both(engine))

    def _both(self, engine: Engine) -> None:
        for prompts in zip(*self.prompts, strict=True):
            serve(engine, prompts, self.plain, "watched")


def image_page(policy: str, text_page: int, image_tokens: int) -> PagePolicy:
    """The page policy that a name of ``PageRatio.policies`` means for images of so many tokens.

    Raises:
        ConfigError: rows of an image that is no square grid.
    """
    from octavo.core.policies import FixedPages
    from octavo.core.policies.page_divisors import RowPages

    if policy != ROWS:
        return FixedPages(int(float(policy) * text_page))
    columns = math.isqrt(image_tokens)
    if columns**2 != image_tokens:
        raise ConfigError(f"policies={ROWS}: images of {image_tokens} tokens are no square grid; leave {ROWS} out")
    return RowPages(columns=columns, grain=math.gcd(columns, 8))


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a size and policy, in the order of the samples; times are medians over rounds."""
    found = []
    counted = [sample for sample in samples if sample["round"] < 0]
    for sample in counted:
        base = next((s for s in counted if (s["item"], s["policy"]) == (sample["item"], BASE)), None)
        rounds = [
            s for s in samples if (s["item"], s["policy"]) == (sample["item"], sample["policy"]) and s not in counted
        ]
        row: Row = {
            "name": "octavo",
            "task": sample["item"],
            "policy": policy_name(sample["policy"]),
            "image_tokens": sample["image"],
            "page_tokens": sample["page_tokens"],
            "requests": sample["requests"],
            "pages_per_sequence": sample["pages"] / sample["requests"],
            "image_pages_per_sequence": sample["image_pages"] / sample["requests"],
            "waste_percent": 100 * sample["empty"] / sample["slots"],
            "predicted_waste_percent": 100 * sample["predicted_empty"] / sample["slots"],
            "hit_percent": sample["hit_percent"],
            "new_tokens": sample["new_tokens"],
            "same_tokens": sample["same_tokens"],
            "logprob_difference_max": sample["logprob_difference_max"],
        }
        if base is not None:
            row["pages_change_percent"] = 100 * (sample["pages"] / base["pages"] - 1)
        if rounds:
            row["rounds"] = len(rounds)
            row["tokens_per_s"] = median(s["tokens"] / s["seconds"] for s in rounds)
            row["free_cores_min"] = min(s["free_cores"] for s in rounds)
        found.append(row)
    return found


def policy_name(policy: str) -> str:
    return policy if policy == ROWS else f"ratio {policy}"


def findings(found: Sequence[Row]) -> list[str]:
    """What a reader wants to know first: what the claimed ratio changes for each size, and what best does."""
    wrong = [row for row in found if row["waste_percent"] != row["predicted_waste_percent"]]
    said = [f"waste is as predicted in {len(found) - len(wrong)} of {len(found)} rows"]
    for task in dict.fromkeys(row["task"] for row in found):
        own = {row["policy"]: row for row in found if row["task"] == task}
        one, claimed = own.get(policy_name(BASE)), own.get(policy_name(CLAIMED))
        if one is None or claimed is None:
            continue
        said.append(
            f"{task}, ratio {CLAIMED} against {BASE}: {claimed['pages_change_percent']:+.1f} % pages, waste "
            f"{claimed['waste_percent']:.2f} % against {one['waste_percent']:.2f} %, hits {claimed['hit_percent']:.1f} "
            f"% against {one['hit_percent']:.1f} %; {claimed['same_tokens']} of {claimed['new_tokens']} tokens are the "
            f"same, log-probabilities within {claimed['logprob_difference_max']:.1e} nats"
        )
        equal = [row for row in own.values() if row["waste_percent"] <= one["waste_percent"]]
        fewest = min(equal, key=lambda row: row["pages_per_sequence"])
        said.append(
            f"{task}, fewest pages without more waste than ratio {BASE}: {fewest['policy']}, pages of "
            f"{fewest['page_tokens']} tokens, {fewest['pages_change_percent']:+.1f} %"
        )
    return said


def figure(found: Sequence[Row]) -> Figure:
    """Pages a sequence and waste by the image's page, a colour for each size; waste predicted as lines, measured as
    dots. Rings are ratio 1.5."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 4), layout="constrained")
    pages, waste = drawn.subplots(1, 2)
    for number, task in enumerate(dict.fromkeys(row["task"] for row in found)):
        own = sorted((row for row in found if row["task"] == task), key=lambda row: row["page_tokens"])
        sizes = [row["page_tokens"] for row in own]
        style = {"color": f"C{number}"}
        pages.plot(sizes, [row["pages_per_sequence"] for row in own], "o-", label=task, **style)
        waste.plot(sizes, [row["predicted_waste_percent"] for row in own], "-", **style)
        waste.plot(sizes, [row["waste_percent"] for row in own], "o", label=task, **style)
        for row in own:
            if row["policy"] == policy_name(CLAIMED):
                ring = {"markersize": 14, "markerfacecolor": "none", "markeredgecolor": "0.4"}
                pages.plot(row["page_tokens"], row["pages_per_sequence"], "o", **ring)
                waste.plot(row["page_tokens"], row["waste_percent"], "o", **ring)
    pages.set(ylabel="pages a sequence", ylim=(0, None))
    waste.set(ylabel="empty slots (%)", ylim=(0, None))
    ticks = sorted({row["page_tokens"] for row in found})
    for axes in (pages, waste):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("tokens of an image page")
        axes.legend(fontsize="small")
    return drawn


def _vision(config: PageRatio, image_tokens: int) -> VisionModel:
    """The model for images of so many tokens."""
    if image_tokens == LLAVA_TOKENS:
        return _random_llava_shape(config)
    with waiting("loading the vision model"):
        vision = load_vision_model(config.model)
    import numpy as np

    own = vision.encoder.n_tokens(np.zeros((96, 96, 3), np.uint8))
    if own != image_tokens:
        raise ConfigError(
            f"images={image_tokens}: the model has {own} tokens an image; give images=[{own}], or {LLAVA_TOKENS}, "
            "which is served with random weights"
        )
    return vision


def _random_llava_shape(config: PageRatio) -> VisionModel:
    """24 x 24 tokens an image as in LLaVA-1.5, on a small model with random weights that reads the same words: memory
    in pages depends on lengths alone."""
    import torch

    from octavo.multimodal.demo_model import DemoConfig, DemoModel
    from octavo.multimodal.demo_tokenizer import build_tokenizer
    from octavo.multimodal.image_encoder import ImageEncoder

    shape = DemoConfig(
        patch=4, tower_width=64, tower_layers=1, hidden=64, inner=128, layers=2, heads=4, kv_heads=2,
        max_tokens=config.images_a_prompt * LLAVA_TOKENS + 1024,
    )  # fmt: skip
    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = DemoModel(shape, config.seed).to(device).eval()
    except ImportError as error:
        raise ConfigError(f"images={LLAVA_TOKENS}: {error}") from error
    return VisionModel(model.language, build_tokenizer(), ImageEncoder(model.tower, model.projector), demo=True)


def _rounds(config: PageRatio) -> int:
    return config.repeats if config.limit is None else 1  # a smoke test


def _item(image_tokens: int) -> str:
    return f"images of {image_tokens}"


def _line(sample: Sample) -> str:
    about = f"{sample['item']}, {policy_name(sample['policy'])}"
    if sample["round"] >= 0:
        return f"{about}: {sample['tokens'] / sample['seconds']:.0f} tokens/s"
    return (
        f"{about}: {sample['pages']} pages, {100 * sample['empty'] / sample['slots']:.2f} % empty, "
        f"{sample['same_tokens']} of {sample['new_tokens']} tokens as under ratio {BASE}"
    )
