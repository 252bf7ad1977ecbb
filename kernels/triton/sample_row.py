"""What both kernels of the sampler do with the logits of a row: load, order, and raise the best noisy score."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl

from octavo.kernels.reference import sampling as truth
from octavo.kernels.triton.sample_noise import hashes, log2_exponentials, noise_bounds

MAX_SCALE = tl.constexpr(truth.MAX_SCALE)
NO_TOKEN = tl.constexpr(2**31 - 1)
LOWEST_KEY = tl.constexpr(-(2**31))


@triton.jit
def load_logits(row, tokens, vocabulary, MASKED: tl.constexpr):
    """Logits in fp32; what is past the end is minus infinity. NaN stays: see ``real``.

    Whole blocks do without the mask, which costs two instructions a token. The loops around it keep STAGES - 1 blocks
    on their way into shared memory (``num_stages``, asynchronous copies).
    """
    if MASKED:
        return tl.load(row + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)
    else:
        return tl.load(row + tokens).to(tl.float32)


@triton.jit
def real(x):
    """NaN becomes minus infinity. Maxima and comparisons pass over NaN anyhow; sums and sorted keys do not."""
    return tl.maximum(x, float("-inf"))


@triton.jit
def comes_before(x, tokens, x_than, token_than):
    """Which tokens come before another one in the order of all."""
    return (x > x_than) | ((x == x_than) & (tokens < token_than))


@triton.jit
def flip(bits):
    """From the bits of an fp32 number to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def raise_best(row, x, tokens, scale, low, high, best, winner):
    """The best score so far and its token, after one more block; and a bound of the block's scores.

    Of a block that can win, the noise is evaluated a token at a time, the highest bound first, until no bound is above
    the best score: mostly of one.
    """
    most = x * scale + noise_bounds(hashes(tokens, low, high))
    bound = tl.max(most)
    reach = bound
    while reach > best:
        token = tl.min(tl.where(most == reach, tokens, NO_TOKEN))
        score = tl.load(row + token).to(tl.float32) * scale - log2_exponentials(hashes(token, low, high))
        if score > best:
            best = score
            winner = token
        most = tl.where(tokens == token, float("-inf"), most)
        reach = tl.max(most)
    return best, winner, bound
