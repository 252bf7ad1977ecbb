"""vLLM in this process, loaded alike for a batch and as a server that is stepped. Its build for CPUs is named alike."""

from __future__ import annotations

import importlib.util
import os
import tempfile
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


def load(path: str | None, model_config: Any, *, dtype: str, longest: int, memory_fraction: float, **more: Any) -> Any:
    """``vllm.LLM`` without prefix cache, for requests of at most ``longest`` tokens.

    Args:
        path: of the weights; None makes random ones in the shape of ``model_config``, of transformers.
        dtype: by its name in torch.
        memory_fraction: of a GPU's memory.
    """
    # Read when vLLM is imported: everything in this process, and nothing sent anywhere.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            model_config.save_pretrained(folder)
            more.update(load_format="dummy", skip_tokenizer_init=True)
        return LLM(
            model=path or folder,
            dtype=dtype,
            max_model_len=longest,
            enable_prefix_caching=False,
            gpu_memory_utilization=memory_fraction,
            **more,
        )


def load_for(config: WithRivals, model: Any, longest: int) -> Any:
    """``load`` of the model that all contenders serve."""
    return load(
        config.model.path,
        model.config,
        dtype=str(model.dtype).removeprefix("torch."),
        longest=longest,
        memory_fraction=config.vllm_memory_fraction,
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
        self._engine = load_for(config, model, longest).llm_engine

    def serve(self, requests: list[TimedRequest], clock: Clock) -> Served:
        return Served(serve(VLLMServer(self._engine), requests, clock), None)
