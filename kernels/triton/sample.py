"""Sampling without a sort: a noisy arg-max over all tokens, and a walk up from it to the first token that is kept.

    logits                          [B, V]             contiguous rows
    part_score, part_id, part_top   [B, S]             a part's best noisy score, its token, and the largest logit
    summary                         [B, N C]           what the survey leaves of a row's N blocks, of C cells each:
        bounds                         [N]             without top-k: no noisy score of the block is above
        peaks                          [N, C]          with top-k: the largest logit of each cell
    masses                          [B, 2, M]          of the second kernel's M blocks: mass before the winner, all mass
    counters                        [B, 4]             listed cells, listed tokens, programs that are done
    listed                          [B, 2, CAPACITY]   with top-k: cells, and the tokens that are candidates

What is kept is a prefix of the tokens in order (largest logit first, equal ones by id). The arg-max over a set that
contains the prefix is therefore the arg-max over the prefix as soon as it falls inside. So:

1. *survey*, S programs a row: the arg-max of logit / temperature + noise over all tokens, filters or not. This is one
   read of the logits, and all that greedy rows and rows without a filter need.
2. *settle*: a row with top-p sums up, in several programs, how much mass comes before the winner (out of L2), and the
   last program to finish decides. Less than the limit: done. Else the kept prefix ends before the winner: take the
   arg-max over the tokens before it and ask again. That visits only the blocks whose bound is above the best so far,
   the highest first: two or three where the filter keeps most of the mass. A filter that keeps the share s of the mass
   is met at once in s of all draws, and after 1 + ln(1 / s) questions on average. Nothing is sorted and no threshold is
   searched, and the result is that of the exact thresholds, ties by id included.

That walk is long for a top-k of few among many, so these rows go another way. The survey leaves the peaks of cells of
CELL tokens in place of the arg-max. They have a k-th largest, found bit by bit in registers, and at least k tokens
reach it: rarely more than a few above k, all in the cells whose peaks do. Their ids are listed in memory, and the walk
is done on the list. More than CAPACITY candidates (k is as large, or very many logits are equal) send the row down the
first way, with the k-th largest logit found bit by bit in as many passes over the row.

The noise is -log2 of an exponential E = -log(1 - w), where the hash gives w (``reference/sampling.py``). Two logarithms
a token would cost more than all the rest, and few tokens can win: E >= w, and the bits of w read as an integer bound
its log2 from below, within 0.09. Only a block in which that bound passes the best score so far evaluates the noise, of
the token with the highest bound first, and mostly of no other.

Every grid comes from shapes and from the number of SMs. How a row was divided leaves no trace in its token: a maximum
is exact, the mass is summed block by block and then over the blocks, whoever did which, and on the list, whose order is
left to chance, in integers.

Rejection from a superset is how FlashInfer samples without a sort (its blog, "Sorting-Free GPU Kernels for LLM
Sampling", 2025), there with fresh random numbers in each round; with the noise of the Gumbel-max trick fixed for each
token, the rounds agree with each other and the draw is a function of the row alone.
"""

from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from octavo.kernels.triton import settings
from octavo.kernels.triton.plan import multiprocessors, overlaps_launches
from octavo.kernels.triton.sample_settle import settle_kernel
from octavo.kernels.triton.sample_survey import survey_kernel

LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Bits of an fp32 number that no logit of a dtype uses: the search of a k-th largest leaves them out."""


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    draws: Tensor,
) -> Tensor:
    """See ``reference.sample``."""
    batch, vocabulary = logits.shape
    out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if not batch:
        return out
    assert logits.stride(1) == 1
    key = str(logits.element_size())
    survey = settings.launch("sample_survey", key, logits.device)
    settle = settings.launch("sample_settle", key, logits.device)
    spans, parts, survey_share = _divided(vocabulary, batch, survey, logits.device)
    blocks, workers, settle_share = _divided(vocabulary, batch, settle, logits.device)
    cells = spans * (survey["BLOCK"] // survey["CELL"])
    overlap = overlaps_launches(logits.device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    part_score, part_top = floats(2, batch, parts)
    summary, masses = floats(batch, cells), floats(batch, 2, blocks)
    part_id, counters, listed = ints(batch, parts), ints(batch, 4), ints(batch, 2, settle["CAPACITY"])
    survey_kernel[parts, batch](
        logits,
        temperature,
        top_k,
        seeds,
        draws,
        part_score,
        part_id,
        part_top,
        summary,
        counters,
        logits.stride(0),
        vocabulary,
        survey_share,
        CELL=survey["CELL"],
        BLOCK=survey["BLOCK"],
        STAGES=survey["STAGES"],
        num_warps=survey["num_warps"],
        maxnreg=survey["maxnreg"],
        OVERLAP=overlap,
    )
    settle_kernel[workers, batch](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        draws,
        part_score,
        part_id,
        part_top,
        summary,
        masses,
        counters,
        listed,
        out,
        logits.stride(0),
        vocabulary,
        parts,
        settle_share,
        LOW_BITS=LOW_BITS[logits.dtype],
        CAPACITY=settle["CAPACITY"],
        CELL=survey["CELL"],
        SPAN=survey["BLOCK"],
        BLOCK=settle["BLOCK"],
        STAGES=settle["STAGES"],
        BLOCK_N=triton.next_power_of_2(spans),
        BLOCK_M=triton.next_power_of_2(blocks),
        BLOCK_C=triton.next_power_of_2(cells),
        num_warps=settle["num_warps"],
        maxnreg=settle["maxnreg"],
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
    return out


def _divided(vocabulary: int, batch: int, launch: Mapping[str, int], device: torch.device) -> tuple[int, int, int]:
    """Blocks of a row, programs that share them, and blocks of each."""
    blocks = triton.cdiv(vocabulary, launch["BLOCK"])
    wanted = max(multiprocessors(device) * launch["programs_per_sm"] // batch, 1)  # no second, short round
    share = triton.cdiv(blocks, min(wanted, blocks))
    return blocks, triton.cdiv(blocks, share), share
