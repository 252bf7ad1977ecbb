"""Races of page selection: K6 page score, K7 page top-k, and both with the decode over what they list (K8).

32 query and 8 KV heads of 128, bf16, pages of 16 tokens in random order, a budget of 2,048 tokens. On a CPU the same
code runs on small tensors in Triton's interpreter, which checks it and times nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.layout import pack_entries, pool_shape
from octavo.kernels.reference import backend as reference
from octavo.scripts.kernel_races.checking import relative_error
from octavo.scripts.kernel_races.race import Field, Race, Target, Times

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BUDGET_PAGES = 2048 // PAGE
KV_BYTES = 2 * KV_HEADS * DIM * 2
"""K and V of a token and layer; its page's box takes as much, once a page."""
COLD_BYTES = 128e6
MODEL_LAYERS = 32
"""Of the store that K6 reads, so that a page's boxes lie as far apart as in a model."""
CALLS = 4
"""Layers that take turns where one call reads over 32 MB."""
SCALE = DIM**-0.5


def races() -> list[Race]:
    contexts = {"8 x 32k": (8, 32768), "1 x 128k": (1, 131072)}
    rows = {"256 x 8192": (256, 8192), "64 x 2048": (64, 2048)}
    bound = Target("at most 23 us, at least 70 % of the read rate", _bound_reached)
    topk = Target("at most 8 us", partial(_within, 8))
    whole = {
        name: Target(f"at most {us} us", partial(_within, us)) for name, us in zip(contexts, (50, 36), strict=True)
    }
    return [
        *(
            Race(
                "K6 score",
                f"{name}, page {PAGE}",
                batch * tokens / PAGE * KV_BYTES,
                0,
                partial(_score, batch, tokens // PAGE),
                bound if batch > 1 else None,
            )
            for name, (batch, tokens) in contexts.items()
        ),
        *(
            Race(
                "K7 top-k",
                f"{name}, {BUDGET_PAGES} pages",
                count * (width * 4 + BUDGET_PAGES * 8),
                0,
                partial(_topk, count, width),
                topk if count == 256 else None,
            )
            for name, (count, width) in rows.items()
        ),
        *(
            Race(
                "K6+K7+K8 sparse",
                f"{name}, budget {BUDGET_PAGES * PAGE}, page {PAGE}",
                batch * (tokens / PAGE + BUDGET_PAGES * PAGE) * KV_BYTES,
                0,
                partial(_sparse, batch, tokens // PAGE),
                whole[name],
            )
            for name, (batch, tokens) in contexts.items()
        ),
    ]


def _within(us: float, times: Times) -> bool:
    return times.us["octavo"] <= us


def _bound_reached(times: Times) -> bool:
    return _within(23, times) and times.floor_us >= 0.7 * times.us["octavo"]


def _score(batch: int, pages: int, device: torch.device) -> Field:
    """Against torch on boxes that lie as it likes them best, and against a store whose layers lie inside a row."""
    dtype, layers = torch.bfloat16, MODEL_LAYERS
    if device.type == "cpu":
        batch, pages, dtype, layers = min(batch, 2), 70, torch.float32, CALLS
    every = {"dtype": dtype, "device": device}
    by_layer = _boxes(torch.empty(layers, batch * pages, KV_HEADS, 2, DIM, **every)).transpose(0, 1)
    by_page = _boxes(torch.empty(batch * pages, layers, KV_HEADS, 2, DIM, **every))
    rows = torch.randperm(batch * pages, device=device).view(batch, pages)
    n_pages = torch.full((batch,), pages, dtype=torch.int32, device=device)
    turns = range(0, layers, layers // CALLS)

    def query() -> Tensor:
        return torch.randn(batch, HEADS, DIM, **every)

    def octavo(q: Tensor, store: Tensor, layer: int) -> Tensor:
        return ops.page_score(q, *store.unbind(3), layer, rows, n_pages, False, "triton")

    def torch_einsum(up: Tensor, down: Tensor, low: Tensor, high: Tensor) -> Tensor:
        bound = torch.einsum("bhgd,bhpd->bhgp", up, high) + torch.einsum("bhgd,bhpd->bhgp", down, low)
        return bound.amax(2)

    def gathered(layer: int) -> tuple[Tensor, Tensor]:
        low, high = by_layer[rows, layer].permute(3, 0, 2, 1, 4).contiguous()  # [B, Hkv, P, D] each
        return low, high

    def error() -> float:
        q = query()
        return max(
            relative_error(octavo(q, store, 1), reference.page_score(q, *store.unbind(3), 1, rows, n_pages, False))
            for store in (by_layer, by_page)
        )

    q = query()
    grouped = q.unflatten(1, (KV_HEADS, -1))
    signs = grouped.clamp(min=0), grouped.clamp(max=0)
    contenders: dict[str, list[Callable[[], object]]] = {
        "octavo": [partial(octavo, q, by_layer, layer) for layer in turns],
        "octavo page-major": [partial(octavo, q, by_page, layer) for layer in turns],
        "torch": [partial(torch_einsum, *signs, *gathered(layer)) for layer in turns],
    }
    return Field(contenders, error, 2e-3)


def _topk(count: int, width: int, device: torch.device) -> Field:
    """Against torch and FlashInfer, which list the pages alone; torch sorts them, FlashInfer leaves them unordered."""
    if device.type == "cpu":
        count, width = 2 * KV_HEADS, 200
    batch, most = count // KV_HEADS, min(BUDGET_PAGES, width // 2)
    calls = math.ceil(COLD_BYTES / (count * width * 4)) if device.type == "cuda" else 2
    budget = torch.full((batch, KV_HEADS), most, device=device)
    n_pages = torch.full((batch,), width, dtype=torch.int32, device=device)
    keep = torch.zeros(batch, width, dtype=torch.bool, device=device)
    keep[:, 0] = keep[:, -4:] = True
    lengths = n_pages * PAGE
    table = pack_entries(torch.randperm(batch * width, device=device) + 1, PAGE).view(batch, width)

    def scores() -> Tensor:
        return torch.randn(batch, KV_HEADS, width, device=device) * 10 + 20

    def octavo(scores: Tensor, backend: str = "triton") -> tuple[Tensor, ...]:
        return ops.page_topk(scores, budget, keep, n_pages, lengths, table, PAGE, 1, most, backend)

    def torch_topk(scores: Tensor) -> Tensor:
        return scores.topk(most, 2).indices.sort(2).values

    def error() -> float:
        fresh = scores()
        pairs = zip(octavo(fresh), octavo(fresh, "reference"), strict=True)
        return 0.0 if all(torch.equal(got, want) for got, want in pairs) else math.inf

    inputs = [scores() for _ in range(calls)]
    contenders: dict[str, list[Callable[[], object]]] = {
        "octavo": [partial(octavo, x) for x in inputs],
        "torch": [partial(torch_topk, x) for x in inputs],
    }
    top_k = _flashinfer_top_k()
    if top_k is not None:
        contenders["flashinfer"] = [partial(top_k, x.flatten(0, 1), most) for x in inputs]
    return Field(contenders, error, 0.0)


def _sparse(batch: int, pages: int, device: torch.device) -> Field:
    """A whole sparse decode of one layer, against octavo's own dense one."""
    dtype = torch.bfloat16
    most = BUDGET_PAGES
    if device.type == "cpu":
        batch, pages, most, dtype = min(batch, 2), 40, 8, torch.float32
    every = {"dtype": dtype, "device": device}
    pool = torch.empty(pool_shape(batch * pages, CALLS, KV_HEADS, PAGE, DIM), **every).normal_()
    boxes = torch.empty(CALLS, len(pool), KV_HEADS, 2, DIM, **every)
    for layer in range(CALLS):
        keys = pool[:, layer, 0]  # [units, Hkv, u, D]
        boxes[layer, :, :, 0], boxes[layer, :, :, 1] = keys.amin(2), keys.amax(2)
    low, high = boxes.transpose(0, 1).unbind(3)
    rows = torch.randperm(batch * pages, device=device).view(batch, pages) + 1
    table = pack_entries(rows, PAGE)
    n_pages = torch.full((batch,), pages, dtype=torch.int32, device=device)
    lengths = n_pages * PAGE
    q_pos = lengths - 1
    keep = torch.zeros(batch, pages, dtype=torch.bool, device=device)
    keep[:, 0] = keep[:, -4:] = True
    budget = torch.full((batch, KV_HEADS), most, device=device)

    def score(q: Tensor, layer: int, backend: str) -> Any:
        return ops.page_score(q, low, high, layer, rows, n_pages, False, backend)

    def choose(scores: Tensor, backend: str) -> Any:
        return ops.page_topk(scores, budget, keep, n_pages, lengths, table, PAGE, 1, most, backend)

    def decode(q: Tensor, layer: int, entries: Tensor, slots: Tensor, backend: str) -> Any:
        scores = (None, None, SCALE, 0, 0.0, False, False)
        return ops.decode(q, pool, layer, entries, slots, q_pos, *scores, backend)[0]

    def octavo(q: Tensor, layer: int) -> Tensor:
        _, _, entries, slots = choose(score(q, layer, "triton"), "triton")
        return decode(q, layer, entries[None], slots[None], "triton")

    def error() -> float:
        """Of the scores; of the choice, exactly, among the scores that were found; and of what was read by it."""
        q = torch.randn(batch, HEADS, DIM, **every)
        scores = score(q, 1, "triton")
        chosen, right = choose(scores, "triton"), choose(scores, "reference")
        if not all(torch.equal(got, want) for got, want in zip(chosen, right, strict=True)):
            return math.inf
        want = decode(q, 1, right[2][None], right[3][None], "reference")
        return max(relative_error(scores, score(q, 1, "reference")), relative_error(octavo(q, 1), want))

    q = torch.randn(batch, HEADS, DIM, **every)
    contenders: dict[str, list[Callable[[], object]]] = {
        "octavo": [partial(octavo, q, layer) for layer in range(CALLS)],
        "octavo dense": [
            partial(decode, q, layer, table[None, :, None], lengths[None, :, None], "triton") for layer in range(CALLS)
        ],
    }
    return Field(contenders, error, 8e-3)


def _boxes(store: Tensor) -> Tensor:
    """Random boxes ``[..., 2, D]``: least, then greatest."""
    store.normal_()
    store[..., 0, :] -= 2
    store[..., 1, :] += 2
    return store


def _flashinfer_top_k() -> Callable[..., object] | None:
    if find_spec("flashinfer") is None:
        return None
    import flashinfer

    return getattr(flashinfer, "top_k", None)
