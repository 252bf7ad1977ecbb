"""Where the time of serving goes: reading prompts, planning, the device, writing texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.engine import Engine


class StageClock:
    """Seconds that stages took within a block, summed over threads; stages that overlap count each.

    ::

        with StageClock(engine).running() as clock:
            engine.generate(prompts, params)
        clock.percent("plan")

    Attributes:
        seconds: by stage. "tokenise": prompts read, images decoded and named. "plan": steps planned. "compute": forward
            passes; of replayed steps, their launch. "wait": for tokens of replayed steps. "detokenise": texts written
            at the end of a request; what a stream writes token by token is part of no stage.
        wall_s: of the block.
    """

    STAGES = ("tokenise", "plan", "compute", "wait", "detokenise")

    def __init__(self, engine: Engine) -> None:
        self._timed: dict[str, list[tuple[Any, str]]] = {
            "tokenise": [(engine._prompts, "read_segments")],
            "plan": [(engine._scheduler, "schedule"), (engine._scheduler, "decode")],
            "compute": [(engine._runner, "run"), (engine._runner, "launch")],
            "wait": [(engine._runner, "land")],
            "detokenise": [(engine._prompts, "write")],
        }
        self._lock = Lock()
        self.seconds = dict.fromkeys(self.STAGES, 0.0)
        self.wall_s = 0.0

    @contextmanager
    def running(self) -> Iterator[StageClock]:
        """Take the time of all that the engine does within the block."""
        begun = time.perf_counter()
        for stage, methods in self._timed.items():
            for owner, name in methods:
                setattr(owner, name, self._measured(stage, getattr(owner, name)))
        try:
            yield self
        finally:
            for methods in self._timed.values():
                for owner, name in methods:
                    delattr(owner, name)  # the class's own is there again
            self.wall_s += time.perf_counter() - begun

    def percent(self, stage: str) -> float:
        """A stage's time, in percent of the block's."""
        return 100 * self.seconds[stage] / self.wall_s

    def _measured(self, stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **more)
            finally:
                with self._lock:
                    self.seconds[stage] += time.perf_counter() - begun

        return measured
