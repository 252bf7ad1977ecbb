"""This engine in the race of decode steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from octavo.scripts import build
from octavo.scripts.decode_shapes import TEMPERATURE, StepShape, Stretch, device_bytes_peak, forget_peak, now
from octavo.scripts.pretended import fill, prefill
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema_decode import BreakEven, DecodeStep
from octavo.scripts.schema_groups import Config, EngineSettings
from octavo.scripts.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.core.execution.downloads import Download
    from octavo.core.interfaces import SparseMethod

WARM_STEPS = 4
"""Between the last prompt and the first timed step: an engine that plans ahead brings its tokens a step later."""


class Octavo:
    """This engine under one execution, with room for every shape and for the batch ``mixed``.

    ``pretended``: no prompt is computed; their pages hold random numbers.
    """

    def __init__(
        self,
        config: DecodeStep | BreakEven,
        model: Any,
        execution: str,
        shapes: Sequence[StepShape],
        mixed: Workload | None,
        *,
        pretended: bool = False,
    ) -> None:
        settings = config.engine
        page_tokens = build.engine_config(settings).text_page_tokens
        slots = [
            shape.batch * -(-(shape.context + most_tokens(settings, shape)) // page_tokens) * page_tokens
            for shape in shapes
        ]
        if mixed is not None:
            slots.append(mixed.slots(page_tokens, settings.max_seqs))
        sized = dataclasses.replace(settings, pool_tokens=settings.pool_tokens or max(slots), execution=execution)
        # Not a changed copy of ``config``, which refuses an execution, as it is not the user's to set there.
        self.engine = build.engine(Config(config.experiment, engine=sized), model, None)
        self._settings = sized
        self._device = model.device
        self._counts_waiting = execution != "eager" and model.device.type == "cuda"
        self._passes = 0
        self._pretended = pretended
        if pretended:
            fill(self.engine, config.seed)

    def warm_up(self, shape: StepShape, method: SparseMethod | None = None) -> None:
        self._run(shape, 2, seed=0, method=method)
        build.spare_collections()

    def stretch(self, shape: StepShape, seed: int, method: SparseMethod | None = None) -> Stretch:
        return self._run(shape, shape.new_tokens, seed, method)

    def _run(self, shape: StepShape, new_tokens: int, seed: int, method: SparseMethod | None) -> Stretch:
        """Compute all prompts, let the pipeline fill, and time whole steps between two moments at which the device has
        no work left.

        Raises:
            ConfigError: a timed step did not bring a token of every sequence.
        """
        from octavo.core import SamplingParams

        engine, device = self.engine, self._device
        params = SamplingParams(max_tokens=most_tokens(self._settings, shape), ignore_eos=True)
        prompts = shape.prompts(engine.spec.vocab_size, seed)
        salt = self._salt()
        forget_peak(device)
        start = now(device)
        ids = [engine.submit(prompt, params, salt=salt, method=method) for prompt in prompts]
        begun: set[str] = set()
        with prefill(engine) if self._pretended else nullcontext():
            while len(begun) < shape.batch:
                begun |= {output.request_id for output in engine.step() if output.new_token_ids}
        prefill_s = time.perf_counter() - start  # the tokens are here; the device may have begun with the next step
        for _ in range(WARM_STEPS):
            engine.step()
        found, in_steps_s = 0, 0.0
        with _waiting() as waited:
            start = now(device)
            for _ in range(new_tokens):
                began = time.perf_counter()
                news = engine.step()
                in_steps_s += time.perf_counter() - began
                found += sum(len(output.new_token_ids) for output in news)
            step_s = (now(device) - start) / new_tokens
        peak = device_bytes_peak(device)
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_work():
            engine.step()
        if found != new_tokens * shape.batch:
            raise ConfigError(
                f"{shape.name}: {new_tokens} steps brought {found} tokens instead of {new_tokens * shape.batch}, with "
                f"a pool of {self._settings.pool_tokens} tokens; give a larger engine.pool_tokens"
            )
        host_s = wait_s = None
        if self._counts_waiting:  # which spins, so that a thread's processor time does not tell it from work
            wait_s = sum(waited) / new_tokens
            host_s = in_steps_s / new_tokens - wait_s
        return Stretch(step_s, prefill_s, host_s, wait_s, peak)

    def serve(self, workload: Workload) -> float:
        from octavo.core import SamplingParams

        salt = self._salt()
        start = now(self._device)
        ids = [
            self.engine.submit(
                prompt, SamplingParams(max_tokens=new, temperature=TEMPERATURE, ignore_eos=True), salt=salt
            )
            for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True)
        ]
        completions = self.engine.finish(ids)
        seconds = now(self._device) - start
        found = [len(completions[request_id].samples[0].token_ids) for request_id in ids]
        assert found == list(workload.new_tokens), "a request was cut short"
        return seconds

    def _salt(self) -> str:
        """Keeps a prompt's pages from being found again by the next pass."""
        self._passes += 1
        return f"pass {self._passes}"


def most_tokens(settings: EngineSettings, shape: StepShape) -> int:
    """Tokens that a sequence gets at most: one a step while the others' prompts are computed beside it, then those of
    the steps that fill the pipeline, that are timed, and that are planned ahead."""
    prompt_steps = -(-shape.batch * shape.context // (settings.step_tokens - shape.batch))
    return prompt_steps + WARM_STEPS + shape.new_tokens + 2


@contextmanager
def _waiting() -> Iterator[list[float]]:
    """Seconds of each wait for tokens within the block."""
    from octavo.core.execution.downloads import Download

    waited: list[float] = []
    wait = Download.wait

    def timed(download: Download) -> Tensor:
        began = time.perf_counter()
        try:
            return wait(download)
        finally:
            waited.append(time.perf_counter() - began)

    Download.wait = timed  # type: ignore[method-assign]
    try:
        yield waited
    finally:
        Download.wait = wait  # type: ignore[method-assign]
