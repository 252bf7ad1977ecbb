"""Prompts that are a long text and a question about it, cut where the question begins and fitted to a length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class QuestionPrompt:
    """Token ids. ``question`` begins behind the text and ends with the cue of the answer."""

    context: list[int]
    question: list[int]

    @property
    def ids(self) -> list[int]:
        return self.context + self.question


def question_prompt(tokenizer: Any, text: str, question: str, cue: str, *, chat: bool) -> QuestionPrompt:
    """The prompt of one question. The two halves are encoded apart, so that equal texts have equal tokens.

    Args:
        chat: put text and question into a user's message of the tokenizer's chat template.

    Raises:
        ValueError: ``chat``, and the tokenizer has no template.
    """
    asked = f"\n\nQuestion: {question}"
    if not chat:
        return QuestionPrompt(tokenizer.encode(text), _plain(tokenizer, f"{asked}\nAnswer: {cue}"))
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat=true needs a tokenizer with a chat template, and this model's has none; give chat=false")
    message = [{"role": "user", "content": f"{text}{asked}"}]
    rendered: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    cut = rendered.rindex(asked)
    return QuestionPrompt(_plain(tokenizer, rendered[:cut]), _plain(tokenizer, f"{rendered[cut:]}{cue}"))


def answer_ids(tokenizer: Any, answer: str) -> list[int]:
    """Token ids of what follows a prompt."""
    return _plain(tokenizer, answer)


def longest(
    make: Callable[[int], QuestionPrompt], least: int, most: int, max_tokens: int
) -> tuple[QuestionPrompt, int]:
    """The longest of the prompts ``make(words)``, from ``least`` to ``most`` words, that has at most ``max_tokens``
    tokens, and its words. Where every further word has tokens of its own, the prompt lacks fewer than one word has.

    Raises:
        ValueError: the shortest is too long.
    """
    best = make(least)
    if len(best.ids) > max_tokens:
        raise ValueError(f"a prompt of at most {max_tokens} tokens is wanted, and the shortest has {len(best.ids)}")
    low, high = least, most + 1  # `low` words fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        prompt = make(middle)
        if len(prompt.ids) <= max_tokens:
            low, best = middle, prompt
        else:
            high = middle
    return best, low


def _plain(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
