"""What a prefill pattern will read of a prompt, in closed form: known before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.interfaces import ModelSpec, PrefillPattern


@dataclass(frozen=True)
class PrefillCost:
    """What computing a prompt's whole blocks of queries under a prefill pattern reads, over all layers without a window
    and all KV heads: bytes of K and V, the same if every block read all pages up to its end, and bytes of K to choose.
    ``dot_products`` of a query and a key are those that the kernels compute, a block's own later keys included."""

    blocks: int
    kv_bytes: int
    dense_kv_bytes: int
    scoring_bytes: int
    dot_products: int
    dense_dot_products: int


def predict_prefill(
    spec: ModelSpec, pattern: PrefillPattern, *, prompt_tokens: int, page_tokens: int, itemsize: int
) -> PrefillCost:
    """Cost of a prompt of which nothing is cached, in closed form; the most, where the pattern is ``adaptive``. What is
    left of the prompt behind its last whole block is dense, and not counted."""
    blocks, block_pages = prompt_tokens // pattern.block_tokens, pattern.block_tokens // page_tokens
    pages = elements = everything = 0
    for layer in (layer for layer, window in enumerate(spec.windows) if not window):
        for block in range(blocks):
            read = pattern.predict(block, layer, spec, page_tokens)
            pages += read.pages
            elements += read.scoring_elements
            everything += (block + 1) * block_pages
    page_bytes = 2 * page_tokens * spec.head_dim * itemsize
    products = spec.q_heads * pattern.block_tokens * page_tokens  # of a block and a page that each of its heads reads
    return PrefillCost(
        blocks=blocks,
        kv_bytes=pages * spec.kv_heads * page_bytes,
        dense_kv_bytes=everything * spec.kv_heads * page_bytes,
        scoring_bytes=elements * spec.kv_heads * itemsize,
        dot_products=pages * products,
        dense_dot_products=everything * products,
    )
