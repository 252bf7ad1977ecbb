"""What kvpress keeps of prompts, asked line by line: a program for an environment of its own, without octavo.

kvpress (https://github.com/NVIDIA/kvpress) pins a transformers that is older than octavo's, so the Python that has it
runs this file by its path, and ``octavo.scripts.kvpress_process`` talks to it::

    in   {"model": folder, "dtype": "float32", "device": "cpu"}
    out  {"kvpress": version, "torch": version, "transformers": version}
    in   {"ids": [...], "presses": [{"press": class name, "arguments": {...}, "tokens": n or [n a layer]}, ...]}
    out  {"kept": [a press][a layer][a KV head][positions, ascending]}, or {"error": text}
    ...

Only what kvpress has really left in the cache counts: its keys are found again among those of a run without a press.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, TextIO

import torch


def main(requests: TextIO, answers: TextIO) -> None:
    """Answer until there are no more requests."""

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    import kvpress  # type: ignore[import-not-found,unused-ignore]

    about = json.loads(requests.readline())
    model = loaded(about["model"], getattr(torch, about["dtype"]), about["device"])
    answer({name: importlib.metadata.version(name) for name in ("kvpress", "torch", "transformers")})
    for line in requests:
        request = json.loads(line)
        ids = torch.tensor([request["ids"]], device=model.device)
        try:
            whole = prefill(model, ids, None)
            kept = [
                kept_positions(model, ids, whole, made(kvpress, asked, ids.shape[1])) for asked in request["presses"]
            ]
            answer({"kept": kept})
        except Exception as error:  # whatever a press raises: the next request may be served
            answer({"error": f"{type(error).__name__}: {error}"})


def loaded(path: str, dtype: torch.dtype, device: str) -> Any:
    """The model. Presses that read its tokenizer find one without a chat template, since prompts here are plain text,
    and a press that knows of a template takes their beginning for a part of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = None
    folder = tempfile.mkdtemp(prefix="kvpress-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    model.config.name_or_path = folder
    return model


def made(kvpress: Any, asked: dict[str, Any], length: int) -> Any:
    """The press, with the ratio that makes it keep ``tokens`` of ``length``; with one a layer, inside kvpress's own
    wrapper for that."""
    press, tokens = getattr(kvpress, asked["press"]), asked["tokens"]
    if isinstance(tokens, int):
        return press(compression_ratio=ratio(tokens, length), **asked["arguments"])
    ratios = [ratio(count, length) for count in tokens]
    return kvpress.PerLayerCompressionPress(press(**asked["arguments"]), ratios)


def ratio(tokens: int, length: int) -> float:
    """The share to remove, so that ``int(length * (1 - share))``, as kvpress rounds, is ``tokens``."""
    share = max(0.0, 1 - tokens / length)
    while share > 0 and int(length * (1 - share)) < tokens:
        share = math.nextafter(share, 0)
    return share


def prefill(model: Any, ids: torch.Tensor, press: Any) -> list[torch.Tensor]:
    """The keys [Hkv, N, D] that each layer's cache holds after the prompt, on the CPU."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    with torch.inference_mode():
        if press is None:
            model.model(input_ids=ids, past_key_values=cache)
        else:
            with press(model):
                model.model(input_ids=ids, past_key_values=cache)
    return [layer.keys[0].cpu() for layer in cache.layers]


def kept_positions(model: Any, ids: torch.Tensor, whole: Sequence[torch.Tensor], press: Any) -> list[list[list[int]]]:
    """By layer and KV head, the positions of the keys that a press has left and does not mask."""
    layers = [layer.self_attn for layer in model.model.layers]
    for layer in layers:
        layer.masked_key_indices = None  # where presses that treat heads unequally say what is gone
    left = prefill(model, ids, press)
    found = []
    for number, (before, after) in enumerate(zip(whole, left, strict=True)):
        masked = layers[number].masked_key_indices
        gone = set() if masked is None else set(zip(masked[1].tolist(), masked[2].tolist(), strict=True))
        heads = []
        for head, (all_keys, keys) in enumerate(zip(before, after, strict=True)):
            at = {key.tobytes(): position for position, key in enumerate(all_keys.view(torch.uint8).numpy())}
            if len(at) != len(all_keys):
                raise ValueError(f"layer {number}, head {head}: two tokens have the same key")
            kept = [at[key.tobytes()] for key in keys.contiguous().view(torch.uint8).numpy()]
            heads.append(sorted(position for position in kept if (head, position) not in gone))
        found.append(heads)
    return found


if __name__ == "__main__":
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints, prints to stderr
    main(sys.stdin, lines)
