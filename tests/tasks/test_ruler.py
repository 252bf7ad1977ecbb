"""The RULER-like suite: what is planted is where it says, is there once, and the prompt fills its length."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.scripts.schema_quality import RULER_TASKS
from octavo.scripts.tasks import filler, ruler
from octavo.scripts.tasks.conversation import conversation
from octavo.scripts.tasks.question_prompts import answer_ids, longest, question_prompt


class Tokenizer:
    """One token a letter or sign; 1 begins a text. Its chat template puts <u> around what the user says."""

    chat_template = "there is one"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<u>{message['content']}</u>" for message in messages) + "<a>"


def text(ids: list[int]) -> str:
    return "".join(chr(token) for token in ids if token != 1)


def test_the_settings_know_all_tasks() -> None:
    assert tuple(ruler.TASKS) == RULER_TASKS


@pytest.mark.parametrize("task", RULER_TASKS)
class TestEveryTask:
    @given(words=st.integers(0, 400), depth=st.one_of(st.none(), st.floats(0, 1)), seed=st.text(max_size=3))
    def test_a_puzzle_is_its_arguments(self, task: str, words: int, depth: float | None, seed: str) -> None:
        one, same = (ruler.puzzle(task, words, depth, seed) for _ in range(2))
        size = max(words, one.text.least_words)
        assert one.text(size) == same.text(size)
        assert (one.question, one.cue, one.gold, one.answers) == (same.question, same.cue, same.gold, same.answers)
        assert one.answers != ruler.puzzle(task, words, depth, f"other {seed}").answers

    @given(words=st.integers(40, 400), seed=st.integers())
    def test_the_text_holds_every_answer_and_the_question_none(self, task: str, words: int, seed: int) -> None:
        puzzle = ruler.puzzle(task, words, None, str(seed))
        found = puzzle.text(words)
        assert all(found.count(answer) >= 1 for answer in puzzle.answers)
        assert len(set(puzzle.answers)) == len(puzzle.answers)
        assert ruler.string_match(puzzle.question + puzzle.cue, puzzle.answers) == 0
        assert ruler.string_match(puzzle.gold, puzzle.answers) == 100

    @pytest.mark.parametrize("chat", [False, True])
    @pytest.mark.parametrize("length", [700, 701, 2000])
    def test_a_prompt_fills_its_length(self, task: str, length: int, chat: bool) -> None:
        puzzle = ruler.puzzle(task, length, 0.5, "0")
        tokenizer = Tokenizer()
        made, words = longest(
            lambda words: question_prompt(tokenizer, puzzle.text(words), puzzle.question, puzzle.cue, chat=chat),
            puzzle.text.least_words,
            length,
            length,
        )
        assert length - 12 < len(made.ids) <= length  # "neighbour" and a space, or the end of a sentence
        assert puzzle.text(words) in text(made.context) and puzzle.cue in text(made.question)


@pytest.mark.parametrize("task", [task for task in RULER_TASKS if task.startswith("needle")])
@given(depth=st.floats(0, 1), words=st.integers(0, 300))
def test_the_asked_needle_lies_at_its_depth(task: str, depth: float, words: int) -> None:
    puzzle = ruler.puzzle(task, 300, depth, "0")
    sentences = re.findall(r"[^.]+\.", puzzle.text(words))
    hay = [sentence for sentence in sentences if not re.search(r"\d", sentence)]
    (place,) = [number for number, sentence in enumerate(sentences) if puzzle.answers[0] in sentence]
    before = [sentence for sentence in sentences[:place] if sentence in hay]
    assert len(before) == round(depth * len(hay))
    assert all(puzzle.text(words).count(answer) == 1 for answer in puzzle.answers)


@given(words=st.integers(0, 300), depth=st.one_of(st.none(), st.floats(0, 1)), seed=st.integers())
def test_variables_are_assigned_before_they_are_used(words: int, depth: float | None, seed: int) -> None:
    puzzle = ruler.puzzle("variable_tracking", 300, depth, str(seed))
    said = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", puzzle.text(words))
    assert [name for name, _ in said] == list(puzzle.answers) and len(said) == ruler.HOPS + 1
    assert said[0][1] in puzzle.question
    assert [source for _, source in said[1:]] == list(puzzle.answers[:-1])


@given(st.integers(ruler.WordList.least_words, 5000))
def test_frequent_words_are_more_frequent_than_all_others(words: int) -> None:
    puzzle = ruler.puzzle("frequent_words", words, None, "0")
    listed = puzzle.text(words).split()
    counts = {word: listed.count(word) for word in puzzle.answers}
    others = max(listed.count(word) for word in set(listed) - set(counts))
    assert len(listed) == words
    first, second, third = counts.values()
    assert first > second > third > others


def test_only_what_is_right_matches() -> None:
    assert ruler.string_match("It is 12, and ABC.", ["12", "abc", "7", "x"]) == 50


@given(words=st.integers(0, 200), seed=st.integers())
def test_filler_has_so_many_words_and_no_digit(words: int, seed: int) -> None:
    cut = filler.first_words(filler.sentences(Random(seed), 200), words)
    assert sum(len(sentence.split()) for sentence in cut) == words
    assert all(sentence.endswith(".") for sentence in cut) and not re.search(r"\d", " ".join(cut))


def test_names_share_no_word_with_each_other_or_the_filler() -> None:
    named = " ".join(filler.names(Random(0), 10)).split()
    said = set(" ".join(filler.sentences(Random(0), 5000)).lower().replace(".", "").split())
    assert len(set(named)) == 20 and not said & set(named)


@given(turns=st.integers(1, 10), words=st.integers(0, 300), seed=st.text(max_size=3))
def test_a_conversation_holds_the_answer_to_every_turn_once(turns: int, words: int, seed: str) -> None:
    talk = conversation(300, turns, seed)
    found = talk.text(words)
    assert len(talk.turns) == turns == len({turn.answer for turn in talk.turns})
    assert all(found.count(f"{turn.cue} {turn.answer}.") == found.count(turn.answer) == 1 for turn in talk.turns)


class TestPrompts:
    def test_plain(self) -> None:
        made = question_prompt(Tokenizer(), "Text.", "Who?", "It is", chat=False)
        assert made.context == [1, *map(ord, "Text.")]
        assert text(made.question) == "\n\nQuestion: Who?\nAnswer: It is" and 1 not in made.question
        assert made.ids == made.context + made.question
        assert answer_ids(Tokenizer(), " x") == [32, 120]

    def test_chat(self) -> None:
        made = question_prompt(Tokenizer(), "Text.", "Who?", "It is", chat=True)
        assert text(made.context) == "<u>Text." and text(made.question) == "\n\nQuestion: Who?</u><a>It is"
        assert 1 not in made.ids  # a template says itself how a text begins

    def test_no_template(self) -> None:
        bare = Tokenizer()
        bare.chat_template = ""
        with pytest.raises(ValueError, match="chat=true needs a tokenizer with a chat template"):
            question_prompt(bare, "Text.", "Who?", "It is", chat=True)

    def test_no_room(self) -> None:
        with pytest.raises(ValueError, match="at most 20 tokens is wanted, and the shortest has 35"):
            longest(lambda n: question_prompt(Tokenizer(), "a " * n, "Who?", "It is", chat=False), 2, 9, 20)
