"""What do turns, forks and images that are put in along the way cost a live session, next to asking anew?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count, groupby
from random import Random
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import build, report
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Sessions
from octavo.scripts.vision_models import load_vision_model
from octavo.scripts.watched_pass import watched_pass

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core import Completion, Engine, Session

Row = dict[str, Any]

KEPT, FOUND, ANEW = "kept", "found", "computed anew"
POLICIES = (KEPT, FOUND, ANEW)
FORK, PRODUCER = "fork", "producer"

NOTES = (
    f"{KEPT}: a session's turn. {FOUND}: the whole history as a request, whose earlier turns are in the prefix cache. "
    f"{ANEW}: the same as the first of its kind. All must write the same tokens.",
    "computed: tokens of the history whose KV was not there. encoded: images that the encoder was asked for.",
    f"{FORK}: sessions that branch off the last turn, each asked another question, in one batch; own units: what one "
    f"of them holds beyond what all share. {PRODUCER}: an image is put in when the model says a certain word; the time "
    "is from that word to the next.",
)


class Asked(NamedTuple):
    """A scene as an image uint8 [96, 96, 3], a question about it, and the answer."""

    image: Any
    question: str
    answer: str


def run(config: Sessions, run: Run) -> None:
    """One sample a conversation. In each, turn by turn::

        session      | turn 1 | turn 2 | ... | turn T | -> forks, one more turn each
        found          request of turns 1 to t, in a salt of the conversation's own
        computed anew  the same, in a salt that nobody else has

    and then once more a history whose answer calls a producer, against the same by hand. Requests are alone in the
    engine, but for the forks. A conversation that is not counted comes first.
    """
    with waiting("loading the model"):
        vision = load_vision_model(config.model)
        encoder = _Counting(vision.encoder)
        engine = build.engine(config, vision.model, vision.tokenizer, encoders={"image": encoder})
    if not vision.demo:
        raise ConfigError(f"model.path={config.model.path}: the scenes have a language of their own; give a demo model")
    _refuse_long(config, engine, encoder)

    items = [f"conversation {number}" for number in range(config.conversations)][: config.limit]
    done = run.done("item")
    with counting(config.experiment, len(items), len(done)) as advance:
        if len(done) < len(items):
            _converse(engine, encoder, config, _asked(config, "warm-up"), "warm-up")
        for item in items:
            if (item,) in done:
                continue
            run.add({"item": item, **_converse(engine, encoder, config, _asked(config, item), item)})
            run.write_rows(rows(run.samples))
            advance(_line(run.samples[-1]))

    found = rows(run.samples)
    for line in _findings(found):
        console.print(line, style="bold", markup=False, highlight=False)
    maps: list[tuple[str, PageWatch | None]] = []
    if config.page_map:
        salt = count()

        def serve() -> object:
            return _converse(engine, encoder, config, _asked(config, items[0]), f"map {next(salt)}")

        maps = [(items[0], watched_pass(engine, serve))]
    report.publish(run, config, found, plots={"sessions": figure(found)}, notes=(*_findings(found), *NOTES), maps=maps)


def rows(samples: Sequence[Sample]) -> list[Row]:
    """A row a turn and policy, then one for forks and one for producers; times are medians over conversations, counts
    are means."""
    found: list[Row] = []
    for turn in range(len(samples[0]["turns"]) if samples else 0):
        for policy in POLICIES:
            own = [sample["turns"][turn][policy] for sample in samples]
            found.append(
                {
                    "name": "octavo",
                    "task": f"turn {turn + 1}",
                    "policy": policy,
                    "conversations": len(own),
                    "prompt_tokens": fmean(one["prompt_tokens"] for one in own),
                    "computed_tokens": fmean(one["computed_tokens"] for one in own),
                    "images_encoded": fmean(one["images_encoded"] for one in own),
                    "ttft_p50_ms": 1e3 * median(one["ttft_s"] for one in own),
                    "as_anew_percent": 100 * fmean(one["same_tokens"] for one in own),
                    "accuracy": 100 * fmean(one["right"] for one in own),
                }
            )
    if samples:
        forks, made = [s[FORK] for s in samples], [s[PRODUCER] for s in samples]
        found.append(
            {
                "name": "octavo",
                "task": FORK,
                "policy": KEPT,
                "conversations": len(forks),
                "forks": forks[0]["forks"],
                "fork_us": median(us for one in forks for us in one["fork_us"]),
                "units_held": fmean(one["units_held"] for one in forks),
                "fork_units": fmean(one["fork_units"] for one in forks),
                "own_units": fmean(one["own_units"] for one in forks),
                "copies": fmean(one["copies"] for one in forks),
                "computed_tokens": fmean(one["computed_tokens"] for one in forks),
                "as_anew_percent": 100 * fmean(one["same_tokens"] for one in forks),
            }
        )
        found.append(
            {
                "name": "octavo",
                "task": PRODUCER,
                "policy": KEPT,
                "conversations": len(made),
                "inserted": fmean(one["inserted"] for one in made),
                "computed_tokens": fmean(one["computed_tokens"] for one in made),
                "ttft_p50_ms": 1e3 * median(one["round_trip_s"] for one in made),
                "as_anew_percent": 100 * fmean(one["same_tokens"] for one in made),
            }
        )
    return found


def figure(found: Sequence[Row]) -> Figure:
    """Left: tokens that a turn computes before it answers. Right: how long that takes."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 4), layout="constrained")
    for axes, key, label in zip(
        drawn.subplots(1, 2),
        ("computed_tokens", "ttft_p50_ms"),
        ("tokens computed before the answer", "ms to the first token (median)"),
        strict=True,
    ):
        for number, policy in enumerate(POLICIES):
            own = [row for row in found if row["policy"] == policy and row["task"].startswith("turn")]
            axes.plot(range(1, len(own) + 1), [row[key] for row in own], "o-", color=f"C{number}", label=policy)
        axes.set(xlabel="turn", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return drawn


class _Counting:
    """An encoder that counts what it is asked for."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self.images = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode(self, items: Sequence[Any]) -> Any:
        self.images += len(items)
        return self._encoder.encode(items)


def _asked(config: Sessions, item: str) -> list[Asked]:
    """Questions of a conversation: one a turn, one more a fork, and one for the producer."""
    from octavo.multimodal.scenes_questions import ask
    from octavo.multimodal.scenes_render import draw

    rng = Random(f"{config.seed} {item}")
    asked = []
    for number in range(config.turns + config.forks + 1):
        question = ask(rng, ("colour", "shape", "size", "place")[number % 4], 1)
        asked.append(Asked(draw(question.scenes)[0], question.question, question.answer))
    return asked


def _converse(engine: Engine, encoder: _Counting, config: Sessions, asked: Sequence[Asked], item: str) -> Sample:
    """All that is measured of a conversation."""
    from octavo.core import SamplingParams

    params = SamplingParams(max_tokens=config.new_tokens)
    session, images = engine.session(salt=f"{item} {KEPT}"), []
    turns: list[dict[str, Any]] = []
    for number, one in enumerate(asked[: config.turns]):
        images.append(one.image)
        _append(session, number, one)
        prompt = _prompt(engine, session.tokens, images)
        makers: dict[str, Callable[[], str]] = {
            KEPT: lambda: session.submit(params),
            FOUND: lambda prompt=prompt: engine.submit(prompt, params, salt=f"{item} {FOUND}"),  # type: ignore[misc]
            ANEW: lambda prompt=prompt, number=number: engine.submit(  # type: ignore[misc]
                prompt, params, salt=f"{item} {ANEW} {number}"
            ),
        }
        turn = {policy: _timed(engine, encoder, make) for policy, make in makers.items()}
        for sample in turn.values():
            sample["same_tokens"] = sample["tokens"] == turn[ANEW]["tokens"]
            sample["right"] = sample.pop("text").strip() == one.answer
        turns.append(turn)
    forked = _fork(engine, session, config, images, asked[config.turns : -1], item)
    session.close()
    return {"turns": turns, FORK: forked, PRODUCER: _produce(engine, config, asked[0], asked[-1], item)}


def _append(session: Session, number: int, asked: Asked) -> None:
    from octavo.multimodal.scenes_prompts import question_part

    which = f"in image {number + 1} , " if number else ""
    session.append([f"image {number + 1} :", asked.image, question_part(which + asked.question)])


def _prompt(engine: Engine, tokens: Sequence[int], images: Sequence[Any]) -> list[Any]:
    """A session's history as a prompt: its text as token ids, its images in order."""
    from octavo.core import TokenSegment

    rest, prompt = iter(images), list[TokenSegment | Any]()
    for is_image, group in groupby(tokens, lambda token: token >= engine.spec.vocab_size):
        prompt.append(next(rest) if is_image else TokenSegment("text", list(group)))
    return prompt


def _timed(engine: Engine, encoder: _Counting, submit: Callable[[], str]) -> dict[str, Any]:
    """Serve one request alone."""
    encoded, start = encoder.images, time.perf_counter()
    name = submit()
    first_s: float | None = None
    completion: Completion | None = None
    while completion is None:
        for out in engine.step():
            if out.request_id == name:
                first_s = first_s or (time.perf_counter() - start if out.new_token_ids else None)
                completion = out.completion or completion
    return {
        "ttft_s": first_s,
        "prompt_tokens": len(completion.prompt_token_ids),
        "computed_tokens": len(completion.prompt_token_ids) - completion.cached_tokens,
        "images_encoded": encoder.images - encoded,
        "tokens": completion.samples[0].token_ids,
        "text": completion.text,
    }


def _fork(
    engine: Engine, session: Session, config: Sessions, images: Sequence[Any], asked: Sequence[Asked], item: str
) -> dict[str, Any]:
    """Fork a session, and ask every fork something else about the last image."""
    from octavo.core import SamplingParams
    from octavo.multimodal.scenes_prompts import question_part

    params = SamplingParams(max_tokens=config.new_tokens)
    before, forks, fork_us = engine.stats(), [], []
    for _ in range(config.forks):
        start = time.perf_counter()
        forks.append(session.fork())
        fork_us.append(1e6 * (time.perf_counter() - start))
    after = engine.stats()
    for fork, one in zip(forks, asked, strict=True):
        fork.append(question_part(one.question))
    prompts = [_prompt(engine, fork.tokens, images) for fork in forks]
    names = [fork.submit(params) for fork in forks]
    done = engine.finish(names)
    ended = engine.stats()
    anew = [engine.submit(prompt, params, salt=f"{item} {FORK} {at}") for at, prompt in enumerate(prompts)]
    alone = engine.finish(anew)
    same = [
        done[name].samples[0].token_ids == alone[other].samples[0].token_ids
        for name, other in zip(names, anew, strict=True)
    ]
    for fork in forks:
        fork.close()
    return {
        "forks": config.forks,
        "fork_us": fork_us,
        "units_held": before.units_held,
        "fork_units": after.units_held - before.units_held,
        "own_units": (ended.units_held - after.units_held) / config.forks,
        "copies": ended.copies - before.copies,
        "computed_tokens": fmean(len(done[n].prompt_token_ids) - done[n].cached_tokens for n in names),
        "same_tokens": all(same),
    }


def _produce(engine: Engine, config: Sessions, asked: Asked, other: Asked, item: str) -> dict[str, Any]:
    """Let the first word of an answer call a producer of one image, and do the same by hand."""
    from octavo.core import SamplingParams

    params = SamplingParams(max_tokens=2 * config.new_tokens, ignore_eos=True)

    def begun(salt: str, **producers: Any) -> Session:
        session = engine.session(salt=f"{item} {PRODUCER} {salt}", **producers)
        _append(session, 0, asked)
        return session

    scout = begun("scout")
    marker = scout.generate(SamplingParams(max_tokens=1, ignore_eos=True)).samples[0].token_ids[0]
    scout.close()
    by_hand, new = begun("by hand"), [marker]
    by_hand.generate(SamplingParams(max_tokens=1, ignore_eos=True))
    by_hand.append([other.image, "."])
    completion = by_hand.generate(SamplingParams(max_tokens=params.max_tokens - 1, ignore_eos=True))
    new += completion.samples[0].token_ids
    by_hand.close()

    session = begun("called", producers={marker: lambda turn: None if turn.calls else [other.image, "."]})
    name, at, tokens, inserted = session.submit(params), list[float](), list[int](), 0
    while engine.has_work():
        for out in engine.step():
            tokens += out.new_token_ids
            inserted += out.request_id == name and out.inserted is not None
            at += [time.perf_counter()] * len(out.new_token_ids)
    session.close()
    return {
        "inserted": inserted,
        "computed_tokens": len(completion.prompt_token_ids) - completion.cached_tokens,
        "round_trip_s": at[1] - at[0],
        "same_tokens": tokens == new,
    }


def _refuse_long(config: Sessions, engine: Engine, encoder: Any) -> None:
    """Raises ConfigError unless the model has room for the last turn."""
    a_turn = encoder.n_tokens(None) + 40 + config.new_tokens
    if (config.turns + 1) * a_turn > engine.max_model_tokens:
        raise ConfigError(
            f"turns={config.turns}: at up to {a_turn} tokens a turn, and one more after a fork, that is more than the "
            f"{engine.max_model_tokens} tokens that this model may have"
        )


def _line(sample: Sample) -> str:
    last = sample["turns"][-1]
    return f"{sample['item']}: last turn computes " + ", ".join(
        f"{last[policy]['computed_tokens']} of {last[policy]['prompt_tokens']} tokens ({policy})" for policy in POLICIES
    )


def _findings(found: Sequence[Row]) -> list[str]:
    """What a reader wants to know first."""
    last = {row["policy"]: row for row in found if row["task"].startswith("turn")}
    lines = [
        f"Last turn: a session computes {last[KEPT]['computed_tokens']:.0f} of {last[KEPT]['prompt_tokens']:.0f} "
        f"tokens; computed anew, the first token takes {last[ANEW]['ttft_p50_ms'] / last[KEPT]['ttft_p50_ms']:.1f} "
        "times as long."
    ]
    for row in found:
        if row["task"] == FORK:
            lines.append(
                f"A fork takes {row['fork_us']:.0f} µs and {row['fork_units']:.0f} units beside the "
                f"{row['units_held']:.0f} that it shares; its own question costs {row['own_units']:.1f} units and "
                f"{row['computed_tokens']:.0f} tokens."
            )
    return lines
