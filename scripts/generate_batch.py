"""transformers' continuous batching, what ``generate_batch`` runs, as a server of requests that come at their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from octavo.scripts.serving import Clock, Journey, Served
from octavo.scripts.timed_requests import TimedRequest
from octavo.scripts.workloads import Workload

NAME = "generate_batch"
PATIENCE_S = 1.0


def missing() -> str | None:
    """Why it cannot run; None if it can."""
    import transformers

    if hasattr(transformers, "ContinuousBatchingConfig"):
        return None
    return f"transformers {transformers.__version__} has no ContinuousBatchingConfig; a later one has"


class GenerateBatch:
    """The manager behind ``generate_batch``, without its prefix cache and with room for ``at_once`` requests.

    It computes in a thread of its own and stamps each token when its step has been read back, with the clock of
    ``time.perf_counter``; tokens are not streamed, so that nothing but the stamps is added to its work. It is started,
    and warmed up where it captures graphs, before the time begins. Preemptions are not told.
    """

    name, method = NAME, "dense"

    def __init__(self, model: Any, workload: Workload, step_tokens: int, at_once: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        page = ContinuousBatchingConfig().page_size
        self._model = model
        self._batching = ContinuousBatchingConfig(
            num_blocks=workload.slots(page, at_once) // page,
            max_batch_tokens=min(step_tokens, sum(map(len, workload.prompts))),
            max_requests_per_batch=at_once,
            allow_block_sharing=False,
        )
        self._generation = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(workload.new_tokens),
            eos_token_id=-1,  # an id that no token has: nothing ends early
            pad_token_id=0,
        )

    def serve(self, requests: Sequence[TimedRequest], clock: Clock) -> Served:
        """All requests from first to last, on a manager of their own.

        Raises:
            RuntimeError: it failed, with its own words.
        """
        done: dict[str, Any] = {}
        # The thread that computes takes over the mode of the thread that starts it.
        with (
            torch.inference_mode(),
            self._model.continuous_batching_context_manager(
                generation_config=self._generation, continuous_batching_config=self._batching
            ) as manager,
        ):
            start = clock.now()
            for number, request in enumerate(requests):
                clock.sleep(max(0.0, request.arrival_s - (clock.now() - start)))
                manager.add_request(
                    request.prompt, str(number), max_new_tokens=request.new_tokens, record_timestamps=True
                )
            while len(done) < len(requests):
                result = manager.get_result(timeout=PATIENCE_S)
                if result is None and not manager.is_running():
                    raise RuntimeError(f"{NAME} stopped after {len(done)} of {len(requests)} requests")
                if result is not None and result.error:
                    raise RuntimeError(f"{NAME}: {result.error}")
                if result is not None and result.is_finished():
                    done[result.request_id] = result
        journeys = []
        for number, request in enumerate(requests):
            result = done[str(number)]
            assert len(result.timestamps) == request.new_tokens, "a request was cut short"
            tokens = [stamp - start for stamp in result.timestamps]
            journeys.append(Journey(request.arrival_s, tokens, result.lifespan[0] - start))
        return Served(journeys, None)
