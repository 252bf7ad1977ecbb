"""Random traffic of segments, sessions and samples on pools of layer groups with a host tier and room to grow."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from octavo.core import CapacityError, SamplingParams
from octavo.core.serving.prompts import TokenSegment

TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
IMAGE = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55]
pieces = st.one_of(
    st.builds(lambda n: TokenSegment("text", TEXT[:n]), st.integers(1, 11)),
    st.builds(lambda n: TokenSegment("image", IMAGE[:n]), st.sampled_from([4, 8, 12, 16])),
)
prompts = st.one_of(
    st.builds(lambda n, rest: TEXT[:n] + rest, st.integers(0, 11), st.lists(st.sampled_from([5, 60]), min_size=1)),
    st.lists(pieces, min_size=1, max_size=3),
)
params = st.builds(
    lambda n, most, hot: SamplingParams(n=n, max_tokens=most, seed=1, temperature=0.9 * hot, ignore_eos=True),
    st.sampled_from([1, 2]), st.integers(3, 12), st.booleans(),
)  # fmt: skip


def plain(prompt):
    return [t for part in prompt for t in (part.token_ids if isinstance(part, TokenSegment) else [part])]


class Traffic(RuleBasedStateMachine):
    fixtures = SimpleNamespace()

    def __init__(self):
        super().__init__()
        self.engine = self.fixtures.tight()
        self.asked, self.completions, self.sessions = {}, {}, []

    def take(self, outputs):
        for out in outputs:
            if out.completion is not None:
                assert out.request_id not in self.completions
                self.completions[out.request_id] = out.completion
        self.engine.check()

    @rule(several=st.lists(st.tuples(prompts, params, st.sampled_from([0, 0, 1])), min_size=2, max_size=5))
    def submit(self, several):
        for prompt, params, priority in several:
            with suppress(CapacityError):  # its holes may make it too large for the pool
                self.asked[self.engine.submit(prompt, params, priority=priority)] = plain(prompt), params
        self.engine.check()

    @rule(count=st.integers(2, 12))
    def step(self, count):
        for _ in range(count):
            if self.engine.has_work():
                self.take(self.engine.step())

    @rule(number=st.integers(0, 30))
    def abort(self, number):
        if self.asked:
            self.engine.abort(list(self.asked)[number % len(self.asked)])
            self.engine.check()

    @rule(way=st.sampled_from(["out", "in"]))
    def fail(self, way):
        """A step whose transfers one way do not come about."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.engine._host, f"copy_{way}", self.fixtures.failing)
            try:
                self.take(self.engine.step())
            except MemoryError:
                self.engine.check()

    @rule(prompt=prompts)
    def open(self, prompt):
        if len(self.sessions) < 3:
            self.sessions.append(self.engine.session(prompt))

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 2), added=st.one_of(st.none(), prompts), params=params, fork=st.booleans())
    def turn(self, number, added, params, fork):
        session = self.sessions[number % len(self.sessions)]
        if session._busy is not None or len(session.tokens) > 50 or params.n > 1:
            return
        if fork and len(self.sessions) < 3:
            self.sessions.append(session.fork())
        if added:
            session.append(added)
        try:
            request_id = session.submit(params)
        except CapacityError:
            return
        self.asked[request_id] = session.tokens.copy(), params
        self.engine.check()

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 2))
    def close(self, number):
        self.sessions.pop(number % len(self.sessions)).close()
        self.engine.check()

    @rule()
    def shrink(self):
        self.engine.shrink()
        self.engine.check()

    def teardown(self):
        for _ in range(2000):
            if not self.engine.has_work():
                break
            self.take(self.engine.step())
        for session in self.sessions:
            session.close()
        assert set(self.completions) == set(self.asked)
        for request_id, (prompt, params) in self.asked.items():
            wanted = self.fixtures.alone(prompt, params)
            for sample, expected in zip(self.completions[request_id].samples, wanted, strict=False):
                if sample.finish_reason == "abort":
                    expected = expected[: len(sample.token_ids)]
                assert sample.token_ids == expected
        self.fixtures.assert_nothing_held(self.engine)
        stats = self.engine.stats()
        host = self.engine._host
        seen = {"hits": stats.hit_tokens, "preemptions": stats.preemptions, "evictions": stats.evictions,
                "copies": stats.copies, "stored": host.stored, "restored": host.restored,
                "dropped from the host": host.evicted}  # fmt: skip
        for name, count in seen.items():
            self.fixtures.totals[name] = self.fixtures.totals.get(name, 0) + count


@pytest.mark.parametrize("examples", [4, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "pool_tokens", "host_tokens"), [("g_model", 56, 100), ("t_model", 72, 48)])
def test_traffic(request, engine_for, host_tier_for, assert_nothing_held, name, pool_tokens, host_tokens, examples):
    model = request.getfixturevalue(name)
    roomy, known = engine_for(model, prefix_cache=False), {}

    def tight():
        return host_tier_for(
            model, page_tokens=16, page_policies={"text": 4, "image": 12}, pool_tokens=pool_tokens, max_seqs=4,
            host_tokens=host_tokens, base_share=0.7, growth_tokens=8, step_tokens=24,
        )  # fmt: skip

    def alone(prompt, params):
        key = tuple(prompt), repr(params)
        if key not in known:
            samples = roomy.generate([prompt], params)[0].samples
            known[key] = [sample.token_ids for sample in samples]
        return known[key]

    def failing(*_):
        raise MemoryError("no room")

    totals = {}
    machine = type("Traffic", (Traffic,), {})
    machine.fixtures = SimpleNamespace(
        tight=tight, alone=alone, failing=failing, assert_nothing_held=assert_nothing_held, totals=totals
    )
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30))
    assert min(totals.values()) > examples // 6, f"the traffic was too light: {totals}"
