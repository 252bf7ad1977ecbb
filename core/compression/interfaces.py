"""The protocols of methods that decide which tokens are kept: what they may see, and what they say.

Shapes: N tokens of a sequence, L layers that see everything, Hq query and Hkv KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from octavo.core.hosting.interfaces import FrameSets
from octavo.core.interfaces import Digest, LayerTraits, ModelSpec, PageView, SparseMethod

Watch = Callable[[int, Tensor, Tensor], None]
"""Is shown, of a layer that sees everything, the positions int64 [Hkv, N] of the context's tokens, -1 in padding, and
attention logits fp32 [Hkv, g, t, N + n] of t queries over these and the n tokens behind; minus infinity where a query
does not see one."""


class Continuation(Protocol):
    """Tokens behind a context, computed for the sake of a decision and then forgotten."""

    def compute(self, token_ids: Sequence[int], watch: Watch | None = None) -> int:
        """Compute these tokens, behind the context and those before them; ``watch`` sees what they attend to. Gives the
        token that the model finds likeliest to follow."""
        ...


class LayerContext(Protocol):
    """What one layer holds of one sequence that is about to be compressed: N tokens in the order of their positions,
    those that an earlier compression has kept and all since. Heads that hold fewer have padding at the end.

    ``positions`` int64 [Hkv, N], -1 in padding; ``keys, values [Hkv, N, D]``, after RoPE, 0 in padding; ``queries
    [w, Hq, D]`` of the last w tokens, after RoPE; ``carried`` fp32 [Hkv, N] is what the compressor has left for the
    tokens it has kept, 0 for others. ``module`` is the model's own attention module, for its weights.
    """

    layer: int
    traits: LayerTraits
    positions: Tensor
    keys: Tensor
    values: Tensor
    queries: Tensor
    carried: Tensor
    module: torch.nn.Module


class ItemTokens(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) are those of an image, on pages of ``page_tokens``."""

    start: int
    end: int
    page_tokens: int


class Context(Protocol):
    """A sequence of ``tokens`` tokens that is about to be compressed, in all ``layers`` that see everything. The last
    ``open_tokens`` of them are on the open page, which is never compressed. ``model`` is the whole model, for what its
    layers share. ``page_tokens`` is the size of text pages; ``items`` are the images, in their order.

    ``token_ids`` are the context's own, an image's being past the vocabulary; ``question`` are the tokens of the prompt
    that come after the decision (``unseen_tokens``), ``answer`` a target that will be scored; ``eos`` end a sequence.
    """

    tokens: int
    open_tokens: int
    page_tokens: int
    layers: tuple[int, ...]
    spec: ModelSpec
    model: torch.nn.Module
    items: tuple[ItemTokens, ...]
    token_ids: list[int]
    question: list[int]
    answer: list[int]
    eos: frozenset[int]

    def read(self, text: str | Sequence[int]) -> list[int]:
        """Token ids of a text that continues another, by the engine's tokenizer; ids are given back."""
        ...

    def continuation(self, overlap: int = 0) -> Continuation:
        """One that begins ``overlap`` tokens before the context's end, with those that stand there."""
        ...

    def layer(self, number: int) -> LayerContext:
        """Reads the layer's K and V."""
        ...

    def item_scores(self, number: int) -> Tensor:
        """What the encoder says of the tokens of image ``number``, fp32 [N]. Only a compressor with ``item_scores`` may
        ask. Raises ValueError if the encoder fails."""
        ...


@dataclass(frozen=True)
class Kept:
    """Which tokens of a context are kept: bool [L, Hkv, N] for its L layers, in the order of ``LayerContext``; of the
    open page, and in padding, it may say anything. ``carry`` fp32 [L, Hkv, N] is given back at the next compression."""

    tokens: Tensor
    carry: Tensor | None = None


class Recalling(Protocol):
    """How decode steps ask back pages of images that were not kept (``octavo.core.compression.recall_step``)."""

    @property
    def digest(self) -> Digest:
        """What stays on the device of each page, to rate it by."""
        ...

    def frames(self, pages: int) -> int:
        """The most pages that a KV head reads besides those that it keeps, of so many that the images have, at least
        1."""
        ...

    def sets(self, frames: int, layers: int, heads: int, device: torch.device) -> FrameSets:
        """Maps of the frames of one sequence."""
        ...

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        """fp32 [1, H, P] of the images' pages, for ``q [1, Hq, D]``, by their digests alone; behind them stands an open
        page that does not exist."""
        ...


class Compressor(Protocol):
    """Decides which tokens a sequence keeps once its prompt is computed, and after every ``every`` tokens from then on
    (0: never again).

    ``window``: queries that it wants to see, of the last so many tokens, and later of those since it decided last;
    ``drops``: what is not kept goes back to the
    pool; otherwise whole pages are kept, nothing moves, and the others are only hidden.

    ``behind_items``: of the window it wants the queries behind the last image alone, if there are any.

    ``demotes``: of what is dropped, exact pages that nobody else holds go to the host tier. ``renews``: a session's
    later turns begin anew from the whole pages, wherever these are. ``recall``: how pages of images that a head does
    not keep come back within an answer; then it keeps whole pages; None: they do not. ``any_pages``: it serves prompts
    whose pages differ in size. ``items``: it is about images, and so of no use without an encoder; ``item_scores``: it
    goes by what the encoder says of their tokens.
    """

    @property
    def window(self) -> int: ...
    @property
    def every(self) -> int: ...
    @property
    def behind_items(self) -> bool: ...
    @property
    def drops(self) -> bool: ...
    @property
    def demotes(self) -> bool: ...
    @property
    def renews(self) -> bool: ...
    @property
    def recall(self) -> Recalling | None: ...
    @property
    def any_pages(self) -> bool: ...
    @property
    def items(self) -> bool: ...
    @property
    def item_scores(self) -> bool: ...
    @property
    def chooser(self) -> SparseMethod | None:
        """How a step chooses among what is kept, which then fills whole pages, as many for each head of a layer; None:
        it reads all."""
        ...

    def behind(self, tokens: int, read: Callable[[str | Sequence[int]], list[int]]) -> int:
        """The most positions behind a context of so many ``tokens`` at which it computes something to decide. ``read``
        as ``Context.read``, whose ValueError it lets pass."""
        ...

    def keep(self, context: Context) -> Kept | None:
        """What to keep; None: everything. A compressor that does not drop keeps or hides whole pages."""
        ...

    def kept_units(self, tokens: int, layer: int, spec: ModelSpec, page_tokens: int, unit_tokens: int) -> int:
        """Table entries, over all KV heads, that ``layer`` lists of the full pages of a sequence that was compressed at
        ``tokens`` tokens, in closed form; the most that there can be, where heads share a budget."""
        ...


class OfTokens:
    """What compressors have in common that know nothing of images: they demote nothing, and ask no encoder."""

    behind_items: ClassVar[bool] = False
    demotes: ClassVar[bool] = False
    renews: ClassVar[bool] = False
    recall: ClassVar[Recalling | None] = None
    items: ClassVar[bool] = False
    item_scores: ClassVar[bool] = False


class TokenScorer(Protocol):
    """Rates tokens: one with a larger score is kept first. ``window``: queries that it wants to see; ``shares``: scores
    estimate shares of a head's attention; ``carries``: it is given back the scores of what was kept."""

    @property
    def window(self) -> int: ...
    @property
    def shares(self) -> bool: ...
    @property
    def carries(self) -> bool: ...

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        """fp32 [Hkv, N]; in padding arbitrary, NaN included."""
        ...


@runtime_checkable
class ContextScorer(Protocol):
    """What a scorer also has that looks at all layers at once, since it computes something behind the context."""

    def behind(self, tokens: int, read: Callable[[str | Sequence[int]], list[int]]) -> int:
        """As ``Compressor.behind``."""
        ...

    def score_all(self, context: Context) -> Tensor:
        """fp32 [L, Hkv, N]; in padding arbitrary, NaN included."""
        ...
