"""Prefill: the op, which chooses; and the dense kernel for the bulk of long chunks.

Three ways, by what the host knows, which is shapes, ``max_q`` and perhaps the chunks' lengths::

    long chunks      gather, then torch's SDPA, then the paged kernel (below)
    short chunks     all of few queries: shared out over programs along the context (``prefill_short.py``)
    all else         the paged kernel (``prefill.py``), which serves every feature

A dense kernel written for one chip does the same arithmetic faster than a Triton kernel over pages, if the chunk is
long enough to pay for bringing its context together. For ``count`` queries after ``context`` tokens::

               context (base of it)          own tokens
             +----------------------------+--+-------+
    rows     | dense, no mask             |  |  \\    |    in whole grains of rows; the paged kernel goes on
             |                            |  |    \\  |    where the dense one ended, and merges
             +----------------------------+--+-------+
    the rest | paged                                \\|
             +---------------------------------------+

and without a context the square of the first rows against their own keys, dense and causal, and the rest paged.

torch aligns ``is_causal`` top-left, so that it suits a square and no chunk; its bottom-right form
(``causal_lower_right``) reaches FlashAttention 2 alone, which was not written for Hopper. Hence the split at the
context, which needs no alignment: cuDNN without a mask gives output and log-sum-exp, and the paged kernel takes them as
the state of its online softmax. No score is computed twice, and nothing is merged afterwards.

cuDNN builds a plan for every new shape, which takes the host tens of milliseconds; so rows and context come in whole
grains (``prefill_dense`` in the settings), and what is left over goes to the paged kernel, in one launch for the whole
batch: it works out by itself what is done (``Done``), so nothing is sent to the device.

How long the chunks are, the host must say (``counts``, ``contexts``); where it does not, and where SDPA lacks a feature
(window, soft cap, sinks, spans, tables of a head), the paged kernel does everything. Where pages are sealed with holes
in them (``unit_pos``), as between texts and images, ``gather`` leaves the holes out, and squares alone are dense.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels import log
from octavo.kernels.triton import prefill_short, settings
from octavo.kernels.triton.gather import gather
from octavo.kernels.triton.prefill import Done, native


@dataclass(frozen=True)
class Part:
    """Rows ``first : first + rows`` of q, of sequence ``b``, to be done densely: over ``base`` tokens of context, or,
    if that is 0, over their own keys."""

    b: int
    first: int
    rows: int
    base: int


def prefill(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: Tensor,
    lengths: Tensor,
    cu_q: Tensor,
    q_pos: Tensor,
    unit_pos: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    max_q: int,
    want_lse: bool,
    q_span: Tensor | None = None,
    counts: Sequence[int] = (),
    contexts: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """See ``reference.prefill``."""
    plain = sinks is None and q_span is None and not window and not softcap
    done = None
    if plain and counts and table.shape[2] == 1 and _serves(q, pool):
        done = Done(**settings.launch("prefill_dense", "any", q.device))
        done = done if unit_pos is None else done.squares
    parts = [] if done is None else dense_parts(counts, contexts, done)
    is_short = not parts and q_span is None and prefill_short.is_short(q, pool, table, max_q)
    if log.KERNELS:
        kernel = "Triton, split over the context" if is_short else "Triton"
        kernel = f"gather and SDPA for {_words(parts)}, else {kernel}" if parts else kernel
        log.chosen("prefill", "triton", kernel, pool, query_heads=q.shape[1], window=window)

    finished = sum(part.rows for part in parts if part.base == 0) == len(q)
    if finished and len(parts) == 1 and q.is_contiguous() and not want_lse:  # SDPA's result is the result
        out, _ = _dense(q, pool, layer, table, lengths, parts[0], scale)
        return out.contiguous(), q.new_empty(0, dtype=torch.float32)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for part in parts:
        rows = slice(part.first, part.first + part.rows)
        out[rows], lse[rows] = _dense(q[rows], pool, layer, table, lengths, part, scale)
    if is_short:
        prefill_short.short(
            q, pool, layer, table, lengths, cu_q, q_pos, unit_pos, sinks, scale, window, softcap, max_q, out, lse
        )
    elif not finished:
        native(
            q, pool, layer, table, lengths, cu_q, q_pos, unit_pos, sinks, scale, window, softcap, max_q, q_span,
            out, lse, done if parts else None,
        )  # fmt: skip
    return out, lse if want_lse else lse.new_empty(0)


def dense_parts(counts: Sequence[int], contexts: Sequence[int], done: Done) -> list[Part]:
    """What the dense kernel does of a batch."""
    assert len(counts) == len(contexts), f"{len(counts)} counts, {len(contexts)} contexts"
    parts, first = [], 0
    for b, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        rows, base = done.of(count, context)
        if rows:
            parts.append(Part(b, first, rows, base))
        first += count
    return parts


def _serves(q: Tensor, pool: Tensor) -> bool:
    """Whether there is a dense kernel for these queries that is faster than the paged one: cuDNN's from Hopper on, for
    half precision, the pool's too, and heads of up to 128. On a CPU, under Triton's interpreter, any will do."""
    if q.dtype != pool.dtype:
        return False
    if not q.is_cuda:
        return True
    half = q.dtype in (torch.float16, torch.bfloat16)
    hopper = torch.cuda.get_device_capability(q.device) >= (9, 0) and torch.backends.cuda.cudnn_sdp_enabled()
    return half and hopper and q.shape[2] % 8 == 0 and q.shape[2] <= 128


def _words(parts: list[Part]) -> str:
    return ", ".join(f"{part.rows} queries on {part.base or 'themselves'}" for part in parts)


def _dense(
    q: Tensor, pool: Tensor, layer: int, table: Tensor, lengths: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor]:
    """Output like q [rows, Hq, D] and log-sum-exp [rows, Hq] of a part, whose queries are ``q``."""
    row = slice(part.b, part.b + 1)
    keys, values = gather(pool, layer, table[:, row], lengths[:, row], part.base or part.rows)
    out, lse = sdpa(q.transpose(0, 1)[None], keys, values, part.base == 0, scale)
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], part.rows).T


def sdpa(q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """torch's dense attention with its log-sum-exp, ``[1, Hq, rows, D]`` over ``[1, Hkv, n, D]``; no mask, or causal
    aligned top-left. The functional API hides the log-sum-exp, so this calls what is behind it: cuDNN; on a CPU, under
    Triton's interpreter, torch's flash attention."""
    if not q.is_cuda:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, keys, values, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    return torch.ops.aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
        q, keys, values, None, True, 0.0, causal, False, scale=scale
    )[:2]
