"""What a method that drops tokens asks of an engine and a prompt, refused before anything is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.compression.interfaces import Compressor
from octavo.core.encoding.pieces import reused
from octavo.core.interfaces import Digest, ModelSpec, SparseMethod
from octavo.core.memory.page_layout import PageLayout

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def compressor_of(method: SparseMethod) -> Compressor | None:
    """Who decides what a method keeps; None if it drops nothing."""
    compressor: Compressor | None = getattr(method, "compressor", None)
    return compressor


def require_compression(method: SparseMethod, engine: Engine) -> None:
    """Refuse, with a ValueError, a method that drops what the engine cannot drop, or goes by what it does not have.

    A method that goes by an encoder's scores makes the engine ask for them from now on.
    """
    compressor = compressor_of(method)
    if compressor is None:
        return
    engine._compaction.validate()
    encoder = engine._items.kind
    if compressor.items and not encoder:
        raise ValueError(
            f"method {method.name!r} rates the tokens of images, and this engine reads none; give it "
            "encoders={'image': ...}, or take a method that rates all tokens"
        )
    if compressor.item_scores and not engine._items.can_score:
        raise ValueError(
            f"method {method.name!r} goes by what the vision encoder says of its tokens, and {encoder} says nothing "
            "(scores_tokens), as one without a class token does; take a method that goes by the language model"
        )
    if compressor.demotes and engine._host is None:
        raise ValueError(
            f"method {method.name!r} demotes pages to the host tier, and host_tokens=0 gives it none; set host_tokens "
            "to what the prompts that run at once have together, or take placement=drop"
        )
    engine._items.scored |= compressor.item_scores


def require_pages(method: SparseMethod, layout: PageLayout, prompt_tokens: int, spec: ModelSpec) -> None:
    """Refuse, with a ValueError, a prompt with images to whose pages a method cannot go down."""
    compressor = compressor_of(method)
    if layout.uniform:
        return
    if compressor is None or not compressor.any_pages:
        raise ValueError(
            f"method {method.name!r} chooses among pages of one size, and this prompt has segments with "
            "pages of their own; sparse methods over several page sizes are not built yet, but for those that drop "
            "tokens (grain=token, placement=drop) and those that rate images"
        )
    if spans := reused(layout):
        raise ValueError(
            f"method {method.name!r} drops tokens, and {len(spans)} images of this prompt are reused from elsewhere; "
            "give reuse=None, or a way of reusing that is exact"
        )
    if compressor.recall is not None:
        _require_digests(method.name, compressor.recall.digest, layout, prompt_tokens, spec)


def _require_digests(name: str, digest: Digest, layout: PageLayout, prompt_tokens: int, spec: ModelSpec) -> None:
    """The last page of an image holds what is left of it, and needs a digest of the same shape as the others."""
    sizes: set[int] = set()
    for item in layout.items(0, prompt_tokens):
        tokens, page_tokens = item.end - item.start, layout.page_slots(layout.page_of(item.start))
        sizes |= {min(tokens, page_tokens), tokens % page_tokens} - {0}
    shapes = set()
    for tokens in sorted(sizes):
        try:
            shapes.add(tuple(sorted(digest.spec(tokens, spec).items())))
        except ValueError as error:
            why = str(error)
            break
    else:
        if len(shapes) <= 1:
            return
        why = "their digests differ in shape"
    raise ValueError(
        f"method {name!r} recalls pages of images by recall.digest={digest}, and those of this prompt hold "
        f"{sorted(sizes)} tokens: {why}; take a digest of pages of any size, as octavo.sparse.digests.MinMax, or image "
        "pages that it can divide"
    )
