"""What tests of the scheduler submit, and what they see of it."""

import random

from octavo.core import SamplingParams

GREEDY = {"ignore_eos": True}


def tokens(n, seed=0, low=3, high=128):
    return random.Random(seed).choices(range(low, high), k=n)


def alone(engine_for, model, prompt, **params):
    """The same request by itself in a roomy engine without a prefix cache."""
    completion = engine_for(model, prefix_cache=False).generate([prompt], SamplingParams(**params))[0]
    found = [sample.token_ids for sample in completion.samples]
    return found[0] if len(found) == 1 else found


def pages(engine):
    stats = engine.stats()
    return {"free": stats.pages_free, "cached": stats.pages_cached, "held": stats.pages_held}


def record_plans(engine):
    """Every plan of the scheduler, as (ids with their tokens, preempted ids)."""
    plans, schedule = [], engine._scheduler.schedule

    def recorded():
        plan = schedule()
        plans.append(
            (
                [(chunk.sequence.request.request_id, chunk.count) for chunk in plan.chunks],
                [sequence.request.request_id for sequence in plan.preempted],
            )
        )
        return plan

    engine._scheduler.schedule = recorded
    return plans
