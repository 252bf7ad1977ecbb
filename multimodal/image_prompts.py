"""Prompts with placeholders, as datasets and chat templates write them, made into the lists that an engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from octavo.core.serving.prompts import TokenSegment

PLACEHOLDER = "<image>"


def image_prompt(
    tokenizer: Any,
    text: str,
    images: Sequence[Any],
    *,
    placeholder: str = PLACEHOLDER,
    add_special_tokens: bool = True,
) -> list[Any]:
    """``text`` with an image in the place of each ``placeholder``, in order.

    The text is tokenised as a whole and cut where the placeholder's token stands, as Hugging Face's processors do:
    some tokenizers (Llama's, for one) read the beginning of a text otherwise than its middle.

    Returns:
        ``TokenSegment`` of text and the images, as ``Engine.generate`` takes them.

    Raises:
        ValueError: another number of images than of placeholders, or a placeholder that is no token of the tokenizer.
    """
    token = placeholder_token(tokenizer, placeholder)
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    if ids.count(token) != len(images):
        raise ValueError(
            f"the text has {ids.count(token)} placeholders {placeholder!r}, and there are {len(images)} images; "
            "each image needs one"
        )
    rest = iter(images)
    prompt: list[Any] = []
    for is_image, group in groupby(ids, lambda id_: id_ == token):
        part = list(group)
        prompt += [next(rest) for _ in part] if is_image else [TokenSegment("text", part)]
    return prompt


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    placeholder: str = PLACEHOLDER,
    add_generation_prompt: bool = True,
) -> list[Any]:
    """Messages in the tokenizer's chat template.

    Args:
        messages: ``{"role": "user", "content": [{"type": "text", "text": "..."}, {"type": "image", "image": image}]}``,
            or a string for the content.
        placeholder: what the template writes where an image is.
        add_generation_prompt: end with what begins an answer.

    Raises:
        ValueError: no chat template, a part that is neither, a text that holds the placeholder itself; and as
            ``image_prompt``, where the template drops an image.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError("messages need a tokenizer with a chat template; without one, write the text yourself")
    images: list[Any] = []
    plain: list[dict[str, Any]] = []
    for message in messages:
        parts = message["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        for part in parts:
            kind = part.get("type")
            if kind not in ("text", "image") or kind not in part:
                raise ValueError(
                    f"a message's part must be {{'type': 'text', 'text': ...}} or {{'type': 'image', 'image': ...}}, "
                    f"got type {kind!r} with {', '.join(map(repr, part))}"
                )
            if kind == "text" and placeholder in part["text"]:
                raise ValueError(
                    f"a message's text holds the placeholder {placeholder!r}: {part['text']!r:.80}; give the image as "
                    "a part of its own"
                )
            images += [part["image"]] if kind == "image" else []
        shown = [part if part["type"] == "text" else {"type": "image"} for part in parts]
        plain.append({**message, "content": shown})
    text: str = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
    begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return image_prompt(tokenizer, text, images, placeholder=placeholder, add_special_tokens=not begun)


def placeholder_token(tokenizer: Any, placeholder: str) -> int:
    """The one token that a placeholder is.

    Raises:
        ValueError: it is several tokens, or unknown to the tokenizer.
    """
    ids: list[int] = tokenizer(placeholder, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        found = "unknown to the tokenizer" if len(ids) == 1 else f"{len(ids)} tokens of the tokenizer"
        raise ValueError(
            f"the placeholder {placeholder!r} is {found} and must be one token; add_special_tokens makes it one"
        )
    return ids[0]
