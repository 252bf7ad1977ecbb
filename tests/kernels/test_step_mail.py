"""What the host and a replayed step tell each other: each turn its own, and nothing of another one."""

import numpy as np
import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.execution.step_mail import TURNS, StepMail

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")


@pytest.fixture(params=[pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.mark.parametrize("most", [1, 3, 5])
def test_a_step_writes_what_it_was_told_and_nothing_else(most, device):
    rng = np.random.default_rng(most)
    mail, entries = StepMail(most, device), torch.full((2, 6), -1, dtype=torch.int32, device=device)
    expected = np.full(12, -1, np.int32)
    for turn in range(3 * TURNS):
        count = turn % (most + 1)
        if count:  # nobody has to say that there is nothing
            places, values = rng.permutation(12)[:count], rng.integers(-(2**31), 2**31, count)
            mail.tell(places, values)
            expected[places] = values
        mail.receive(entries)
        mail.send(torch.full((most,), turn, dtype=torch.int64, device=device))
        assert mail.launched(most).wait().tolist() == [[turn] * most]
        assert np.array_equal(entries.cpu().numpy().ravel(), expected)


def test_steps_may_be_under_way_while_others_are_told(device):
    """News are read late, and what was told lies where it is until its step has come."""
    mail, entries = StepMail(2, device), torch.zeros((1, 9), dtype=torch.int32, device=device)
    flights = []
    for turn in range(9):
        mail.tell(np.array([turn]), np.array([turn + 1]))
        mail.receive(entries)
        mail.send(torch.tensor([turn, -turn], device=device))
        flights.append(mail.launched(2))
        if turn:
            assert flights[turn - 1].wait().tolist() == [[turn - 1, 1 - turn]]
    assert entries.tolist() == [[*range(1, 10)]]


def test_what_was_told_to_a_step_that_was_not_launched_is_not_told_to_the_next(device):
    """Its tables may be another sequence's by then."""
    mail, entries = StepMail(2, device), torch.zeros((1, 4), dtype=torch.int32, device=device)
    for turn in range(2 * TURNS):
        mail.tell(np.array([1]), np.array([9]))
        if turn % 2:
            mail.tell_nothing()
        else:
            mail.tell(np.array([2]), np.array([turn + 1]))
        mail.receive(entries)
        mail.send(None)
        mail.launched(0).wait()
        mail.tell_nothing()
    assert entries.tolist() == [[0, 0, 2 * TURNS - 1, 0]]


def test_fewer_columns_and_no_news(device):
    mail, entries = StepMail(4, device), torch.zeros((1, 4), dtype=torch.int32, device=device)
    for drawn in (None, torch.tensor([5, 6], device=device), None):
        mail.receive(entries)
        mail.send(drawn)
        news = mail.launched(0 if drawn is None else 2)
        assert news.wait().tolist() == ([[]] if drawn is None else [[5, 6]])
    assert not entries.any()


def test_a_program_that_was_no_step_takes_nobodys_turn(device):
    """As before one is captured. It writes over no news that are still to be read."""
    mail, entries = StepMail(1, device), torch.zeros((1, 4), dtype=torch.int32, device=device)
    flights = []
    for turn in range(2 * TURNS):
        for _ in range(3):
            mail.receive(entries)
            mail.send(torch.tensor([99], device=device))
            mail.take_back()
        if flights:
            assert flights.pop().wait().tolist() == [[turn - 1]]
        mail.tell(np.array([turn % 4]), np.array([turn]))
        mail.receive(entries)
        mail.send(torch.tensor([turn], device=device))
        flights.append(mail.launched(1))
    assert entries.tolist() == [[4, 5, 6, 7]]


class Replays:
    """In place of captured graphs: the programs themselves, in Triton's interpreter where they read and write mail."""

    def __init__(self, engine):
        self.program = engine._runner._program
        self.program._mail = StepMail(engine.config.max_seqs, torch.device("cpu"))
        self.program._prepare = lambda variant: None
        self.program._graphs = self
        self.told = self.failures = 0
        tell = self.program._mail.tell
        self.program._mail.tell = lambda *given: (tell(*given), setattr(self, "told", self.told + 1))

    def __getitem__(self, variant):
        self.variant = variant
        return self

    def replay(self):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no launch")
        with torch.inference_mode():
            self.program._news[self.variant] = self.program._run(self.variant)


@interpreted
class TestAnEngine:
    """Its tables are written by its steps, and nowhere do they read a page that was not told of: unwritten slots are
    NaN, and tokens those of an engine that runs eagerly."""

    def serve(self, engine, drain, after_step=None):
        for i in range(5):
            params = SamplingParams(max_tokens=9 + 5 * i, ignore_eos=True, n=1 + i % 2, seed=i, temperature=i % 2)
            engine.submit([(7 * i + at) % 128 for at in range(3 + 2 * i)], params, request_id=str(i))
        done = drain(engine, after_step).completions
        return {name: [sample.token_ids for sample in completion.samples] for name, completion in done.items()}

    @pytest.mark.parametrize("model", ["t_model", "g_model"])
    def test_same_tokens(self, model, request, engine_for, drain):
        model = request.getfixturevalue(model)
        fields = {"max_seqs": 4, "pool_tokens": 160}
        want = self.serve(engine_for(model, execution="eager", **fields), drain)
        engine = engine_for(model, execution="graph", **fields)
        replays = Replays(engine)
        assert self.serve(engine, drain) == want
        windowed = any(group.window for group in engine._plan.groups)
        assert (replays.told > 4) != windowed, "behind windows tables change otherwise"

    def test_what_was_told_to_a_step_that_was_not_launched_is_told_again(self, t_model, engine_for, drain):
        want = self.serve(engine_for(t_model, execution="eager"), drain)
        engine = engine_for(t_model, execution="graph")
        replays, left = Replays(engine), 6
        for i in range(5):
            params = SamplingParams(max_tokens=9 + 5 * i, ignore_eos=True, n=1 + i % 2, seed=i, temperature=i % 2)
            engine.submit([(7 * i + at) % 128 for at in range(3 + 2 * i)], params, request_id=str(i))
        found, told = {}, 0
        while engine.has_work():
            if left and replays.told > told:  # the step before has grown tables
                replays.failures, left = 1, left - 1
            told = replays.told
            try:
                news = engine.step()
            except RuntimeError:
                news = []
            engine.check()
            found |= {output.request_id: output.completion for output in news if output.completion is not None}
        assert not left and not replays.failures
        assert {name: [sample.token_ids for sample in done.samples] for name, done in found.items()} == want
