"""Requests of all kinds, and what an engine makes of them."""

import random

from octavo.core import SamplingParams


def tokens(count, seed=0):
    draw = random.Random(seed)
    return [draw.randrange(3, 128) for _ in range(count)]


def run(engine, requests):
    """Serve requests, checking the engine after each step; the samples' token ids by request id."""
    ids = [engine.submit(prompt, params, request_id=str(i)) for i, (prompt, params) in enumerate(requests)]
    done = {}
    while engine.has_work():
        for output in engine.step():
            if output.completion is not None:
                done[output.request_id] = output.completion
        engine.check()
    return [done[request_id] for request_id in ids]


def found(completions, counted=True):
    """What requests got and, unless it depends on time (how fast the bus is), what it cost."""
    return [
        [(s.token_ids, s.finish_reason, *((s.decode_steps, s.kv_bytes_read) if counted else ())) for s in c.samples]
        for c in completions
    ]


GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
MIXED = [
    (tokens(1), SamplingParams(max_tokens=20)),
    (tokens(5, 1), SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=3, n=3)),
    (tokens(33, 2), GREEDY),
    (tokens(17, 3), SamplingParams(max_tokens=14, temperature=1.0, top_k=20, min_p=0.01, seed=1)),
    (tokens(33, 2), SamplingParams(max_tokens=5)),
    (tokens(8, 4), SamplingParams(max_tokens=3, logprobs=2)),
    (tokens(6, 5), SamplingParams(max_tokens=11, repetition_penalty=1.3)),
    (tokens(9, 6), SamplingParams(max_tokens=12, min_tokens=6, stop_token_ids=(7, 9, 30))),
    (tokens(4, 7), SamplingParams(max_tokens=1)),
    (tokens(12, 8), SamplingParams(max_tokens=13, temperature=0.7, prompt_logprobs=1, seed=5)),
]
