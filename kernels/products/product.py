"""``octavo::product``: a Linear layer, and the residual behind it, by an algorithm that was measured.

cuBLASLt proposes eight or so algorithms for a product and torch takes the first. At 64 to 192 rows another one is up to
10 % faster; on Hopper, octavo has three kernels of its own (``hopper/product_streams.py``, ``product_tiles.py`` and
``product_waves.py``), in several ways of sharing out the work. All of them add a residual for nothing, where an
addition of its own costs a launch and two more passes over memory, and tiles and waves gate, too:
``octavo::gated_product`` is gate, up and the activation of an MLP. Which one is the fastest depends on the card, so it
is tried: within ``choosing()`` every call notes what it multiplies, and at the end of the block each shape that is new
is timed over several weights, one after the other, as a step will run them::

    choosing():   product(x, w of layer 0, r)  product(x, w of layer 1, r) ...     noted, and computed by torch
    at its end:   algorithm 0: [w0 w1 w2 ...] algorithm 1: [w0 w1 w2 ...] ...      timed, as CUDA graphs
    later:        product(x, w, r)                                                 the fastest

The choice is kept on disk (``cache_dir``), for the sums of another algorithm are rounded otherwise: a process that
chooses anew might answer otherwise, too. Numbers of rows that are met once, as those of the last step of a prompt, are
not tried: up to ``MOST_ROWS`` they are torch's own products, beyond they add and gate on the way all the same. Other
types, and a CPU, have torch's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.hopper import product_streams as streams
from octavo.kernels.hopper import product_tiles as tiles
from octavo.kernels.hopper import product_waves as waves
from octavo.kernels.products import cublaslt, kept
from octavo.kernels.products.cublaslt import Product, Shape

log = logging.getLogger(__name__)

MOST_ROWS = 512
"""Beyond, a product takes so long that cards get to the limit of their power."""

SUSTAINED_S = 0.05
"""That a product of more rows is run for before it is timed, and while it is."""

TRIED_BYTES = 160 << 20
"""Of weights that a time is taken over: twice the L2 of the largest cards and more, as in a step, where none is found
there again."""

MOST_TRIED = 12
MARGIN = 0.99
"""A later proposal has to take less than this part of the time of the best one before it."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
"""Of gates."""
GATED_IN_TRITON = (torch.bfloat16, torch.float16, torch.float32)

Call = tuple[Tensor, Tensor, Tensor | None]

Run = Callable[[Tensor, Tensor, Any, Tensor], None]
"""``x, weight, residual, out``"""


@dataclass(frozen=True)
class Proposal:
    """A way of computing a product; ``prepare`` compiles what it takes for a call, which may be done in any thread."""

    run: Run
    prepare: Callable[[Tensor, Tensor], object] = lambda x, weight: None


@dataclass
class _Notes:
    """What is multiplied within a block, by device and shape; of so many ``rows`` alone, if any."""

    rows: int | None
    calls: dict[tuple[int, Shape], list[Call]] = field(default_factory=dict)


_chosen: dict[tuple[int, Shape], Run] = {}
_noted: ContextVar[_Notes | None] = ContextVar("octavo_noted_products", default=None)
"""Of a thread: another one may be choosing, too, or run an engine of its own meanwhile."""


def product(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    """``x [..., K] @ weight [N, K].T``, and ``+ residual [..., N]``; rounded once where an algorithm was chosen.

    ``weight`` must not be written by the kernel just before, which may still run while it is read."""
    out = _by_choice(x, weight, residual)
    if out is None:
        out = F.linear(x, weight)
        out = out if residual is None else out + residual  # laid out as the first of both
    return out


def gated_product(x: Tensor, weight: Tensor, gate: str) -> Tensor:
    """``act(x @ A.T) * (x @ B.T)`` of ``x [..., K]`` and ``weight [2 N, K]``, A above B; ``gate`` is the activation,
    "silu" or "gelu_tanh". For ``weight`` holds what it does for ``product``.

    Raises:
        ValueError: another activation, or a weight of an odd number of outputs.
    """
    if gate not in ACTIVATIONS:
        raise ValueError(f"gate={gate!r}: it is one of {sorted(ACTIVATIONS)}")
    if len(weight) % 2:
        raise ValueError(f"a weight of {len(weight)} outputs has no two halves")
    out = _by_choice(x, weight, None, gate)
    if out is None:
        out = x.new_empty((*x.shape[:-1], len(weight) // 2))
        _product_then_gate(gate, x, weight, None, out)
    return out


def _product_then_gate(gate: str, x: Tensor, weight: Tensor, residual: None, out: Tensor) -> None:
    """A gated product in two launches."""
    both = product(x, weight, None)
    if both.device.type == "cuda" and both.dtype in GATED_IN_TRITON:
        from octavo.kernels.triton.gating import gate as let_through  # for GPUs alone; a CPU may have no Triton

        let_through(both, gate, out)
    else:
        gates, passed = both.chunk(2, -1)
        torch.mul(ACTIVATIONS[gate](gates), passed, out=out.view(passed.shape))


def _by_choice(x: Tensor, weight: Tensor, residual: Tensor | None, gate: str = "") -> Tensor | None:
    """The product as it was chosen, or is computed where nobody has; None where that is torch's. Within ``choosing()``
    it is noted, if nobody has chosen."""
    key = _key(x, weight, residual, gate)
    if key is None:
        return None
    run = _chosen.get(key)
    if run is None:
        _note(key, (x, weight, residual))
        run = _untried(*key)
    if run is None:
        return None
    out = x.new_empty((*x.shape[:-1], key[1].given))
    run(x, weight, residual, out)
    return out


def _note(key: tuple[int, Shape], call: Call) -> None:
    notes = _noted.get()
    if notes is not None and notes.rows in (None, key[1].rows):
        calls, weight = notes.calls.setdefault(key, []), call[1]
        most = MOST_TRIED if key[1].rows <= MOST_ROWS else 1  # of many rows no memory is left for more, nor needed
        if len(calls) < most and len(calls) * weight.nbytes < TRIED_BYTES:
            calls.append(call)


def _key(x: Tensor, weight: Tensor, residual: Tensor | None, gate: str = "") -> tuple[int, Shape] | None:
    """Device and shape of a product that an algorithm can be chosen for; None of any other."""
    rows = x.shape[:-1].numel()
    if residual is not None and residual.shape != (*x.shape[:-1], weight.shape[0]):
        return None
    if x.device.type != "cuda" or x.dtype not in cublaslt.DTYPES or not rows:
        return None
    parts = [x, weight] if residual is None else [x, weight, residual]
    if any(not t.is_contiguous() or t.dtype != x.dtype or t.data_ptr() % cublaslt.ALIGNMENT for t in parts):
        return None
    return x.device.index, Shape(rows, weight.shape[0], weight.shape[1], x.dtype, residual is not None, gate)


@lru_cache(maxsize=256)
def _untried(device: int, shape: Shape) -> Run | None:
    """What multiplies many rows that nothing was chosen for, if not torch: what adds or gates on the way."""
    if shape.rows <= MOST_ROWS:
        return None
    if shape.gate:
        serves = waves.serves(torch.device("cuda", device), shape.rows, shape.outputs, shape.inputs, shape.gate)
        return partial(waves.run, shape.gate) if serves else None
    if shape.adds:
        with suppress(OSError, RuntimeError):  # no cuBLASLt, or nothing that it proposes
            made = Product(shape, device)
            return partial(made.run, made.proposals()[0])
    return None


@contextmanager
def choosing(rows: int | None = None) -> Iterator[None]:
    """At the end of the block an algorithm is chosen for every shape of product that was met within it, or of so many
    ``rows`` alone. What was multiplied is kept until then. Not to be used while a graph is captured."""
    notes = _Notes(rows)
    before = _noted.set(notes)
    try:
        yield
    finally:
        _noted.reset(before)
    with torch.inference_mode():
        for key, calls in sorted(
            notes.calls.items(), key=lambda item: item[0][1].gate
        ):  # a gate may come behind the others
            try:
                _chosen[key] = _choose(key, calls)
            except RuntimeError as error:
                log.info("%s: nothing is chosen (%s)", key[1], error)


def _choose(key: tuple[int, Shape], calls: list[Call]) -> Run:
    device, shape = key
    proposals, name = _proposals(device, shape), str(shape)
    if not proposals:
        raise RuntimeError("nothing is proposed")
    known = kept.choices(device).get(name)
    best, best_s = None, float("inf")
    out = torch.empty((shape.rows, shape.given), dtype=shape.dtype, device=calls[0][0].device)
    if isinstance(known, str) and known in proposals:
        with suppress(RuntimeError):  # no longer, and another one is chosen
            run = proposals[known].run
            run(*calls[0], out)  # a kernel cannot be loaded while a graph is captured, which comes next
            return run
    _prepare(proposals, calls[0])
    sustained = SUSTAINED_S if shape.rows > MOST_ROWS else 0.0
    for proposal, proposed in proposals.items():
        try:
            seconds = _seconds(lambda run=proposed.run: [run(*call, out) for call in calls], sustained)
        except RuntimeError as error:
            log.info("%s: %s is refused (%s)", name, proposal, error)
            continue
        if seconds < MARGIN * best_s:
            best, best_s = proposal, seconds
    if best is None:
        raise RuntimeError(f"none of {len(proposals)} proposals runs")
    log.info("%s: %s of %d proposals, %.1f us", name, best, len(proposals), 1e6 * best_s / len(calls))
    kept.add(device, name, best)
    return proposals[best].run


def _prepare(proposals: dict[str, Proposal], call: Call) -> None:
    """Compile in as many threads as there are cores; what does not compile is refused when it is run."""

    def prepare(proposal: Proposal) -> None:
        with suppress(RuntimeError):
            proposal.prepare(*call[:2])

    with ThreadPoolExecutor() as pool:
        list(pool.map(prepare, proposals.values()))


def _proposals(device: int, shape: Shape) -> dict[str, Proposal]:
    """Ways of multiplying, by a name that is kept: cuBLASLt's favourite first, octavo's own last."""
    found: dict[str, Proposal] = {}
    card, sizes, gate = torch.device("cuda", device), (shape.rows, shape.outputs, shape.inputs), shape.gate
    if gate:
        found["a product, then its gate"] = Proposal(partial(_product_then_gate, gate))
    else:
        with suppress(OSError, RuntimeError):  # no cuBLASLt, or nothing that it proposes
            made = Product(shape, device)
            found |= {algorithm.hex(): Proposal(partial(made.run, algorithm)) for algorithm in made.proposals()}
        for way in streams.ways(card, *sizes):
            found[f"hopper: {way}"] = Proposal(partial(streams.run, way), partial(streams.prepare, way))
    for tiling in tiles.tilings(card, *sizes, gate):
        run, prepare = partial(tiles.run, tiling, gate), partial(tiles.prepare, tiling, gate)
        found[f"hopper: {tiling}"] = Proposal(run, prepare)
    if waves.serves(card, *sizes, gate):
        found["hopper: waves"] = Proposal(partial(waves.run, gate), partial(waves.prepare, gate))
    return found


def _seconds(run: Callable[[], object], sustained: float = 0.0) -> float:
    """Time of one replay: the median of a few, or of those that take ``sustained`` seconds the mean, behind as many."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    graph.replay()
    seconds = median(_replayed(graph, 1) for _ in range(5))
    if sustained:
        often = 1 + int(sustained / seconds)
        _replayed(graph, often)
        seconds = _replayed(graph, often)
    return seconds


def _replayed(graph: torch.cuda.CUDAGraph, often: int) -> float:
    """Seconds of one replay among so many."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(often):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end) / often


_library = torch.library.Library("octavo", "FRAGMENT")
_library.define("product(Tensor x, Tensor weight, Tensor? residual) -> Tensor")
_library.define("gated_product(Tensor x, Tensor weight, str gate) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("product", product, _device)
    _library.impl("gated_product", gated_product, _device)
torch.library.register_fake(
    "octavo::product", lambda x, weight, _: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=_library
)
torch.library.register_fake(
    "octavo::gated_product", lambda x, weight, _: x.new_empty((*x.shape[:-1], weight.shape[0] // 2)), lib=_library
)
