"""Thousands of random requests through one engine on a tight pool: whatever happens around a request, it gets what it
gets alone, and in the end every page is free."""

from dataclasses import dataclass
from random import Random as Draws

import pytest

from octavo.core import SamplingParams
from octavo.sparse.budgets import Uniform
from octavo.sparse.lossless import Lossless
from octavo.sparse.method import Method
from octavo.sparse.scorers import Random

TIGHT = {"pool_tokens": 96, "max_seqs": 5, "step_tokens": 16, "shared_decode_bytes": 0, "backend": "auto"}
SESSIONS = 4
LONGEST_HISTORY = 40
SURELY_CHECKED = 200
"""Steps after each of which the engine is checked; later on, every 50th."""


@dataclass
class Asked:
    """A request that is under way. ``compared``: its samples are to be those of the same request alone."""

    prompt: list[int]
    params: SamplingParams
    compared: bool


class Soak:
    """Random life of an engine. ``compare(prompt, params, completion)`` looks at a share of what comes out."""

    def __init__(self, engine, compare, share, seed):
        self.engine, self.compare, self.share = engine, compare, share
        self.random = Draws(seed)
        self.asked = {}
        self.streamed = {}
        self.sessions = []
        self.steps = self.submitted = self.ended = self.compared = self.aborted = 0
        self.prefixes = [self.tokens(12) for _ in range(6)]

    def live(self, requests):
        moves = {self.submit: 8, self.step: 12, self.turn: 4, self.open: 2, self.fork: 1, self.close: 1, self.abort: 1}
        while self.submitted < requests:
            (move,) = self.random.choices(list(moves), list(moves.values()))
            if len(self.asked) > 12:  # so that requests wait, and yet all are served
                move = self.step
            move()
        while self.engine.has_work():
            self.step()
        while self.sessions:
            self.close()
        self.engine.check()
        assert self.ended == self.submitted and not self.asked and not self.streamed

    def tokens(self, count):
        return [self.random.randrange(3, 128) for _ in range(count)]

    def params(self):
        draw = self.random
        hot = draw.random() < 0.5
        longest = draw.randrange(1, 13)
        return SamplingParams(
            n=draw.choice([1, 1, 1, 1, 2, 3]),
            max_tokens=longest,
            min_tokens=draw.randrange(longest + 1) if draw.random() < 0.2 else 0,
            temperature=draw.choice([0.6, 1.0]) if hot else 0.0,
            top_k=draw.choice([0, 20]) if hot else 0,
            top_p=draw.choice([1.0, 0.9]) if hot else 1.0,
            repetition_penalty=1.3 if draw.random() < 0.1 else 1.0,
            seed=draw.randrange(1000),
            stop_token_ids=self.tokens(8) if draw.random() < 0.3 else (),
            ignore_eos=draw.random() < 0.5,
            logprobs=2 if draw.random() < 0.1 else None,
        )

    def submit(self):
        prefix = self.random.choice(self.prefixes)[: self.random.randrange(13)]
        prompt, params = prefix + self.tokens(self.random.randrange(1, 9)), self.params()
        request_id = self.engine.submit(
            prompt,
            params,
            priority=self.random.choice([0, 0, 0, 1, 2]),
            salt=self.random.choice([None, None, None, "a"]),
        )
        self.note(request_id, prompt, params)

    def note(self, request_id, prompt, params):
        self.asked[request_id] = Asked(prompt, params, self.random.random() < self.share)
        self.submitted += 1

    def step(self):
        for _ in range(self.random.randrange(1, 5)):
            if not self.engine.has_work():
                return
            for output in self.engine.step():
                self.streamed.setdefault((output.request_id, output.sample), []).extend(output.new_token_ids)
                if output.completion is not None:
                    self.take(output.completion, output.request_id)
            self.steps += 1
            if self.steps <= SURELY_CHECKED or self.steps % 50 == 0:
                self.engine.check()

    def take(self, completion, request_id):
        """A request has ended: its streams hold what its samples do, and if it is compared, so does the one alone."""
        asked = self.asked.pop(request_id)
        self.ended += 1
        for number, sample in enumerate(completion.samples):
            assert self.streamed.pop((request_id, number), []) == sample.token_ids
            assert sample.finish_reason in ("stop", "length", "abort")
            self.aborted += sample.finish_reason == "abort"
        if asked.compared:
            self.compare(asked.prompt, asked.params, completion)
            self.compared += 1

    def abort(self):
        if self.asked:
            self.engine.abort(self.random.choice(list(self.asked)))

    def open(self):
        if len(self.sessions) < SESSIONS:
            self.sessions.append(self.engine.session(self.tokens(self.random.randrange(1, 12))))

    def idle(self):
        """A session that can have one more turn, or None."""
        found = [s for s in self.sessions if s._busy is None and len(s.tokens) < LONGEST_HISTORY]
        return self.random.choice(found) if found else None

    def turn(self):
        session, params = self.idle(), self.params()
        if session is not None and params.n == 1:
            session.append(self.tokens(self.random.randrange(1, 6)))
            prompt = session.tokens.copy()
            self.note(session.submit(params, priority=self.random.choice([0, 0, 1])), prompt, params)

    def fork(self):
        if (session := self.idle()) is not None and len(self.sessions) < SESSIONS:
            self.sessions.append(session.fork())

    def close(self):
        """Close any session; a turn that is under way is aborted."""
        if self.sessions:
            self.sessions.pop(self.random.randrange(len(self.sessions))).close()


def soak(engine, alone, requests, share, give_everything_up, assert_nothing_held):
    """Let an engine live, and see that nothing is held in the end, and nothing kept once caches are given up."""

    def compare(prompt, params, completion):
        (expected,) = alone.generate([prompt], params)
        assert completion.prompt_token_ids == prompt
        for sample, wanted in zip(
            completion.samples, expected.samples, strict=False
        ):  # an abort may come before a fork
            if sample.finish_reason == "abort":
                assert sample.token_ids == wanted.token_ids[: len(sample.token_ids)]
            else:
                assert (sample.token_ids, sample.finish_reason) == (wanted.token_ids, wanted.finish_reason)

    life = Soak(engine, compare, share, seed=7)
    life.live(requests)
    assert_nothing_held(engine)
    give_everything_up(engine)
    stats = engine.stats()
    assert stats.units_free == stats.units_total and stats.units_cached == 0
    happened = [life.compared, life.aborted, stats.preemptions, stats.copies, stats.evictions, stats.hit_tokens]
    happened += [] if engine._host is None else [engine._host.restored]
    assert min(happened) >= requests // 100, f"the traffic was too light: {happened}"


@pytest.fixture(scope="module")
def alone(t_model, engine_for):
    """Serves one request at a time, and finds nothing again."""
    return engine_for(t_model, prefix_cache=False, execution="eager", backend="auto")


VARIANTS = {
    "eager": {"execution": "eager"},
    "graph": {"execution": "graph"},
    "host tier": {"execution": "graph", "host_tokens": 128},
    "drafts": {"execution": "graph", "host_tokens": 128, "method": Lossless(Method("random", Random(), Uniform(8)), 3)},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_a_hundred_requests(t_model, host_tier_for, alone, fields, give_everything_up, assert_nothing_held):
    engine = host_tier_for(t_model, **TIGHT, **fields)
    soak(engine, alone, 100, 0.3, give_everything_up, assert_nothing_held)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_ten_thousand_requests(t_model, host_tier_for, alone, fields, give_everything_up, assert_nothing_held):
    engine = host_tier_for(t_model, **TIGHT, **fields)
    soak(engine, alone, 10_000, 0.02, give_everything_up, assert_nothing_held)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_ten_thousand_requests_on_a_gpu(
    make_llama, engine_for, host_tier_for, fields, give_everything_up, assert_nothing_held
):
    """Heads of 64, since Triton's products want at least 16."""
    model = make_llama(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64).to("cuda")
    alone = engine_for(model, prefix_cache=False, execution="eager", backend="triton")
    engine = host_tier_for(model, **{**TIGHT, "backend": "triton"}, **fields)
    soak(engine, alone, 10_000, 0.02, give_everything_up, assert_nothing_held)
