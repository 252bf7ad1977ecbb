"""Random traffic on a tiny pool: whatever happens around it, each request gives what it gives alone."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from octavo.core import SamplingParams
from octavo.sparse.budgets import Uniform
from octavo.sparse.lossless import Lossless
from octavo.sparse.method import Method
from octavo.sparse.scorers import Random

DRAFTING = Lossless(Method("random", Random(), Uniform(8)), 3)
PREFIXES = [
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [5, 6, 7, 8, 21, 22, 23],
    [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51],
    [],
]
prompts = st.builds(
    lambda prefix, cut, rest: PREFIXES[prefix][:cut] + rest,
    st.integers(0, 3), st.integers(0, 12), st.lists(st.sampled_from([5, 9, 60]), min_size=1, max_size=7),
)  # fmt: skip
params = st.builds(
    lambda n, max_tokens, seed, hot, ignore_eos, entries: SamplingParams(
        n=n, max_tokens=max_tokens, seed=seed, temperature=0.9 if hot else 0.0, ignore_eos=ignore_eos,
        prompt_logprobs=entries,
    ),
    st.sampled_from([1, 1, 1, 2, 3]), st.integers(1, 9), st.integers(0, 2), st.booleans(), st.booleans(),
    st.sampled_from([None, None, None, 0]),
)  # fmt: skip


class Traffic(RuleBasedStateMachine):
    fixtures = SimpleNamespace()

    def __init__(self):
        super().__init__()
        self.engine = self.fixtures.tight()
        self.asked = {}
        self.completions = {}
        self.tokens = {}
        self.sessions = []
        self.turns = {}

    def take(self, outputs):
        for out in outputs:
            self.tokens.setdefault((out.request_id, out.sample), []).extend(out.new_token_ids)
            if out.completion is not None:
                assert out.request_id not in self.completions
                self.completions[out.request_id] = out.completion
        self.engine.check()

    @rule(
        prompt=prompts,
        params=params,
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        salt=st.sampled_from([None, None, "a"]),
    )
    def submit(self, prompt, params, priority, salt):
        request_id = self.engine.submit(prompt, params, priority=priority, salt=salt)
        self.asked[request_id] = prompt, params
        self.engine.check()

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            if self.engine.has_work():
                self.take(self.engine.step())

    @rule(number=st.integers(0, 30))
    def abort(self, number):
        if self.asked:
            self.engine.abort(list(self.asked)[number % len(self.asked)])
            self.engine.check()

    @rule()
    def fail(self):
        """A forward pass that raises, with whatever was planned for it."""
        forward = self.engine._model.forward
        self.engine._model.forward = self.fixtures.failing
        try:
            self.take(self.engine.step())
        except MemoryError:
            self.engine.check()
        finally:
            self.engine._model.forward = forward

    @rule(prompt=prompts)
    def open(self, prompt):
        if len(self.sessions) < 4:
            self.sessions.append(self.engine.session(prompt))

    def idle_session(self, number):
        session = self.sessions[number % len(self.sessions)]
        return session if session._busy is None and len(session.tokens) < 40 else None

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 3), appended=st.lists(st.sampled_from([5, 9, 60]), max_size=5), params=params,
          priority=st.sampled_from([0, 0, 1]))  # fmt: skip
    def turn(self, number, appended, params, priority):
        if (session := self.idle_session(number)) and params.n == 1:
            if appended:
                session.append(appended)
            request_id = session.submit(params, priority=priority)
            self.asked[request_id] = session.tokens.copy(), params
            self.engine.check()

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 3))
    def fork(self, number):
        if (session := self.idle_session(number)) and len(self.sessions) < 4:
            self.sessions.append(session.fork())
            self.engine.check()

    @precondition(lambda self: self.sessions)
    @rule(number=st.integers(0, 3))
    def close(self, number):
        self.sessions.pop(number % len(self.sessions)).close()
        self.engine.check()

    def teardown(self):
        for session in self.sessions:
            if session._busy is None:
                session.close()
        for _ in range(2000):
            if not self.engine.has_work():
                break
            self.take(self.engine.step())
        for session in self.sessions:
            session.close()
        assert set(self.completions) == set(self.asked)
        for request_id, (prompt, params) in self.asked.items():
            completion = self.completions[request_id]
            expected = self.fixtures.alone(prompt, params)
            assert completion.prompt_token_ids == prompt
            for number, sample in enumerate(completion.samples):
                wanted = expected.samples[number].token_ids
                if sample.finish_reason == "abort":
                    assert sample.token_ids == wanted[: len(sample.token_ids)]
                else:
                    assert (sample.token_ids, sample.finish_reason) == (wanted, expected.samples[number].finish_reason)
                assert self.tokens.get((request_id, number), []) == sample.token_ids
            if all(sample.finish_reason != "abort" for sample in completion.samples):
                assert len(completion.samples) == params.n
                self.compare_entries(completion.prompt_logprobs, expected.prompt_logprobs)
        self.fixtures.assert_idle(self.engine)
        stats = self.engine.stats()
        for name in self.fixtures.totals:
            self.fixtures.totals[name] += getattr(stats, name)

    @staticmethod
    def compare_entries(got, expected):
        assert (got is None) == (expected is None)
        for one, other in zip(got or [], expected or [], strict=True):
            assert one == (other and pytest.approx(other, abs=1e-3))


def fixtures_of(roomy, **others):
    """What a machine runs on: ``alone`` completes a prompt in a ``roomy`` engine, once; ``failing`` stands for what has
    no room; and ``others``."""
    known = {}

    def alone(prompt, params):
        key = tuple(prompt), repr(params)
        if key not in known:
            known[key] = roomy.generate([prompt], params)[0]
        return known[key]

    def failing(*_):
        raise MemoryError("no room")

    return SimpleNamespace(alone=alone, failing=failing, **others)


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name, fields",
    [
        ("t_model", {"pool_tokens": 60, "step_tokens": 9, "max_seqs": 4}),
        ("t_model", {"pool_tokens": 56, "step_tokens": 64, "max_seqs": 6, "prefix_cache": False}),
        ("w_model", {"pool_tokens": 60, "page_tokens": 5, "step_tokens": 3, "max_seqs": 3}),
        ("g_model", {"pool_tokens": 48, "step_tokens": 11, "max_seqs": 4}),
        ("t_model", {"pool_tokens": 60, "step_tokens": 9, "max_seqs": 4, "execution": "graph"}),
        ("g_model", {"pool_tokens": 48, "step_tokens": 11, "max_seqs": 4, "execution": "graph"}),
        ("t_model", {"pool_tokens": 48, "step_tokens": 9, "max_seqs": 5, "method": DRAFTING}),
        ("g_model", {"pool_tokens": 48, "step_tokens": 11, "max_seqs": 4, "method": DRAFTING, "execution": "graph"}),
    ],
    ids=[
        "small_steps",
        "no_prefix_cache",
        "window_page_5",
        "layer_groups",
        "replayed",
        "replayed_layer_groups",
        "drafts",
        "replayed_drafts",
    ],
)
def test_traffic(request, engine_for, assert_idle, name, fields, examples):
    model = request.getfixturevalue(name)
    totals = dict.fromkeys(["preemptions", "copies"], 0)
    if fields.get("prefix_cache", True):
        totals |= dict.fromkeys(["hit_tokens", "evictions"], 0)
    machine = type("Traffic", (Traffic,), {})
    machine.fixtures = fixtures_of(
        engine_for(model, prefix_cache=False),
        tight=lambda: engine_for(model, **fields), assert_idle=assert_idle, totals=totals,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))
    assert min(totals.values()) > examples // 3, f"the traffic was too light: {totals}"
