"""The noise of a token: ``reference/sampling.py`` in Triton, and a bound without a logarithm (see sample.py)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (the parameters of a kernel are Triton's business)

import triton
import triton.language as tl

GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15)
MIX64_A, MIX64_B = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
GOLDEN32 = tl.constexpr(0x9E3779B9)
MIX32_A, MIX32_B = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)
TO_UNIT, HALF_STEP = tl.constexpr(2.0**-32), tl.constexpr(2.0**-33)
BELOW_ONE, SMALL = tl.constexpr(1 - 2.0**-24), tl.constexpr(2.0**-6)
ONE_BITS = tl.constexpr(0x3F800000)  # 1.0
MANTISSA = tl.constexpr(2.0**-23)
BOUND_BIAS = tl.constexpr(127.01)  # the exponent's bias, and a little more than any rounding


@triton.jit
def row_key(seeds, draws, b):
    """Both words of the row's key, uint32; ``reference.row_keys``."""
    seed = tl.load(seeds + b).to(tl.uint64)
    draw = tl.load(draws + b).to(tl.uint64)
    key = _splitmix(_splitmix(seed + GOLDEN64) + (draw + 1) * GOLDEN64)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _splitmix(x):
    x = (x ^ (x >> 30)) * MIX64_A
    x = (x ^ (x >> 27)) * MIX64_B
    return x ^ (x >> 31)


@triton.jit
def hashes(tokens, low, high):
    """The 32 bits of each token, uint32."""
    bits = tokens.to(tl.uint32) * GOLDEN32 + low
    bits = (bits ^ (bits >> 16)) * MIX32_A
    return (bits ^ (bits >> 15) ^ high) * MIX32_B


@triton.jit
def log2_exponentials(bits):
    """log2 of E; ``reference.exponentials``."""
    w = tl.minimum(bits.to(tl.float32) * TO_UNIT + HALF_STEP, BELOW_ONE)
    series = w * (1 + w * (0.5 + w * (1 / 3 + w * 0.25)))
    return tl.log2(tl.where(w < SMALL, series, -tl.log(1 - w)))


@triton.jit
def noise_bounds(bits):
    """No less than -log2 of E, without a logarithm: w, rounded down to 23 bits, and its own bits as log2."""
    w = ((bits >> 9) + ONE_BITS).to(tl.float32, bitcast=True) - 1.0
    return BOUND_BIAS - w.to(tl.int32, bitcast=True).to(tl.float32) * MANTISSA
