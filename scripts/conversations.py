"""Conversations about scenes: texts and images in turn, several questions about the same images, and what the engine
answers on which pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.multimodal.demo_exam import LONGEST_ANSWER
from octavo.multimodal.demo_photographs import on_photograph, photographs
from octavo.multimodal.scenes import Scene
from octavo.multimodal.scenes_prompts import question_part, remarked_images
from octavo.multimodal.scenes_questions import Question, ask
from octavo.multimodal.scenes_render import draw
from octavo.multimodal.scenes_tasks import SCENE_TASKS
from octavo.scripts.image_traffic import segments_of

if TYPE_CHECKING:
    import numpy as np

    from octavo.core import Completion, Engine


class Page(NamedTuple):
    """``kind`` of its segment; ``tokens`` in it; ``found``: it had been computed for an earlier question."""

    kind: str
    tokens: int
    found: bool


@dataclass
class Turn:
    """A question, with its right answer; and once it was served, what the model answered, on which pages."""

    question: str
    gold: str
    output: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pages: list[Page] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.output == self.gold


@dataclass
class Conversation:
    """``about``: texts, and images uint8 [SIDE, SIDE, 3], which all turns share unless ``question_first``."""

    title: str
    about: list[Any]
    turns: list[Turn]
    question_first: bool = False

    @property
    def images(self) -> list[np.ndarray]:
        return [part for part in self.about if not isinstance(part, str)]

    def prompt(self, turn: Turn) -> list[Any]:
        """In the demo model's form."""
        if self.question_first:
            return [f"question : {turn.question}", *self.about, "answer :"]
        return [*self.about, question_part(turn.question)]


def conversations(seed: int) -> list[Conversation]:
    """One of every kind: an image; a pair; four images with remarks; eight with a needle; the question in front; and
    things on photographs that installed packages ship, where there are any."""
    rng = Random(f"conversations {seed}")
    one = _asked(rng, "describe", 1)
    pair = _asked(rng, "compare", 2)
    hops = ask(rng, "multihop", 4)
    needle = ask(rng, "needle_object", 8)
    first = ask(rng, "indexed_colour", 3)
    found = [
        _conversation(rng, "one image", one.scenes, [(one.question, one.answer), *_more(rng, one.scenes)]),
        _conversation(
            rng,
            "two images",
            pair.scenes,
            [_described(pair.scenes, 2), (pair.question, pair.answer), *_more(rng, pair.scenes)],
        ),
        _conversation(rng, "four images", hops.scenes, [_described(hops.scenes, 3), (hops.question, hops.answer)]),
        _conversation(
            rng, "eight images", needle.scenes, [_described(needle.scenes, 1), (needle.question, needle.answer)]
        ),
        _conversation(rng, "the question first", first.scenes, [(first.question, first.answer)]),
    ]
    found[-1].question_first = True
    backdrops = photographs()
    if backdrops:
        names = [*backdrops, *backdrops][: max(2, min(3, len(backdrops)))]
        scenes = [_asked(rng, "describe", 1).scenes[0] for _ in names]
        title = f"things on photographs ({', '.join(dict.fromkeys(names))})"
        talk = _conversation(rng, title, scenes, [_described(scenes, 2), *_more(rng, scenes)])
        drawn = iter([on_photograph(scene, backdrops[name]) for scene, name in zip(scenes, names, strict=True)])
        talk.about = [part if isinstance(part, str) else next(drawn) for part in talk.about]
        found.append(talk)
    return found


def converse(engine: Engine, talks: Sequence[Conversation]) -> None:
    """Serve all turns and note what came of them. The first questions enter together; as soon as their prompts are
    computed come the others, which find the images' pages while those still use them."""
    from octavo.core import SamplingParams

    params = SamplingParams(max_tokens=LONGEST_ANSWER)
    asked: dict[str, tuple[Conversation, Turn]] = {}
    done: dict[str, Completion] = {}

    def submit(pairs: Sequence[tuple[Conversation, Turn]]) -> None:
        asked.update({engine.submit(talk.prompt(turn), params): (talk, turn) for talk, turn in pairs})

    submit([(talk, talk.turns[0]) for talk in talks])
    begun: set[str] = set()
    followed = False
    while engine.has_work():
        for news in engine.step():
            begun.add(news.request_id)
            if news.completion is not None:
                done[news.request_id] = news.completion
        if not followed and begun == asked.keys():
            submit([(talk, turn) for talk in talks for turn in talk.turns[1:]])
            followed = True
    for request_id, (talk, turn) in asked.items():
        completion = done[request_id]
        turn.output = completion.text.strip()
        turn.prompt_tokens, turn.cached_tokens = len(completion.prompt_token_ids), completion.cached_tokens
        turn.pages = pages_of(engine, talk.prompt(turn), completion)


def pages_of(engine: Engine, prompt: Sequence[Any], completion: Completion) -> list[Page]:
    """The pages of a prompt, in order."""
    from octavo.core.memory.page_layout import PageLayout

    [segments] = segments_of(engine, [prompt])
    layout = PageLayout(segments, engine.config.policies, engine.config.unit_tokens)
    total = len(completion.prompt_token_ids)
    ends = [min(layout.end_token(page), total) for page in range(layout.pages_for(total))]
    return [
        Page(layout.kind(page), end - layout.first_token(page), end <= completion.cached_tokens)
        for page, end in enumerate(ends)
    ]


def _asked(rng: Random, task: str, images: int) -> Question:
    """A question about scenes that all show something."""
    while True:
        question = ask(rng, task, images)
        if all(len(scene.things) > 1 for scene in question.scenes):
            return question


def _conversation(rng: Random, title: str, scenes: Sequence[Scene], asked: Sequence[tuple[str, str]]) -> Conversation:
    images = draw(scenes)
    about = [part if isinstance(part, str) else images[part] for part in remarked_images(rng, len(scenes))]
    return Conversation(title, about, [Turn(question, gold) for question, gold in asked])


def _described(scenes: Sequence[Scene], number: int) -> tuple[str, str]:
    """Everything in one of several images. Its answer is long, so whoever comes next finds its pages in use."""
    return f"in image {number} , what is there ?", scenes[number - 1].description


def _more(rng: Random, scenes: Sequence[Scene]) -> list[tuple[str, str]]:
    """How many things there are in an image, and the colour of one whose shape is there once."""
    number = rng.randrange(len(scenes))
    scene = scenes[number]
    where = f"in image {number + 1} , " if len(scenes) > 1 else ""
    asked = [(f"{where}how many objects ?", SCENE_TASKS["count"].answer(scene, "objects"))]
    single = [thing for thing in scene.things if len(scene.of(kind=thing.kind)) == 1 and not thing.kind.isdigit()]
    if single:
        thing = rng.choice(single)
        asked.append((f"{where}what colour is the {thing.kind} ?", thing.colour))
    return asked
