"""Producers: a session's turn that a user's function adds to while it is generated equals the turns that do the same by
hand, and to its user it stays one request."""

import gc
import threading
import time

import pytest

from octavo.core import SamplingParams
from octavo.sparse.budgets import Uniform
from octavo.sparse.lossless import Lossless
from octavo.sparse.method import Method
from octavo.sparse.scorers import Random

from ..pictures import A, Picture, ids, image_engine, text

GREEDY = {"ignore_eos": True}
RANDOM = Method("random", Random(), Uniform(8))


def params(tokens, **more):
    return SamplingParams(max_tokens=tokens, **{**GREEDY, **more})


@pytest.fixture(params=["eager", "graph"])
def counting(request, make_chain, engine_for):
    """An engine whose model counts: after token t comes t + 1."""
    return engine_for(make_chain(32), execution=request.param)


class TestMarkers:
    def test_a_token_calls_its_producer(self, counting, drain, assert_idle):
        told = []

        def jump(state):
            told.append(state)
            return [20] if len(told) == 1 else [10]

        session = counting.session([1], producers={5: jump, 22: jump})
        name = session.submit(params(9))
        drained = drain(counting)
        done = drained.completions[name]
        assert drained.tokens_of(name) == [2, 3, 4, 5, 21, 22, 11, 12, 13]
        assert session.tokens == [1, 2, 3, 4, 5, 20, 21, 22, 10, 11, 12, 13]
        assert done.samples[0].inserted == [(4, [20]), (6, [10])] and done.samples[0].finish_reason == "length"
        assert done.prompt_token_ids == [1] and done.samples[0].text == ""
        assert [(s.tokens, s.marker, s.calls) for s in told] == [
            ([1, 2, 3, 4, 5], 5, 0),
            ([1, 2, 3, 4, 5, 20, 21, 22], 22, 1),
        ]
        session.close()
        assert_idle(counting)

    def test_the_stream_says_what_was_inserted_where(self, counting):
        session = counting.session([1], producers={3: lambda state: [20]})
        name = session.submit(params(4))
        news = []
        while counting.has_work():
            news += counting.step()
            counting.check()
        assert {out.request_id for out in news} == {name}
        assert [out.new_token_ids or out.inserted for out in news if out.new_token_ids or out.inserted] == [
            [2], [3], [20], [21], [22]
        ]  # fmt: skip
        assert [out.finish_reason for out in news if out.finish_reason] == ["length"]
        assert [out.completion is not None for out in news] == [False] * (len(news) - 1) + [True]

    @pytest.mark.parametrize(
        ("pieces", "kept"),
        [
            (["a", "<i>", "b", "c", "d", "e"], [1, 2]),
            (["a", "<", "i", ">", "b", "c"], [1, 2, 3, 4]),
            (["a", "<i", ">b", ">", "c", "d"], [1, 2, 4]),
        ],
        ids=["a_token", "three_tokens", "within_a_token"],
    )
    def test_a_text_calls_its_producer(self, pieces, kept, make_chain, engine_for, piece_tokenizer, drain):
        """Whatever its tokens: the history ends with the marker."""
        told = []
        tokenizer = piece_tokenizer(["<s>", *pieces, "x", "y", "z"], specials=[0])
        engine = engine_for(make_chain(10), tokenizer, page_tokens=2)
        session = engine.session([0], producers={"<i>": lambda state: told.append(state) or "x"})
        name = session.submit(params(6, stop="z"))
        drained = drain(engine)
        done = drained.completions[name]
        assert done.text == drained.text[name, 0] == "a<i>y" and done.samples[0].finish_reason == "stop"
        (state,) = told
        assert state.tokens == [0, *kept] and state.text == "a<i>" and state.marker == "<i>"
        assert session.tokens == [0, *kept, 7, 8]
        assert done.samples[0].inserted == [(3 if pieces[1] == "<i" else len(kept), "x")]

    def test_a_marker_counts_before_the_least_number_of_tokens(self, counting):
        session = counting.session([1], producers={3: lambda state: [20]})
        done = session.generate(SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=[21, 23]))
        assert done.samples[0].token_ids[:2] == [2, 3] and len(done.samples[0].token_ids) > 4
        assert done.samples[0].finish_reason == "stop" or len(done.samples[0].token_ids) == 9

    def test_the_last_token_calls_nobody(self, counting):
        session = counting.session([1], producers={3: lambda state: [20]})
        done = session.generate(params(2))
        assert (done.samples[0].token_ids, done.samples[0].inserted) == ([2, 3], [])
        assert done.samples[0].finish_reason == "length" and session.tokens == [1, 2, 3]

    @pytest.mark.parametrize("nothing", [None, [], ""])
    def test_a_producer_may_have_nothing_to_add(self, nothing, counting):
        session = counting.session([1], producers={3: lambda state: nothing})
        done = session.generate(params(4))
        assert done.samples[0].token_ids == [2, 3, 4, 5] and done.samples[0].inserted == [(2, nothing)]

    def test_a_fork_has_the_same_producers(self, counting):
        session = counting.session([1], producers={3: lambda state: [20]})
        twin = session.fork()
        for one in (session, twin):
            assert one.generate(params(4)).samples[0].token_ids == [2, 3, 21, 22]

    def test_what_is_counted_is_counted_over_all_legs(self, t_model, engine_for):
        engine = engine_for(t_model)
        alone = engine.session(ids(9)).generate(params(6)).samples[0].token_ids
        marker = alone[2]
        session = engine.session(ids(9), producers={marker: lambda state: ids(5, state.calls)}, salt="x")
        done = session.generate(params(9, logprobs=1, prompt_logprobs=0))
        (sample,) = done.samples
        assert len(sample.token_ids) == len(sample.logprobs) == 9 and len(done.prompt_logprobs) == 9
        assert all(token in entry for token, entry in zip(sample.token_ids, sample.logprobs, strict=True))
        assert sample.decode_steps == 9 - 1 - len(sample.inserted) and sample.kv_bytes_read > 0
        assert done.cached_tokens == 0


class TestImages:
    @pytest.fixture
    def served(self, t_model, poison_pool):
        def build(**fields):
            return image_engine(t_model, poison_pool, **fields)

        return build

    def by_hand(self, engine, tokens, marker, pictures):
        """Turns that end at the marker, with a picture appended after each."""
        session, pictures, new = engine.session([text(5), A]), iter(pictures), []
        while len(new) < tokens:
            new += session.generate(params(tokens - len(new), stop_token_ids=[marker])).samples[0].token_ids
            if new[-1] == marker and len(new) < tokens:
                session.append([next(pictures)])
        return new, session.tokens

    @pytest.mark.parametrize("fields", [{}, {"step_tokens": 5}, {"pool_tokens": 56}, {"prefix_cache": False}], ids=str)
    @pytest.mark.parametrize("lost", [False, True])
    def test_equal_turns_by_hand(self, lost, fields, served, drain, give_everything_up, assert_nothing_held):
        marker = served().session([text(5), A]).generate(params(4)).samples[0].token_ids[2]
        pictures = [Picture(30 + i, 3 + i % 5) for i in range(9)]
        wanted, history = self.by_hand(served(), 12, marker, pictures)
        engine = served(**fields)

        def produce(state):
            return pictures[state.calls]  # an item need not be in a list

        session = engine.session([text(5), A], producers={marker: produce})
        name = session.submit(params(12))
        beside = engine.submit([text(6, 3)], params(4))
        drained = drain(engine, lambda drained: give_everything_up(engine) if lost else None)
        assert drained.tokens_of(name) == wanted and session.tokens == history
        assert len(drained.tokens_of(beside)) == 4
        inserted = drained.completions[name].samples[0].inserted
        assert inserted and [item for _, item in inserted] == pictures[: len(inserted)]
        session.close()
        assert_nothing_held(engine)

    @pytest.mark.parametrize("chosen", [RANDOM, Lossless(RANDOM, 3)], ids=["shapes", "drafts"])
    def test_under_a_method_for_pages_of_one_size(self, chosen, served, assert_nothing_held):
        engine = served()
        marker = served().session([text(15)], method=chosen).generate(params(4)).samples[0].token_ids[2]
        session = engine.session([text(15)], method=chosen, producers={marker: lambda state: [A]})
        with pytest.raises(ValueError, match="chooses among pages of one size"):
            session.generate(params(6))
        session.close()
        assert_nothing_held(engine)

    def test_only_what_is_new_is_computed(self, served):
        engine = served()
        marker = served().session([text(5), A]).generate(params(4)).samples[0].token_ids[2]
        session = engine.session([text(5), A], producers={marker: lambda state: [Picture(30, 7)]})
        computed, schedule = [], engine._scheduler.schedule
        engine._scheduler.schedule = lambda: (computed.append((plan := schedule()).tokens), plan)[1]
        done = session.generate(params(5))
        assert done.samples[0].inserted[0][0] == 3
        assert [count for count in computed if count][:4] == [14, 1, 1, 8]  # the marker and the picture


class Gate:
    """A producer that waits."""

    def __init__(self, gives):
        self.gives, self.begun, self.open = gives, threading.Event(), threading.Event()

    def __call__(self, state):
        self.begun.set()
        assert self.open.wait(20)
        return self.gives


class TestBeside:
    def test_others_go_on_meanwhile(self, counting, drain):
        gate = Gate([20])
        session = counting.session([1], producers={3: gate})
        name = session.submit(params(4))
        other = counting.submit([1], params(9))
        got = []
        while len(got) < 9:
            got += [token for out in counting.step() if out.request_id == other for token in out.new_token_ids]
            counting.check()
        assert not gate.open.is_set() and counting.has_work()
        gate.open.set()
        assert drain(counting).completions[name].samples[0].token_ids == [2, 3, 21, 22]

    def test_a_step_that_has_nothing_else_to_do_waits(self, counting):
        gate = Gate([20])
        session = counting.session([1], producers={3: gate})
        threading.Thread(target=lambda: (gate.begun.wait(20), time.sleep(0.05), gate.open.set())).start()
        assert session.generate(params(4)).samples[0].token_ids == [2, 3, 21, 22]

    @pytest.mark.parametrize("how", ["abort", "close"])
    def test_an_end_while_a_producer_works(self, how, counting, drain, assert_idle):
        gate = Gate([20])
        session = counting.session([1], producers={3: gate})
        name = session.submit(params(9))
        while name not in counting._productions:
            counting.step()
        with pytest.raises(ValueError, match="is in use"):
            counting.submit([1], request_id=name)
        with pytest.raises(ValueError, match="under way"):
            session.append([4])
        counting.abort(name) if how == "abort" else session.close()
        done = drain(counting).completions[name]
        assert done.samples[0].token_ids == [2, 3] and done.samples[0].finish_reason == "abort" and done.error is None
        gate.open.set()
        if how == "abort":
            assert session.tokens == [1, 2, 3]
            assert session.generate(params(2)).samples[0].token_ids == [4, 5]
            session.close()
        assert_idle(counting)

    def test_an_interrupt_ends_the_turn(self, counting, monkeypatch, assert_idle):
        gate = Gate([20])
        session = counting.session([1], producers={3: gate})

        def interrupted(*args, **more):
            raise KeyboardInterrupt

        monkeypatch.setattr("octavo.core.engine.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(params(9))
        gate.open.set()
        assert session.tokens == [1, 2, 3] and not counting.has_work()
        session.close()
        assert_idle(counting)

    def test_no_thread_is_left_behind(self, make_chain, engine_for):
        before = set(threading.enumerate())
        engine = engine_for(make_chain(16))
        session = engine.session([1], producers={3: lambda state: None})
        assert set(threading.enumerate()) <= before
        session.generate(params(4))
        (thread,) = set(threading.enumerate()) - before
        del engine, session
        gc.collect()
        thread.join(10)
        assert not thread.is_alive()


def fails(error):
    def producer(state):
        raise error

    return producer


class TestErrors:
    @pytest.mark.parametrize(
        ("producer", "message"),
        [
            (fails(ValueError("no idea")), "^no idea$"),
            (fails(RuntimeError("boom")), r"a producer of the session failed: RuntimeError\('boom'\)"),
            (lambda state: [999], "token id 999 is outside the vocabulary"),
            (lambda state: 7, None),
            (lambda state: "text", "needs a tokenizer"),
            (lambda state: object(), "type object needs an encoder"),
            (lambda state: [4] * 300, "a prompt of 303 tokens and 1 new ones are 304 tokens, and a sequence may"),
        ],
    )
    def test_fail_their_own_turn(self, producer, message, counting, drain, assert_idle):
        session = counting.session([1], producers={3: producer})
        name = session.submit(SamplingParams(max_tokens=4))
        other = counting.submit([1], params(6))
        drained = drain(counting)
        done = drained.completions[name]
        assert drained.tokens_of(other) == [2, 3, 4, 5, 6, 7]
        if message is None:  # a token id by itself is an item of one
            assert done.samples[0].token_ids == [2, 3, 8, 9]
        else:
            assert done.samples[0].token_ids == [2, 3] and done.samples[0].finish_reason == "abort"
            with pytest.raises(ValueError, match=message):
                raise done.error
            assert session.tokens == [1, 2, 3]
            with pytest.raises(ValueError, match=message):
                counting.session([1], producers={3: producer}).generate(SamplingParams(max_tokens=4))
            while counting._scheduler.parked:
                counting._scheduler._reclaim()
        session.close()
        assert_idle(counting)

    @pytest.mark.parametrize(
        ("producers", "message"),
        [
            ({32: id}, "marker 32 is outside the vocabulary of 32"),
            ({-1: id}, "marker -1 is outside"),
            ({True: id}, "a token id or a text, got True"),
            ({2.0: id}, "a token id or a text, got 2.0"),
            ({"": id}, "a token id or a text, got ''"),
            ({"x": id}, "'x' is text and needs a tokenizer"),
            ({5: None}, "the producer of 5 cannot be called: None"),
        ],
    )
    def test_registrations(self, producers, message, counting):
        with pytest.raises(ValueError, match=message):
            counting.session([1], producers=producers)

    def test_a_marker_that_ends_sequences(self, make_chain, engine_for):
        with pytest.raises(ValueError, match="marker 4 ends sequences"):
            engine_for(make_chain(16, eos=4)).session([1], producers={4: id})
