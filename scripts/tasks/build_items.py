"""Builds the item list of the code-completion task from the pinned sources.

`python -m octavo.scripts.tasks.build_items --tokenizer <folder>` writes the committed file again.

Items are chosen by syntax and by likeness to their context (`BuildSpec`), never by what a model answers. A line
qualifies only if the cross-file code holds one that is like it but not the same: then there is something far away to
read, and to lose. That makes the task no easy one. On the twelve items of under 2,500 tokens SmolLM2-135M-Instruct,
dense and in bf16, writes no line exactly; edit similarity is 44 points and the gold line's log-likelihood -1.35 nats a
token. Before this rule another twelve gave 0, 45 and -1.57, too few items to call it a difference. Most answers miss
from the first word on: sound code, but another statement. With so small a model edit similarity and likelihood carry a
comparison, and exact match does not.
"""

import argparse
import gzip
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.progress import track

from octavo.kernels.cache_dir import cache_dir
from octavo.scripts.tasks.items import CodeItem, Tokenizer, dump_items, leaks, prompt_text, sha256
from octavo.scripts.tasks.metrics import edit_similarity, identifiers
from octavo.scripts.tasks.mining import Candidate, Module, candidates, import_lines, parse_project, related_files
from octavo.scripts.tasks.sources import DATA, Source, python_files, read_sources

# Short prompts first, so that a small limit is quick; the five long ones fill a window of 8,192 tokens, less 40 for
# the answer and up to 20 for a gold line to be scored. Mean of the first 24: about 3,400.
TARGETS = (
    *(1030, 1100, 1200, 1300, 1400, 1500, 7700, 1700, 1900, 2100, 2300, 7900),
    *(2500, 2700, 2900, 3100, 8000, 2200, 3300, 3500, 8100, 3800, 4200, 5000),
    *(1600, 2000, 3000, 4500, 5500, 6000, 7800, 2600),
)


@dataclass(frozen=True)
class BuildSpec:
    """What the items of a list look like; lengths in tokens of the building tokenizer."""

    targets: tuple[int, ...] = TARGETS  # prompt length of each item, in order
    shortfall: float = 0.02  # share of its target that a prompt may fall short of
    max_in_file: float = 0.5  # share of its target that the in-file code may take
    in_file_lines: int = 40  # code kept before the gold line, besides the file's imports
    max_gold_tokens: int = 16
    likeness: tuple[float, float] = (70.0, 95.0)  # bounds of `likeness`, in points


def build_items(
    sources_dir: Path,
    tokenizer: Tokenizer,
    spec: BuildSpec = BuildSpec(),
    seed: int = 0,
    sources: Sequence[Source] | None = None,
) -> list[CodeItem]:
    """One item for each target length. The same sources, tokenizer, spec and seed give the same list.

    1. Mine every source (`mining.candidates`) and shuffle its candidates.
    2. Deal targets to the sources in turn. The first candidate of a file not used before that can be packed to the
       target becomes the item; if the source has none, the next source is asked.

    Raises ValueError if a source is missing or no source can serve a target.
    """
    rng = random.Random(seed)
    miners = [_Miner(source, sources_dir, rng) for source in (sources if sources is not None else read_sources())]
    rng.shuffle(miners)
    items = []
    for number, target in enumerate(track(spec.targets, description="items", transient=True)):
        turn = number % len(miners)
        packed = (miner.take(target, tokenizer, spec) for miner in miners[turn:] + miners[:turn])
        item = next((found for found in packed if found is not None), None)
        if item is None:
            raise ValueError(f"no source has an item of {target} tokens left (item {number} of {len(spec.targets)})")
        items.append(item)
    return items


class _Miner:
    """One parsed source and the candidates that it has left."""

    def __init__(self, source: Source, sources_dir: Path, rng: random.Random) -> None:
        self.source = source
        self.project = parse_project(python_files(source, sources_dir))
        self.left = [c for module in self.project.values() for c in candidates(module, self.project)]
        rng.shuffle(self.left)

    def take(self, target: int, tokenizer: Tokenizer, spec: BuildSpec) -> CodeItem | None:
        for candidate in self.left:
            if len(tokenizer.encode(candidate.gold.strip())) > spec.max_gold_tokens:
                continue
            item = _pack(candidate, self.project, self.source, target, tokenizer, spec)
            if item is not None:
                self.left = [c for c in self.left if c.path != candidate.path]
                return item
        return None


def _pack(
    candidate: Candidate,
    project: dict[str, Module],
    source: Source,
    target: int,
    tokenizer: Tokenizer,
    spec: BuildSpec,
) -> CodeItem | None:
    """The candidate with as much cross-file code as `target` allows, or None.

    None if that is too little, if the prompt leaks the gold line, if it lacks one of its identifiers, or if the
    likeness of the gold line to the cross-file code is out of bounds: reading, not guessing, is what the task is about.

    Files enter whole, the most relevant first and empty ones left out, until one does not fit. Of that one as many
    lines enter as fit: from the definition on if it is the defining file, else from the top. Nothing enters after it.
    """
    item = CodeItem(
        item_id=f"{source.folder}/{candidate.path}:{candidate.line}",
        source=source.name,
        version=source.version,
        licence=source.licence,
        path=candidate.path,
        setting="cross_file_first" if candidate.first_use else "cross_file_random",
        context=(),
        prefix=_in_file_code(project[candidate.path], candidate.line, spec.in_file_lines),
        gold=candidate.gold,
        uses=candidate.name,
        defined_in=candidate.defined_in,
        tokens=0,
        prompt_sha256="",
    )

    def length(trial: CodeItem) -> int:
        return len(tokenizer.encode(prompt_text(trial)))

    if length(item) > spec.max_in_file * target:
        return None
    related = related_files(candidate.path, candidate.defined_in, project)
    for path in (p for p in related if project[p].text.strip()):
        lines = project[path].text.rstrip().split("\n")
        start = candidate.definition_line - 1 if path == candidate.defined_in else 0
        extended = partial(_with_lines, item, path, lines, start)
        fitting = _largest(len(lines), lambda count, extended=extended: length(extended(count)) <= target)
        if fitting:
            item = extended(fitting)
        if fitting < len(lines):
            break

    prompt = prompt_text(item)
    tokens = len(tokenizer.encode(prompt))
    if tokens < (1 - spec.shortfall) * target or not item.context or leaks(item.gold, prompt):
        return None
    if not set(identifiers(item.gold, "python")) <= set(re.findall(r"\w+", prompt)):
        return None
    low, high = spec.likeness
    if not low <= likeness(item) <= high:
        return None
    return replace(item, tokens=tokens, prompt_sha256=sha256(prompt))


def likeness(item: CodeItem) -> float:
    """Edit similarity, in points, of the gold line to the line of cross-file code that is most like it, both without
    indentation."""
    gold = item.gold.strip()
    lines = {line.strip() for _, text in item.context for line in text.split("\n")}
    return max(edit_similarity(line, gold) for line in lines)


def _with_lines(item: CodeItem, path: str, lines: list[str], start: int, count: int) -> CodeItem:
    """`item` with `count` more lines of context, from `start` on; near the end of its file the window moves up."""
    first = min(start, len(lines) - count)
    return replace(item, context=((path, "\n".join(lines[first : first + count])), *item.context))


def _in_file_code(module: Module, line: int, keep: int) -> str:
    """Code before 1-based `line`: all of it, or the file's imports and the last `keep` lines."""
    before = module.text.split("\n")[: line - 1]
    if len(before) > keep:
        crop = len(before) - keep
        before = [*import_lines(module, before=crop + 1), "", *before[crop:]]
    return "\n".join(before)


def _largest(high: int, fits: Callable[[int], bool]) -> int:
    """The largest count in [0, high] that fits, 0 being taken to fit; asks about `high` first."""
    if fits(high):
        return high
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def notice(sources: Sequence[Source], sources_dir: Path) -> str:
    """Text of the NOTICE file: whose code the items quote, and under which terms."""

    def parts() -> Iterator[str]:
        yield (
            "items.jsonl.gz quotes source code of the packages below, unchanged save for where an excerpt begins and\n"
            "ends, and for import lines gathered at its top. Each item names its package, version, licence and files.\n"
        )
        for source in sources:
            yield f"{'=' * 80}\n{source.name} {source.version}\n{source.licence}\n{source.copyright}\n"
            if source.licence == "Apache-2.0":
                yield "The text of the Apache License 2.0 is in the LICENSE file of this project.\n"
            else:
                yield (sources_dir / source.folder / source.licence_file).read_text(encoding="utf-8").strip() + "\n"

    return "\n".join(parts())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--sources", type=Path, default=cache_dir() / "sources")
    parser.add_argument("--out", type=Path, default=DATA, help="folder for items.jsonl.gz and NOTICE")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)

    from transformers import AutoTokenizer  # here, because a library user builds with a tokenizer already loaded

    spec, sources = BuildSpec(), read_sources()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    items = build_items(arguments.sources, tokenizer, spec, arguments.seed, sources)
    used = [s for s in sources if any(i.source == s.name for i in items)]
    keep = ("name", "version", "licence", "copyright", "wheel", "sha256")
    text = dump_items(
        items,
        seed=arguments.seed,
        tokenizer="SmolLM2-135M-Instruct",
        spec=asdict(spec),
        sources=[{key: getattr(s, key) for key in keep} for s in used],
    )
    (arguments.out / "items.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    (arguments.out / "NOTICE").write_text(notice(used, arguments.sources), encoding="utf-8")
    print(f"{len(items)} items, {sum(i.tokens for i in items) / len(items):.0f} tokens on average")


if __name__ == "__main__":
    main()
