"""Questions as prompts of text and images, and the words that these are made of."""

from __future__ import annotations

from random import Random

from octavo.multimodal.scenes import COLOURS, COLUMNS, DIGITS, ROWS, SHAPES, SIZES
from octavo.multimodal.scenes_tasks import NONE, PLURALS, RELATIONS

REMARKS = (
    "look at it closely .",
    "this one comes next .",
    "take your time .",
    "here is a picture that was drawn by hand .",
    "it may help to know that colours matter .",
    "please go on .",
)
"""What is said between images, so that positions and the ends of pages vary. It means nothing."""

TEMPLATE_WORDS = (
    "? , . : above answer are below colour digit do has have help how image images in is left many more nothing "
    "object objects of question right same shape show size that the there what where which a an yes no equal"
)

PARAPHRASE = 0.3
"""Share of prompts in which the question comes before the images, and, apart from that, of images with a remark."""

Parts = list[str | int]
"""Text, and numbers of images from 0."""


def words() -> list[str]:
    """Every word that a prompt or an answer can hold, sorted."""
    text = [*COLOURS, *SHAPES, *PLURALS.values(), *DIGITS, *SIZES, *ROWS, *COLUMNS, *RELATIONS, *REMARKS]
    return sorted({word for part in (*text, NONE, TEMPLATE_WORDS) for word in part.split()})


def prompt_parts(question: str, images: int) -> Parts:
    """The plain form: ``image 1 :``, the first image, ..., ``question : ... answer :``. Two questions about the same
    images begin alike, up to the question."""
    shown: Parts = [part for image in range(images) for part in (f"image {image + 1} :", image)]
    return [*shown, question_part(question)]


def question_part(question: str) -> str:
    """A question as it stands behind images, or behind an earlier answer."""
    return f"question : {question} answer :"


def varied_parts(rng: Random, question: str, images: int) -> Parts:
    """The same with remarks here and there, and now and then with the question in front."""
    first = rng.random() < PARAPHRASE
    shown = remarked_images(rng, images)
    return [f"question : {question}", *shown, "answer :"] if first else [*shown, question_part(question)]


def remarked_images(rng: Random, images: int) -> Parts:
    """The images, numbered, with remarks here and there; a single one is not always called image 1."""
    parts: Parts = []
    for image in range(images):
        if rng.random() < PARAPHRASE:
            parts += [rng.choice(REMARKS) for _ in range(rng.randint(1, 2))]
        if images > 1 or rng.random() < 0.5:
            parts.append(f"image {image + 1} :")
        parts.append(image)
    return parts
