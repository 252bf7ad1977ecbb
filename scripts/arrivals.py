"""Made-up traffic as a trace: arrivals, lengths, shared prefixes and turns, all drawn from one seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from octavo.core.inspection.trace import Trace
from octavo.core.inspection.trace_recorder import TraceBuilder

VOCABULARY = 50_000


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths in tokens with this mean; ``sigma`` is the standard deviation of the logarithm."""

    mean: float
    sigma: float = 1.0
    most: int = 8192

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """int64 [count], each from 1 to ``most``."""
        logs = random.normal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return np.clip(np.exp(logs).round(), 1, self.most).astype(np.int64)


@dataclass(frozen=True)
class Mixture:
    """Lengths of several kinds, each equally likely."""

    kinds: tuple[Lengths, ...]

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        """int64 [count]"""
        drawn = np.stack([kind.draw(random, count) for kind in self.kinds])
        return drawn[random.integers(len(self.kinds), size=count), np.arange(count)]


@dataclass(frozen=True)
class Poisson:
    """Arrivals at a steady rate."""

    rate_per_s: float

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Times of arrival in seconds, rising, fp64 [count]."""
        return np.cumsum(random.exponential(1 / self.rate_per_s, count))


@dataclass(frozen=True)
class Bursty:
    """Arrivals at two rates that take turns: a two-state Markov-modulated Poisson process (Fischer and
    Meier-Hellstern, Performance Evaluation 18(2), 1993). The states last ``calm_s`` and ``burst_s`` on average."""

    calm_per_s: float
    burst_per_s: float
    calm_s: float
    burst_s: float

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Times of arrival in seconds, rising, fp64 [count]."""
        times: list[NDArray[np.float64]] = []
        begin, bursting, left = 0.0, False, count
        while left > 0:
            rate, mean_s = (self.burst_per_s, self.burst_s) if bursting else (self.calm_per_s, self.calm_s)
            lasting = random.exponential(mean_s)
            # Given their number, the arrivals of a Poisson process are uniform over the time.
            times.append(begin + np.sort(random.uniform(0, lasting, random.poisson(rate * lasting)))[:left])
            left -= len(times[-1])
            begin, bursting = begin + lasting, not bursting
        return np.concatenate(times)


@dataclass(frozen=True)
class PrefixTree:
    """System prompts that share their beginnings: a tree of ``depth`` levels, with ``branches`` ways on from each node
    and ``tokens`` tokens in it. Leaves are chosen by Zipf's law: the k-th with weight 1 / k."""

    depth: int = 0
    branches: int = 4
    tokens: int = 128

    def draw(self, random: np.random.Generator, count: int) -> list[list[int]]:
        """The system prompt of each of ``count`` conversations."""
        if not self.depth:
            return [[] for _ in range(count)]
        leaves = self.branches**self.depth
        weights = 1 / np.arange(1, leaves + 1)
        chosen = random.choice(random.permutation(leaves), count, p=weights / weights.sum())
        prompts: list[list[int]] = [[]]
        for _ in range(self.depth):
            prompts = [prompt + _tokens(random, self.tokens) for prompt in prompts for _ in range(self.branches)]
        return [prompts[leaf] for leaf in chosen.tolist()]


@dataclass(frozen=True)
class Traffic:
    """Conversations of one or more turns, served by a machine that never makes anybody wait.

    A turn's prompt is everything that was said before and a new question; it is computed in one step, and each step
    of ``step_s`` seconds then adds ``tokens_a_step`` tokens to the answer. The next turn comes a think time after.

    Attributes:
        requests: turns, over all conversations.
        turns: mean of the geometric number of turns of a conversation; think_s: mean of the exponential think time.
        prefixes: what system prompts conversations share.
        urgent: share of the conversations that have priority 1.
    """

    requests: int
    arrivals: Poisson | Bursty
    prompts: Lengths | Mixture
    outputs: Lengths | Mixture
    prefixes: PrefixTree = field(default_factory=PrefixTree)
    turns: float = 1.0
    think_s: float = 30.0
    urgent: float = 0.0
    step_s: float = 0.2
    tokens_a_step: int = 8

    def trace(self, seed: int) -> Trace:
        """The page traffic; the same seed gives the same."""
        random = np.random.default_rng(seed)
        builder = TraceBuilder()
        running: dict[int, _Turn] = {}  # by sequence, in the order of arrival
        coming = self._conversations(random)
        step = 0
        while coming or running:
            if not running:
                step = max(step, int(np.ceil(coming[0].at_s / self.step_s)))
            now = step * self.step_s
            builder.at(step, now)
            for sequence, turn in running.items():
                new = turn.answer[turn.said : turn.said + self.tokens_a_step]
                turn.said += len(new)
                builder.grow(sequence, len(turn.prompt) + turn.said, new)
            while coming and coming[0].at_s <= now:
                turn = heappop(coming)
                sequence = builder.open(turn.prompt, priority=turn.priority)
                builder.grow(sequence, len(turn.prompt))
                running[sequence] = turn
            for sequence in [sequence for sequence, turn in running.items() if turn.said == len(turn.answer)]:
                turn = running.pop(sequence)
                builder.close(sequence)
                if turn.later:
                    heappush(coming, turn.next(now))
            step += 1
        return builder.build()

    def _conversations(self, random: np.random.Generator) -> list[_Turn]:
        """The first turns, as a heap."""
        counts: list[int] = []
        while sum(counts) < self.requests:
            counts.append(min(int(random.geometric(1 / self.turns)), self.requests - sum(counts)))
        times = self.arrivals.draw(random, len(counts))
        urgent = random.random(len(counts)) < self.urgent
        systems = self.prefixes.draw(random, len(counts))
        lengths = zip(
            random.exponential(self.think_s, self.requests).tolist(),
            self.prompts.draw(random, self.requests).tolist(),
            self.outputs.draw(random, self.requests).tolist(),
            strict=True,
        )
        first = []
        for number, count in enumerate(counts):
            exchanges = [
                _Exchange(think_s, _tokens(random, question), _tokens(random, answer))
                for think_s, question, answer in islice(lengths, count)
            ]
            prompt, answer = systems[number] + exchanges[0].question, exchanges[0].answer
            first.append(_Turn(float(times[number]), number, int(urgent[number]), prompt, answer, exchanges[1:]))
        heapify(first)
        return first


@dataclass(frozen=True)
class _Exchange:
    think_s: float
    question: list[int]
    answer: list[int]


@dataclass(order=True)
class _Turn:
    """A turn that comes at a time; ``later`` are those of its conversation that follow."""

    at_s: float
    conversation: int
    priority: int = field(compare=False)
    prompt: list[int] = field(compare=False)
    answer: list[int] = field(compare=False)
    later: list[_Exchange] = field(compare=False)
    said: int = field(default=0, compare=False)

    def next(self, now: float) -> _Turn:
        coming, *later = self.later
        prompt = self.prompt + self.answer + coming.question
        return _Turn(now + coming.think_s, self.conversation, self.priority, prompt, coming.answer, later)


def _tokens(random: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = random.integers(VOCABULARY, size=count).tolist()
    return tokens


def mix(name: str, longest: int) -> tuple[Lengths | Mixture, Lengths | Mixture]:
    """Lengths of prompts and of answers, together at most ``longest`` tokens: "chat" (short prompts, long answers),
    "documents" (the other way round), or "mixed", where every length may be of either kind."""
    prompt, answer = longest * 3 // 4, longest // 4
    chat = Lengths(160, 1.0, prompt), Lengths(240, 0.8, answer)
    documents = Lengths(1000, 0.5, prompt), Lengths(120, 0.8, answer)
    kinds: dict[str, tuple[Lengths | Mixture, Lengths | Mixture]] = {
        "chat": chat,
        "documents": documents,
        "mixed": (Mixture((chat[0], documents[0])), Mixture((chat[1], documents[1]))),
    }
    return kinds[name]
