"""What drafts are worth in time, on random weights, where how many are right is forced."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo.scripts import build, lossless_plots, model_shapes, report
from octavo.scripts.decode_shapes import StepShape, device_bytes_peak, forget_peak, now
from octavo.scripts.machine_load import busy_rounds, watch
from octavo.scripts.progress import counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema_groups import Config
from octavo.scripts.schema_lossless import Lossless

if TYPE_CHECKING:
    import torch

    from octavo.core import Completion, Engine
    from octavo.core.interfaces import SparseMethod

log = logging.getLogger(__name__)

GPU_SHAPES, CPU_SHAPES = ([12, 65_536],), ([2, 512],)
WARM_STEPS = 4
"""Between the last prompt and the time."""

NOTES = (
    "Random weights. Acceptance is forced: a draft is taken as right with the given probability, whatever it is. So "
    "the tokens mean nothing, and only their number and the time do.",
    "Prompts are computed once and found again. Times begin when all sequences decode, and end with the first that has "
    "all its tokens, between moments at which the device has no work left; medians over the rounds.",
    "Predicted: (1 - a^(k+1)) / (1 - a) tokens for k steps of the method alone and one dense step, at their times.",
)


@dataclasses.dataclass(frozen=True)
class Contender:
    """Dense, a method alone, or one that drafts: who decodes, and what it is called in rows."""

    method: str
    chooser: SparseMethod | None
    drafts: int = 0
    forced: float | None = None

    def made(self) -> SparseMethod | None:
        if not self.drafts or self.chooser is None:
            return self.chooser
        return build.drafting(self.chooser, self.drafts, self.forced)

    @property
    def label(self) -> str:
        return f"{self.method} x {self.drafts} at {self.forced:g}" if self.drafts else self.method


def run(config: Lossless, run: Run, drafters: Mapping[str, SparseMethod]) -> None:
    """One sample a shape, contender and round; one row a shape and contender. In each round all take turns."""
    with waiting("making a model of random weights"):
        model = model_shapes.make(config.model)
    contenders = [Contender("dense", None)]
    for name, method in drafters.items():
        contenders.append(Contender(name, method))
        contenders += [Contender(name, method, k, a) for k in config.drafts for a in config.forced]
    pairs = (config.shapes or (GPU_SHAPES if model.device.type == "cuda" else CPU_SHAPES))[: config.limit]
    shapes = [StepShape(batch, context, config.new_tokens) for batch, context in pairs]
    done = run.done("item", "contender", "round")
    total = len(shapes) * len(contenders) * config.rounds
    with counting(config.experiment, total, len(done)) as advance:
        for shape in shapes:
            left = [
                (number, contender)
                for number in range(config.rounds)
                for contender in contenders
                if (shape.name, contender.label, number) not in done
            ]
            if not left:
                continue
            engine = _engine(config, model, shape)
            build.fit({c.label: c.made() for c in contenders}, engine)
            prompts = shape.prompts(engine.spec.vocab_size, config.seed)
            with waiting(f"{shape.name}: computing prompts, and warming up"):
                _stretch(engine, model.device, prompts, None, 1)
                for contender in dict.fromkeys(contender for _, contender in left):
                    _stretch(engine, model.device, prompts, contender, 2 * max(config.drafts) + WARM_STEPS)
            for number, contender in left:
                load = watch()
                sample = {
                    "item": shape.name,
                    "contender": contender.label,
                    "round": number,
                    "method": contender.method,
                    "drafts": contender.drafts,
                    "forced_acceptance": contender.forced,
                    **dataclasses.asdict(shape),
                    **_stretch(engine, model.device, prompts, contender, config.new_tokens),
                    **dataclasses.asdict(load),
                }
                run.add(sample)
                run.write_rows(rows(run.samples))
                advance(f"{shape.name} {contender.label}: {sample['tokens'] / sample['seconds']:.1f} tokens/s")
            del engine
    final = rows(run.samples)
    notes = [*NOTES, *busy_rounds(run.samples, "item", "contender")]
    report.publish(run, config, final, plots={"speed_up": lossless_plots.speed_up_by_acceptance(final)}, notes=notes)


def rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row a shape and contender, beside the dense one of its shape."""
    found: list[dict[str, Any]] = []
    for item, contender in dict.fromkeys((s["item"], s["contender"]) for s in samples):
        own = [s for s in samples if (s["item"], s["contender"]) == (item, contender)]
        first, judged = own[0], sum(s["accepted"] + s["rejected"] for s in own)
        row = {
            "name": "octavo",
            "task": item,
            "method": first["method"],
            "drafts": first["drafts"] or None,
            "forced_acceptance": first["forced_acceptance"],
            "acceptance_percent": 100 * sum(s["accepted"] for s in own) / judged if judged else None,
            "tokens_per_s": median(s["tokens"] / s["seconds"] for s in own),
            "ms_per_token": 1e3 * first["batch"] / median(s["tokens"] / s["seconds"] for s in own),
            "device_bytes_peak": max((s["device_bytes_peak"] or 0 for s in own), default=0) or None,
            "rounds": len(own),
        }
        found.append(row)
        alone = {r["method"]: r["ms_per_token"] for r in found if r["task"] == item and r["drafts"] is None}
        if "dense" in alone:
            row["speed_up"] = alone["dense"] / row["ms_per_token"]
        if row["drafts"] and row["method"] in alone and "dense" in alone:
            share = alone[row["method"]] / alone["dense"]
            row["predicted_speed_up"] = predicted_speed_up(row["forced_acceptance"], row["drafts"], share)
    return found


def predicted_speed_up(acceptance: float, drafts: int, share: float) -> float:
    """Of rounds of ``drafts`` steps, each of which takes ``share`` of a dense one, and one dense step."""
    tokens = drafts + 1 if acceptance == 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
    return tokens / (drafts * share + 1)


def _engine(config: Lossless, model: Any, shape: StepShape) -> Engine:
    """Room for the prompts of a shape, and for what follows them."""
    page = build.engine_config(config.engine).text_page_tokens
    slots = shape.batch * (-(-(shape.context + shape.new_tokens + max(config.drafts)) // page) + 1) * page
    sized = dataclasses.replace(config.engine, pool_tokens=config.engine.pool_tokens or slots)
    if shape.batch > sized.max_seqs:
        raise ConfigError(f"shapes=[{shape.batch},...]: more sequences than engine.max_seqs={sized.max_seqs}")
    if shape.context + shape.new_tokens > model.config.max_position_embeddings:
        raise ConfigError(
            f"shapes=[...,{shape.context}]: with {shape.new_tokens} new tokens a sequence is longer than the model's "
            f"{model.config.max_position_embeddings} positions"
        )
    return build.engine(Config(config.experiment, engine=sized), model, None)


def _stretch(
    engine: Engine, device: torch.device, prompts: list[list[int]], contender: Contender | None, new_tokens: int
) -> Sample:
    """Decode all prompts; the tokens and seconds from when all of them do, until the first has all of its own."""
    from octavo.core import SamplingParams

    method = None if contender is None else contender.made()
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    forget_peak(device)
    ids = [engine.submit(prompt, params, method=method) for prompt in prompts]
    begun: set[str] = set()
    ended: list[Completion] = []

    def step() -> int:
        news = engine.step()
        begun.update(output.request_id for output in news if output.new_token_ids)
        ended.extend(output.completion for output in news if output.completion is not None)
        return sum(len(output.new_token_ids) for output in news)

    while len(begun) < len(ids):
        step()
    for _ in range(0 if ended else WARM_STEPS):
        step()
    tokens, start = 0, now(device)
    while not ended:
        tokens += step()
    seconds = now(device) - start
    peak = device_bytes_peak(device)
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_work():
        step()
    counts = [completion.samples[0].drafts for completion in ended]
    facts = {name: sum(getattr(c, name) for c in counts) for name in ("drafted", "accepted", "rejected")}
    return {"tokens": tokens, "seconds": seconds, **facts, "device_bytes_peak": peak}
