"""The reference backend: every op in plain torch, the truth that the others are tested against."""

from octavo.kernels.reference.attention import append_decode, decode, gather, prefill
from octavo.kernels.reference.pages import append, append_fused, copy_units, transfer, transfer_counted
from octavo.kernels.reference.rotation import merge_states, rotate_keys, rotate_queries
from octavo.kernels.reference.sampling import sample
from octavo.kernels.reference.select import page_score, page_topk
from octavo.kernels.reference.shared import decode_shared
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
