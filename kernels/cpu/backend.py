"""The CPU backend: compiled C and packed matrix products where they are faster than the reference."""

from octavo.kernels.cpu.attention import append_decode, decode, prefill
from octavo.kernels.cpu.pages import append, append_fused, transfer
from octavo.kernels.cpu.sampling import sample
from octavo.kernels.cpu.select import page_score, page_topk
from octavo.kernels.cpu.shared import decode_shared
from octavo.kernels.reference.attention import gather
from octavo.kernels.reference.pages import copy_units, transfer_counted
from octavo.kernels.reference.rotation import merge_states, rotate_keys, rotate_queries
from octavo.kernels.reference.step import scatter_tokens, step_decode

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
