"""Sessions: turns on kept pages equal one long request, forks share, idle pages never stand in the way."""

import random

import pytest
import torch

from octavo.core import CapacityError, SamplingParams

from ..cells import covering

GREEDY = {"ignore_eos": True}


def tokens(n, seed=0, low=3, high=128):
    return random.Random(seed).choices(range(low, high), k=n)


def cold(engine_for, model, prompt, **params):
    return engine_for(model).generate([prompt], SamplingParams(**{**GREEDY, **params}))[0].samples[0].token_ids


def turn(session, appended=(), **params):
    if appended:
        session.append(list(appended))
    return session.generate(SamplingParams(**{**GREEDY, **params}))


class TestTurns:
    @pytest.mark.parametrize("first, new, appended", [(6, 3, 5), (8, 1, 1), (4, 4, 4), (5, 4, 0), (1, 1, 1), (7, 9, 2)])
    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_turns_equal_one_long_request(self, t_model, engine_for, assert_idle, first, new, appended, prefix_cache):
        engine = engine_for(t_model, prefix_cache=prefix_cache)
        session = engine.session(tokens(first))
        history, stored = tokens(first), 0
        for number in range(3):
            added = tokens(appended, 10 + number) if number else []
            history += added
            completion = turn(session, added, max_tokens=new)
            engine.check()
            assert completion.prompt_token_ids == history
            assert completion.samples[0].token_ids == cold(engine_for, t_model, history, max_tokens=new)
            assert completion.cached_tokens == stored
            history += completion.samples[0].token_ids
            stored = len(history) - 1
            assert session.tokens == history
        session.close()
        assert_idle(engine)

    def test_pages_stay_and_only_new_tokens_are_computed(self, t_model, engine_for):
        engine = engine_for(t_model)
        session = engine.session(tokens(9))
        turn(session, max_tokens=2)
        assert engine.stats().pages_held == 3
        (parked,) = engine._scheduler.parked
        before = parked.table.pages().tolist()
        session.append(tokens(3, 1))
        session.submit(SamplingParams(max_tokens=1))
        assert engine._scheduler.schedule().tokens == 4  # the token that was drawn last, and the three new ones
        assert engine._scheduler.running[0].table.pages()[:3].tolist() == before

    def test_a_turn_with_nothing_new_to_say(self, t_model, engine_for, assert_idle):
        engine = engine_for(t_model)
        session = engine.session(tokens(5))
        first, second = turn(session, max_tokens=3), turn(session, max_tokens=3)
        both = cold(engine_for, t_model, tokens(5), max_tokens=6)
        assert first.samples[0].token_ids + second.samples[0].token_ids == both
        session.close()
        assert_idle(engine)

    def test_an_ending_is_kept_in_the_history(self, make_chain, engine_for):
        session = engine_for(make_chain(16, eos=4)).session([1])
        assert session.generate(SamplingParams(max_tokens=9)).samples[0].token_ids == [2, 3, 4]
        assert session.tokens == [1, 2, 3, 4]

    def test_turns_as_requests_among_others(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, step_tokens=3)
        session = engine.session(tokens(5))
        mine = session.submit(SamplingParams(max_tokens=4, **GREEDY))
        other = engine.submit(tokens(6, 1), SamplingParams(max_tokens=4, **GREEDY))
        drained = drain(engine)
        assert drained.tokens_of(mine) == cold(engine_for, t_model, tokens(5), max_tokens=4)
        assert drained.tokens_of(other) == cold(engine_for, t_model, tokens(6, 1), max_tokens=4)
        assert session.tokens == tokens(5) + drained.tokens_of(mine)
        session.close()
        assert_idle(engine)

    def test_prompt_logprobs_of_a_later_turn_are_complete(self, t_model, engine_for):
        session = engine_for(t_model).session(tokens(9))
        turn(session, max_tokens=2)
        completion = turn(session, tokens(2, 1), max_tokens=1, prompt_logprobs=0)
        expected = engine_for(t_model).generate([session.tokens[:-1]], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert completion.prompt_logprobs[0] is None and len(completion.prompt_logprobs) == 13
        for got, wanted in zip(completion.prompt_logprobs[1:], expected[0].prompt_logprobs[1:], strict=True):
            assert got == pytest.approx(wanted, abs=1e-4)

    @pytest.mark.parametrize("steps", [0, 1, 2, 3])
    def test_an_aborted_turn_keeps_what_it_had(self, t_model, engine_for, assert_idle, steps):
        engine = engine_for(t_model, step_tokens=4)
        session = engine.session(tokens(6))
        request_id = session.submit(SamplingParams(max_tokens=9, **GREEDY))
        for _ in range(steps):
            engine.step()
        engine.abort(request_id)
        engine.check()
        (news,) = engine.step()
        kept = news.completion.samples[0].token_ids
        assert news.finish_reason == "abort" and len(kept) == max(0, steps - 1)
        assert session.tokens == tokens(6) + kept
        completion = turn(session, max_tokens=4)
        assert completion.samples[0].token_ids == cold(engine_for, t_model, tokens(6) + kept, max_tokens=4)
        session.close()
        assert_idle(engine)


class TestStopStrings:
    """The model counts through pieces of text."""

    def session(self, make_chain, engine_for, piece_tokenizer, pieces):
        tokenizer = piece_tokenizer(["<s>", *pieces], specials=[0])
        return engine_for(make_chain(len(pieces) + 1), tokenizer, page_tokens=2).session([0])

    @pytest.mark.parametrize(
        "pieces, stop, kept",
        [
            (["a", "b", "\n", "c", "d", "e", "f", "g"], "\n", [1, 2]),
            (["a", "b", "E", "N", "D", "c", "d", "e"], "END", [1, 2]),
            (["a", "bE", "ND", "b", "c", "d", "e", "f"], "END", [1, 4]),
            (["E", "ND", "a", "b", "c", "d", "e", "f"], "END", []),
        ],
        ids=["a_token", "three_tokens", "in_a_token", "at_once"],
    )
    def test_a_cut_stop_string_is_not_kept(self, make_chain, engine_for, piece_tokenizer, pieces, stop, kept):
        session = self.session(make_chain, engine_for, piece_tokenizer, pieces)
        engine = session._engine
        completion = session.generate(SamplingParams(max_tokens=8, stop=stop))
        engine.check()
        assert completion.samples[0].finish_reason == "stop"
        assert session.tokens == [0, *kept]
        text = engine.tokenizer.decode(session.tokens[1:], skip_special_tokens=True)
        assert text == completion.text == "".join(pieces).split(stop)[0]
        again = session.generate(SamplingParams(max_tokens=1))  # nothing was appended in between
        assert again.samples[0].token_ids == [session.tokens[-2] + 1]
        session.close()
        engine.check()
        assert engine.stats().pages_held == 0

    def test_an_included_stop_string_is_kept(self, make_chain, engine_for, piece_tokenizer):
        session = self.session(make_chain, engine_for, piece_tokenizer, ["a", "b", "E", "N", "D", "c", "d", "e"])
        session.generate(SamplingParams(max_tokens=8, stop="END", include_stop=True))
        assert session.tokens == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("page_tokens, cut", covering([1, 2, 4, 16], [1, 2, 3, 5]))
    def test_after_a_cut_the_model_sees_the_kept_history_only(
        self, make_llama, engine_for, piece_tokenizer, assert_idle, page_tokens, cut
    ):
        tokenizer, model = piece_tokenizer([chr(33 + i) for i in range(64)]), make_llama(64)
        params = {"temperature": 1.0, "seed": 5, "max_tokens": 9, **GREEDY}
        prompt = tokens(9, 3, 0, 64)
        free = engine_for(model, tokenizer).generate([prompt], SamplingParams(**params))[0].samples[0]
        stop = free.text[cut : cut + 3]
        assert free.text.find(stop) == cut
        engine = engine_for(model, tokenizer, page_tokens=page_tokens)
        session = engine.session(prompt)
        first = session.generate(SamplingParams(stop=stop, **params))
        assert first.text == free.text[:cut] and session.tokens == prompt + free.token_ids[:cut]
        history = session.tokens + tokens(4, 4, 0, 64)
        session.append(tokens(4, 4, 0, 64))
        later = session.generate(SamplingParams(max_tokens=1, logprobs=64))
        engine.check()
        expected = engine_for(model, tokenizer).generate([history], SamplingParams(max_tokens=1, logprobs=64))[0]
        assert later.samples[0].logprobs[0] == pytest.approx(expected.samples[0].logprobs[0], abs=1e-3)
        # The pages of the turn as it was before the cut are still what they say they are.
        uncut = prompt + free.token_ids[: cut + 3]
        again = engine.generate([uncut], SamplingParams(max_tokens=1, logprobs=64))[0].samples[0]
        expected = engine_for(model, tokenizer).generate([uncut], SamplingParams(max_tokens=1, logprobs=64))[0]
        assert again.logprobs[0] == pytest.approx(expected.samples[0].logprobs[0], abs=1e-3)
        session.close()
        assert_idle(engine)


class TestForks:
    def test_a_fork_shares_every_page(self, t_model, engine_for, assert_idle):
        engine = engine_for(t_model)
        session = engine.session(tokens(9))
        turn(session, max_tokens=2)
        twin = session.fork()
        engine.check()
        assert engine.stats().pages_held == 3
        history = session.tokens.copy()
        for number, one in enumerate((session, twin)):
            got = turn(one, tokens(2, 5 + number), max_tokens=5).samples[0].token_ids
            assert got == cold(engine_for, t_model, history + tokens(2, 5 + number), max_tokens=5)
        assert engine.stats().copies == 1
        assert session.tokens != twin.tokens
        session.close()
        assert turn(twin, tokens(1), max_tokens=2).cached_tokens == len(twin.tokens) - 2 - 1 - 1
        twin.close()
        assert_idle(engine)

    def test_forks_of_forks_and_of_a_fresh_session(self, t_model, engine_for, assert_idle):
        engine = engine_for(t_model)
        first = engine.session(tokens(6))
        second = first.fork()
        turn(first, max_tokens=3)
        third = first.fork().fork()
        outputs = [turn(one, [9], max_tokens=4).samples[0].token_ids for one in (first, second, third)]
        assert outputs[0] == outputs[2] == cold(engine_for, t_model, third.tokens[:10], max_tokens=4)
        assert outputs[1] == cold(engine_for, t_model, [*tokens(6), 9], max_tokens=4)
        for sequence in list(engine._scheduler.parked):
            engine._scheduler.remove(sequence)
        assert_idle(engine)

    def test_forks_run_in_one_batch(self, t_model, engine_for, drain):
        engine = engine_for(t_model)
        session = engine.session(tokens(9))
        turn(session, max_tokens=2)
        forks = [session.fork() for _ in range(4)]
        for number, fork in enumerate(forks):
            fork.append([10 + number])
        ids = [fork.submit(SamplingParams(max_tokens=5, **GREEDY)) for fork in forks]
        drained = drain(engine)
        for number, request_id in enumerate(ids):
            expected = cold(engine_for, t_model, [*session.tokens, 10 + number], max_tokens=5)
            assert drained.tokens_of(request_id) == expected


class TestIdlePages:
    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_idle_sessions_never_block(self, t_model, engine_for, assert_idle, prefix_cache):
        engine = engine_for(t_model, pool_tokens=40, prefix_cache=prefix_cache)
        session = engine.session(tokens(15))
        turn(session, max_tokens=3)
        assert engine.stats().pages_held == 5
        big = engine.generate([tokens(36, 1)], SamplingParams(max_tokens=4, **GREEDY))[0]
        assert big.samples[0].token_ids == cold(engine_for, t_model, tokens(36, 1), max_tokens=4)
        assert engine.stats().preemptions == 0 and engine.stats().pages_held == 0
        history = [*session.tokens, 7]
        got = turn(session, [7], max_tokens=4)
        assert got.samples[0].token_ids == cold(engine_for, t_model, history, max_tokens=4)
        session.close()
        assert_idle(engine)

    def test_the_longest_idle_session_goes_first(self, t_model, engine_for):
        engine = engine_for(t_model, pool_tokens=40)
        sessions = [engine.session(tokens(11, number)) for number in range(3)]
        for session in sessions:
            turn(session, max_tokens=2)
        assert engine.stats().pages_held == 9
        engine.generate([tokens(9, 9)], SamplingParams(max_tokens=1))
        alive = [session._parked in engine._scheduler.parked for session in sessions]
        assert alive == [False, True, True]

    def test_a_running_request_takes_idle_pages_before_it_preempts(self, t_model, engine_for, drain):
        engine = engine_for(t_model, pool_tokens=40)
        session = engine.session(tokens(11))
        turn(session, max_tokens=2)
        for number in range(2):
            engine.submit(tokens(8, number + 1), SamplingParams(max_tokens=9, **GREEDY))
        drain(engine)
        assert engine.stats().preemptions == 0 and session._parked not in engine._scheduler.parked

    def test_a_turn_that_finds_no_place_waits(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, max_seqs=1)
        session = engine.session(tokens(9))
        turn(session, max_tokens=2)
        history = session.tokens
        engine.submit(tokens(5, 1), SamplingParams(max_tokens=4, **GREEDY), request_id="other")
        engine.step()
        request_id = session.submit(SamplingParams(max_tokens=4, **GREEDY))
        drained = drain(engine)
        assert drained.order == ["other", request_id]
        assert drained.tokens_of(request_id) == cold(engine_for, t_model, history, max_tokens=4)
        session.close()
        assert_idle(engine)

    def test_a_preempted_turn_goes_on(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model, pool_tokens=40)
        session = engine.session(tokens(9))
        turn(session, max_tokens=2)
        history = session.tokens
        request_id = session.submit(SamplingParams(max_tokens=12, **GREEDY))
        engine.step()
        engine.submit(tokens(34, 1), SamplingParams(max_tokens=2), priority=1)
        drained = drain(engine)
        assert engine.stats().preemptions == 1
        assert drained.tokens_of(request_id) == cold(engine_for, t_model, history, max_tokens=12)
        session.close()
        assert_idle(engine)


class TestErrors:
    def test_one_turn_at_a_time(self, t_model, engine_for, drain):
        engine = engine_for(t_model)
        session = engine.session(tokens(5))
        request_id = session.submit(SamplingParams(max_tokens=2))
        for call in (session.submit, session.generate, session.fork, lambda: session.append([5])):
            with pytest.raises(ValueError, match=f"under way as request '{request_id}'"):
                call()
        drain(engine)
        session.append([5])

    def test_closed(self, t_model, engine_for, assert_idle):
        engine = engine_for(t_model)
        session = engine.session(tokens(5))
        turn(session, max_tokens=2)
        session.close()
        session.close()
        for call in (session.submit, session.generate, session.fork, lambda: session.append([5])):
            with pytest.raises(ValueError, match="the session is closed"):
                call()
        assert_idle(engine)

    @pytest.mark.parametrize("steps", [0, 1, 2])
    def test_closing_aborts_the_turn(self, t_model, engine_for, drain, assert_idle, steps):
        engine = engine_for(t_model)
        session = engine.session(tokens(5))
        request_id = session.submit(SamplingParams(max_tokens=9, **GREEDY))
        for _ in range(steps):
            engine.step()
        session.close()
        completion = drain(engine).completions[request_id]
        assert completion.samples[0].finish_reason == "abort" and len(completion.samples[0].token_ids) == steps
        assert_idle(engine)

    def test_bad_turns_leave_the_session_usable(self, t_model, engine_for, assert_idle):
        engine = engine_for(t_model, max_model_tokens=16)
        session = engine.session()
        with pytest.raises(ValueError, match="the session is empty"):
            session.generate()
        with pytest.raises(ValueError, match="token id 999"):
            session.append([5, 999])
        with pytest.raises(ValueError, match="is empty"):
            session.append([])
        session.append(tokens(14))
        with pytest.raises(ValueError, match="one sample, got n=2"):
            session.generate(SamplingParams(n=2))
        with pytest.raises(CapacityError, match="14 tokens and 3 new ones are 17 tokens"):
            session.generate(SamplingParams(max_tokens=3, min_tokens=3))
        assert turn(session, max_tokens=2).samples[0].token_ids == cold(engine_for, t_model, tokens(14), max_tokens=2)
        with pytest.raises(CapacityError, match="16 tokens and 1 new"):
            session.generate()
        assert len(session.tokens) == 16
        session.close()
        assert_idle(engine)

    def test_roles_need_a_chat_template(self, t_model, make_llama, engine_for, byte_tokenizer):
        with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
            engine_for(t_model).session().append("hi", role="user")
        with pytest.raises(ValueError, match="chat template"):
            engine_for(make_llama(258), byte_tokenizer).session().append("hi", role="user")


class TestChat:
    def test_messages_go_through_the_template(self, make_scripted, engine_for, piece_tokenizer):
        letters = [chr(97 + i) for i in range(26)]
        tokenizer = piece_tokenizer([*letters, "<", ">", "|", "</s>"], specials=[29], eos=29)
        tokenizer.chat_template = "yes"

        def apply(messages, tokenize, add_generation_prompt):
            text = "".join(f"<{m['role'][0]}>{m['content']}|" for m in messages)
            return text + ("<a>" if add_generation_prompt else "")

        tokenizer.apply_chat_template = apply
        counting = torch.eye(30).roll(1, 1)
        counting[27] = torch.eye(30)[3]  # after ">" comes "d"
        session = engine_for(make_scripted(10 * counting), tokenizer).session()
        session.append("hello", role="user")
        assert tokenizer.decode(session.tokens) == "<u>hello|<a>"
        answer = session.generate(SamplingParams(max_tokens=3, ignore_eos=True)).text
        assert answer == "def"
        session.append("more", role="user")
        assert tokenizer.decode(session.tokens) == f"<u>hello|<a>{answer}|<u>more|<a>"
