"""Whoever takes part in the throughput race: octavo, its rivals, and the floor."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from octavo.core import SamplingParams
from octavo.core.sizing import kv_dtype
from octavo.scripts import build, linears
from octavo.scripts.schema import Throughput
from octavo.scripts.workloads import Workload

FLOOR = "linears"


@dataclass(frozen=True)
class Outing:
    """One pass over a workload. new_tokens: those that were asked for, whatever else was computed. kv_bytes: K and V
    held at the peak; None if there is none, or nobody can tell."""

    seconds: float
    new_tokens: int
    kv_bytes: int | None


class Contender(Protocol):
    name: str

    def run(self, workload: Workload) -> Outing:
        """All requests of the workload from first to last, timed; nothing is kept from earlier passes."""
        ...


class Octavo:
    """This engine, with room for all requests at once unless ``engine.pool_tokens`` says otherwise."""

    name = "octavo"

    def __init__(self, config: Throughput, model: Any, workload: Workload) -> None:
        page_tokens = build.engine_config(config.engine).text_page_tokens
        pool_tokens = config.engine.pool_tokens or workload.slots(page_tokens)
        sized = dataclasses.replace(config, engine=dataclasses.replace(config.engine, pool_tokens=pool_tokens))
        self.engine = build.engine(sized, model, None)
        self._passes = 0

    def run(self, workload: Workload) -> Outing:
        self._passes += 1
        start = time.perf_counter()
        ids = [
            # The salt keeps the prompts' pages from being found again by the next pass.
            self.engine.submit(prompt, SamplingParams(max_tokens=new, ignore_eos=True), salt=f"pass {self._passes}")
            for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True)
        ]
        completions = self.engine.finish(ids)
        seconds = time.perf_counter() - start
        found = [len(completions[request_id].samples[0].token_ids) for request_id in ids]
        assert found == list(workload.new_tokens), "a request was cut short"
        spec, config = self.engine.spec, self.engine.config
        slot_bytes = spec.kv_bytes_per_token(kv_dtype(config, spec).itemsize)
        held = self.engine.stats().units_held_peak * config.unit_tokens
        return Outing(seconds, workload.total_new, held * slot_bytes)


class Transformers:
    """``generate`` on one static batch: prompts padded on the left to the longest, every row run to the longest
    output, since a row of a static batch cannot leave it."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, workload: Workload) -> Outing:
        longest, steps = max(map(len, workload.prompts)), max(workload.new_tokens)
        ids = torch.zeros((len(workload.prompts), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(workload.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        text = self._model.config.get_text_config()
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                max_new_tokens=steps,
                do_sample=False,
                eos_token_id=text.vocab_size,  # an id that no token has: nothing ends a row early
                pad_token_id=0,
            ).tolist()
        seconds = time.perf_counter() - start
        assert all(len(row) == longest + steps for row in output), "a row ended early"
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        slot_bytes = 2 * text.num_hidden_layers * heads * head_dim * self._model.dtype.itemsize
        slots = len(output) * (longest + steps - 1)  # the last token's KV is never stored
        return Outing(seconds, workload.total_new, slots * slot_bytes)


class VLLM:
    """vLLM's offline batch, without its prefix cache, in this process. Its KV bytes are not known from outside."""

    def __init__(self, name: str, config: Throughput, model: Any, workload: Workload) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read when vLLM is imported
        from vllm import LLM

        self.name = name
        self._llm = LLM(
            model=config.model.path,
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=workload.longest,
            enable_prefix_caching=False,
            gpu_memory_utilization=config.vllm_memory_fraction,
        )

    def run(self, workload: Workload) -> Outing:
        from vllm import SamplingParams as Params

        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        params = [
            Params(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False) for new in workload.new_tokens
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        found = [len(output.outputs[0].token_ids) for output in outputs]
        assert found == list(workload.new_tokens), "a request was cut short"
        return Outing(seconds, workload.total_new, None)


class Linears:
    """The floor, run like a contender so that it sees the same machine."""

    name = FLOOR

    def __init__(self, config: Throughput, model: Any) -> None:
        self._model = model
        self._step_tokens = config.engine.step_tokens

    def run(self, workload: Workload) -> Outing:
        return Outing(linears.seconds(self._model, workload, self._step_tokens), workload.total_new, None)


def line_up(config: Throughput, model: Any, workload: Workload) -> tuple[list[Contender], list[str]]:
    """Octavo, the rivals that can run here and the floor, in this order, and a note on each rival that cannot."""
    contenders: list[Contender] = [Octavo(config, model, workload)]
    notes = []
    for name in config.rivals:
        missing = None if name == "transformers" else _vllm_is_missing(name, model.device.type)
        if missing:
            notes.append(f"{name} did not run: {missing}.")
        else:
            contenders.append(Transformers(model) if name == "transformers" else VLLM(name, config, model, workload))
    return [*contenders, Linears(config, model)], notes


def _vllm_is_missing(name: str, device: str) -> str | None:
    """Why a build of vLLM cannot run; the builds for CPU and GPU are imported under one name."""
    wanted = "cpu" if name == "vllm_cpu" else "cuda"
    if device != wanted:
        return f"it is for {wanted}, and the model is on {device}"
    return None if importlib.util.find_spec("vllm") else "it is not installed"
