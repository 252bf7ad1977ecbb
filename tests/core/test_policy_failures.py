"""An eviction policy of a user's own may fail: the pool stays whole, somebody hears of it, and requests go on."""

from dataclasses import dataclass

import numpy as np
import pytest

from octavo.core import EngineConfig, SamplingParams


@dataclass
class Failing:
    """Ranks by last use, except on its second call."""

    result: object
    calls: int = 0
    history: int = 1

    def rank(self, pages, facts):
        self.calls += 1
        if self.calls == 2:
            if isinstance(self.result, Exception):
                raise self.result
            return self.result(len(pages))
        return facts.last_used[pages].astype(float)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (KeyError("page"), "KeyError"),
        (lambda n: np.full(n, np.nan), "not NaN"),
        (lambda n: np.zeros(n + 1), "as many numbers"),
        (lambda n: ["one"] * n, "ValueError"),
    ],
    ids=["raises", "nan", "too_many", "no_numbers"],
)
def test_the_pool_stays_whole(t_model, engine_for, assert_idle, result, message):
    prompts = [[seed, *range(3, 14)] for seed in (20, 21, 22, 23)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = [c.samples[0].token_ids for c in engine_for(t_model).generate(prompts, params)]
    engine = engine_for(t_model, eviction=Failing(result), pool_tokens=24, max_seqs=1)
    ids = [engine.submit(prompt, params) for prompt in prompts]
    completions, failures = {}, []
    while engine.has_work():
        try:
            outputs = engine.step()
        except RuntimeError as error:
            failures.append(str(error))
            outputs = []
        engine.check()
        completions |= {out.request_id: out.completion for out in outputs if out.completion is not None}
    assert len(failures) == 1 and "the eviction policy failed" in failures[0] and message in failures[0]
    assert [completions[i].samples[0].token_ids for i in ids] == expected
    assert engine.stats().evictions > 0
    assert_idle(engine)


def test_it_is_configured_by_an_object():
    policy = Failing(KeyError())
    assert EngineConfig(eviction=policy).eviction_policy is policy
