"""Prompts as users give them, read into token ids or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Number
from threading import Lock
from typing import Any, NamedTuple

from octavo.core.encoding.items import IMAGE, ItemReader
from octavo.core.interfaces import SegmentEncoder
from octavo.core.memory.page_layout import TEXT, Segment

_NO_ITEMS = (str, Number, type(None))

Prompt = str | Sequence[Any]
"""A string, a list of token ids, or a list of strings, which are joined where they meet, of token segments, and of
whatever the engine's encoder takes."""


@dataclass(frozen=True)
class TokenSegment:
    """A stretch of a prompt that gets pages of its own; ``kind`` names their policy in
    ``EngineConfig.page_policies``."""

    kind: str
    token_ids: Sequence[int]


class ReadPrompt(NamedTuple):
    """A prompt's tokens, and the segments that they make up; none where all of it is one text."""

    tokens: list[int]
    segments: list[Segment]


class PromptReader:
    """Reads prompts for one tokenizer, vocabulary, and encoder, if there is one; a step computes ``step_tokens``. For
    several threads at once."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, encoder: SegmentEncoder | None = None, step_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._tokenizing = Lock()  # few tokenizers are made for several threads
        self._vocab_size = vocab_size
        self._items = None if encoder is None else ItemReader(IMAGE, encoder, vocab_size, step_tokens)

    def read(self, prompt: Prompt, *, continues: bool = False) -> list[int]:
        """Token ids of a prompt; a text that ``continues`` another gets no special tokens.

        Raises:
            ValueError: not a prompt, empty, an id outside the vocabulary, or text without a tokenizer.
        """
        if isinstance(prompt, str):
            ids = self._encode(prompt, continues)
        elif isinstance(prompt, list | tuple):
            if any(issubclass(kind, str) for kind in _kinds(prompt)):
                ids = self._encode("".join(map(_text, prompt)), continues)
            else:
                ids = self._tokens(prompt)
        else:
            raise ValueError(
                f"a prompt is a string or a list of token ids, got {type(prompt).__name__}: {prompt!r:.80}"
            )
        if not ids:
            raise ValueError(
                f"the {'text' if continues else 'prompt'} is empty: {prompt!r:.80}; at least one token is needed"
            )
        return ids

    def read_segments(self, prompt: Prompt, *, continues: bool = False) -> ReadPrompt:
        """Token ids and segments of a prompt; an image's positions hold its placeholder.

        Special tokens that begin a text begin the prompt, also where an image comes first. Empty strings count for
        nothing, unless there is nothing else.

        Raises:
            ValueError: as ``read``; a segment that is empty, an item that the encoder refuses, or no encoder.
        """
        if not isinstance(prompt, list | tuple) or all(issubclass(kind, _NO_ITEMS) for kind in _kinds(prompt)):
            return ReadPrompt(self.read(prompt, continues=continues), [])
        tokens: list[int] = []
        segments: list[Segment] = []
        for part in _joined(prompt):
            begins = not (continues or tokens)
            if isinstance(part, TokenSegment):
                added = [self._token_segment(part)]
            elif isinstance(part, str):
                added = [(Segment(TEXT, len(ids)), ids) for ids in [self._encode(part, not begins)]]
            else:
                item = self._item_reader(part).read(part)
                first = self._encode("", False) if begins and self._tokenizer is not None else []
                added = [(Segment(TEXT, len(first)), first)]
                added.append((Segment(item.kind, item.tokens, item), [item.placeholder] * item.tokens))
            for segment, ids in added:
                tokens += ids
                segments += [segment] if ids else []
        return ReadPrompt(tokens, segments)

    def write(self, tokens: Sequence[int]) -> str:
        """The text of all tokens of a sample: what a ``Detokenizer`` gives of them, one by one, in sum."""
        with self._tokenizing:
            text: str = self._tokenizer.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text

    def _token_segment(self, part: TokenSegment) -> tuple[Segment, list[int]]:
        if not isinstance(part.kind, str):
            raise ValueError(f"a segment's kind must be a string, got {type(part.kind).__name__}: {part.kind!r:.80}")
        if not isinstance(part.token_ids, list | tuple):
            raise ValueError(
                f"token_ids of a segment must be a list of token ids, got {type(part.token_ids).__name__}: "
                f"{part.token_ids!r:.80}"
            )
        ids = self.read(part.token_ids, continues=True)
        return Segment(part.kind, len(ids)), ids

    def _item_reader(self, part: Any) -> ItemReader:
        if isinstance(part, Number | None):
            raise ValueError(
                f"a prompt part of type {type(part).__name__} among texts and segments: {part!r:.80}; give token ids "
                'as TokenSegment("text", [...])'
            )
        if self._items is None:
            raise ValueError(
                f"a prompt part of type {type(part).__name__} needs an encoder, and the engine serves text only; give "
                'Engine(..., encoders={"image": ...})'
            )
        return self._items

    def _encode(self, text: str, continues: bool) -> list[int]:
        if self._tokenizer is None:
            raise ValueError(f"the text {text!r:.80} needs a tokenizer, and the engine has none; give token ids")
        try:
            with self._tokenizing:
                ids: list[int] = self._tokenizer(text, add_special_tokens=not continues)["input_ids"]
        except Exception as error:  # whatever a tokenizer raises, it is this prompt that it cannot read
            raise ValueError(f"the tokenizer cannot read {text!r:.80}: {error}") from error
        return self._tokens(ids)

    def _tokens(self, tokens: Sequence[Any]) -> list[int]:
        if _kinds(tokens) == {int} and min(tokens) >= 0 and max(tokens) < self._vocab_size:
            return list(tokens)
        return [self._token(token) for token in tokens]  # one by one, to say which it is

    def _token(self, token: Any) -> int:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"a token id must be an integer, got {type(token).__name__}: {token!r:.80}")
        if not 0 <= token < self._vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self._vocab_size} tokens")
        return token


def _kinds(parts: Sequence[Any]) -> set[type]:
    """Of thousands of tokens there is one, and it takes no call of Python's for each to see that."""
    return set(map(type, parts))


def _text(part: Any) -> str:
    if not isinstance(part, str):
        raise ValueError(
            f"a prompt part of type {type(part).__name__} among texts: {part!r:.80}; give token ids as "
            'TokenSegment("text", [...])'
        )
    return part


def _joined(prompt: Sequence[Any]) -> list[Any]:
    """The parts of a prompt, strings that meet as one."""
    parts: list[Any] = []
    for are_texts, group in groupby(prompt, lambda part: isinstance(part, str)):
        whole = list(group)
        parts += ["".join(whole)] if are_texts else whole
    return parts
