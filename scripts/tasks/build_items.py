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
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.progress import track

from octavo.kernels.cache_dir import cache_dir
from octavo.scripts.tasks.items import CodeItem, Tokenizer, dump_items
from octavo.scripts.tasks.mining import candidates, parse_project
from octavo.scripts.tasks.packing import BuildSpec, pack
from octavo.scripts.tasks.sources import DATA, Source, python_files, read_sources

# Short prompts first, so that a small limit is quick; the five long ones fill a window of 8,192 tokens, less 40 for
# the answer and up to 20 for a gold line to be scored. Mean of the first 24: about 3,400.
TARGETS = (
    *(1030, 1100, 1200, 1300, 1400, 1500, 7700, 1700, 1900, 2100, 2300, 7900),
    *(2500, 2700, 2900, 3100, 8000, 2200, 3300, 3500, 8100, 3800, 4200, 5000),
    *(1600, 2000, 3000, 4500, 5500, 6000, 7800, 2600),
)
DEFAULT = BuildSpec(targets=TARGETS)


def build_items(
    sources_dir: Path,
    tokenizer: Tokenizer,
    spec: BuildSpec = DEFAULT,
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
        def length(text: str) -> int:
            return len(tokenizer.encode(text))

        for candidate in self.left:
            if length(candidate.gold.strip()) > spec.max_gold_tokens:
                continue
            item = pack(candidate, self.project, self.source, target, length, spec)
            if item is not None:
                self.left = [c for c in self.left if c.path != candidate.path]
                return item
        return None


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

    spec, sources = DEFAULT, read_sources()
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
