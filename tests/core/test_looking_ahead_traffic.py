"""Random traffic of what is planned ahead, with launches and landings that fail: each request gives what it gives
alone."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from octavo.core import SamplingParams
from octavo.core.execution.replayer import Replayer

from .test_looking_ahead import watched
from .test_state_machine import Traffic, fixtures_of, prompts

pytestmark = pytest.mark.usefixtures("as_if_beside")


params = st.builds(
    lambda max_tokens, seed, hot, ignore_eos: SamplingParams(
        max_tokens=max_tokens, seed=seed, temperature=0.9 if hot else 0.0, ignore_eos=ignore_eos
    ),
    st.integers(1, 9), st.integers(0, 2), st.booleans(), st.booleans(),
)  # fmt: skip


class PlainTraffic(Traffic):
    """All of whose steps can be read later."""

    @rule(prompt=prompts, params=params, priority=st.sampled_from([0, 0, 0, 1, 2]))
    def submit(self, prompt, params, priority):
        self.asked[self.engine.submit(prompt, params, priority=priority)] = prompt, params
        self.engine.check()

    @rule()
    def fail_to_land(self):
        land = Replayer.land
        try:
            Replayer.land = self.fixtures.failing
            self.take(self.engine.step())
        except MemoryError:
            self.engine.check()
        finally:
            Replayer.land = land

    def teardown(self):
        super().teardown()
        self.fixtures.ahead.append(sum(event[0] == "launch" and event[2] > 0 for event in self.engine.events))


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name, fields",
    [
        ("t_model", {"pool_tokens": 60, "step_tokens": 9, "max_seqs": 4}),
        ("g_model", {"pool_tokens": 48, "step_tokens": 11, "max_seqs": 4}),
    ],
    ids=["small_steps", "layer_groups"],
)
def test_traffic(request, engine_for, assert_idle, name, fields, examples):
    model = request.getfixturevalue(name)

    def tight():
        engine = engine_for(model, **fields, execution="graph")
        engine.events = watched(engine)
        return engine

    machine = type("PlainTraffic", (PlainTraffic,), {})
    totals, ahead = dict.fromkeys(["preemptions", "hit_tokens", "evictions"], 0), []
    machine.fixtures = fixtures_of(
        engine_for(model, prefix_cache=False), tight=tight, assert_idle=assert_idle, totals=totals, ahead=ahead
    )
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))
    assert min(totals.values()) > 0 and sum(ahead) > 2 * examples, f"the traffic was too light: {totals}, {ahead}"
