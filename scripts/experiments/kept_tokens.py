"""Which tokens do methods keep, next to kvpress on the same model and prompts, and what makes the difference?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import build, long_context, report
from octavo.scripts.kvpress_process import Kvpress, Press, check_python
from octavo.scripts.long_context import Methods
from octavo.scripts.progress import waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema_kept import KeptTokens, Pair
from octavo.scripts.tasks import documents

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod

Positions = list[list[list[int]]]
"""By layer and KV head, ascending."""

COMPOSED = "as composed"

NOTES = (
    "Sets of kept tokens of a layer and KV head. Equal: of all sets; Jaccard: tokens in both over tokens in either; "
    "within: tokens in both over those of the smaller set, 100 % where only the sizes differ. Means over sets.",
    "Each row takes one more difference away than the row above it. octavo always keeps the open page, the last "
    "tokens of a prompt past a multiple of a page.",
    "kvpress keeps int(length x (1 - ratio)) tokens; its ratio is chosen so that this is the budget.",
)


@dataclass(frozen=True)
class Compared:
    """A pair with some of its differences taken away."""

    pair: str
    step: str
    method: SparseMethod
    press: Press
    counts: bool

    @property
    def name(self) -> str:
        return f"{self.pair}: {self.step}"


def run(config: KeptTokens, run: Run) -> None:
    """One sample a prompt, pair and step; one row a pair, step and number of tokens."""
    python = check_python(config.kvpress_python)
    compared = {one.name: one for name in config.only or config.pairs for one in steps(name, config)}
    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
        engine = build.engine(config, model, tokenizer)
        methods = {name: one.method for name, one in compared.items()}
        build.fit(methods, engine)
    if any(engine.spec.windows):
        raise ConfigError(f"model.path={config.model.path}: its layers have windows, and kvpress compresses those too")
    long_context.refuse_longer("contexts + 2", max(config.contexts) + 2, engine)
    engine.watch = PageWatch() if config.page_map else None
    prompts = _prompts(config, tokenizer)
    with waiting("loading it in the environment of kvpress"):
        dtype, device = str(model.dtype).removeprefix("torch."), str(model.device)
        kvpress = Kvpress(python, str(config.model.path), dtype, device, run.folder / "kvpress.log")

    def measure(item: str, missing: Methods) -> list[Sample]:
        ids = prompts[item][1]
        began = time.perf_counter()
        ours = _kept_by_octavo(engine, ids, [compared[name] for name in missing])
        presses = {name: _press(compared[name], ours[name], ids) for name in missing}
        distinct = list({repr(press): press for press in presses.values()}.values())
        found = dict(zip(map(repr, distinct), kvpress.kept(ids, distinct), strict=True))
        seconds = time.perf_counter() - began
        return [
            {
                "method": name,
                "pair": compared[name].pair,
                "step": compared[name].step,
                "prompt_tokens": len(ids),
                "seconds": seconds,
                **agreement(ours[name], found[repr(presses[name])]),
            }
            for name in missing
        ]

    with kvpress:
        final = long_context.work_through(
            config, run, {item: facts for item, (facts, _) in prompts.items()}, methods, measure, rows
        )
    versions = ", ".join(f"{name} {version}" for name, version in kvpress.versions.items())
    maps = [("all prompts, one after another", engine.watch)]
    report.publish(
        run, config, final, plots={"agreement": figure(final)}, notes=[*NOTES, f"There: {versions}."], maps=maps
    )


def steps(name: str, config: KeptTokens) -> list[Compared]:
    """A pair as composed on both sides, then with one difference after the other taken away."""
    pair = config.pair(name)
    parts: Mapping[str, Any] = {}
    press, arguments, counts = pair.press, dict(pair.arguments), False
    found = [_compared(name, COMPOSED, config, pair, parts, Press(press, arguments, config.budget_tokens), counts)]
    for step in pair.steps:
        parts = _merged(parts, step.method)
        arguments = dict(step.arguments) if step.press else {**arguments, **step.arguments}
        press, counts = step.press or press, counts or step.counts
        asked = Press(press, arguments, config.budget_tokens)
        found.append(_compared(name, step.title, config, pair, parts, asked, counts))
    return found


def kept_tokens(engine: Engine, ids: Sequence[int], method: SparseMethod) -> Positions:
    """What octavo keeps of a prompt in the layers that see everything, the open page included."""
    from octavo.core import SamplingParams

    # Two tokens: with the first, the prompt is computed and compressed, and the request is still there.
    request = engine.submit(list(ids), SamplingParams(max_tokens=2, ignore_eos=True), method=method)
    while not any(news.request_id == request and news.new_token_ids for news in engine.step()):
        pass
    (sequence,) = engine._scheduler.running
    kept = sequence.kept
    layers, heads = range(engine.spec.layers), range(engine.spec.kv_heads)
    since = list(range(0 if kept is None else kept.end, len(ids)))
    before = [[[] for _ in heads] for _ in layers] if kept is None else kept.positions.tolist()
    engine.abort(request)
    return [[[at for at in before[layer][head] if at >= 0] + since for head in heads] for layer in layers]


def agreement(ours: Positions, theirs: Positions) -> Sample:
    """How far the sets agree: means over layers and KV heads in percent, the most tokens that one set has and the other
    has not, and the layers in which some set differs."""
    pairs = [
        (set(own), set(other))
        for layer, others in zip(ours, theirs, strict=True)
        for own, other in zip(layer, others, strict=True)
    ]
    return {
        "equal_percent": _mean([100.0 * (own == other) for own, other in pairs]),
        "jaccard_percent": _mean([100.0 * len(own & other) / len(own | other) for own, other in pairs]),
        "within_percent": _mean([100.0 * len(own & other) / max(1, min(len(own), len(other))) for own, other in pairs]),
        "differing_tokens_max": max(max(len(own - other), len(other - own)) for own, other in pairs),
        "kept_tokens": _mean([len(own) for own, _ in pairs]),
        "kvpress_kept_tokens": _mean([len(other) for _, other in pairs]),
        "sets": len(pairs),
        "differing_layers": [number for number, heads in enumerate(ours) if heads != theirs[number]],
    }


def rows(samples: Sequence[Sample], intervals: bool) -> list[dict[str, Any]]:
    """One row a pair, step and length, in the order of the samples; ``intervals`` changes nothing, since samples are
    sets of several documents and not estimates."""
    good = [sample for sample in samples if "error" not in sample]
    found = []
    for pair, step, length in dict.fromkeys((s["pair"], s["step"], s["prompt_tokens"]) for s in good):
        own = [s for s in good if (s["pair"], s["step"], s["prompt_tokens"]) == (pair, step, length)]
        means = ("equal_percent", "jaccard_percent", "within_percent", "kept_tokens", "kvpress_kept_tokens")
        found.append(
            {
                "name": "octavo",
                "method": pair,
                "same": step,
                "length": length,
                "items": len(own),
                "sets": sum(sample["sets"] for sample in own),
                **{key: _mean([sample[key] for sample in own]) for key in means},
                "differing_tokens_max": max(sample["differing_tokens_max"] for sample in own),
                "differing_layers": sorted({layer for sample in own for layer in sample["differing_layers"]}),
            }
        )
    order = {length: number for number, length in enumerate(dict.fromkeys(row["length"] for row in found))}
    return sorted(found, key=lambda row: order[row["length"]])


def figure(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Agreement by pair and step; a panel a length."""
    from matplotlib.figure import Figure

    lengths = list(dict.fromkeys(row["length"] for row in found))
    drawn = Figure(figsize=(2 + 5 * len(lengths), 1 + 0.3 * len(found) / len(lengths)), layout="constrained")
    for axes, length in zip(drawn.subplots(1, len(lengths), squeeze=False, sharey=True)[0], lengths, strict=True):
        own = [row for row in found if row["length"] == length]
        labels = [f"{row['method']}: {row['same']}" for row in own]
        axes.barh(labels, [row["jaccard_percent"] for row in own], color="C0", alpha=0.35, label="Jaccard")
        axes.plot([row["equal_percent"] for row in own], labels, "o", color="C0", label="equal sets")
        axes.set(xlabel="%", xlim=(0, 103), title=f"prompts of {length:,} tokens")
    axes.invert_yaxis()
    axes.legend(fontsize="small", loc="lower left")
    return drawn


def _compared(
    name: str, step: str, config: KeptTokens, pair: Pair, parts: Mapping[str, Any], press: Press, counts: bool
) -> Compared:
    method = build.method(pair.method, budget_tokens=config.budget_tokens, **parts)
    if getattr(method, "compressor", None) is None:
        raise ConfigError(f"pairs.{name}.method={pair.method}: it keeps all tokens; give one that drops some")
    assert method is not None
    return Compared(name, step, method, press, counts)


def _kept_by_octavo(engine: Engine, ids: Sequence[int], compared: Sequence[Compared]) -> dict[str, Positions]:
    """By name; steps that change nothing on this side are computed once."""
    found: dict[str, Positions] = {}
    for one in compared:
        if one.method.provenance not in found:
            found[one.method.provenance] = kept_tokens(engine, ids, one.method)
    return {one.name: found[one.method.provenance] for one in compared}


def _press(compared: Compared, ours: Positions, ids: Sequence[int]) -> Press:
    """What is asked of kvpress, which keeps no more than there is."""
    press = compared.press
    assert isinstance(press.tokens, int)
    tokens = [len(heads[0]) for heads in ours] if compared.counts else min(press.tokens, len(ids))
    return Press(press.press, press.arguments, tokens)


def _prompts(config: KeptTokens, tokenizer: Any) -> dict[str, tuple[Sample, list[int]]]:
    """The beginnings of documents by name; lengths take turns, then kinds, so that any first few are of all."""
    texts = [
        documents.long_enough(kind, config.seed, tokenizer, max(config.contexts), config.documents)
        for kind in config.kinds
    ]
    found = {}
    for turn in range(config.documents):
        for kind, own in zip(config.kinds, texts, strict=True):
            for length in config.contexts if turn < len(own) else ():
                document, ids = own[turn]
                facts = {"task": kind, "source": document.source, "sha256": document.sha256}
                found[f"{kind}/{document.name}/{length}"] = facts, ids[:length]
    return dict(list(found.items())[: config.limit])


def _merged(parts: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = OmegaConf.to_container(OmegaConf.merge(parts, more))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
