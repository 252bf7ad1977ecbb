"""Text as it streams: certain characters only, stop strings wherever token borders fall."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core import SamplingParams
from octavo.core.serving.detokenizer import Detokenizer

EURO, FAMILY = "€".encode(), "👨‍👩".encode()


class Bytes:
    """Decodes token i as the i-th piece; nothing else of a tokenizer is used."""

    def __init__(self, pieces):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=None):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def stream(pieces, stop=(), include_stop=False, min_tokens=0):
    """News of each token, then what the end brings; stops where a stop string is complete."""
    detokenizer = Detokenizer(Bytes(pieces), tuple(stop), include_stop)
    news = []
    for token in range(len(pieces)):
        news.append(detokenizer.add(token, search=token + 1 >= min_tokens))
        if detokenizer.stopped:
            break
    news.append(detokenizer.finish())
    assert "".join(news) == detokenizer.text
    return news, detokenizer


class TestDetokenizer:
    @pytest.mark.parametrize(
        "pieces, news",
        [
            (["a", "b"], ["a", "b", ""]),
            (["", "a", ""], ["", "a", "", ""]),
            ([EURO[:1], EURO[1:2], EURO[2:], "x"], ["", "", "€", "x", ""]),
            (["a" + "é", EURO[:2], EURO[2:] + b"!"], ["aé", "", "€!", ""]),
            ([b"a" + EURO[:1], EURO[1:] + b"b"], ["", "a€b", ""]),
            (["a", EURO[:2]], ["a", "", "\ufffd"]),
            ([FAMILY[:5], FAMILY[5:]], ["", "👨‍👩", ""]),
            (["a", b"\xff", "b"], ["a", "", "\ufffdb", ""]),
        ],
        ids=["plain", "empty", "split_in_three", "two_borders", "mixed", "never_finished", "joined", "invalid"],
    )
    def test_characters_across_tokens(self, pieces, news):
        assert stream(pieces)[0] == news

    @pytest.mark.parametrize(
        "pieces, stop, include, news",
        [
            (["x", "END", "y"], ["END"], False, ["x", "", ""]),
            (["x", "END", "y"], ["END"], True, ["x", "END", ""]),
            (["x", "E", "N", "D"], ["END"], False, ["x", "", "", "", ""]),
            (["x", "E", "N", "D"], ["END"], True, ["x", "", "", "END", ""]),
            (["xE", "NDy"], ["END"], False, ["x", "", ""]),
            (["xE", "NDy"], ["END"], True, ["x", "END", ""]),
            (["E", "E", "ND"], ["END"], False, ["", "E", "", ""]),
            (["E", "N", "x"], ["END"], False, ["", "", "ENx", ""]),
            (["E", "N"], ["END"], False, ["", "", "EN"]),
            (["aab", "aac"], ["aabaac"], False, ["", "", ""]),
            (["a b", " c"], ["b c", "b"], False, ["a ", ""]),
            (["ab"], ["b", "ab"], False, ["", ""]),
            (["\n", "\n", "x"], ["\n\n"], False, ["", "", ""]),
            ([EURO[:2], EURO[2:] + b"x"], ["€"], False, ["", "", ""]),
            (["one two", " three"], ["wo", "three"], False, ["one t", ""]),
        ],
    )
    def test_stop_strings(self, pieces, stop, include, news):
        got, detokenizer = stream(pieces, stop, include)
        assert got == news
        assert detokenizer.stopped == any(text in Bytes(pieces).decode(range(len(pieces))) for text in stop)

    def test_a_tokenizer_that_drops_the_space_of_its_first_token(self):
        class Words(Bytes):
            def decode(self, ids, **kwargs):
                return super().decode(ids).removeprefix(" ")

        pieces = [" one", " two", " ", EURO[:2], EURO[2:], *[" more"] * 20]
        detokenizer = Detokenizer(Words(pieces), (), False)
        news = [detokenizer.add(token, search=True) for token in range(len(pieces))] + [detokenizer.finish()]
        assert "".join(news) == detokenizer.text == Words(pieces).decode(range(len(pieces)))

    def test_nothing_is_searched_below_the_minimum_length(self):
        assert stream(["END", "x", "END", "y"], ["END"], min_tokens=3)[0] == ["END", "x", "", ""]

    def test_a_stop_string_may_begin_below_the_minimum_length(self):
        assert stream(["E", "ND"], ["END"], min_tokens=2)[0] == ["", "", ""]

    @settings(max_examples=400)
    @given(
        text=st.text(alphabet="ab€é ", min_size=1, max_size=14),
        cuts=st.sets(st.integers(0, 40)),
        stop=st.lists(st.text(alphabet="ab€é ", min_size=1, max_size=4), max_size=2),
        include=st.booleans(),
    )
    def test_any_cut_gives_the_same_text(self, text, cuts, stop, include):
        data = text.encode()
        borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        pieces = [data[a:b] for a, b in pairwise(borders)]
        news, detokenizer = stream(pieces, stop, include)
        # The stop string that is complete after the fewest tokens; among several, the one that begins first.
        expected = text
        for count in range(1, len(pieces) + 1):
            known = b"".join(pieces[:count]).decode(errors="replace").rstrip("\ufffd")
            if not b"".join(pieces[:count]).decode(errors="replace").endswith("\ufffd"):
                found = [(known.find(s), known.find(s) + len(s)) for s in stop if s in known]
                if found:
                    start, end = min(found)
                    expected = known[: end if include else start]
                    break
        assert detokenizer.text == expected and "".join(news) == expected


class TestStreams:
    """Through the engine: the model counts through the pieces of a text."""

    def run(self, pieces, make_chain, engine_for, piece_tokenizer, **params):
        tokenizer = piece_tokenizer(["<s>", *pieces], specials=[0])
        engine = engine_for(make_chain(max(8, len(pieces) + 1)), tokenizer)
        request_id = engine.submit([0], SamplingParams(**{"max_tokens": len(pieces), "ignore_eos": True, **params}))
        news, completion = [], None
        while engine.has_work():
            for out in engine.step():
                assert out.request_id == request_id and completion is None
                news.append(out.new_text)
                completion = out.completion
            engine.check()
        sample = completion.samples[0]
        assert "".join(news) == sample.text
        return news, sample

    def test_news_add_up_and_stop_strings_span_tokens(self, make_chain, engine_for, piece_tokenizer):
        pieces = ["Hel", "lo ", EURO[:2], EURO[2:], " wor", "ld. E", "N", "D of", " it"]
        news, sample = self.run(pieces, make_chain, engine_for, piece_tokenizer, stop=["END"])
        assert news == ["Hel", "lo ", "", "€", " wor", "ld. ", "", ""]
        assert (sample.text, sample.finish_reason, len(sample.token_ids)) == ("Hello € world. ", "stop", 8)

    def test_include_stop(self, make_chain, engine_for, piece_tokenizer):
        _, sample = self.run(["a", "b;", "c"], make_chain, engine_for, piece_tokenizer, stop=";", include_stop=True)
        assert (sample.text, sample.finish_reason) == ("ab;", "stop")

    def test_what_was_held_back_comes_at_the_end(self, make_chain, engine_for, piece_tokenizer):
        news, sample = self.run(["a", "E", "N"], make_chain, engine_for, piece_tokenizer, stop=["END"])
        assert news == ["a", "", "EN"] and sample.finish_reason == "length"

    def test_a_stop_id_gives_no_text_unless_it_is_included(self, make_chain, engine_for, piece_tokenizer):
        args = (["a", "b", "c"], make_chain, engine_for, piece_tokenizer)
        assert self.run(*args, stop_token_ids=[2])[1].text == "a"
        assert self.run(*args, stop_token_ids=[2], include_stop=True)[1].text == "ab"
        assert self.run(*args, stop_token_ids=[2])[1].token_ids == [1, 2]

    def test_an_abort_gives_out_what_was_held_back(self, make_chain, engine_for, piece_tokenizer):
        tokenizer = piece_tokenizer(["<s>", "a", "E", "N", "x", "y", "z", "!"], specials=[0])
        engine = engine_for(make_chain(8), tokenizer)
        engine.submit([0], SamplingParams(max_tokens=7, stop=["END"]), request_id="a")
        engine.step()
        engine.step()
        engine.abort("a")
        (news,) = engine.step()
        assert (news.new_text, news.completion.text, news.finish_reason) == ("E", "aE", "abort")

    def test_samples_stream_apart(self, make_scripted, engine_for, piece_tokenizer, drain):
        import torch

        model = make_scripted(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))
        tokenizer = piece_tokenizer([chr(97 + i) for i in range(16)])
        engine = engine_for(model, tokenizer)
        engine.submit("abc", SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=9, stop="ab"), request_id="it")
        drained = drain(engine)
        for number, sample in enumerate(drained.completions["it"].samples):
            assert drained.text["it", number] == sample.text
            assert sample.text == tokenizer.decode(sample.token_ids).split("ab")[0]

    def test_text_prompts_get_the_special_tokens_once(self, t_model, make_llama, engine_for, byte_tokenizer):
        engine = engine_for(make_llama(258), byte_tokenizer)
        completion = engine.generate(["hi", ["h", "i"], [256, 104, 105]], SamplingParams(max_tokens=2))
        assert [c.prompt_token_ids for c in completion] == [[256, 104, 105]] * 3
        assert len({tuple(c.samples[0].token_ids) for c in completion}) == 1
