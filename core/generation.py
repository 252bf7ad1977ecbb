"""A batch of prompts, from first to last: what an engine does when nobody follows its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.core.config import SamplingParams
from octavo.core.errors import BatchError
from octavo.core.outputs import Completion
from octavo.core.prompts import Prompt

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def generate(
    engine: Engine, prompts: Sequence[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[Completion]:
    """``Engine.generate``."""
    if not isinstance(prompts, str | Sequence):
        raise ValueError(f"prompts must be a list of prompts, got {type(prompts).__name__}")
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts came with {len(each)} sampling parameters; give one, or one a prompt")
    errors: dict[int, Exception] = {}
    ids: dict[str, int] = {}
    try:
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            try:
                ids[engine.submit(prompt, one)] = index
            except ValueError as error:
                errors[index] = error
    except BaseException:
        for request_id in ids:
            engine.abort(request_id)
        raise
    ordered: list[Completion | None] = [None] * len(prompts)
    for request_id, completion in engine.finish(list(ids)).items():
        if completion.error is None:
            ordered[ids[request_id]] = completion
        else:
            errors[ids[request_id]] = completion.error
    if errors:
        raise BatchError(ordered, errors)
    return [completion for completion in ordered if completion is not None]
