"""Steps with prompts in them, planned and launched before the tokens of the last step are read."""

import random
import sys
from pathlib import Path

import pytest
import torch

from octavo import core
from octavo.core import SamplingParams
from octavo.core.execution.decode_state import DecodeState
from octavo.core.execution.replayer import Replayer
from octavo.core.inspection.trace_recorder import TraceRecorder
from octavo.core.memory.block_table import BlockTable
from octavo.sparse.budgets import Uniform
from octavo.sparse.method import Method
from octavo.sparse.scorers import Random

from .mixed_requests import GREEDY, found, run, tokens
from .test_state_machine import DRAFTING

pytestmark = pytest.mark.usefixtures("as_if_beside")

CORE = Path(core.__file__).parent
PLAIN = [
    (tokens(1), SamplingParams(max_tokens=20, ignore_eos=True)),
    (tokens(33, 2), GREEDY),
    (tokens(17, 3), SamplingParams(max_tokens=14, temperature=1.0, top_k=20, min_p=0.01, seed=1, ignore_eos=True)),
    (tokens(33, 2), SamplingParams(max_tokens=5)),
    (tokens(9, 6), SamplingParams(max_tokens=12, stop_token_ids=(7, 9, 30))),
    (tokens(33, 2)[:20] + tokens(20, 4), SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=3)),
    (tokens(4, 7), SamplingParams(max_tokens=1)),
    (tokens(12, 8), SamplingParams(max_tokens=13, temperature=0.7, seed=5)),
    (tokens(26, 9), GREEDY),
]
"""Of which every step can be read later: long and short prompts, shared beginnings, all ways to draw and to end."""


def watched(engine):
    """What an engine does from now on: ("launch", tokens of the chunks, of how many of them nobody knows the token yet)
    and ("read",), in order. A step that only decodes has no chunks where nobody looked around for it."""
    runner, events = engine._runner, []
    launch, land, compute = runner.launch, runner.land, runner.run

    def launched(plan, *args, **how):
        counts = [chunk.count for chunk in plan.chunks]
        unread = sum(chunk.sequence.unread for chunk in plan.chunks)
        events.append(("launch", counts, unread))
        return launch(plan, *args, **how)

    def read(flight):
        events.append(("read",))
        return land(flight)

    def computed(*args):
        events.append(("at once",))
        return compute(*args)

    runner.launch, runner.land, runner.run = launched, read, computed
    return events


def kinds(events):
    return [event[0] for event in events]


def stepped(engine):
    """The tokens of a step by request."""
    news = {}
    for output in engine.step():
        news.setdefault(output.request_id, []).extend(output.new_token_ids)
    engine.check()
    return news


@pytest.fixture
def counting(make_chain, engine_for):
    """After token t comes t + 1; 60 ends. Eight tokens a step."""

    def build(**fields):
        return engine_for(make_chain(64, eos=60), **{"step_tokens": 8, "execution": "graph", **fields})

    return build


class TestOrder:
    def test_a_step_with_a_prompt_is_launched_before_the_tokens_of_the_last_one_are_read(self, counting):
        engine = counting()
        engine.submit([5, 6, 7], SamplingParams(max_tokens=8), request_id="a")
        engine.submit(list(range(20, 40)), SamplingParams(max_tokens=3), request_id="b")
        events = watched(engine)
        assert stepped(engine) == {} and events == [("launch", [3, 5], 0)]
        events.clear()
        for token in (8, 9):  # "a" decodes beside the rest of "b", its token where the device has left it
            assert stepped(engine) == {"a": [token]}
            assert events == [("launch", [1, 7], 1), ("read",)]
            events.clear()
        assert stepped(engine) == {"a": [10]} and events == [("launch", [1, 1], 1), ("read",)]
        events.clear()
        for token in (11, 12):  # both decode, and nobody needs to look around
            assert stepped(engine) == {"a": [token], "b": [token + 29]} and events == [("launch", [], 0), ("read",)]
            events.clear()

    def test_nobody_who_decodes_waits_for_prompts(self, counting):
        engine = counting(pool_tokens=800)
        for number in range(4):
            engine.submit([10 * number], SamplingParams(max_tokens=12, ignore_eos=True), request_id=str(number))
        for _ in range(2):
            stepped(engine)
        engine.submit([3] * 24, SamplingParams(max_tokens=2, ignore_eos=True), request_id="long")
        events = watched(engine)
        for at in range(2, 9):
            news = stepped(engine)
            assert [news[str(number)] for number in range(4)] == [[10 * number + at] for number in range(4)]
        assert [event[1] for event in events if event[0] == "launch"][:6] == [[1, 1, 1, 1, 4]] * 6
        assert "at once" not in kinds(events)

    def test_prompts_of_which_nothing_is_drawn_yet_are_not_waited_for(self, counting):
        engine = counting()
        engine.submit([9] * 20, SamplingParams(max_tokens=2), request_id="a")
        events = watched(engine)
        assert stepped(engine) == stepped(engine) == stepped(engine) == {}
        assert stepped(engine) == {"a": [10]} and stepped(engine) == {"a": [11]}
        launches = [("launch", chunks, 0) for chunks in ([8], [8], [4], [])]
        assert events == [*launches, ("read",), ("read",)]

    def test_new_prompts_behind_prompts_that_have_ended(self, counting):
        engine = counting(prefix_cache=False)
        for number in range(3):
            engine.submit([number] * 8, SamplingParams(max_tokens=1), request_id=str(number))
        events = watched(engine)
        assert [stepped(engine) for _ in range(4)] == [{}, {"0": [1]}, {"1": [2]}, {"2": [3]}]
        assert kinds(events) == ["launch", "launch", "read", "launch", "read", "read"]

    def test_steps_that_only_decode_are_launched_ahead_while_others_wait(self, counting):
        engine = counting(max_seqs=1)
        for number in range(2):
            engine.submit([number], SamplingParams(max_tokens=4), request_id=str(number))
        events = watched(engine)
        assert [stepped(engine) for _ in range(4)] == [{}, {"0": [1]}, {"0": [2]}, {"0": [3]}]
        assert kinds(events) == ["launch", *["launch", "read"] * 3]
        assert stepped(engine) == {"0": [4]} and stepped(engine) == {"1": [2]}

    def test_nothing_is_planned_ahead_of_a_recorder_that_reads_tokens(self, counting):
        engine = counting()
        engine.recorder = TraceRecorder()
        engine.submit([5, 6, 7], SamplingParams(max_tokens=4), request_id="a")
        engine.submit([9] * 20, SamplingParams(max_tokens=2), request_id="b")
        events = watched(engine)
        while engine.has_work():
            stepped(engine)
        assert all(event[2] == 0 for event in events if event[0] == "launch")

    def test_a_recorder_that_does_not_read_tokens_sees_how_far_each_step_comes(self, counting):
        class Places:
            """Where the chunks of a plan end, by request."""

            reads_tokens = False

            def __init__(self):
                self.plans = []

            def stepping(self, *_):
                self.plans.append({})

            def placed(self, sequence, end):
                self.plans[-1][sequence.request.request_id] = end

            def __getattr__(self, name):
                return lambda *_, **__: None

        engine = counting()
        engine.recorder = Places()
        engine.submit([5, 6, 7], SamplingParams(max_tokens=4), request_id="a")
        engine.submit([9] * 20, SamplingParams(max_tokens=2), request_id="b")
        events, recorder = watched(engine), engine.recorder
        while engine.has_work():
            stepped(engine)
        assert kinds(events)[:3] == ["launch", "launch", "read"]
        assert recorder.plans[:4] == [{"a": 3, "b": 5}, {"a": 4, "b": 12}, {"a": 5, "b": 19}, {"a": 6, "b": 20}]

    def test_a_launch_reads_nothing_from_the_device(self, t_model, engine_for, monkeypatch):
        """On a GPU a tensor that the host asks for its values would wait for all steps before."""
        engine = engine_for(t_model, execution="graph", step_tokens=12)
        for prompt, params in PLAIN:
            engine.submit(prompt, params)
        launch, launching = engine._runner.launch, []

        def launched(*args, **how):
            launching.append(True)
            flight = launch(*args, **how)
            launching.clear()
            return flight

        def guarded(read):
            def asked(tensor, *args):
                caller = Path(sys._getframe(1).f_code.co_filename)
                assert not (launching and CORE in caller.parents), f"{caller} reads a tensor"
                return read(tensor, *args)

            return asked

        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__"):
            monkeypatch.setattr(torch.Tensor, name, guarded(getattr(torch.Tensor, name)))
        engine._runner.launch = launched
        assert len(run_on(engine)) == len(PLAIN)

    def test_what_needs_the_host_is_read_at_once(self, counting):
        """Somebody with log-probabilities comes, and goes; both times the others stay as they are."""
        engine = counting()
        engine.submit([5], SamplingParams(max_tokens=12), request_id="a")
        stepped(engine)
        engine.submit([20] * 12, SamplingParams(max_tokens=2, logprobs=1), request_id="b")
        events, seen = watched(engine), []
        while engine.has_work():
            seen += stepped(engine).get("a", [])
        assert seen == list(range(6, 18))
        assert kinds(events).count("at once") == 3 and kinds(events)[-3:] == ["launch", "read", "read"]

    def test_a_plan_that_comes_to_nothing_costs_nobody_their_turn(self, counting):
        """Four turns share two tokens a step, and whenever the first one is next, planning ahead is in vain."""
        engine = counting(step_tokens=2)
        sessions = [engine.session([10 * number]) for number in range(4)]
        for session in sessions:
            session.generate(SamplingParams(max_tokens=1))
        asked = [SamplingParams(max_tokens=6, logprobs=entries) for entries in (0, None, None, None)]
        names = [session.submit(params) for session, params in zip(sessions, asked, strict=True)]
        last = {}
        for step in range(20):
            last |= dict.fromkeys(stepped(engine), step)
        assert [last[name] for name in names] == [10, 10, 12, 12]


FIELDS = [
    {},
    {"step_tokens": 3},
    {"max_seqs": 2},
    {"prefix_cache": False},
    {"shared_decode_bytes": 0},
    {"pool_tokens": 72, "max_seqs": 4},
    {"pool_tokens": 96, "host_tokens": 64},
    {"base_share": 0.1, "growth_tokens": 32},
]


class TestSameTokens:
    @pytest.mark.parametrize("model", ["t_model", "w_model", "g_model"])
    @pytest.mark.parametrize("fields", FIELDS, ids=str)
    def test_as_eager_steps(self, model, fields, request, engine_for, assert_idle):
        model = request.getfixturevalue(model)
        config = {"pool_tokens": 800, "max_seqs": 6, "step_tokens": 16, **fields}
        eager, ahead = (engine_for(model, **config, execution=execution) for execution in ("eager", "graph"))
        events, counted = watched(ahead), config["pool_tokens"] == 800
        assert found(run(ahead, PLAIN), counted) == found(run(eager, PLAIN), counted)
        assert "at once" not in kinds(events)
        assert any(event[0] == "launch" and event[2] and max(event[1]) > 1 for event in events)
        if counted:
            assert ahead._runner.accounts.bytes_spared == eager._runner.accounts.bytes_spared or "shared" not in fields
            assert ahead.stats().preemptions == 0
        assert_idle(ahead)

    @pytest.mark.slow
    def test_compiled(self, t_model, engine_for):
        config = {"pool_tokens": 800, "max_seqs": 6, "step_tokens": 16}
        eager, ahead = (engine_for(t_model, **config, execution=how) for how in ("eager", "compiled"))
        assert [[s.token_ids for s in c.samples] for c in run(ahead, PLAIN)] == [
            [s.token_ids for s in c.samples] for c in run(eager, PLAIN)
        ]

    def test_beside_requests_of_all_kinds(self, t_model, engine_for, assert_idle):
        """In every order some steps need the host and some do not."""
        drawing = Method("random", Random(), Uniform(8))
        kinds_of = [
            (SamplingParams(max_tokens=6, logprobs=1), None),
            (SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=4), None),
            (SamplingParams(max_tokens=6, repetition_penalty=1.4), None),
            (SamplingParams(max_tokens=9, min_tokens=4), None),
            (SamplingParams(max_tokens=6, ignore_eos=True, seed=4), drawing),
            *((params, None) for _, params in PLAIN),
        ]
        alone = engine_for(t_model, prefix_cache=False)
        for seed in range(6):
            draw = random.Random(seed)
            requests = [(tokens(draw.randrange(1, 20), draw.randrange(9)), *draw.choice(kinds_of)) for _ in range(12)]
            engine, done = engine_for(t_model, execution="graph", step_tokens=12, max_seqs=5), {}
            for number, (prompt, params, method) in enumerate(requests):
                engine.submit(prompt, params, request_id=str(number), method=method)
                for _ in range(draw.randrange(3)):
                    done |= {out.request_id: out.completion for out in engine.step() if out.completion is not None}
                    engine.check()
            done |= run_on(engine)
            for number, (prompt, params, method) in enumerate(requests):
                name = alone.submit(prompt, params, method=method)
                wanted = [s.token_ids for s in alone.finish([name])[name].samples]
                assert [s.token_ids for s in done[str(number)].samples] == wanted
            assert_idle(engine)

    def test_a_stop_string_beside_a_prompt(self, make_chain, piece_tokenizer, engine_for, assert_idle):
        model, tokenizer = make_chain(64), piece_tokenizer([chr(40 + i) for i in range(64)])
        for execution in ("eager", "graph"):
            engine = engine_for(model, tokenizer, execution=execution, step_tokens=6)
            engine.submit([5], SamplingParams(max_tokens=20, stop=("56",)), request_id="a")  # tokens 13 and 14
            engine.submit([20] * 30, SamplingParams(max_tokens=2), request_id="b")
            done = run_on(engine)
            assert done["a"].samples[0].finish_reason == "stop" and done["a"].samples[0].text == "./01234"
            assert done["b"].samples[0].token_ids == [21, 22]
            assert_idle(engine)

    def test_a_sequence_that_is_computed_again(self, t_model, engine_for):
        """Its last tokens are no step of decoding then, whoever reads them."""
        cost = []
        for execution in ("eager", "graph"):
            engine = engine_for(t_model, execution=execution, prefix_cache=False)
            engine.submit(tokens(9), GREEDY)
            sample = engine._requests[next(iter(engine._requests))].sequences[0]
            while sample.generated < 5:
                engine.step()
            engine._land_pending()
            while sample.generated < 8:
                engine.step()
                engine._land_pending()
            engine._scheduler.preempt(sample)
            (completion,) = run_on(engine).values()
            cost.append(found([completion]))
        assert cost[0] == cost[1] and cost[0][0][0][2] == 10


def run_on(engine):
    """Completions by request, of an engine that is stepped to its end and checked after each step."""
    done = {}
    while engine.has_work():
        done |= {out.request_id: out.completion for out in engine.step() if out.completion is not None}
        engine.check()
    return done


class TestInFlight:
    def test_one_that_has_ended_is_computed_once_too_often_beside_a_prompt(self, counting, assert_idle):
        engine = counting()
        engine.submit([57], SamplingParams(max_tokens=20), request_id="ends")
        engine.submit([20] * 40, SamplingParams(max_tokens=3), request_id="b")
        seen = {}
        while engine.has_work():
            for name, ids in stepped(engine).items():
                seen.setdefault(name, []).extend(ids)
        assert seen == {"ends": [58, 59, 60], "b": [21, 22, 23]}
        assert_idle(engine)

    @pytest.mark.parametrize("name", ["a", "b"])
    @pytest.mark.parametrize("after", range(1, 6))
    def test_an_abort(self, counting, assert_idle, name, after):
        engine = counting()
        engine.submit([5, 6, 7], SamplingParams(max_tokens=6), request_id="a")
        engine.submit([20] * 18, SamplingParams(max_tokens=4), request_id="b")
        done = {}
        for _ in range(after):
            done |= {out.request_id: out.completion for out in engine.step() if out.completion is not None}
        engine.abort(name)
        engine.check()
        done |= run_on(engine)
        wanted = {"a": list(range(8, 14)), "b": [21, 22, 23, 24]}
        for key, tokens_of in wanted.items():
            (sample,) = done[key].samples
            assert sample.token_ids == tokens_of[: len(sample.token_ids)]
            assert (sample.finish_reason == "abort") == (key == name)
        assert_idle(engine)

    @pytest.mark.parametrize("steps", range(1, 5))
    def test_a_turn_that_is_aborted_behind_a_launch_that_failed(self, counting, assert_idle, monkeypatch, steps):
        """A token of it was planned for, and nobody will read that."""
        engine = counting()
        session = engine.session([5, 6, 7])
        turn = session.submit(SamplingParams(max_tokens=20))
        engine.submit([20] * 30, SamplingParams(max_tokens=3), request_id="b")
        for _ in range(steps):
            stepped(engine)
        broken_forward(engine, 1, monkeypatch)
        with pytest.raises(MemoryError):
            engine.step()
        engine.abort(turn)
        assert run_on(engine)["b"].samples[0].token_ids == [21, 22, 23]
        session.append([40])
        assert session.generate(SamplingParams(max_tokens=3)).samples[0].token_ids == [41, 42, 43]
        session.close()
        assert_idle(engine)

    def test_pages_that_an_end_brings_are_waited_for_and_nobody_is_preempted(self, counting, assert_idle):
        """The pool has 6 pages. "a" ends with a token that nobody has read while "b" needs a page more."""
        engine = counting(pool_tokens=24, prefix_cache=False, step_tokens=32)
        engine.submit(list(range(50, 59)), SamplingParams(max_tokens=15), request_id="a")  # 3 pages: 59, 60, the end
        engine.submit(list(range(10, 21)), SamplingParams(max_tokens=8), request_id="b")
        seen = {}
        while engine.has_work():
            for name, ids in stepped(engine).items():
                seen.setdefault(name, []).extend(ids)
        assert seen == {"a": [59, 60], "b": list(range(21, 29))}
        assert engine.stats().preemptions == 0
        assert_idle(engine)

    def test_nor_does_who_comes_take_the_pages_of_an_idle_session(self, counting):
        """2 pages are the session's, 3 those of "a", and "b" needs 3."""
        engine = counting(pool_tokens=24, prefix_cache=False, step_tokens=32)
        session = engine.session([1, 2, 3, 4, 5])
        session.generate(SamplingParams(max_tokens=1))
        engine.submit(list(range(50, 59)), SamplingParams(max_tokens=15), request_id="a")
        assert [stepped(engine) for _ in range(2)] == [{}, {"a": [59]}]
        engine.submit(list(range(10, 19)), SamplingParams(max_tokens=3), request_id="b")
        assert stepped(engine) == {"a": [60]} and session._parked in engine._scheduler.parked
        assert run_on(engine)["b"].samples[0].token_ids == [19, 20, 21]
        assert session._parked in engine._scheduler.parked

    def test_a_prefix_that_is_still_being_computed_on_the_device_is_found(self, counting, assert_idle):
        engine = counting()
        engine.submit([9] * 16, SamplingParams(max_tokens=4), request_id="a")
        events = watched(engine)
        stepped(engine)
        engine.submit([9] * 8 + [30], SamplingParams(max_tokens=2), request_id="b")
        stepped(engine)
        done = run_on(engine)
        assert done["b"].cached_tokens == 8 and done["b"].samples[0].token_ids == [31, 32]
        assert "at once" not in kinds(events)
        assert_idle(engine)

    def test_a_higher_priority_takes_a_place_as_always(self, counting, assert_idle):
        engine = counting(max_seqs=2)
        for number in range(2):
            engine.submit([10 * number], SamplingParams(max_tokens=9), request_id=str(number))
        for _ in range(3):
            stepped(engine)
        engine.submit([40] * 5, SamplingParams(max_tokens=3), request_id="first", priority=1)
        done = run_on(engine)
        assert list(done) == ["first", "0", "1"] and engine.stats().preemptions == 1
        assert done["1"].samples[0].token_ids == list(range(11, 20))
        assert_idle(engine)

    def test_a_session_over_turns_beside_a_prompt(self, t_model, engine_for):
        said = []
        for execution in ("eager", "graph"):
            engine = engine_for(t_model, execution=execution, step_tokens=6)
            session, turns = engine.session(tokens(9)), []
            for turn in range(3):
                other = engine.submit(tokens(25, turn), SamplingParams(max_tokens=4))
                turns.append(session.generate(SamplingParams(max_tokens=7)).samples[0].token_ids)
                turns.append(engine.finish([other])[other].samples[0].token_ids)
                session.append(tokens(3, turn))
                engine.check()
            said.append(turns)
        assert said[0] == said[1]


def once(function, at, error):
    """``function``, but its call number ``at`` raises."""
    calls = []

    def wrapped(*args, **named):
        calls.append(1)
        if len(calls) == at:
            raise error
        return function(*args, **named)

    return wrapped


def broken_forward(engine, at, patch):
    patch.setattr(engine._model, "forward", once(engine._model.forward, at, MemoryError("forward")))


def broken_draw(engine, at, patch):
    patch.setattr(DecodeState, "draw", once(DecodeState.draw, at, MemoryError("draw")))


def broken_copy(engine, at, patch):
    patch.setattr(Replayer, "land", once(Replayer.land, at, MemoryError("copy")))


def broken_publisher(engine, at, patch):
    patch.setattr(engine._publisher, "publish", once(engine._publisher.publish, at, MemoryError("index")))


def interrupted(engine, at, patch):
    patch.setattr(engine._model, "forward", once(engine._model.forward, at, KeyboardInterrupt()))


DAMAGE = [broken_forward, broken_draw, broken_copy, broken_publisher, interrupted]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("at", range(1, 9))
def test_a_failure_loses_nothing(damage, at, counting, assert_idle, monkeypatch):
    engine, asked, seen, failures = counting(), {}, {}, 0
    for number in range(5):
        prompt, new = [7 * number] * (3 + 4 * number), 4 + number
        asked[str(number)] = list(range(7 * number + 1, 7 * number + 1 + new))
        engine.submit(prompt, SamplingParams(max_tokens=new), request_id=str(number))
    damage(engine, at, monkeypatch)
    while engine.has_work():
        try:
            for name, ids in stepped(engine).items():
                seen.setdefault(name, []).extend(ids)
        except (MemoryError, KeyboardInterrupt):
            failures += 1
            engine.check()
    monkeypatch.undo()
    assert seen == asked and failures == 1
    assert_idle(engine)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("at", [1, 2, 4, 7])
@pytest.mark.parametrize("model", ["w_model", "g_model"])
def test_nor_where_a_window_passes_pages(damage, at, model, request, engine_for, assert_idle, monkeypatch):
    model = request.getfixturevalue(model)
    expected = run(engine_for(model), PLAIN)
    engine, done = engine_for(model, execution="graph", step_tokens=6, max_seqs=4), {}
    for number, (prompt, params) in enumerate(PLAIN):
        engine.submit(prompt, params, request_id=str(number))
    damage(engine, at, monkeypatch)
    while engine.has_work():
        try:
            done |= {out.request_id: out.completion for out in engine.step() if out.completion is not None}
        except (MemoryError, KeyboardInterrupt):
            engine.check()
        engine.check()
    assert found([done[str(number)] for number in range(len(PLAIN))], False) == found(expected, False)
    assert_idle(engine)


@pytest.mark.parametrize("at", range(1, 13))
def test_a_page_that_a_failed_plan_took_is_told_to_the_device(at, w_model, engine_for, assert_idle, monkeypatch):
    """Three decode behind a window, and turn to their next pages in the same steps."""
    requests = [(tokens(9, seed), SamplingParams(max_tokens=20, ignore_eos=True)) for seed in range(3)]
    expected = run(engine_for(w_model), requests)
    engine, done = engine_for(w_model, execution="graph"), {}
    for number, (prompt, params) in enumerate(requests):
        engine.submit(prompt, params, request_id=str(number))
    monkeypatch.setattr(BlockTable, "extend", once(BlockTable.extend, at, MemoryError("pages")))
    while engine.has_work():
        try:
            done |= {out.request_id: out.completion for out in engine.step() if out.completion is not None}
        except MemoryError:
            engine.check()
        engine.check()
    assert found([done[str(number)] for number in range(3)], False) == found(expected, False)
    assert_idle(engine)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("followed", [False, True], ids=["ids", "text"])
def test_nor_where_drafts_are_verified(
    damage, at, followed, t_model, engine_for, piece_tokenizer, assert_idle, monkeypatch
):
    tokenizer = piece_tokenizer([chr(40 + i) for i in range(128)]) if followed else None
    requests = [(tokens(17, seed), SamplingParams(max_tokens=14, ignore_eos=True)) for seed in range(2)]
    expected = run(engine_for(t_model, tokenizer), requests)
    engine, seen, text = engine_for(t_model, tokenizer, execution="graph", method=DRAFTING), {}, {}
    for number, (prompt, params) in enumerate(requests):
        engine.submit(prompt, params, request_id=str(number))
    damage(engine, at, monkeypatch)
    while engine.has_work():
        try:
            for out in engine.step():
                seen.setdefault(out.request_id, []).extend(out.new_token_ids)
                text[out.request_id] = text.get(out.request_id, "") + out.new_text
        except (MemoryError, KeyboardInterrupt):
            engine.check()
        engine.check()
    for number, completion in enumerate(expected):
        assert seen[str(number)] == completion.samples[0].token_ids
        assert text[str(number)] == completion.samples[0].text
    assert_idle(engine)


@pytest.mark.parametrize("model", ["w_model", "g_model"])
@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_a_page_that_a_window_passes_before_it_was_published_is_none(
    model, execution, request, engine_for, drain, monkeypatch
):
    engine = engine_for(request.getfixturevalue(model), execution=execution, step_tokens=16)
    broken_publisher(engine, 1, monkeypatch)
    engine.submit(tokens(40), GREEDY, request_id="a")
    with pytest.raises(MemoryError):
        engine.step()
    wanted = drain(engine).tokens_of("a")
    assert 0 not in engine._pool.index
    engine.submit(tokens(40), GREEDY, request_id="again")
    assert drain(engine).tokens_of("again") == wanted


class TestOnACpu:
    """Whoever launches waits there: a prompt's token that is read behind the next step is only late."""

    @pytest.fixture(autouse=True)
    def a_cpu(self, monkeypatch):
        monkeypatch.setattr("octavo.core.execution.step_runner.computes_beside", lambda device: device.type == "cuda")

    def test_a_prompts_token_comes_with_its_step(self, t_model, engine_for):
        engine = engine_for(t_model, execution="graph", step_tokens=8)
        for prompt in (list(range(8)), list(range(8, 16))):
            engine.submit(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
        assert [len(engine.step()) for _ in range(2)] == [1, 1]
