"""Rivals in the race of decode steps. Whole generations are all that is seen of them from outside."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from octavo.scripts import vllm_server
from octavo.scripts.decode_shapes import TEMPERATURE, StepShape, Stretch, device_bytes_peak, forget_peak
from octavo.scripts.schema_decode import DecodeStep
from octavo.scripts.workloads import Workload

SHORT_TOKENS = 8  # of the shorter of two generations


class BySlope(ABC):
    """A step is the slope between a short and a long generation of the same prompts; what is left of the short one is
    the time of its prompts."""

    device: torch.device
    vocab_size: int

    @abstractmethod
    def generate(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds to give each of the prompts, which are of one length, so many tokens."""

    def warm_up(self, shape: StepShape) -> None:
        for new_tokens in (SHORT_TOKENS, SHORT_TOKENS + shape.new_tokens):
            self.generate(shape.prompts(self.vocab_size, 0), new_tokens)

    def stretch(self, shape: StepShape, seed: int) -> Stretch:
        prompts = shape.prompts(self.vocab_size, seed)
        forget_peak(self.device)
        short = self.generate(prompts, SHORT_TOKENS)
        long = self.generate(prompts, SHORT_TOKENS + shape.new_tokens)
        step_s = (long - short) / shape.new_tokens
        return Stretch(step_s, short - (SHORT_TOKENS - 1) * step_s, None, None, device_bytes_peak(self.device))


class Transformers(BySlope):
    """``generate`` with a static cache, greedily; on a GPU transformers compiles it. It serves no requests of several
    lengths: every row of a static batch would be as long as the longest."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.device = model.device
        self.vocab_size = model.config.get_text_config().vocab_size

    def generate(self, prompts: list[list[int]], new_tokens: int) -> float:
        ids = torch.tensor(prompts, device=self.device)
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                cache_implementation="static",
                disable_compile=self.device.type != "cuda",
                eos_token_id=self.vocab_size,  # an id that no token has: nothing ends a row early
                pad_token_id=0,
            ).tolist()
        seconds = time.perf_counter() - start
        assert all(len(row) == len(prompts[0]) + new_tokens for row in output), "a row ended early"
        return seconds


class VLLM(BySlope):
    """vLLM's offline batch on a model of the same shape, with weights of its own making unless one was loaded."""

    def __init__(
        self, config: DecodeStep, model_config: Any, dtype: str, shapes: Sequence[StepShape], mixed: Workload | None
    ) -> None:
        longest = [shape.context + SHORT_TOKENS + shape.new_tokens for shape in shapes]
        self.device = torch.device("cuda")
        self.vocab_size = model_config.get_text_config().vocab_size
        self._llm = vllm_server.load(
            config.model.path,
            model_config,
            dtype=dtype,
            longest=max([*longest, 0 if mixed is None else mixed.longest]),
            memory_fraction=config.vllm_memory_fraction,
            max_num_seqs=config.engine.max_seqs,
            disable_log_stats=True,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> float:
        return self._generate(prompts, [vllm_server.greedy(new_tokens)] * len(prompts))

    def serve(self, workload: Workload) -> float:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=TEMPERATURE, max_tokens=new, ignore_eos=True, detokenize=False)
            for new in workload.new_tokens
        ]
        return self._generate(list(workload.prompts), params)

    def _generate(self, prompts: list[list[int]], params: list[Any]) -> float:
        start = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        found = [len(output.outputs[0].token_ids) for output in outputs]
        assert found == [one.max_tokens for one in params], "a request was cut short"
        return seconds
