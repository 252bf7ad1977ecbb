"""Fast CPU path (same signatures and semantics as reference.py)."""
from octavo.kernels.reference import append, copy_units, decode, prefill  # noqa: F401
