"""Sampling without a sort: a noisy arg-max over all tokens, and a walk up from it to the first token that is kept.

    logits                          [B, V]             contiguous rows
    part_score, part_id, part_top   [B, S]             a part's best noisy score, its token, and the largest logit
    bounds, block_masses            [B, N]             of the survey's N blocks: no noisy score is above; with
                                                       top-p, the mass in units of 2^bound
    peaks                           [B, N C]           with top-k or top-p: the largest logit of each cell, C in a block
    masses                          [B, 2, M]          of the second kernel's M blocks: mass before the winner, all mass
    arrivals                        [B]                programs of the long way that are done
    listed                          [B, 2, CAPACITY]   of the short way: cells, and the tokens that are candidates

What is kept is a prefix of the tokens in order (largest logit first, equal ones by id). The arg-max over a set that
contains the prefix is therefore the arg-max over the prefix as soon as it falls inside. So:

1. *survey* (sample_survey.py), S programs a row: the arg-max of logit / temperature + noise over all tokens, filters or
   not. This is one read of the logits, and all that greedy rows and rows without a filter need. Rows with top-k are
   spared the noise: many rounds lie between that arg-max and a few tokens. With top-k or top-p it leaves the peaks of
   cells of CELL tokens, and with top-p the mass of each block.
2. *settle* (sample_settle.py): is less than the limit of top-p before the winner? Else the kept prefix ends before it:
   the arg-max over the tokens before it is the next winner. A filter that keeps the share s of the mass is met at once
   in s of all draws, and after 1 + ln(1 / s) questions on average. No threshold is searched, and the result is that of
   the exact thresholds, ties by id included. There are two ways to the answers.

*The short way* (sample_list.py), one program a row: the tokens above a bound are listed, found by the peaks, and all
questions are answered on the list. The bound of a row with top-k is the k-th largest peak, found bit by bit in
registers: at least k tokens reach it, rarely more than a few above k. The bound of a row with top-p is the winner's
logit: all that comes before it is listed. If that is in too many cells, the bound is the peak of such rank that the
list is likely to fit; when its mass passes the limit, the winner is out and the list holds all that is kept. Mass and
limit compare because the survey has summed the whole row.

*The long way* (sample_walk.py), of flat rows, whose nucleus is longer than a list, and of large k: all programs of a
row sum up how much mass comes before the winner (out of L2), and the last one to finish walks. For another arg-max it
visits only blocks whose bound is above the best so far, the highest first: two or three where the filter keeps most of
the mass. For another sum it weighs blocks again, an eighth of them first. With top-k, the k-th largest logit is found
bit by bit in as many passes over the row.

The noise is -log2 of an exponential E = -log(1 - w), where the hash gives w (``reference/sampling.py``). Two logarithms
a token would cost more than all the rest, and few tokens can win: E >= w, and the bits of w read as an integer bound
its log2 from below, within 0.09. Only a block in which that bound passes the best score so far evaluates the noise, of
the token with the highest bound first, and mostly of no other.

Every grid comes from shapes and from the number of SMs. How a row was divided leaves no trace in its token: a maximum
is exact, mass is summed block by block and then over the blocks, whoever did which, a list is in the order of the ids,
and which way a row goes is decided by what is the same in every batch.

Rejection from a superset is how FlashInfer samples without a sort (its blog, "Sorting-Free GPU Kernels for LLM
Sampling", 2025), there with fresh random numbers in each round; with the noise of the Gumbel-max trick fixed for each
token, the rounds agree with each other and the draw is a function of the row alone.
"""

import math
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

FILL = 0.9
"""Of a list's room, what a list that ends before its row's winner is to take. n tokens, strewn at random, are in the
share 1 - exp(-n / C) of C cells: so many cells are looked into."""


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
    most_cells = int(cells * -math.expm1(-FILL * settle["CAPACITY"] / cells))
    overlap = overlaps_launches(logits.device)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    part_score, part_top = empty(2, batch, parts)
    part_id = empty(batch, parts, dtype=torch.int32)
    bounds, block_masses = empty(2, batch, spans)
    peaks = empty(batch, cells, dtype=logits.dtype)
    masses = empty(batch, 2, blocks)
    arrivals, listed = empty(batch, dtype=torch.int32), empty(batch, 2, settle["CAPACITY"], dtype=torch.int32)
    survey_kernel[parts, batch](
        logits,
        temperature,
        top_k,
        top_p,
        seeds,
        draws,
        part_score,
        part_id,
        part_top,
        bounds,
        block_masses,
        peaks,
        arrivals,
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
        bounds,
        block_masses,
        peaks,
        masses,
        arrivals,
        listed,
        out,
        logits.stride(0),
        vocabulary,
        parts,
        settle_share,
        most_cells,
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
