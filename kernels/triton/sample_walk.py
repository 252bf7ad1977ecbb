"""The long way to a row's token (see sample.py): up from winner to winner, with passes over the row in between."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl

from octavo.kernels.triton.sample_row import LOWEST_KEY, NO_TOKEN, comes_before, flip, load_logits, raise_best, real

FIRST_SHARE = tl.constexpr(8)  # of a row that is weighed again, this part first


@triton.jit
def next_noisiest(
    row, vocabulary, scale, low, high, bounds, least, x_than, token_than, SPAN: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Of the tokens before ``token_than``, whose logit is ``x_than``, and not below ``least``: that of the best score.

    Blocks of SPAN tokens are visited from the highest of their ``bounds`` [BLOCK_N] down to the best score. Gives the
    bounds back, closer where a block was visited: the next token wanted is before this one.
    """
    at = tl.arange(0, BLOCK_N)
    best = float("-inf")
    winner = 0
    open = bounds
    reach = tl.max(open)
    while reach > best:
        block = tl.min(tl.where(open == reach, at, NO_TOKEN))
        tokens = block * SPAN + tl.arange(0, SPAN)
        x = load_logits(row, tokens, vocabulary, True)
        x = tl.where((x >= least) & comes_before(x, tokens, x_than, token_than), x, float("-inf"))
        best, winner, bound = raise_best(row, x, tokens, scale, low, high, best, winner)
        bounds = tl.where(at == block, bound, bounds)
        open = tl.where(at == block, float("-inf"), open)
        reach = tl.max(open)
    return winner, bounds


@triton.jit
def _reaching(row, blocks, vocabulary, key, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """How many tokens of the row have a key of at least ``key``, and the lowest such key."""
    count = tl.zeros([BLOCK], tl.int32)
    lowest = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        keys = flip(real(load_logits(row, tokens, vocabulary, True)).to(tl.int32, bitcast=True))
        reach = (keys >= key) & (tokens < vocabulary)
        count += reach.to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(reach, keys, NO_TOKEN))
    return tl.sum(count), tl.min(lowest)


@triton.jit
def kth_of_row(row, blocks, vocabulary, k, LOW_BITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """k-th largest logit of the row; a pass over the row for each bit."""
    reach, _ = _reaching(row, blocks, vocabulary, 0, BLOCK, STAGES)
    kth = tl.where(reach >= k, 0, LOWEST_KEY)
    for i in range(31 - LOW_BITS):
        trial = kth | (1 << (30 - i))
        reach, _ = _reaching(row, blocks, vocabulary, trial, BLOCK, STAGES)
        kth = tl.where(reach >= k, trial, kth)
    _, kth = _reaching(row, blocks, vocabulary, kth, BLOCK, STAGES)
    return flip(kth).to(tl.float32, bitcast=True)


@triton.jit
def preceding(row, blocks, vocabulary, x_than, token_than, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """How many tokens come before ``token_than``, whose logit is ``x_than``."""
    count = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        count += comes_before(load_logits(row, tokens, vocabulary, True), tokens, x_than, token_than).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _weigh_block(x, scale, top, over, masses, block, blocks):
    """To ``masses`` [2, blocks]: the block's mass above ``over``, and all its mass. One sum of pairs, one reduction."""
    weights = tl.exp2((real(x) - top) * scale)
    pair = tl.sum(tl.join(tl.where(x > over, weights, 0.0), weights), 0)
    tl.store(masses + tl.arange(0, 2) * blocks + block, pair)


@triton.jit
def weigh(
    row,
    first,
    last,
    blocks,
    vocabulary,
    scale,
    top,
    x_than,
    token_than,
    masses,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """To ``masses`` [2, blocks], of blocks ``first`` to ``last``: mass before ``token_than``, and all mass.

    A block that lies before the token's own takes its logit's equals in: they are above the next lower number. In the
    block of the token itself they are left out here; see ``mass_before``.
    """
    key = tl.where(x_than == 0, -1, flip(x_than.to(tl.int32, bitcast=True)))  # -1: of minus zero
    lower = flip(key - 1).to(tl.float32, bitcast=True)
    own = token_than // BLOCK
    whole = tl.minimum(last, vocabulary // BLOCK)
    for block in tl.range(first, whole, num_stages=STAGES):
        x = load_logits(row, block * BLOCK + tl.arange(0, BLOCK), vocabulary, False)
        _weigh_block(x, scale, top, tl.where(block < own, lower, x_than), masses, block, blocks)
    if whole < last:
        x = load_logits(row, whole * BLOCK + tl.arange(0, BLOCK), vocabulary, True)
        _weigh_block(x, scale, top, tl.where(whole < own, lower, x_than), masses, whole, blocks)


@triton.jit
def mass_before(
    row, blocks, vocabulary, scale, top, x_than, token_than, masses, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Mass before ``token_than``, and of the whole row, from what ``weigh`` left."""
    at = tl.arange(0, BLOCK_N)
    # Written by other programs, or by other threads of this one: read past the L1.
    mass = tl.sum(tl.load(masses + at, mask=at < blocks, other=0.0, cache_modifier=".cg"))
    total = tl.sum(tl.load(masses + blocks + at, mask=at < blocks, other=0.0, cache_modifier=".cg"))
    tokens = token_than // BLOCK * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(row, tokens, vocabulary, True)
    ties = tl.sum(((x == x_than) & (tokens < token_than)).to(tl.int32))
    return tl.where(ties > 0, mass + ties * tl.exp2((x_than - top) * scale), mass), total


@triton.jit
def too_late(
    row,
    blocks,
    vocabulary,
    scale,
    top,
    x_than,
    token_than,
    goal,
    limited,
    masses,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Whether a mass of ``goal`` or more comes before ``token_than``.

    What comes before it comes before the winner of the last round, too. So the masses of that round are upper bounds of
    those of this one, and their sum, with ever more blocks weighed anew, may fall below the goal early: of a filter
    that keeps 0.9 of the mass, mostly after the first eighth or third of the blocks. A row with top-k begins the walk
    without a winner, and weighs all blocks.
    """
    done = 0
    step = tl.where(limited, blocks, tl.cdiv(blocks, FIRST_SHARE))
    late = done < blocks
    while late & (done < blocks):
        tl.debug_barrier()  # the masses so far have been read
        last = tl.minimum(done + step, blocks)
        weigh(row, done, last, blocks, vocabulary, scale, top, x_than, token_than, masses, BLOCK, STAGES)
        tl.debug_barrier()
        mass, _ = mass_before(row, blocks, vocabulary, scale, top, x_than, token_than, masses, BLOCK, BLOCK_N)
        late = mass >= goal
        done = last
        step *= 2
    return late
