"""Who takes part: octavo, its rivals and the floor in the throughput race, and the rivals under arrivals."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from octavo.core import SamplingParams
from octavo.core.sizing import kv_dtype
from octavo.kernels.cpu.linear import PackedLinears
from octavo.scripts import build, generate_batch, linears, vllm_server
from octavo.scripts.generate_batch import GenerateBatch
from octavo.scripts.schema import Latency, Throughput
from octavo.scripts.schema_serving import WithRivals
from octavo.scripts.serving import Clock, Served
from octavo.scripts.timed_requests import TimedRequest, timed
from octavo.scripts.vllm_server import VLLMService
from octavo.scripts.workloads import Workload

if TYPE_CHECKING:
    from octavo.core import Engine

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


class Service(Protocol):
    """Serves requests as they come, under one method."""

    name: str
    method: str

    def serve(self, requests: list[TimedRequest], clock: Clock) -> Served:
        """All requests from first to last; nothing is kept from earlier passes."""
        ...


def engine_for(config: WithRivals, model: Any, workload: Workload) -> Engine:
    """An engine with room for all requests that may run at once, unless ``engine.pool_tokens`` says otherwise."""
    page_tokens = build.engine_config(config.engine).text_page_tokens
    pool_tokens = config.engine.pool_tokens or workload.slots(page_tokens, config.engine.max_seqs)
    sized = dataclasses.replace(config, engine=dataclasses.replace(config.engine, pool_tokens=pool_tokens))
    return build.engine(sized, model, None)


class Octavo:
    """This engine."""

    name = "octavo"

    def __init__(self, config: Throughput, model: Any, workload: Workload) -> None:
        self.engine = engine_for(config, model, workload)
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


class Batch:
    """transformers' ``generate_batch``: the same batch, continuously. Its KV bytes are not known from outside."""

    name = generate_batch.NAME

    def __init__(self, config: Throughput, model: Any, workload: Workload) -> None:
        self._service = GenerateBatch(model, workload, config.engine.step_tokens, config.engine.max_seqs)

    def run(self, workload: Workload) -> Outing:
        journeys = self._service.serve(timed(workload, None, 0), Clock()).journeys
        return Outing(max(journey.token_s[-1] for journey in journeys), workload.total_new, None)


class VLLM:
    """vLLM's offline batch. Its KV bytes are not known from outside."""

    def __init__(self, name: str, config: Throughput, model: Any, workload: Workload) -> None:
        self.name = name
        self._llm = vllm_server.load_for(config, model, workload.longest)

    def run(self, workload: Workload) -> Outing:
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        params = list(map(vllm_server.greedy, workload.new_tokens))
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        found = [len(output.outputs[0].token_ids) for output in outputs]
        assert found == list(workload.new_tokens), "a request was cut short"
        return Outing(seconds, workload.total_new, None)


class Linears:
    """The floor, run like a contender so that it sees the same machine. On a CPU the layers multiply by weights packed
    as octavo packs them, which are the fastest at hand."""

    name = FLOOR

    def __init__(self, config: Throughput, model: Any) -> None:
        self._model = model
        self._step_tokens = config.engine.step_tokens
        self._packed = PackedLinears(model)

    def run(self, workload: Workload) -> Outing:
        with self._packed.used():
            return Outing(linears.seconds(self._model, workload, self._step_tokens), workload.total_new, None)


def line_up(config: Throughput, model: Any, workload: Workload) -> tuple[list[Contender], list[str]]:
    """Octavo, the rivals that can run here and the floor, in this order, and a note on each rival that cannot."""
    makers: dict[str, Callable[[str], Contender]] = {
        "transformers": lambda name: Transformers(model),
        generate_batch.NAME: lambda name: Batch(config, model, workload),
        "vllm": lambda name: VLLM(name, config, model, workload),
        "vllm_cpu": lambda name: VLLM(name, config, model, workload),
    }
    present, notes = _present(config.rivals, model.device.type)
    rivals = [makers[name](name) for name in present]
    return [Octavo(config, model, workload), *rivals, Linears(config, model)], notes


def rival_services(config: Latency, model: Any, workload: Workload) -> tuple[list[Service], list[str]]:
    """The rivals that can serve requests as they come, of those that can run here, and notes as of ``line_up``."""
    present, notes = _present(config.rivals, model.device.type)
    return [
        GenerateBatch(model, workload, config.engine.step_tokens, config.engine.max_seqs)
        if name == generate_batch.NAME
        else VLLMService(name, config, model, workload.longest)
        for name in present
    ], notes


def _present(names: Sequence[str], device: str) -> tuple[list[str], list[str]]:
    """Those of the rivals that can run, and a note on each that cannot."""
    absent = {name: _missing(name, device) for name in names}
    present = [name for name, why in absent.items() if why is None]
    return present, [f"{name} did not run: {why}." for name, why in absent.items() if why is not None]


def _missing(name: str, device: str) -> str | None:
    """Why a rival cannot run here."""
    if name == generate_batch.NAME:
        return generate_batch.missing()
    return None if name == "transformers" else vllm_server.missing(name, device)
