"""Text as it becomes certain: a stream that never takes a character back."""

from __future__ import annotations

from typing import Any

WINDOW = 8


class Detokenizer:
    """Turns the tokens of one sample into text, holding back what a later token could still change.

    ::

        decoded  [ given out ........ | held back ]
                   never taken back     an unfinished character, or the beginning of a stop string

    Decoding starts from a token a few places back, since a tokenizer's pieces depend on their neighbours (a leading
    space, bytes of one character); the text of that window is subtracted.

    A ``marker`` ends the text too, and is part of it. It is looked for everywhere, and nothing is held back for it.
    """

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...], include_stop: bool, markers: tuple[str, ...] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._markers = markers
        self._tokens: list[int] = []
        self._prefix = 0
        self._read = 0
        self.text = ""
        self._given = 0
        self.stopped = False
        self.marker: str | None = None
        self._searching = False

    def add(self, token: int, *, search: bool) -> str:
        """Take a token, and give the text that is certain now. ``search`` looks for stop strings, and sets
        ``stopped`` when one is complete; the text then ends in front of it, or with it. A complete marker is ``marker``
        then."""
        self._tokens.append(token)
        self._searching = search
        before = len(self.text)
        window = self._decode(self._prefix, self._read)
        full = self._decode(self._prefix, len(self._tokens))
        if len(full) > len(window) and not full.endswith("\ufffd"):
            self._advance(full[len(window) :])
        if self._markers or (search and self._stop):
            self._find_end(before, self._stop if search else ())
        return self._give(len(self.text) if self.stopped or self.marker is not None else self._certain())

    def finish(self) -> str:
        """No token will follow: give out what was held back, up to a stop string that is complete in it."""
        if not self.stopped and self.marker is None:
            before = len(self.text)
            window = self._decode(self._prefix, self._read)
            self._advance(self._decode(self._prefix, len(self._tokens))[len(window) :])
            if self._searching and self._stop:
                self._find_end(before, self._stop)
        return self._give(len(self.text))

    def _advance(self, text: str) -> None:
        self.text += text
        self._prefix = max(self._prefix, self._read - WINDOW)
        self._read = len(self._tokens)

    def _decode(self, start: int, stop: int) -> str:
        text: str = self._tokenizer.decode(
            self._tokens[start:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _find_end(self, before: int, stops: tuple[str, ...]) -> None:
        """Cut the text at the stop string or marker that comes first in what is new."""
        found = []
        for is_marker, ends in ((False, stops), (True, self._markers)):
            for end in ends:
                at = self.text.find(end, max(0, before - len(end) + 1))
                if at >= 0:
                    found.append((at, at + len(end), is_marker))
        if found:
            start, stop, is_marker = min(found)
            if is_marker:
                self.marker = self.text[start:stop]
            self.stopped = not is_marker
            self.text = self.text[: stop if is_marker or self._include_stop else start]

    def _certain(self) -> int:
        """Characters that no stop string can claim any more: all but the longest tail that begins one."""
        for held in range(min(max(map(len, self._stop), default=1) - 1, len(self.text)), 0, -1):
            tail = self.text[-held:]
            if any(stop.startswith(tail) for stop in self._stop):
                return len(self.text) - held
        return len(self.text)

    def _give(self, upto: int) -> str:
        news = self.text[self._given : upto]
        self._given = max(self._given, upto)
        return news
