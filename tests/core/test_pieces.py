"""Passes that are replayed in pieces: the tokens of whole passes, whatever lies in the padding."""

import pytest
import torch

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.core.execution.pieces import PADDED, PiecewisePass
from octavo.sparse.budgets import Uniform
from octavo.sparse.digests import MinMax
from octavo.sparse.keep import Keep
from octavo.sparse.method import Method
from octavo.sparse.scorers import UpperBound

from ..cells import covering
from .mixed_requests import MIXED, found, run, tokens

QUEST = Method("quest", UpperBound(), Uniform(tokens=16), digest=MinMax(), keep=Keep(sink_tokens=4, recent_tokens=4))
CONFIG = {"page_tokens": 4, "pool_tokens": 800, "max_seqs": 6}


class Poisoned(PiecewisePass):
    """Counts its passes, and finds NaN wherever the step before has left something."""

    def forward(self, input_ids, position_ids, rows, step):
        self.sizes = [*getattr(self, "sizes", []), len(input_ids)]
        with torch.inference_mode():
            for shared in (self._q, self._attended, self._logits):
                shared.fill_(torch.nan)
        return super().forward(input_ids, position_ids, rows, step).clone()


def in_pieces(model, execution="eager", **fields):
    """An engine whose steps go in pieces on a CPU, too, where they are not captured."""
    engine = Engine(model, None, EngineConfig(**CONFIG, execution=execution, **fields))
    runner = engine._runner
    runner._pieces = Poisoned(engine._model, runner.kv, runner._plan, runner.backend, engine.config.max_seqs)
    return engine


@pytest.mark.parametrize(
    "model, fields",
    covering(["t_model", "w_model", "g_model"], [{"step_tokens": 16}, {"step_tokens": 100}, {"step_tokens": 5}]),
)
def test_the_tokens_of_whole_passes(model, fields, request):
    model = request.getfixturevalue(model)
    whole, pieces = Engine(model, None, EngineConfig(**CONFIG, execution="eager", **fields)), in_pieces(model, **fields)
    assert found(run(pieces, MIXED)) == found(run(whole, MIXED))
    assert any(size not in PADDED for size in pieces._runner._pieces.sizes)


def test_chosen_pages_beside_prompts(t_model):
    requests = [(tokens(60, seed), SamplingParams(max_tokens=9, ignore_eos=True)) for seed in range(3)]
    results = []
    for engine in (
        Engine(t_model, None, EngineConfig(**CONFIG, execution="eager", step_tokens=24)),
        in_pieces(t_model, step_tokens=24),
    ):
        done = {}
        for seed, (prompt, params) in enumerate(requests):
            engine.submit(prompt, params, method=QUEST if seed else None, request_id=str(seed))
        while engine.has_work():
            done |= {o.request_id: found([o.completion]) for o in engine.step() if o.completion is not None}
            engine.check()
        results.append(done)
    assert results[0] == results[1]


def test_what_is_served(t_model):
    pieces = in_pieces(t_model)._runner._pieces
    assert pieces.serves(1, 1) and pieces.serves(PADDED[-1], 6)
    assert not pieces.serves(PADDED[-1] + 1, 1) and not pieces.serves(64, 7)


@pytest.mark.gpu
@pytest.mark.parametrize("execution", ["graph", "compiled"])
def test_captured(execution, make_llama):
    model = make_llama(num_hidden_layers=3).to("cuda")
    config = {**CONFIG, "step_tokens": 64}
    eager = Engine(model, None, EngineConfig(**config, execution="eager"))
    expected = [[sample.token_ids for sample in completion.samples] for completion in run(eager, MIXED)]
    engine = Engine(model, None, EngineConfig(**config, execution=execution))
    for _ in range(2):  # the second time, every number of tokens has been captured
        got = [[sample.token_ids for sample in completion.samples] for completion in run(engine, MIXED)]
        assert got == expected
    captured = engine._runner._pieces._captured
    assert captured and all(len(one.graphs) == 4 for one in captured.values())
