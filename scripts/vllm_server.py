"""vLLM in this process, loaded alike for a batch and as a server that is stepped. Its build for CPUs is named alike."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from octavo.scripts.schema_serving import WithRivals
from octavo.scripts.serving import Clock, Served, serve
from octavo.scripts.timed_requests import TimedRequest


def missing(name: str, device: str) -> str | None:
    """Why ``vllm`` or ``vllm_cpu`` cannot run; None if it can."""
    wanted = "cpu" if name == "vllm_cpu" else "cuda"
    if device != wanted:
        return f"it is for {wanted}, and the model is on {device}"
    return None if importlib.util.find_spec("vllm") else "it is not installed"


def load(config: WithRivals, model: Any, longest: int) -> Any:
    """``vllm.LLM`` of the same weights and dtype, without prefix cache, for requests of at most ``longest`` tokens."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read when vLLM is imported
    from vllm import LLM

    return LLM(
        model=config.model.path,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=longest,
        enable_prefix_caching=False,
        gpu_memory_utilization=config.vllm_memory_fraction,
        disable_log_stats=False,  # without its statistics it does not say when a request was admitted
    )


def greedy(new_tokens: int, **more: Any) -> Any:
    """Sampling parameters for exactly so many tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **more)


class VLLMServer:
    """One pass of vLLM's engine over requests. Each step brings the tokens that are new in it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._admitted: dict[str, float] = {}

    def submit(self, number: int, request: TimedRequest) -> None:
        from vllm.sampling_params import RequestOutputKind

        params = greedy(request.new_tokens, output_kind=RequestOutputKind.DELTA)
        self._engine.add_request(str(number), {"prompt_token_ids": request.prompt}, params)

    def step(self) -> list[tuple[int, int]]:
        outputs = self._engine.step()
        for output in outputs:
            # On Linux vLLM's time.monotonic() and our time.perf_counter() are one clock.
            admitted = getattr(output.metrics, "scheduled_ts", 0.0)
            if admitted:
                self._admitted.setdefault(output.request_id, admitted)
        return [(int(output.request_id), len(output.outputs[0].token_ids)) for output in outputs]

    def admitted_at(self, number: int) -> float | None:
        return self._admitted.get(str(number))


class VLLMService:
    """vLLM among those who serve the same requests. Its preemptions cannot be seen from outside."""

    method = "dense"

    def __init__(self, name: str, config: WithRivals, model: Any, longest: int) -> None:
        self.name = name
        self._engine = load(config, model, longest).llm_engine

    def serve(self, requests: list[TimedRequest], clock: Clock) -> Served:
        return Served(serve(VLLMServer(self._engine), requests, clock), None)
