"""Who takes part in the race of decode steps, and whose memory is whose."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.scripts import build, model_shapes
from octavo.scripts.decode_shapes import StepShape
from octavo.scripts.schema_decode import EXECUTIONS, DecodeStep
from octavo.scripts.workloads import Workload


@dataclass
class Models:
    """The model that the contenders of a run share, made when it is first needed."""

    config: DecodeStep
    _model: Any = None

    def get(self) -> Any:
        if self._model is None:
            self._model = model_shapes.make(self.config.model)
        return self._model

    def drop(self) -> None:
        """Give its memory back, for a contender that brings its own."""
        self._model = None
        free()


@dataclass(frozen=True)
class Entrant:
    """A contender before it takes memory. ``execution``: of octavo's engine, "" for a rival. ``serves``: it makes a
    ``Server``, and no mere ``Stepper``."""

    name: str
    execution: str
    make: Callable[[], Any]
    serves: bool = True

    @property
    def label(self) -> str:
        return f"{self.name} {self.execution}".rstrip()


def line_up(
    config: DecodeStep, device: str, models: Models, shapes: Sequence[StepShape], mixed: Workload | None
) -> tuple[list[Entrant], list[str]]:
    """All contenders that can run here, the one with a model of its own last, and a note on each that cannot."""
    from octavo.scripts import vllm_server
    from octavo.scripts.decode_octavo import Octavo
    from octavo.scripts.decode_rivals import VLLM, Transformers

    def octavo(execution: str) -> Entrant:
        return Entrant("octavo", execution, lambda: Octavo(config, models.get(), execution, shapes, mixed))

    def vllm() -> VLLM:
        models.drop()
        settings = config.model
        return VLLM(config, model_shapes.configuration(settings), model_shapes.dtype(settings), shapes, mixed)

    executions = config.executions or [name for name in EXECUTIONS if device == "cuda" or name != "compiled"]
    entrants, absent = [octavo(execution) for execution in executions], []
    if "transformers" in config.rivals:
        entrants.append(Entrant("transformers", "", lambda: Transformers(models.get()), serves=False))
    if "vllm" in config.rivals:
        why = vllm_server.missing("vllm", device)
        if why is None:
            entrants.append(Entrant("vllm", "", vllm))
        else:
            absent.append(f"vllm did not run: {why}.")
    return entrants, absent


def free() -> None:
    """Give back the memory of whom nobody refers to any more."""
    import torch

    gc.unfreeze()  # who was warm may go, too
    gc.collect()
    build.spare_collections()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
