"""What the system says of this machine's processor."""

from functools import cache
from pathlib import Path


@cache
def said(*names: str) -> str:
    """The first line of /proc/cpuinfo that begins with one of the names, what stands before the colon included; empty
    where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(names)), "")


def flags() -> str:
    """Its instructions, and so what ``-march=native`` depends on; a home folder may be shared by different machines."""
    return said("flags", "Features")


def multiplies_bf16() -> bool:
    """Whether it multiplies bf16 in hardware (AVX512-BF16 or AMX)."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags().split())
