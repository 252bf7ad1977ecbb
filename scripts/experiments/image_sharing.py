"""What does it save to take an image's KV from another request, and what does it cost in what the model says?"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.scripts import build, model_shapes, report
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import ImageSharing
from octavo.scripts.schema_image_sharing import EXACT
from octavo.scripts.watched_pass import watched_pass

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import Tensor

    from octavo.core import Engine
    from octavo.core.interfaces import SegmentReuse
    from octavo.core.outputs import TokenLogprobs

Row = dict[str, Any]
Prompt = list[Any]

FIRST_TOKEN = 1

COLUMNS = (
    "method", "exact", "ttft_ms", "ttft_speedup", "new_images_ttft_ms", "hit_tokens", "computed_tokens",
    "image_units_held", "image_units_listed", "kl_nats", "logit_difference_max", "token_agreement",
)  # fmt: skip

NOTES = (
    "ttft_ms: from submitting a request to its first token, nothing else running. The same images were seen before, "
    "behind another text. new_images_ttft_ms: nobody has seen them. ttft_speedup: times as fast as prefix, which finds "
    "nothing behind another text, so it is uncached. Medians over the rounds.",
    "image_units_listed: units of images in the block tables of the requests that hold them at once; image_units_held: "
    "different ones among these.",
    "kl_nats, logit_difference_max, token_agreement: next-token distributions (log-softmax) against those of an "
    "uncached run, behind the tokens that it generates; means over tokens and rounds, but for the largest difference. "
    "Agreement in points: the most likely token is the same.",
    "Embeddings of images are random rows of the size of the model's own for words, so encoding costs nothing here.",
)


class Picture(NamedTuple):
    """Stands for an image: its embeddings are drawn from ``seed``."""

    seed: int
    tokens: int


class RandomImages:
    """A ``SegmentEncoder`` of random embeddings [I, N, width] with the standard deviation ``scale``, drawn on the
    device that computes with them, where it takes no time."""

    bidirectional = False

    def __init__(self, width: int, scale: float, device: torch.device) -> None:
        self._width, self._scale, self._device = width, scale, device

    def identity(self, item: Picture) -> bytes:
        return sha256(f"{item} {self._width} {self._scale}".encode()).digest()

    def n_tokens(self, item: Picture) -> int:
        return item.tokens

    def encode(self, items: Sequence[Picture]) -> Tensor:
        import torch

        def drawn(item: Picture) -> Tensor:
            generator = torch.Generator(self._device).manual_seed(item.seed)
            return torch.randn(item.tokens, self._width, generator=generator, device=self._device)

        return self._scale * torch.stack([drawn(item) for item in items])


def run(config: ImageSharing, run: Run) -> None:
    """One sample a mode and round, one row a mode, all on one engine, in a name space of its own each:

    1. a request with new images, and one with the same images behind another text, each timed to its first token;
    2. several requests with the same images at different positions, together: units that they list, and hold;
    3. the distributions of the next tokens, behind tokens that the exact mode has generated, beside its own.

    A round that does not count comes first, so that kernels are compiled and graphs captured.
    """
    modes = {name: build.reuse(name) for name in config.all_modes}
    _refuse_longer(config)
    with waiting("making the model"):
        model = model_shapes.make(config.model)
        engine = _engine(config, model)
    _fit(modes, engine)
    rounds = list(range(config.rounds))[: config.limit]
    done = run.done("item", "method")
    left = [(number, name) for number in rounds for name in modes if (f"round {number}", name) not in done]
    known: dict[int, Reference] = {}
    with counting(config.experiment, len(rounds) * len(modes), len(rounds) * len(modes) - len(left)) as advance:
        for name in dict.fromkeys(name for _, name in left):
            _times(engine, config, -1, name, modes[name])
        for number, name in left:
            if number not in known:
                known = {number: _reference(engine, config, number)}
            sample = _measure(engine, config, number, name, modes[name], known[number])
            run.add({"item": f"round {number}", "method": name, "exact": modes[name].exact, **sample})
            found = rows(config, run.samples)
            run.write_rows(found)
            advance(f"round {number}, {name}: {sample['ttft_ms']:,.1f} ms, {sample['kl_nats']:.4f} nats")

    found = rows(config, run.samples)
    for line in findings(found):
        console.print(line, style="bold", markup=False, highlight=False)
    device = model_shapes.device_type(config.model)
    served = f"Served: {config.model.path or config.model.shape or model_shapes.default_shape(device)}"
    weights = "as loaded" if config.model.path else "random weights: times and units say something, divergence little"
    plots = {"image_sharing": bars(found)}
    maps = [_map(engine, config, modes)] if config.page_map else []
    notes = (*findings(found), f"{served}, {weights}.", *NOTES)
    report.publish(run, config, found, plots=plots, notes=notes, tables=[(found, COLUMNS)], maps=maps)


class Reference(NamedTuple):
    """What the exact mode says in a round: tokens, and log-probabilities fp32 [n, vocabulary] of each."""

    tokens: list[int]
    logprobs: NDArray[np.float32]


def rows(config: ImageSharing, samples: Sequence[Sample]) -> list[Row]:
    """One row a mode, in the order of the modes."""
    uncached = [sample["ttft_ms"] for sample in samples if sample["method"] == EXACT]
    found = []
    for name in config.all_modes:
        own = [sample for sample in samples if sample["method"] == name]
        if not own:
            continue
        ttft = statistics.median(sample["ttft_ms"] for sample in own)
        found.append(
            {
                "name": "octavo",
                "method": name,
                "task": f"{config.images} images of {config.image_tokens} tokens, {config.requests} requests",
                "exact": own[0]["exact"],
                "ttft_ms": ttft,
                "ttft_speedup": statistics.median(uncached) / ttft,
                "new_images_ttft_ms": statistics.median(sample["new_images_ttft_ms"] for sample in own),
                "hit_tokens": own[0]["hit_tokens"],
                "computed_tokens": own[0]["prompt_tokens"] - own[0]["hit_tokens"],
                "image_units_held": own[0]["image_units_held"],
                "image_units_listed": own[0]["image_units_listed"],
                "kl_nats": statistics.fmean(sample["kl_nats"] for sample in own),
                "logit_difference_max": max(sample["logit_difference_max"] for sample in own),
                "token_agreement": statistics.fmean(sample["token_agreement"] for sample in own),
            }
        )
    return found


def findings(found: Sequence[Row]) -> list[str]:
    """What a reader wants to know first."""
    approximate = [row for row in found if not row["exact"]]
    if not approximate:
        return []
    fastest = max(approximate, key=lambda row: row["ttft_speedup"])
    closest = min(approximate, key=lambda row: row["kl_nats"])
    fewest = min(approximate, key=lambda row: row["image_units_held"])
    return [
        f"{fastest['method']} gives the first token {fastest['ttft_speedup']:.2f} times as fast as uncached",
        f"{fewest['method']} holds {fewest['image_units_held']:,} units of images where the requests list "
        f"{fewest['image_units_listed']:,}",
        f"{closest['method']} is nearest to uncached: {closest['kl_nats']:.4f} nats, the same token in "
        f"{closest['token_agreement']:.1f} % of cases",
    ]


def _prompt(config: ImageSharing, number: int, text: int, vocabulary: int, more: Sequence[int] = ()) -> Prompt:
    """The images of a round between texts; ``text`` says which, and how much longer the first one is, so that the
    images are at positions of their own. All begin with the same token, as prompts do."""
    from octavo.core.serving.prompts import TokenSegment

    random = Random(f"{config.seed} {number} {text}")

    def words(count: int) -> list[int]:
        return [random.randrange(vocabulary) for _ in range(count)]

    prompt: Prompt = []
    for image in range(config.images):
        begins = [] if image else [FIRST_TOKEN, *words(text)]
        seed = int.from_bytes(sha256(f"{config.seed} {number} {image}".encode()).digest()[:4], "little")
        prompt += [TokenSegment("text", [*begins, *words(config.text_tokens)]), Picture(seed, config.image_tokens)]
    return [*prompt, TokenSegment("text", [*words(config.question_tokens), *more])]


def _measure(
    engine: Engine, config: ImageSharing, number: int, name: str, reuse: SegmentReuse, reference: Reference
) -> Sample:
    timed = _times(engine, config, number, name, reuse)
    held = _together(engine, config, number, name, reuse)
    said = _distributions(engine, config, number, name, reuse, reference.tokens)
    differences = np.abs(said - reference.logprobs)
    kl = (np.exp(reference.logprobs) * (reference.logprobs - said)).sum(1)
    same = said.argmax(1) == reference.logprobs.argmax(1)
    return {
        **timed,
        **held,
        "kl_nats": float(kl.mean()),
        "logit_difference_max": float(differences.max()),
        "token_agreement": 100.0 * float(same.mean()),
    }


def _times(engine: Engine, config: ImageSharing, number: int, name: str, reuse: SegmentReuse) -> Sample:
    """Milliseconds to the first token of a request with new images, and of one that finds them."""
    times, completion = [], None
    gc.collect()  # of the distributions before, which are dictionaries of the whole vocabulary: not while time is taken
    for text in range(2):
        prompt = _prompt(config, number, text, engine.spec.vocab_size)
        start = time.perf_counter()
        request = engine.submit(prompt, _params(1), salt=name, reuse=reuse)
        completion = engine.finish([request])[request]
        times.append(1e3 * (time.perf_counter() - start))
    assert completion is not None
    hits, prompt_tokens = completion.cached_tokens, len(completion.prompt_token_ids)
    return {"new_images_ttft_ms": times[0], "ttft_ms": times[1], "hit_tokens": hits, "prompt_tokens": prompt_tokens}


def _together(engine: Engine, config: ImageSharing, number: int, name: str, reuse: SegmentReuse) -> Sample:
    """Units of images that several requests list and hold, once all of them decode."""
    from octavo.core.inspection.page_census import units_of_kind

    most = {"image_units_listed": 0, "image_units_held": 0}
    for text in range(config.requests):
        prompt = _prompt(config, number, 2 + text, engine.spec.vocab_size)
        engine.submit(prompt, _params(config.new_tokens + config.requests), salt=name, reuse=reuse)
    while engine.has_work():
        engine.step()
        listed, held = units_of_kind(engine, "image")
        if listed > most["image_units_listed"]:
            most = {"image_units_listed": listed, "image_units_held": held}
    return most


def _distributions(
    engine: Engine, config: ImageSharing, number: int, name: str, reuse: SegmentReuse, tokens: Sequence[int]
) -> NDArray[np.float32]:
    """Log-probabilities fp32 [n, vocabulary] of what comes behind the first 0, 1, ... n - 1 of ``tokens``."""
    vocabulary = engine.spec.vocab_size
    params = _params(1, logprobs=vocabulary)
    prompts = [_prompt(config, number, 1, vocabulary, tokens[:count]) for count in range(len(tokens))]
    requests = [engine.submit(prompt, params, salt=name, reuse=reuse) for prompt in prompts]
    completions = engine.finish(requests)
    return np.stack([_dense(completions[request].samples[0].logprobs, vocabulary) for request in requests])


def _reference(engine: Engine, config: ImageSharing, number: int) -> Reference:
    """The exact mode's tokens and distributions, from requests that share nothing with what is measured."""
    exact = build.reuse(EXACT)
    prompt = _prompt(config, number, 1, engine.spec.vocab_size)
    request = engine.submit(prompt, _params(config.new_tokens), salt="reference", reuse=exact)
    tokens = engine.finish([request])[request].samples[0].token_ids
    return Reference(tokens, _distributions(engine, config, number, "reference", exact, tokens))


def _dense(logprobs: list[TokenLogprobs] | None, vocabulary: int) -> NDArray[np.float32]:
    assert logprobs is not None
    row = np.full(vocabulary, -np.inf, np.float32)
    row[list(logprobs[0])] = list(logprobs[0].values())
    return row


def _params(tokens: int, logprobs: int | None = None) -> Any:
    from octavo.core import SamplingParams

    return SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=logprobs)


def _engine(config: ImageSharing, model: Any) -> Engine:
    from octavo.core import Engine

    weight = model.get_input_embeddings().weight
    encoder = RandomImages(weight.shape[1], float(weight[:1024].detach().float().std()), weight.device)
    try:
        return Engine(model, None, build.engine_config(config.engine), encoders={"image": encoder})
    except ValueError as error:
        raise ConfigError(f"engine: {error}") from error


def _fit(modes: dict[str, SegmentReuse], engine: Engine) -> None:
    from octavo.core.encoding.reusing import validate_reuse

    for name, reuse in modes.items():
        try:
            validate_reuse(reuse, engine)
        except ValueError as error:
            raise ConfigError(f"modes: {name}: {error}") from error


def _refuse_longer(config: ImageSharing) -> None:
    text = model_shapes.configuration(config.model).get_text_config()
    most = text.max_position_embeddings
    tokens = config.images * (config.text_tokens + config.image_tokens) + config.question_tokens
    tokens += 3 + config.requests + 2 * config.new_tokens
    if tokens > most:
        raise ConfigError(
            f"images={config.images}: the longest request has {tokens} tokens, and the model at most {most}; lower "
            "images or image_tokens"
        )


def _map(engine: Engine, config: ImageSharing, modes: dict[str, SegmentReuse]) -> tuple[str, Any]:
    name = next((name for name, reuse in modes.items() if not reuse.exact), EXACT)
    shows = f"{config.requests} requests with the same {config.images} images, {name}"
    return shows, watched_pass(engine, lambda: _together(engine, config, 0, name, modes[name]))


def bars(found: Sequence[Row]) -> Figure:
    """Left: time to the first token by mode, images seen before (full) and not. Right: divergence against that time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.9 + 0.45 * len(found)), layout="constrained")
    times, costs = figure.subplots(1, 2)
    names = [row["method"] for row in found]
    places = np.arange(len(found))
    times.barh(places - 0.2, [row["ttft_ms"] for row in found], 0.4, label="images seen before")
    times.barh(places + 0.2, [row["new_images_ttft_ms"] for row in found], 0.4, label="new images", alpha=0.4)
    times.set_yticks(places, names)
    times.invert_yaxis()
    times.set_xlabel("time to the first token (ms)")
    times.legend()
    for row in found:
        costs.plot(row["ttft_ms"], row["kl_nats"], "o", color="0.3" if row["exact"] else None)
        costs.annotate(row["method"], (row["ttft_ms"], row["kl_nats"]), xytext=(4, 4), textcoords="offset points")
    costs.set_xlabel("time to the first token (ms), images seen before")
    costs.set_ylabel("divergence from uncached (nats)")
    return figure
