"""Prompts that keep a small memory busy, and what their requests are given."""

import random

from octavo.core import SamplingParams

GREEDY = {"ignore_eos": True}


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


def step(engine):
    outputs = engine.step()
    engine.check()
    return outputs


def alone(engine_for, model, prompt, **params):
    """Tokens of a request, or of its samples, that has a roomy engine for itself."""
    samples = engine_for(model, prefix_cache=False).generate([prompt], SamplingParams(**GREEDY, **params))[0].samples
    return samples[0].token_ids if len(samples) == 1 else [sample.token_ids for sample in samples]


SYSTEM = tokens(21, 99)
TRAFFIC = [
    SYSTEM[: 21 - 8 * (i % 2)] + tokens(random.Random(i).randrange(1, 30), 50 + i)
    for i in (0, 1, 2, 3, 0, 4, 1, 5, 2, 0, 3, 1)
]


def serve_traffic(engine, drain, **kwargs):
    ids = [engine.submit(prompt, SamplingParams(max_tokens=7, **GREEDY)) for prompt in TRAFFIC]
    drained = drain(engine, **kwargs)
    return [drained.tokens_of(request_id) for request_id in ids]
