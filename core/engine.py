"""The engine: requests in, tokens out, on pages that are really paged."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from itertools import repeat
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from octavo.core import interrupts, sizing
from octavo.core.compression.compaction import Compaction
from octavo.core.config import EngineConfig, SamplingParams
from octavo.core.encoding.encoded_items import EncodedItems
from octavo.core.encoding.items import image_encoder, with_image_pages
from octavo.core.encoding.reusing import compare_images, validate_reuse
from octavo.core.execution.decode_batch import DecodeBatch
from octavo.core.execution.drafts import UNREAD, take_drawn
from octavo.core.execution.flight import Flight, Row
from octavo.core.execution.forking import fork_samples
from octavo.core.execution.looking_ahead import plan_ahead
from octavo.core.execution.publisher import Publisher
from octavo.core.execution.sampler import Draw, record_known, sample
from octavo.core.execution.step_runner import StepRunner
from octavo.core.execution.verification import take_verified
from octavo.core.hf_model import HFModel, load
from octavo.core.inspection import capacity_report
from octavo.core.inspection.counters import engine_stats
from octavo.core.inspection.invariants import check_engine
from octavo.core.inspection.trace_recorder import TraceRecorder
from octavo.core.interfaces import ModelSpec, SegmentEncoder, SegmentReuse, SparseMethod
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.memory.page_layout import PageLayout
from octavo.core.memory.page_pool import PagePool
from octavo.core.memory.prefix_cache import PrefixCache
from octavo.core.memory.transfer_costs import PageCosts
from octavo.core.memory.virtual_memory import DriverError
from octavo.core.outputs import Completion, EngineStats, StepOutput
from octavo.core.policies import ALLOCATORS
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence as TokenSequence
from octavo.core.serving.detokenizer import Detokenizer
from octavo.core.serving.generation import finish, generate
from octavo.core.serving.producing import Producer, Productions
from octavo.core.serving.prompts import Prompt, PromptReader
from octavo.core.serving.requests import accept, validate_method
from octavo.core.serving.scoring import score_many
from octavo.core.serving.session import Session
from octavo.core.serving.turn import MARKER
from octavo.core.step_plan import StepPlan

if TYPE_CHECKING:
    from octavo.core.inspection.page_watch import PageWatch

log = logging.getLogger(__name__)


class Engine:
    """Serves one model on one device with continuous batching.

    ::

        submit -> Scheduler -> StepRunner -> model -> attention over pages -> sample -> StepOutput
                    PagePool, block tables, prefix cache

    Args:
        model: a transformers causal language model, in memory, in eval mode. It is used as it is and left as it was.
            Its weights must stay as they are while the engine lives: cached pages come from them.
        tokenizer: its tokenizer; None serves token ids only.
        config: see ``EngineConfig``.
        method: the sparse method of every request that names none; None is dense.
        encoders: {"image": encoder} lets prompts hold images, or whatever else the encoder reads.
        reuse: how images are reused (``octavo.multimodal.reuse``); None: behind the same prefix only, which is exact.

    Raises:
        UnsupportedModelError: attention that cannot be paged.
        ValueError: a configuration that this model or machine cannot have.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        method: SparseMethod | None = None,
        encoders: Mapping[str, SegmentEncoder] | None = None,
        reuse: SegmentReuse | None = None,
    ) -> None:
        encoder = image_encoder(encoders)
        self.config = with_image_pages(config or EngineConfig(), encoder)
        self.tokenizer = tokenizer
        self._model = HFModel(model)
        self._method = method
        self._reuse = reuse
        self._max_tokens = sizing.max_tokens(self.config, self.spec)
        backend = sizing.backend(self.config, self.spec, self._model.device)
        execution = sizing.execution(self.config, backend, self._model.device)
        dtype = sizing.kv_dtype(self.config, self.spec)
        device = self._model.device
        self._model.prepare(execution, self.config.join_linears)
        self._plan = LayerPlan.of(self.spec.windows, self.config.layer_groups)
        self._text = PageLayout([], self.config.policies, self.config.unit_tokens)
        entries = self._text.entries_for(self._max_tokens)
        sizing.require_tables(self.config, self._plan, entries, device)
        units = sizing.pool_units(self.config, self.spec, self._plan, dtype, self._max_tokens, device)
        self._memory = sizing.allocate_pool(self.config, self.spec, self._plan, units, dtype, device)
        kv = self._memory.tensor
        index = PrefixCache(len(self._plan.groups))
        self._host = sizing.host_tier(self.config, self._plan, kv, backend, index)
        self.costs = PageCosts.of(model, self.spec, kv, backend, self._host is not None)
        self._pool = PagePool(
            ALLOCATORS[self.config.allocator](self._memory.units),
            self.config.eviction_policy,
            index,
            unit_bytes=kv[0].nbytes,
            growable=self._memory.max_units - self._memory.units,
            grow=self._grow,
            on_evict=None if self._host is None else lambda *page: self._publisher.demote(*page),
        )
        self._publisher = Publisher(
            self._pool, self._plan, self.costs, self._host, self.config.prefix_cache,
            lambda key, sequence: self._scheduler.published(key, sequence),
        )  # fmt: skip
        self._items = EncodedItems(encoder, self._model, self.config.encode_tokens, self.config.step_tokens)
        publish = self._publisher.make_findable
        self._scheduler = Scheduler(self.config, self._pool, self._plan, publish, self._host, self._items)
        self._runner = StepRunner(
            self._model, self.config, kv, backend, execution, self._pool, self._plan, entries, self._host, self._items
        )
        self._prompts = PromptReader(tokenizer, self.spec.vocab_size, encoder, self.config.step_tokens)
        read = partial(self._prompts.read, continues=True)
        self._compaction = Compaction(
            self._model, self._runner, self._pool, self._plan, self._scheduler, self._host, read, self._items
        )
        eos = getattr(tokenizer, "eos_token_id", None)
        self._eos = self._model.eos_token_ids | (set() if eos is None else {eos})
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._steps = 0
        self._flight: Flight | None = None
        self._ended = False  # somebody has who may be in it
        self._undelivered: list[StepOutput] = []
        self._productions = Productions()
        self._stepping = Lock()
        self.watch: PageWatch | None = None
        if method is not None:
            validate_method(method, self)
        validate_reuse(reuse, self)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        **kwargs: Any,
    ) -> Engine:
        """An engine on a checkpoint: a local folder or a hub id. Keyword arguments go to ``Engine``.

        Raises:
            ValueError: nothing can be loaded from ``path``.
        """
        model, tokenizer = load(str(path), dtype, device)
        return cls(model, tokenizer, config, **kwargs)

    @property
    def spec(self) -> ModelSpec:
        """What the engine found out about the model."""
        return self._model.spec

    @property
    def recorder(self) -> TraceRecorder | None:
        """Takes down the page traffic, if there is one (``octavo.core.inspection.trace``).

        Raises:
            ValueError: on being set while sequences hold pages, which it would not know.
        """
        return self._scheduler.recorder

    @recorder.setter
    def recorder(self, recorder: TraceRecorder | None) -> None:
        known = len(self._scheduler.running) + len(self._scheduler.parked)
        if known:
            raise ValueError(f"a recorder must see sequences begin, and {known} hold pages; set it before or after")
        self._scheduler.recorder = recorder

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence, prompt and output together."""
        return self._max_tokens

    def generate(
        self, prompts: Sequence[Prompt] | str, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete a batch of prompts, in the order given: each a string, token ids, or a list of texts and images.

        Raises:
            BatchError: some prompts were refused. The others are finished first and are in ``.completions``.
        """
        return generate(self, prompts, params)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        method: SparseMethod | None = None,
        priority: int = 0,
        salt: str | None = None,
        unseen_tokens: int = 0,
        reuse: SegmentReuse | None = None,
        token_prior: Sequence[float] | None = None,
    ) -> str:
        """Queue a request and give its id. Nothing is held before the scheduler admits it.

        Args:
            method: a sparse method for this request, instead of the engine's.
            priority: a higher one is served first and may preempt a lower one.
            salt: only requests with the same salt share cached pages.
            unseen_tokens: of the end of the prompt, which a method that drops tokens does not know when it decides.
            reuse: how its images are reused, instead of the engine's way.
            token_prior: 0 to 1 for each prompt token, what is known of its worth beforehand, for a method that asks.

        Raises:
            CapacityError: the prompt and what must follow it can never fit.
            ValueError: an unusable prompt, or an id that is in use.
        """
        read = self._prompts.read_segments(prompt)
        return accept(
            self, read, params, request_id, method, priority, salt, unseen_tokens, reuse, token_prior=token_prior
        )

    def step(self) -> list[StepOutput]:
        """One forward pass for whoever is next, and the news it brings.

        If it raises, no news is lost and every request goes on with the next step. Ctrl-C ends a forward pass at once,
        and waits for the end of everything else. Where decode steps are replayed (``execution``), their tokens, and on
        a GPU those of steps with prompts in them, come with the step after.
        """
        self._step()
        self._pool.raise_policy_failure()
        news, self._undelivered = self._undelivered, []
        return news

    @interrupts.held()
    def _step(self) -> None:
        """Plan a step and compute it; news go to ``_undelivered``."""
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("another thread is in this engine's step(); an engine belongs to one thread at a time")
        try:
            self._productions.deliver()
            ahead = plan_ahead(self)
            if ahead is not None:
                self._look_ahead(ahead)
            else:
                self._land_pending()
                self._next(self._schedule())
            if self.watch is not None:
                self.watch.observe(self)
        finally:
            self._items.keep()
            self._stepping.release()

    def _schedule(self) -> StepPlan:
        """Plan a step. Where nobody can compute anything before somebody's image is encoded, or somebody's producer is
        done, wait for it."""
        while True:
            plan = self._scheduler.schedule()
            self._runner.copies.queue(plan.copies)
            if plan.chunks or plan.stranded or plan.compared or self._undelivered:
                return plan
            if not self._items.settle():  # or some image was finished in the meantime
                busy: list[Future[Any]] = [*self._items.futures, *self._productions.futures]
                if not busy:
                    return plan
                with interrupts.let_through():
                    wait(busy, return_when=FIRST_COMPLETED)
            self._productions.deliver()

    def _next(self, plan: StepPlan) -> None:
        for sequence in plan.stranded:
            log.warning(capacity_report.stranded(sequence, self))
            sequence.request.unforked = 0  # the samples that wait for its prompt go with it
            self._undelivered.append(self._finish(sequence, "capacity"))
        if plan.chunks:
            self._pass(plan)
        elif self._requests and not (plan.stranded or plan.compared or self._undelivered):
            raise RuntimeError(f"no progress is possible: {capacity_report.queues(self)}")
        compare_images(self, plan.compared)

    def _look_ahead(self, plan: StepPlan) -> None:
        """Let the device begin a step, and only then read the tokens of the last one, if that is still under way.

        What the step fills becomes findable after that, when all of its tokens are known: whoever finds it is computed
        behind it. Who turns out to have ended with its token of the last step has been computed once too often; nobody
        sees what came of it.
        """
        before = self._flight
        with capacity_report.noted(plan, self):
            self._flight = self._runner.launch(plan, self._scheduler, idle=before is None)
        self._steps += 1
        plan.settle()
        try:
            if before is not None:
                self._land(before)
        finally:  # pages that a window passes are let go of with the next step, findable or not
            if plan.batch is None:
                self._publisher.publish(c.sequence for c in plan.chunks if c.sequence.finish_reason is None)
        if plan.verification is not None:
            plan.verification.foresee()  # while the device computes it

    def _land_pending(self) -> None:
        """Let nothing be under way."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight.alive())

    def _land(self, flight: Flight) -> DecodeBatch | None:
        """Read the tokens of a flight of living sequences and make news of them. Gives the round behind a verification,
        if that needs no look around."""
        try:
            if flight.verification is not None:
                return take_verified(self, flight)
            self._take_tokens(flight)
            return None
        except BaseException:
            self._start_over()
            raise

    def _take_tokens(self, flight: Flight) -> None:
        batch, tokens = flight.batch, self._runner.land(flight)
        if flight.begun:
            self.costs.observe(flight.chunks, time.perf_counter() - flight.begun)
        flight.take(tokens)
        if batch.drafts:  # which are no news
            exact = ~batch.drafting
            if not exact.any():
                return
            batch, tokens = batch.only(exact), tokens[exact]
        try:
            self._publisher.publish_filled(batch)
        finally:  # whoever has its token hears of it
            self._make_news(batch, tokens)

    def _make_news(self, batch: DecodeBatch, tokens: NDArray[np.int64]) -> None:
        first, one_each = len(self._undelivered), tokens[:, None].tolist()
        self._undelivered += map(StepOutput, batch.names, batch.samples, one_each, repeat(""))
        for row in np.flatnonzero(batch.needs_look(tokens)).tolist():
            sequence = batch.sequences[row]
            sequence.drafts.begin()
            self._undelivered[first + row] = self._take(sequence, int(tokens[row]))

    def _pass(self, plan: StepPlan) -> None:
        """Compute a plan, publish what it filled and take the tokens it yields; news go to ``_undelivered``."""
        for request, error in self._items.encode(plan.chunks):
            self._abort(request, error)
        for sequence in [chunk.sequence for chunk in plan.chunks if chunk.sequence.finish_reason is not None]:
            plan.leave_out(sequence)
        if not plan.chunks:
            return
        if self._runner.launches(plan):
            self._look_ahead(plan)
            return
        began = time.perf_counter()
        with capacity_report.noted(plan, self):
            logits, rows = self._runner.run(plan, self._scheduler)
        self._steps += 1
        try:
            plan.settle()
            self._publisher.publish(chunk.sequence for chunk in plan.chunks)
            paused = time.perf_counter()
            failed = self._compaction.run([chunk.sequence for chunk in plan.chunks])
            began += time.perf_counter() - paused  # which says nothing of what computing these chunks costs
            for request, reason in failed:
                self._abort(request, reason)
            if failed:
                alive = [i for i, row in enumerate(rows) if row.chunk.sequence.finish_reason is None]
                logits, rows = logits[alive], [rows[i] for i in alive]
            self._read_logits(logits, rows)
            self.costs.observe(((chunk.count, chunk.start) for chunk in plan.chunks), time.perf_counter() - began)
        except BaseException:
            self._start_over()
            raise

    def _start_over(self) -> None:
        """Preempt those whose logits, queries or unread tokens are lost: they compute their last tokens again."""
        self._flight = None
        self._runner.forget()
        for sequence in self._scheduler.running.copy():
            drawn = sequence.computed + sequence.unread >= sequence.goal or UNREAD in sequence.drafts.tokens
            if drawn or sequence.is_due:
                self._scheduler.preempt(sequence)

    def finish(self, request_ids: list[str]) -> dict[str, Completion]:
        """Step until these requests have ended; news of others is kept for later calls of ``step``.

        If a step fails, or the caller is interrupted, the requests are aborted.
        """
        return finish(self, request_ids)

    @interrupts.held()
    def abort(self, request_id: str) -> None:
        """End a request now and give its pages back; its completion, with what it has, comes with the next step.

        Unknown and finished ids are ignored.
        """
        if request_id in self._requests:
            self._abort(self._requests[request_id])
            self._items.keep()
        elif request_id in self._productions:
            self._productions.abort(request_id)

    def _abort(self, request: Request, error: ValueError | None = None) -> None:
        request.unforked, request.error = 0, error
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._undelivered.append(self._finish(sequence, "abort"))

    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to deliver."""
        return bool(self._requests or self._undelivered or self._productions)

    def score(self, prompt: Prompt, target: str | list[int], *, method: SparseMethod | None = None) -> list[float]:
        """Log-likelihood of each target token after the prompt, each computed as it would be when decoding.

        Under a sparse method the target's tokens are fed one at a time, each with its own selection; a method that
        draws takes the engine's seed, so a score depends on nothing that was asked before.
        """
        return self.score_many([(prompt, target, method)])[0]

    def score_many(self, items: Sequence[tuple[Prompt, str | list[int], SparseMethod | None]]) -> list[list[float]]:
        """``score`` for several (prompt, target, method) at once, batched."""
        return score_many(self, items)

    def session(
        self, prompt: Prompt = "", *, method: SparseMethod | None = None, salt: str | None = None,
        producers: Mapping[int | str, Producer] | None = None, reuse: SegmentReuse | None = None,
    ) -> Session:  # fmt: skip
        """A growing conversation whose pages stay between turns; see ``Session``. ``producers``, by marker, add to a
        turn while it is generated."""
        return Session(self, prompt, method or self._method, salt, producers or {}, reuse)

    def stats(self) -> EngineStats:
        """Counters and the state of the pool now."""
        return engine_stats(self)

    @interrupts.held()
    def shrink(self) -> int:
        """Give memory of an elastic pool back to the system, as far as whole growth steps at its end are free; says how
        many bytes. Evicts nothing."""
        self._land_pending()  # a replayed step may still write to pages that are free by now
        before = self._memory.committed_bytes
        while self._memory.last_step and self._pool.shrink(self._memory.last_step):
            self._memory.shrink(self._pool.total_units)
        return before - self._memory.committed_bytes

    def _grow(self, units: int) -> int:
        before = self._memory.units
        try:
            return self._memory.grow(before + units) - before
        except DriverError as error:
            log.warning("the pool cannot grow beyond %d units and evicts from now on: %s", before, error)
            return 0

    def check(self) -> None:
        """Walk pool, tables, index and queues.

        Raises:
            AssertionError: naming the first invariant that is broken.
        """
        check_engine(self)

    def _enter(self, request: Request, sequence: TokenSequence) -> None:
        request.sequences.append(sequence)
        self._requests[request.request_id] = request
        if self.tokenizer is not None and request.streamed and not sequence.forced:
            params, markers = request.params, tuple(marker for marker in request.markers if isinstance(marker, str))
            sequence.detokenizer = Detokenizer(self.tokenizer, tuple(params.stop), params.include_stop, markers)

    def _read_logits(self, logits: torch.Tensor, rows: list[Row]) -> None:
        """Record known tokens' log-probabilities, fork the samples of finished prompts, draw, judge drafts, and see who
        is done."""
        known = [i for i, row in enumerate(rows) if row.position + 1 < len(row.chunk.sequence.tokens)]
        if known:
            record_known(logits[known], [(rows[i].chunk.sequence, rows[i].position) for i in known])
        drawing: list[tuple[int, Draw]] = []
        for i, row in enumerate(rows):
            sequence, behind = row.chunk.sequence, row.position + 1 - len(row.chunk.sequence.tokens)
            if behind >= 0:
                drawing.append((i, Draw(sequence, behind, row.chunk.draft)))
                drawing += [(i, Draw(child)) for child in fork_samples(self, sequence)]
        for sequence in dict.fromkeys(row.chunk.sequence for row in rows):
            if sequence.forced and sequence.computed == sequence.goal:
                self._undelivered.append(self._finish(sequence, "stop"))
        if drawing:
            draws = [draw for _, draw in drawing]
            drawn = sample(logits[[i for i, _ in drawing]], draws, self._eos, self._runner.backend)
            take_drawn(self, draws, drawn)

    def _take(self, sequence: TokenSequence, token: int) -> StepOutput:
        """Make news of a drawn token, and end the sample if it is the last."""
        request, params = sequence.request, sequence.request.params
        enough = sequence.generated >= params.min_tokens
        ends = enough and token in request.ending
        text = ""
        if sequence.detokenizer is not None and (not ends or params.include_stop):
            text = sequence.detokenizer.add(token, search=enough)
        reason = None
        marker = None if sequence.detokenizer is None else sequence.detokenizer.marker
        if ends or (sequence.detokenizer is not None and sequence.detokenizer.stopped):
            reason = "stop"
        elif len(sequence.tokens) == request.limit:
            reason = "length"
        elif marker is not None or token in request.markers:
            reason = MARKER
        if reason is None:
            return StepOutput(request.request_id, sequence.sample, [token], text)
        output = self._finish(sequence, reason)
        output.new_token_ids.insert(0, token)
        output.new_text = text + output.new_text
        return output

    def _finish(self, sequence: TokenSequence, reason: str) -> StepOutput:
        """End a sample; with the last one the request ends and its completion is made."""
        request = sequence.request
        text = sequence.detokenizer.finish() if sequence.detokenizer is not None else ""
        if reason in ("length", MARKER) and sequence.detokenizer is not None and sequence.detokenizer.stopped:
            reason = "stop"  # the stop string ended in a token that also held half a character
        self._runner.accounts.settle()  # of what is computed after its end it is not told
        sequence.finish_reason, self._ended = reason, True
        sequence.kv_bytes_resident = int(self._pool.size[sequence.held].sum()) * self._runner.kv[0].nbytes
        if request.keep is not None and sequence in self._scheduler.running and not sequence.returns:
            self._scheduler.park(sequence)
        else:
            self._scheduler.remove(sequence)
        output = StepOutput(request.request_id, sequence.sample, [], text, reason)
        if request.finished:
            del self._requests[request.request_id]
            output.completion = request.completion()
        if request.keep is not None:
            request.keep(sequence, output)
        return output
