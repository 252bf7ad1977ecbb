"""The ops as the engine calls them: one torch op each, dispatched by backend name.

They are registered with torch (``torch.ops.octavo.*``) so that ``torch.compile`` and CUDA graphs see one opaque call
that takes the *whole* pool and the layer number. A view of the pool as an argument would be copied on every call by
functionalisation.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import log
from octavo.kernels.cpu import backend as cpu
from octavo.kernels.reference import backend as reference

_KERNELS = {"reference": "torch", "cpu": "torch", "triton": "Triton"}
"""What runs an op of a backend, where there is nothing to choose."""
_CHOOSES = {
    ("append_decode", "cpu"), ("append_decode", "triton"), ("decode", "cpu"), ("decode", "triton"),
    ("decode_shared", "cpu"), ("prefill", "cpu"), ("prefill", "triton"),
}  # fmt: skip
"""Where there is, and the choice is logged by the one who makes it."""


def backend(name: str) -> ModuleType:
    """The module that implements the ops of a backend: ``reference``, ``cpu`` or ``triton`` (imported on first use)."""
    if name == "triton":
        return import_module("octavo.kernels.triton.backend")
    return {"reference": reference, "cpu": cpu}[name]


_library = torch.library.Library("octavo", "DEF")


def _no_facts(*_: Any) -> dict[str, object]:
    return {}


def _register(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    pool: int | None = None,
    facts: Callable[..., dict[str, object]] = _no_facts,
) -> Any:
    """Make ``torch.ops.octavo.<name>``, whose last positional argument names the backend.

    ``fake`` gives the shapes of the results. For the log, ``pool`` says which argument is the pool (or what stands for
    it; None: there is none, and nothing to log), and ``facts(*args)`` what else the kernel depends on.
    """

    def run(*args: Any, **named: Any) -> Any:
        by = args[-1]
        if log.KERNELS and pool is not None and (name, by) not in _CHOOSES:
            log.chosen(name, by, _KERNELS[by], args[pool], **facts(*args))
        return getattr(backend(by), name)(*args[:-1], **named)

    _library.define(f"{name}({schema}")
    _library.impl(name, run, "CPU")
    _library.impl(name, run, "CUDA")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_library)
    return getattr(torch.ops.octavo, name)


def _nothing(*_: Any) -> None:
    """The fake of an op that writes into its arguments."""


def _decode_fake(q: Tensor, pool: Tensor, layer: int, table: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    want_mass, want_lse = rest[-3:-1]
    mass = (q.shape[0], pool.shape[3], table.shape[3]) if want_mass else (0,)
    lse = q.shape[:2] if want_lse else (0,)
    return torch.empty_like(q), q.new_empty(lse, dtype=torch.float32), q.new_empty(mass, dtype=torch.float32)


def _prefill_fake(q: Tensor, *rest: Any, **_: Any) -> tuple[Tensor, Tensor]:
    want_lse = rest[-2]
    return torch.empty_like(q), q.new_empty(q.shape[:2] if want_lse else (0,), dtype=torch.float32)


_TABLE = "Tensor q, Tensor pool, int layer, Tensor table, Tensor lengths"
_SCORES = "Tensor? unit_pos, Tensor? sinks, float scale, int window, float softcap"

append = _register(
    "append", "Tensor k, Tensor v, Tensor(a!) pool, int layer, Tensor slots, str backend) -> ()", _nothing, pool=2
)
copy_units = _register("copy_units", "Tensor(a!) pool, Tensor pairs, str backend) -> ()", _nothing, pool=0)
decode = _register(
    "decode",
    f"{_TABLE}, Tensor q_pos, {_SCORES}, bool want_mass, bool want_lse, str backend) -> (Tensor, Tensor, Tensor)",
    _decode_fake,
    pool=1,
    facts=lambda q, *_: {"query_heads": q.shape[1]},
)
append_decode = _register(
    "append_decode",
    "Tensor q, Tensor k, Tensor v, Tensor(a!) pool, int layer, Tensor slots, Tensor table, Tensor lengths, "
    "Tensor q_pos, Tensor? cos, Tensor? sin, Tensor? sinks, float scale, int window, float softcap, str backend) "
    "-> Tensor",
    lambda q, *_: torch.empty_like(q),
    pool=3,
    facts=lambda *args: {"query_heads": args[0].shape[1], "rotary": args[9] is not None},
)
prefill = _register(
    "prefill",
    f"{_TABLE}, Tensor cu_q, Tensor q_pos, {_SCORES}, int max_q, bool want_lse, str backend, *, "
    "Tensor? q_span=None, int[] counts=[], int[] contexts=[]) -> (Tensor, Tensor)",
    _prefill_fake,
    pool=1,
    facts=lambda q, *rest: {"query_heads": q.shape[1], "window": rest[9]},
)
transfer = _register("transfer", "Tensor source, Tensor(a!) target, Tensor pairs, str backend) -> ()", _nothing, pool=0)
transfer_counted = _register(
    "transfer_counted",
    "Tensor source, Tensor(a!) target, Tensor pairs, Tensor count, str backend) -> ()",
    _nothing,
    pool=0,
)
append_fused = _register(
    "append_fused",
    "Tensor k, Tensor v, Tensor(a!) pool, int layer, Tensor slots, Tensor? cos, Tensor? sin, Tensor(b!)? digests, "
    "int digest_layer, Tensor? tables, int table_slice, Tensor? rows, Tensor? q_pos, int page_tokens, str backend) "
    "-> ()",
    _nothing,
    2,
    lambda *args: {"rotary": args[5] is not None, "digests": args[7] is not None},
)


def _step_fake(rows: Tensor, lengths: Tensor, tokens: Tensor, tables: Tensor, *_: Any) -> tuple[Tensor, ...]:
    batch = rows.shape[0]
    ids, positions = rows.new_empty(batch, dtype=torch.int64), rows.new_empty(batch, dtype=torch.int64)
    slots = rows.new_empty((tables.shape[0], batch), dtype=torch.int64)
    return ids, positions, rows.new_empty(batch), slots, rows.new_empty((1, batch, 1))


step_decode = _register(
    "step_decode",
    "Tensor rows, Tensor lengths, Tensor tokens, Tensor tables, int unit_tokens, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _step_fake,
)
scatter_tokens = _register(
    "scatter_tokens",
    "Tensor rows, Tensor ids, Tensor(a!) tokens, Tensor(b!) lengths, str backend) -> ()",
    _nothing,
)
decode_shared = _register(
    "decode_shared",
    f"{_TABLE}, Tensor q_pos, Tensor groups, Tensor? sinks, float scale, float softcap, str backend) -> Tensor",
    lambda q, *_: torch.empty_like(q),
    pool=1,
    facts=lambda q, *_: {"query_heads": q.shape[1], "rows": len(q)},
)


def _rotate_queries_fake(q: Tensor, rows: Tensor, *_: Any) -> Tensor:
    return q.new_empty((rows.shape[0], *q.shape[1:]))


def _merge_states_fake(outs: Tensor, lses: Tensor, bounds: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = bounds.shape[0] - 1
    return outs.new_empty((rows, *outs.shape[1:])), lses.new_empty((rows, lses.shape[1]))


rotate_keys = _register(
    "rotate_keys",
    "Tensor(a!) pool, Tensor units, Tensor deltas, Tensor inv_freq, Tensor kinds, int first_layer, int end_layer, "
    "bool interleaved, str backend) -> ()",
    _nothing,
    pool=0,
    facts=lambda *args: {"interleaved": args[7]},
)
rotate_queries = _register(
    "rotate_queries",
    "Tensor q, Tensor rows, Tensor deltas, Tensor inv_freq, bool interleaved, str backend) -> Tensor",
    _rotate_queries_fake,
)
merge_states = _register(
    "merge_states",
    "Tensor outs, Tensor lses, Tensor bounds, Tensor? sinks, str backend) -> (Tensor, Tensor)",
    _merge_states_fake,
)


def _page_score_fake(q: Tensor, low: Tensor, high: Tensor, layer: int, rows: Tensor, *rest: Any) -> Tensor:
    per_query_head = rest[1]
    heads = q.shape[1] if per_query_head else low.shape[2]
    return q.new_empty((q.shape[0], heads, rows.shape[1]), dtype=torch.float32)


def _page_topk_fake(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    page_units, most = rest[6:8]
    batch, heads, width = scores.shape
    listed = min(most, width)
    shapes = (batch, heads, listed), (batch, heads), (batch, heads, listed * page_units), (batch, heads)
    pages, counts, entries, slots = (scores.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return pages, counts, entries, slots


page_score = _register(
    "page_score",
    "Tensor q, Tensor low, Tensor high, int layer, Tensor rows, Tensor n_pages, bool per_query_head, str backend) "
    "-> Tensor",
    _page_score_fake,
)
page_topk = _register(
    "page_topk",
    "Tensor scores, Tensor budget, Tensor keep, Tensor n_pages, Tensor lengths, Tensor table, int page_tokens, "
    "int page_units, int most, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _page_topk_fake,
)


def _gather_fake(pool: Tensor, layer: int, table: Tensor, lengths: Tensor, tokens: int, *_: Any) -> Any:
    shape = (table.shape[1], pool.shape[3], tokens, pool.shape[5])
    return pool.new_empty(shape), pool.new_empty(shape)


gather = _register(
    "gather",
    "Tensor pool, int layer, Tensor table, Tensor lengths, int tokens, str backend) -> (Tensor, Tensor)",
    _gather_fake,
    pool=0,
)

_FILTERS = "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p"
sample = _register(
    "sample",
    f"Tensor logits, {_FILTERS}, Tensor seeds, Tensor draws, str backend) -> Tensor",
    lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64),
)
