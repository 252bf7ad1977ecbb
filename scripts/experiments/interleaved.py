"""A small model that sees, asked about texts and images in turn: does it read the right images, on which pages?"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import build, report
from octavo.scripts.conversations import Conversation, conversations, converse
from octavo.scripts.gallery import conversation_figure, gallery
from octavo.scripts.progress import counting, waiting
from octavo.scripts.refusal import ConfigError, each_once
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Interleaved
from octavo.scripts.tasks.statistics import bootstrap_mean
from octavo.scripts.vision_models import load_vision_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core import Engine

Row = dict[str, Any]

SHOWN = ("right", "blank", "wrong")
TWICE = "asked twice"

NOTES = (
    "Accuracy: whole answers, greedily, in points; 95 % intervals, bootstrap over questions. Blank images are empty; "
    "wrong ones are those of another question of the task.",
    "tokens found: of the second of two questions about an image, prompt tokens whose pages the first had computed.",
    "verdict: of answers that say first what was seen (`circle left , ring right , left . yes`), what follows from it.",
    "Photographs come with installed packages. On photographs: what is asked about lies on them, and they are dark; "
    "among photographs: half of the images that are not asked about are photographs as they are. What a photograph "
    "itself shows, the model has no words for.",
)


def run(config: Interleaved, run: Run) -> None:
    """All through one engine, on pages of text and pages of images in one pool:

    1. Conversations: prompts of texts and images, with several questions about the same images. They are served anew
       when a run goes on.
    2. Exams: each task on the right images, on blank ones and on those of another question. One sample a question.
    3. Scenes on photographs and among them; and two questions about each of some images.
    """
    from octavo.multimodal.demo_data import EXAMS
    from octavo.multimodal.demo_photographs import PHOTOGRAPH_EXAMS, photographs

    each_once("exams", config.exams, tuple(EXAMS))
    with waiting("loading the demo model"):
        vision = load_vision_model(config.model)
        engine = build.engine(config, vision.model, vision.tokenizer, encoders={"image": vision.encoder})
    if not vision.demo:
        raise ConfigError(f"model.path={config.model.path}: the scenes have a language of their own; give a demo model")
    watch = PageWatch() if config.page_map else None
    talks = conversations(config.seed)
    _talk(engine, talks, run, watch)

    exams = [(exam, shown) for exam in config.exams for shown in SHOWN]
    exams += [(exam, "right") for exam in PHOTOGRAPH_EXAMS if photographs()]
    done = run.done("item", "shown")
    with counting("exams", len(exams) + 1) as advance:
        for exam, shown in exams:
            for sample in _examined(engine, config, exam, shown, done):
                run.add(sample)
            run.write_rows(rows(run.samples, config.seed, intervals=False))
            advance(f"{exam}, {shown} images: {_points(run.samples, exam, shown):.0f}")
        if (TWICE, "right") not in done:
            run.add(_asked_twice(engine, config))
        advance(TWICE)

    found = rows(run.samples, config.seed)
    figures = {"conversations": conversation_figure(talks), "accuracy": figure(found)}
    maps = [("the conversations, all at once", watch)]
    report.publish(run, config, found, plots=figures, notes=NOTES, maps=maps, sections=[gallery(talks)])


def rows(samples: Sequence[Sample], seed: int, *, intervals: bool = True) -> list[Row]:
    """One row an exam, in the order of the samples; the conversations, and what was asked twice, have one each."""
    found: list[Row] = []
    for exam in dict.fromkeys(sample["exam"] for sample in samples):
        own = [sample for sample in samples if sample["exam"] == exam]
        row: Row = {"name": "octavo", "task": exam}
        for shown in SHOWN:
            points = [sample["accuracy"] for sample in own if sample["shown"] == shown]
            key = "accuracy" if shown == "right" else f"{shown}_accuracy"
            if not points:
                continue
            row |= {"items": len(points)} if shown == "right" else {}
            row[key] = sum(points) / len(points)
            if intervals and len(points) > 1:
                estimate = bootstrap_mean(points, seed=seed)
                row[f"{key}_ci"] = [estimate.low, estimate.high]
        verdicts = [sample["verdict"] for sample in own if sample["shown"] == "right" and "verdict" in sample]
        if verdicts:
            row["verdict_accuracy"] = sum(verdicts) / len(verdicts)
        asked = [sample for sample in own if "query_tokens" in sample]
        if asked:
            row["hit_tokens"] = sum(sample["hit_tokens"] for sample in asked)
            row["query_tokens"] = sum(sample["query_tokens"] for sample in asked)
            row["hit_percent"] = 100 * row["hit_tokens"] / row["query_tokens"]
        found.append(row)
    return found


def figure(found: Sequence[Row]) -> Figure:
    """Accuracy of every task on the right images, on blank ones and on wrong ones."""
    from matplotlib.figure import Figure

    own = [row for row in found if "blank_accuracy" in row]
    drawn = Figure(figsize=(10, 4.5), layout="constrained")
    axes = drawn.add_subplot()
    for number, (key, label) in enumerate(
        (("accuracy", "right images"), ("blank_accuracy", "blank"), ("wrong_accuracy", "of another question"))
    ):
        places = [place + (number - 1) * 0.27 for place in range(len(own))]
        bars = [row[key] for row in own]
        ends = [row.get(f"{key}_ci", (row[key], row[key])) for row in own]
        error = [[bar - low for bar, (low, _) in zip(bars, ends, strict=True)],
                 [high - bar for bar, (_, high) in zip(bars, ends, strict=True)]]  # fmt: skip
        axes.bar(places, bars, 0.27, yerr=error, label=label, color=("C0", "0.75", "C1")[number], capsize=2)
    axes.set_xticks(range(len(own)), [row["task"] for row in own], rotation=35, ha="right")
    axes.set(ylabel="accuracy (points, 95 % interval)", ylim=(0, 105))
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return drawn


def _talk(engine: Engine, talks: Sequence[Conversation], run: Run, watch: PageWatch | None) -> None:
    engine.watch = watch
    converse(engine, talks)
    engine.watch = None
    engine.check()
    done = run.done("item", "shown")
    turns = [(talk, number, turn) for talk in talks for number, turn in enumerate(talk.turns)]
    with counting("conversations", len(turns)) as advance:
        for talk, number, turn in turns:
            item = f"{talk.title}/{number}"
            sample = {"item": item, "shown": "right", "exam": "conversations", "accuracy": 100.0 * turn.right,
                      "question": turn.question, "output": turn.output, "gold": turn.gold,
                      "query_tokens": turn.prompt_tokens, "hit_tokens": turn.cached_tokens,
                      "pages": [list(page) for page in turn.pages]}  # fmt: skip
            if (item, "right") not in done:
                run.add(sample)
            right = "" if turn.right else f" (right: {turn.gold})"
            images = sum(page.kind == "image" for page in turn.pages)
            advance(
                f"{talk.title}: {turn.question} {turn.output}{right}; {turn.cached_tokens} of {turn.prompt_tokens} "
                f"tokens found, {images} of {len(turn.pages)} pages are of images"
            )


def _size(config: Interleaved) -> int:
    return min(config.questions, config.limit or config.questions)


def _examined(
    engine: Engine, config: Interleaved, exam: str, shown: str, done: Container[tuple[str, ...]]
) -> list[Sample]:
    """Samples of the questions that are not done yet. All of them in one batch."""
    from octavo.multimodal.demo_data import exam_questions
    from octavo.multimodal.demo_exam import engine_answers, exam_images
    from octavo.multimodal.demo_photographs import PHOTOGRAPH_EXAMS, photograph_exam
    from octavo.multimodal.scenes_tasks import THEREFORE, verdict

    if exam in PHOTOGRAPH_EXAMS:
        questions, images = photograph_exam(exam, config.seed, _size(config))
    else:
        questions = exam_questions(exam, config.seed, _size(config))
        images = exam_images(questions, shown)
    left = [number for number in range(len(questions)) if (f"{exam}/{number}", shown) not in done]
    asked = [questions[number] for number in left]
    answers = engine_answers(engine, asked, [images[number] for number in left]) if left else []
    samples: list[Sample] = []
    for number, question, answer in zip(left, asked, answers, strict=True):
        sample: Sample = {"item": f"{exam}/{number}", "shown": shown, "exam": exam,
                          "accuracy": 100.0 * (answer == question.answer), "question": question.question,
                          "output": answer, "gold": question.answer}  # fmt: skip
        if THEREFORE in question.answer.split():
            sample["verdict"] = 100.0 * (verdict(answer) == verdict(question.answer))
        samples.append(sample)
    return samples


def _asked_twice(engine: Engine, config: Interleaved) -> Sample:
    from octavo.multimodal.demo_exam import shared_questions

    shared = shared_questions(engine, config.seed, _size(config))
    return {"item": TWICE, "shown": "right", "exam": TWICE, "accuracy": 100 * shared.second,
            "first_accuracy": 100 * shared.first, "hit_tokens": shared.hit_tokens,
            "query_tokens": shared.query_tokens}  # fmt: skip


def _points(samples: Sequence[Sample], exam: str, shown: str) -> float:
    own = [sample["accuracy"] for sample in samples if (sample["exam"], sample["shown"]) == (exam, shown)]
    return float(sum(own) / len(own))
