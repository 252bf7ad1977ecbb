"""The Triton backend: the functions of the reference, one file a kernel."""

from octavo.kernels.triton.append import append, append_fused
from octavo.kernels.triton.copy import copy_units
from octavo.kernels.triton.decode import append_decode, decode
from octavo.kernels.triton.gather import gather
from octavo.kernels.triton.merge import merge_states
from octavo.kernels.triton.page_score import page_score
from octavo.kernels.triton.page_topk import page_topk
from octavo.kernels.triton.prefill_dense import prefill
from octavo.kernels.triton.rotate import rotate_keys, rotate_queries
from octavo.kernels.triton.sample import sample
from octavo.kernels.triton.shared import decode_shared
from octavo.kernels.triton.step import scatter_tokens, step_decode
from octavo.kernels.triton.transfer import transfer, transfer_counted

__all__ = [
    "append",
    "append_decode",
    "append_fused",
    "copy_units",
    "decode",
    "decode_shared",
    "gather",
    "merge_states",
    "page_score",
    "page_topk",
    "prefill",
    "rotate_keys",
    "rotate_queries",
    "sample",
    "scatter_tokens",
    "step_decode",
    "transfer",
    "transfer_counted",
]
