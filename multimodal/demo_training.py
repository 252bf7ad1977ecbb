"""Training the demo model: the recipe, one step, and exams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo.multimodal.demo_data import EXAMS, Batch, exam_batches, exam_questions
from octavo.multimodal.demo_model import DemoModel
from octavo.multimodal.demo_tokenizer import IGNORED, IMAGE, VOCABULARY
from octavo.multimodal.scenes import BLANK
from octavo.multimodal.scenes_questions import Question
from octavo.multimodal.scenes_render import render, scene_arrays

SHOWN = ("right", "blank", "wrong")
"""What an exam shows: the images asked about; blank ones; or those of another question, which tells a model that looks
from one that guesses well."""


@dataclass(frozen=True)
class Recipe:
    """What a training run is, whatever machine it runs on.

    Attributes:
        steps, train_seconds: it ends with the one that comes first; ``progress`` goes from 0 to 1 with the faster.
        step_images: images a step, in up to four batches.
        follow_up: most questions that are asked, one after the other, when the first about some images is answered.
            Looking is what costs, so they come almost free.
        learning_rate: at its highest; it rises over ``warmup_steps`` and falls as a cosine of the progress, to a
            hundredth.
        first_phase: share of the progress in which there are few images and mostly descriptions. A single word of an
            answer says too little for colours to be bound to shapes: without this phase, questions about colour stay
            at what naming any colour in the picture scores.
        descriptions: share of descriptions in the first phase and after it.
        first_groups: groups of ``demo_data.GROUPS`` in the first phase; all of them after it.
        alone: share of batches whose images see themselves only, so that their KV can serve behind any text; in the
            others images read all that is in front of them. Ma et al. (arXiv 2409.15355), whose blocks are texts, found
            that a model keeps both ways without loss.
        exam_every: steps from one exam to the next.
        exam_size: questions of each exam.
    """

    seed: int = 0
    steps: int = 7000
    train_seconds: float = 1200.0
    step_images: int = 1024
    follow_up: int = 6
    learning_rate: float = 8e-4
    weight_decay: float = 0.05
    warmup_steps: int = 200
    clip_norm: float = 1.0
    first_phase: float = 0.2
    descriptions: tuple[float, float] = (0.7, 0.1)
    first_groups: int = 2
    groups: int = 4
    alone: float = 0.5
    exam_every: int = 500
    exam_size: int = 128

    def progress(self, step: int, seconds: float) -> float:
        return min(1.0, max(step / self.steps, seconds / self.train_seconds))

    def rate(self, step: int, progress: float) -> float:
        """Learning rate."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)

    def mixture(self, progress: float) -> tuple[float, int]:
        """Share of descriptions, and how many groups of image counts there are."""
        if progress < self.first_phase:
            return self.descriptions[0], self.first_groups
        return self.descriptions[1], self.groups


class Trainer:
    """A model, its optimizer and its device."""

    def __init__(self, model: DemoModel, recipe: Recipe, device: torch.device) -> None:
        self.model = model.to(device)
        self.recipe = recipe
        self.device = device
        # Norms, biases and positions are not pulled towards zero.
        flat = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": flat, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
        )

    def step(self, batches: Sequence[Batch], rate: float) -> Tensor:
        """One step over the mean of the batches' losses, whatever their sizes. The loss, a number on the device: nobody
        waits for it here."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.device)
        for batch in batches:
            logits, labels = self._logits(batch)
            loss = answer_loss(logits, labels) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    @torch.no_grad()
    def accuracy(
        self,
        questions: Sequence[Question],
        shown: str = "right",
        images: Sequence[Sequence[np.ndarray]] | None = None,
        alone: bool = False,
    ) -> float:
        """Share of ``questions``, all with equally many images, that are answered word by word, as greedy decoding
        would answer: a prefix of right words is what it would have written itself.

        Args:
            images: of each question, uint8 [SIDE, SIDE, 3], in place of its scenes.
            alone: each image sees itself only.
        """
        right = begun = 0
        for batch in exam_batches(questions, self.model.config.image_tokens):
            end = begun + len(batch.token_ids)
            given = None if images is None else np.stack([image for own in images[begun:end] for image in own])
            logits, labels = self._logits(batch._replace(alone=alone), shown, given)
            right, begun = right + int(answered(logits, labels).sum()), end
        return right / len(questions)

    def exams(self, seed: int, size: int, shown: str = "right", alone: bool = False) -> dict[str, float]:
        """Accuracy by exam."""
        return {name: self.accuracy(exam_questions(name, seed, size), shown, alone=alone) for name in EXAMS}

    def _logits(self, batch: Batch, shown: str = "right", given: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Logits and labels of a batch, with its images, or what ``shown`` says instead of them, or those ``given``,
        uint8 [I, SIDE, SIDE, 3]."""
        things, backgrounds = batch.things, batch.backgrounds
        if shown == "blank":
            things, backgrounds = scene_arrays([BLANK] * len(backgrounds))
        if given is None:
            pixels = render(self._moved(things), self._moved(backgrounds))
        else:
            pixels = self._moved(given)
        if shown == "wrong":
            pixels = pixels.roll(batch.images, 0)
        places = np.flatnonzero(batch.token_ids == VOCABULARY[IMAGE])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(self._moved(batch.token_ids), pixels, self._moved(places), batch.alone)
        return logits, self._moved(batch.labels)

    def _moved(self, array: np.ndarray) -> Tensor:
        """On the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def answer_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the answers' words, in nats.

    A row whose answers have n words in all counts sqrt(n): with words counted alike, descriptions would drown the
    answers of one word; with rows counted alike, a word of a description would teach little.

    Args:
        logits: [B, L, words], of the token behind each position.
        labels: int64 [B, L], ``IGNORED`` where there is no answer.
    """
    behind = labels[:, 1:]
    losses = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), behind.flatten(), ignore_index=IGNORED, reduction="none"
    )
    lengths = (behind != IGNORED).sum(1)
    return (losses.view_as(behind).sum(1) / lengths.sqrt()).sum() / lengths.sqrt().sum()


def answered(logits: Tensor, labels: Tensor) -> Tensor:
    """bool [B]: whether every word of the answer, its end included, is the most likely one."""
    behind = labels[:, 1:]
    return ((logits[:, :-1].argmax(-1) == behind) | (behind == IGNORED)).all(1)
