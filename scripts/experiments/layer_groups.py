"""What do block tables of their own save for layers with a sliding window, and is anything else different?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from octavo.scripts import build, report
from octavo.scripts.machine_load import watch
from octavo.scripts.progress import console, counting, waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import LayerGroups
from octavo.scripts.tasks.items import code_tokens
from octavo.scripts.watched_pass import watched_pass
from octavo.scripts.window_memory import fitting, measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core import Engine
    from octavo.core.inspection.page_watch import PageWatch

Row = dict[str, Any]

POLICIES = {"on": "layer groups", "off": "one group"}
POOL_REQUESTS = 8
"""The pool in which requests are counted holds so many of the ungrouped engine."""
SHOWN_RATIO = 0.25
WATCHED_TOKENS = 4096

NOTES = (
    "KV held is the bytes of the units that tables list, counted after every step; a closed form over the layers' "
    "windows predicts it. A window's table holds the window and one step: a chunk at the peak, one token in decoding.",
    "same tokens: equal to those of the engine with one group, greedily, up to the first difference.",
    f"requests in one pool: how many fit where {POOL_REQUESTS} of the engine with one group do, one of them computing "
    "its prompt while the others decode; arithmetic on the bytes held.",
    "on a prefix hit: seconds to the first token when the prompt's pages are found.",
)


def run(config: LayerGroups, run: Run) -> None:
    """One sample a context and engine: each with a prompt of real code, greedily, on an engine of its own.

    1. The request alone, from nothing: units held after every step, and the same in closed form.
    2. The request again: a prefix hit.
    3. A session that decodes half of the output, is forked, and of which both sides decode the rest.

    All three write the same tokens, and so do the two engines, up to near ties of the arithmetic.
    """
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
    _refuse(config, model)
    contexts = config.contexts[: config.limit]
    text = code_tokens(tokenizer, max(contexts), config.seed)

    done = run.done("item", "groups")
    turns = [(context, groups) for context in contexts for groups in POLICIES]
    with counting(config.experiment, len(turns), len(done)) as advance:
        for context, groups in turns:
            if (str(context), groups) not in done:
                prompt = text[: context - config.new_tokens]
                sample = {"item": str(context), "groups": groups, **_measure(config, model, prompt, groups == "on")}
                run.add(sample)
                run.write_rows(rows(run.samples))
                held = report.format_bytes(max(sample["units_held"]) * sample["unit_bytes"])
                advance(f"{context:,} tokens, {POLICIES[groups]}: {held}, prefill {sample['prefill_seconds']:.1f} s")

    found = rows(run.samples)
    for line in _findings(found):
        console.print(line, style="bold", markup=False, highlight=False)
    prompt = text[: watched_context(contexts) - config.new_tokens]
    maps = [_map(config, model, prompt, groups) for groups in POLICIES] if config.page_map else []
    notes = (*NOTES, *_near_ties(found))
    report.publish(run, config, found, plots={"layer_groups": figure(found)}, notes=notes, maps=maps)


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row a context and engine, short contexts first. What compares the two is there once both have run."""
    found = []
    for sample in sorted(samples, key=lambda s: int(s["item"])):
        pair = {s["groups"]: s for s in samples if s["item"] == sample["item"]}
        off = pair.get("off")
        peak, decoding = _bytes(sample)
        row: Row = {
            "name": "octavo",
            "task": f"{int(sample['item']):,} tokens",
            "policy": POLICIES[sample["groups"]],
            "context_tokens": int(sample["item"]),
            **{key: sample[key] for key in ("prompt_tokens", "new_tokens", "unit_bytes", "table_slices")},
            "units_held_peak": sample["units_held_peak"],
            "predicted_units_held_peak": max(sample["predicted_units_held"]),
            "kv_bytes_held_peak": peak,
            "kv_bytes_held_decoding": decoding,
            "unpredicted_steps": _differing(sample["units_held"], sample["predicted_units_held"]),
        }
        if off is not None:
            off_peak, off_decoding = _bytes(off)
            same, margin = agreement(sample, off)
            row |= {"kv_ratio": peak / off_peak, "kv_decoding_ratio": decoding / off_decoding}
            row |= {"same_tokens": same, "margin_nats": margin}
            row |= {"requests_fit": fitting(POOL_REQUESTS * off_peak, peak, decoding)}
        row |= {
            "prefill_seconds": sample["prefill_seconds"],
            "tokens_per_s": (sample["new_tokens"] - 1) / sample["decode_seconds"],
            "hit_tokens": sample["hit"]["cached_tokens"],
            "hit_seconds": sample["hit"]["seconds"],
            "hit_same_tokens": agreement(sample["hit"], sample)[0],
            **{key: sample["fork"][key] for key in ("fork_us", "fork_units", "copies", "predicted_copies")},
            "fork_units_held": sample["fork"]["units_held"],
            "predicted_fork_units_held": sample["fork"]["predicted_units_held"],
            "fork_same_tokens": min(agreement(side, sample)[0] for side in sample["fork"]["sides"]),
            "free_cores": sample["free_cores"],
        }
        found.append(row)
    return found


def agreement(one: Sample, other: Sample) -> tuple[int, float | None]:
    """Tokens up to the first difference of two outputs; and how clear the choice was there, on the side where it was
    clearer, in nats. None if they do not differ."""
    pairs = list(zip(one["tokens"], other["tokens"], strict=True))
    same = next((at for at, (token, twin) in enumerate(pairs) if token != twin), len(pairs))
    return same, None if same == len(pairs) else max(one["margins"][same], other["margins"][same])


def figure(found: Sequence[Row]) -> Figure:
    """Left: bytes held by context, at the peak and while decoding. Right: on over off, with the aimed-at quarter."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 4), layout="constrained")
    held, ratio = drawn.subplots(1, 2)
    for number, policy in enumerate(POLICIES.values()):
        own = [row for row in found if row["policy"] == policy]
        contexts = [row["context_tokens"] for row in own]
        for key, style, when in (("peak", "o-", "peak"), ("decoding", "o:", "decoding")):
            megabytes = [row[f"kv_bytes_held_{key}"] / 1e6 for row in own]
            held.plot(contexts, megabytes, style, color=f"C{number}", label=f"{policy}, {when}")
    grouped = [row for row in found if row["policy"] == POLICIES["on"] and "kv_ratio" in row]
    for key, style, when in (("kv_ratio", "o-", "peak"), ("kv_decoding_ratio", "o:", "decoding")):
        ratio.plot([r["context_tokens"] for r in grouped], [r[key] for r in grouped], style, color="C0", label=when)
    ratio.axhline(SHOWN_RATIO, color="0.6", linestyle="--", label=f"{SHOWN_RATIO}")
    held.set(ylabel="MB of KV held", yscale="log")
    ratio.set(ylabel="bytes, on / off", ylim=(0, 1))
    ticks = sorted({row["context_tokens"] for row in found})
    for axes in (held, ratio):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel("tokens of context")
        axes.legend(fontsize="small")
    return drawn


def _measure(config: LayerGroups, model: Any, prompt: list[int], grouped: bool) -> Sample:
    load = watch()
    engine = _engine(config, model, len(prompt), grouped)
    sample = measure(engine, prompt, config.new_tokens)
    engine.check()
    return {**sample, **dataclasses.asdict(load)}


def watched_context(contexts: Sequence[int]) -> int:
    """The context of the page maps: the longest of at most 4,096 tokens, which costs little and reaches far behind a
    window; the shortest if all are longer."""
    return max((tokens for tokens in contexts if tokens <= WATCHED_TOKENS), default=min(contexts))


def _map(config: LayerGroups, model: Any, prompt: list[int], groups: str) -> tuple[str, PageWatch]:
    """The pool of one engine, during all that is done with a prompt."""
    engine = _engine(config, model, len(prompt), groups == "on")
    shows = f"{POLICIES[groups]}, {len(prompt) + config.new_tokens:,} tokens"
    return shows, watched_pass(engine, lambda: measure(engine, prompt, config.new_tokens))


def _engine(config: LayerGroups, model: Any, prompt: int, grouped: bool) -> Engine:
    """An engine with room for one request in every layer, and for a second one's own pages after a fork."""
    from octavo.core import Engine

    settings = build.engine_config(config.engine)
    page = settings.text_page_tokens
    pages = -(-(prompt + config.new_tokens) // page) + -(-config.new_tokens // page) + 2
    return Engine(model, None, dataclasses.replace(settings, pool_tokens=pages * page, layer_groups=grouped))


def _refuse(config: LayerGroups, model: Any) -> None:
    """Raises ConfigError unless the model has windows, and room for the contexts."""
    from octavo.core.hf_model import HFModel

    spec = HFModel(model).spec
    if not any(spec.windows):
        raise ConfigError(
            f"model.path={config.model.path}: none of its {spec.layers} layers has a sliding window, so no page ever "
            "falls behind one; take model=gemma3, or another model with windows"
        )
    most = min(spec.max_tokens, config.engine.max_model_tokens or spec.max_tokens)
    for context in config.contexts[: config.limit]:
        if context > most:
            raise ConfigError(f"contexts={context}: more than the {most} tokens that this model may have")


def _bytes(sample: Sample) -> tuple[int, int]:
    """Bytes held at the peak, and in the last step that left the request alive."""
    return sample["units_held_peak"] * sample["unit_bytes"], sample["units_held"][-1] * sample["unit_bytes"]


def _differing(counted: Sequence[int], predicted: Sequence[int]) -> int:
    """Steps whose count is not as predicted; what the last step held is not seen from outside."""
    return sum(one != other for one, other in zip(counted, predicted[:-1], strict=True))


def _findings(found: Sequence[Row]) -> Iterator[str]:
    """What a reader wants to know first."""
    for row in found:
        if row["policy"] == POLICIES["on"] and "kv_ratio" in row:
            yield (
                f"{row['task']}: {row['kv_ratio']:.3f}x the KV bytes at the peak, "
                f"{row['kv_decoding_ratio']:.3f}x while decoding; {row['same_tokens']} of {row['new_tokens']} tokens "
                f"are the same; {row['requests_fit']} requests fit where {POOL_REQUESTS} did"
            )


def _near_ties(found: Sequence[Row]) -> list[str]:
    return [
        f"{row['task']}, {row['policy']}: the first different token was chosen by {row['margin_nats']:.3f} nats."
        for row in found
        if row.get("margin_nats") is not None
    ]
