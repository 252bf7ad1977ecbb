"""The next step's plan, made while the device computes the last one.

::

    host     plan n+1, launch it | read n, publish | plan n+2, launch it | read n+1, publish
    device   ---- step n ----------->|---- step n+1 ------------------------>|---- step n+2

Who decodes goes on behind a token that the host does not know: it is planned for as one more (``Sequence.unread``), and
the device finds it where it has left it (``DecodeState``). That is possible while nothing but that token is unknown:

1. All that decoded in step n, and whose bounds allow one more token, decode again, or verify their drafts, and nobody
   else has anything to do (``Scheduler.decode``). Where step n has verified drafts, they are read first, and the next
   round is as sure.
2. Otherwise the scheduler looks around as always: prompts begin and go on, and the others decode beside them. What it
   plans is launched if all of it can be computed and drawn without the host (``Sequence.is_plain``), and nobody has to
   give pages or its place up, which some token of step n may make needless.

What is planned and not launched does no harm: pages that somebody has by then, it will need, and the scheduler looks
around again once the tokens are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.core.execution.verification import Verification
from octavo.core.sequence import Sequence
from octavo.core.step_plan import StepPlan

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def plan_ahead(engine: Engine) -> StepPlan | None:
    """The next step's plan, with its copies queued, for the device to be given now; None if the tokens of the last one
    are to be read first."""
    verification = None
    if engine._flight is not None and engine._ended:
        engine._flight, engine._ended = engine._flight.alive(), False
    flight = engine._flight
    if flight is None or (engine.recorder is not None and engine.recorder.reads_tokens):
        return None
    if flight.verification is not None:  # where all go on depends on it
        engine._flight = None
        batch = engine._land(flight)
        running = 0 if batch is None else len(batch)
    else:
        verification = Verification.behind(flight.batch, engine.config.step_tokens)
        batch = flight.batch.following() if verification is None else verification.batch
        running = len(flight.batch)
    if batch is not None and not engine._runner.carries(batch):
        return None
    try:
        plan = None if batch is None else engine._scheduler.decode(batch, running, verification)
        if plan is None and flight.is_plain:
            engine._flight = replace(flight, counted=True)
            plan = _look_around(engine, [] if batch is None else batch.sequences)
    except BaseException:  # whose tables have changed by then, the next plan does not say
        engine._runner.forget()
        raise
    if plan is not None:
        engine._runner.copies.queue(plan.copies)
    return plan


def _look_around(engine: Engine, going: list[Sequence]) -> StepPlan | None:
    """What the scheduler plans if those ``going`` on have one token more, as far as it need not know that."""
    for sequence in going:
        sequence.unread = 1
    plan = engine._scheduler.schedule(sparing=True)
    surely = plan.chunks and not (plan.short or plan.stranded or plan.compared)
    if surely and engine._runner.launches(plan) and plan.verification is None:
        return plan
    engine._runner.copies.queue(plan.copies)
    return None
