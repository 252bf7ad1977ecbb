"""This engine as a server of requests that come at their times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.profiler import record_function

from octavo.core import SamplingParams
from octavo.scripts.refusal import ConfigError
from octavo.scripts.serving import Clock, Served, serve
from octavo.scripts.timed_requests import TimedRequest

if TYPE_CHECKING:
    from octavo.core import Engine
    from octavo.core.interfaces import SparseMethod

PLAN = "engine: plan"


class AdmissionTimes:
    """Notes when each request is first admitted, as the engine's recorder (see ``TraceRecorder``, whose moments these
    are), and names the planning of a step in a profile."""

    reads_tokens = False  # so steps are planned ahead as they are without it

    def __init__(self, clock: Clock) -> None:
        self.at: dict[str, float] = {}
        self._clock = clock
        self._planning = record_function(PLAN)

    def stepping(self, step: int, evictions: int) -> None:
        self._planning = record_function(PLAN)
        self._planning.__enter__()

    def planned(self, evictions: int) -> None:
        self._planning.__exit__(None, None, None)

    def admitted(self, sequence: Any, hit_tokens: int, segments: Any = None) -> None:
        self.at.setdefault(sequence.request.request_id, self._clock.now())

    def placed(self, sequence: Any, end: int) -> None: ...

    def forked(self, sequence: Any, parent: Any) -> None: ...

    def continued(self, sequence: Any, previous: Any) -> None: ...

    def parked(self, sequence: Any) -> None: ...

    def preempted(self, sequence: Any) -> None: ...

    def closed(self, sequence: Any) -> None: ...


class OctavoServer:
    """One pass of an engine over requests, greedily, each to its last token. The engine must have no other work."""

    def __init__(self, engine: Engine, method: SparseMethod | None, clock: Clock, salt: str) -> None:
        self._engine = engine
        self._method = method
        self._salt = salt
        self._admissions = AdmissionTimes(clock)
        engine.recorder = self._admissions  # type: ignore[assignment]

    def submit(self, number: int, request: TimedRequest) -> None:
        params = SamplingParams(max_tokens=request.new_tokens, ignore_eos=True)
        self._engine.submit(request.prompt, params, request_id=str(number), method=self._method, salt=self._salt)

    def step(self) -> list[tuple[int, int]]:
        """One step of the engine.

        Raises:
            ConfigError: the pool could not hold one more token of a request, alone.
        """
        news = self._engine.step()
        for output in news:
            if output.finish_reason not in (None, "length"):
                raise ConfigError(
                    f"request {output.request_id} ended early ({output.finish_reason}) with a pool of "
                    f"{self._engine.stats().units_total * self._engine.config.unit_tokens} tokens; "
                    "give a larger engine.pool_tokens"
                )
        return [(int(output.request_id), len(output.new_token_ids)) for output in news]

    def admitted_at(self, number: int) -> float | None:
        return self._admissions.at.get(str(number))


class OctavoService:
    """This engine under one method, among those who serve the same requests."""

    name = "octavo"

    def __init__(self, engine: Engine, method_name: str, method: SparseMethod | None) -> None:
        self.method = method_name
        self._engine = engine
        self._sparse = method
        self._passes = 0

    def server(self, clock: Clock) -> OctavoServer:
        """The engine, for one more pass, which finds no page of an earlier one."""
        self._passes += 1
        return OctavoServer(self._engine, self._sparse, clock, f"{self.method}, pass {self._passes}")

    def serve(self, requests: list[TimedRequest], clock: Clock) -> Served:
        before = self._engine.stats().preemptions
        journeys = serve(self.server(clock), requests, clock)
        return Served(journeys, self._engine.stats().preemptions - before)
