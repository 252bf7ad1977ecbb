"""The Triton backend: the functions of reference.py, one file a kernel."""

from octavo.kernels.triton_append import append
from octavo.kernels.triton_copy import copy_units
from octavo.kernels.triton_decode import decode
from octavo.kernels.triton_prefill import prefill
from octavo.kernels.triton_transfer import transfer

__all__ = ["append", "copy_units", "decode", "prefill", "transfer"]
