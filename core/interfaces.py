"""The protocols at which octavo's parts meet. Each says what it may read, what it changes and what it returns.

Shapes: b sequences of one method in a step, P pages of the longest of them, Hq query and Hkv KV heads, D head_dim,
p page_tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from octavo.core.hosting.interfaces import AwayPages, Hosting


@dataclass(frozen=True)
class ModelSpec:
    """What the engine must know of a model; read from its config and from one probing forward pass.

    ``window[l]`` is the sliding window of layer l in tokens, 0 for full attention. ``sinks``: some layer has learned
    logits that join its softmax.
    """

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    vocab_size: int
    max_tokens: int
    windows: tuple[int, ...]
    sinks: bool = False

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * itemsize


class Allocator(Protocol):
    """Deals in the units 1 to ``total_units`` of a pool. Knows nothing of who holds them, nor of pages."""

    @property
    def total_units(self) -> int: ...
    @property
    def free_units(self) -> int: ...
    @property
    def looks_near(self) -> bool:
        """Whether ``allocate`` heeds ``near``."""
        ...

    def allocate(self, units: int, near: int | None = None) -> NDArray[np.int32]:
        """``units`` unit ids, in as few runs of consecutive ids as this allocator finds, each run ascending.

        ``near`` is a unit after which they should lie if possible (the last unit of the same sequence). Precondition:
        ``units <= free_units``; that many are always found, if need be apart from one another.
        """
        ...

    def free(self, units: NDArray[np.int32]) -> None:
        """Take units back and merge them with their free neighbours.

        Raises:
            ValueError: a unit is free already, is listed twice, or is none of this pool's; nothing has changed.
        """
        ...

    def grow(self, units: int) -> None:
        """Add ``units`` free units at the end."""
        ...

    def shrink(self, units: int) -> bool:
        """Take the last ``units`` units away if all of them are free; otherwise change nothing and say False."""
        ...

    def check(self) -> NDArray[np.int32]:
        """All free units, ascending; raises AssertionError where the allocator's own structures disagree."""
        ...


@dataclass
class PageFacts:
    """What is known of every page, by page id (the page's first unit); arrays of ``units + 1`` entries.

    Times are the pool's clock, which goes up with every step. A use begins with the page's publication, and with each
    later prefix hit, and lasts until nobody holds the page: ``last_used`` is when the last one ended (or the present
    one began), ``history [units + 1, K]`` are when the last K began, latest first, -1 where there were fewer.
    ``priority`` is the highest of the requests that used the page. ``recompute_s`` are the predicted seconds that
    computing the page again would take, ``nbytes`` the bytes that it holds.
    """

    published: NDArray[np.int64]
    last_used: NDArray[np.int64]
    uses: NDArray[np.int64]
    history: NDArray[np.int64]
    priority: NDArray[np.int64]
    recompute_s: NDArray[np.float64]
    nbytes: NDArray[np.int64]


class EvictionPolicy(Protocol):
    """Says which idle page is worth least. Chains are not its concern: of the pages that nothing findable depends on,
    the one of lowest rank goes first (``octavo.core.memory.eviction``)."""

    @property
    def history(self) -> int:
        """Uses of a page to remember, K; at least 1."""
        ...

    def rank(self, pages: NDArray[np.int32], facts: PageFacts) -> NDArray[np.float64]:
        """fp64, one a page, that became idle just now: lower is evicted earlier, infinite never (pinned)."""
        ...


@runtime_checkable
class PagePolicy(Protocol):
    """Tokens of a page of a segment. ``grain`` divides every size that the policy gives."""

    @property
    def grain(self) -> int: ...

    def page_tokens(self, segment_tokens: int | None) -> int:
        """Slots of each page of a segment of so many tokens; None where the length is not known (growing text).

        Raises:
            ValueError: the policy needs the length, or cannot page a segment of this one.
        """
        ...


class Encoded(NamedTuple):
    """I items of N tokens each: their ``embeddings`` [I, N, D], and ``scores`` fp32 [I, N], what each token is worth by
    the encoder's own account (the attention of its class token, say). Larger is worth more."""

    embeddings: Tensor
    scores: Tensor


class SegmentEncoder(Protocol):
    """Turns what a prompt held (a PIL image, say) into embeddings of the language model's width, D.

    An encoder that has them is asked for two more things. ``read(item)``, when a prompt is read, gives what the other
    methods get instead of the item: pixels that no later write to a file or array changes. ``witness(item) -> bytes``
    is a second digest of what ``identity`` names: where one of the two differs, no cached page is shared.

    One that works beside the engine has ``submit(items) -> list[Future]``, embeddings [N, D] of each. It is called as
    soon as somebody may need an item, and comes back at once; only requests that hold the item wait for it.

    One that knows what its tokens are worth says so with ``scores_tokens``, a bool, and has ``encode_scored(items) ->
    Encoded``, which gives the embeddings of ``encode`` bit for bit; one with ``submit`` then takes ``submit(items,
    scored=True)``, for an ``Encoded`` of [N, D] and [N] each. Engines ask once a method goes by it. Scores are a
    function of what ``identity`` names, and shape no page that others may find, so they have no part in any key.

    ``bidirectional``: the item's positions see all of it, and not only what is in front of them.
    """

    bidirectional: bool

    def identity(self, item: Any) -> bytes:
        """32 bytes that stand for the item's embeddings, the same in every process: pixels, preprocessing, weights."""
        ...

    def n_tokens(self, item: Any) -> int:
        """Positions that the item takes in a prompt, N; at least 1."""
        ...

    def encode(self, items: Sequence[Any]) -> Tensor:
        """Embeddings [I, N, D] of I items of N tokens each. They stand where the output of the model's embedding layer
        would: behind whatever scale that layer applies."""
        ...


class SegmentReuse(Protocol):
    """How the KV of an image serves a request in which something else stands in front of it.

    ``exact``: not at all; then ``finds`` says whether images are found behind the very same prefix. Otherwise the image
    is computed once behind the first ``context_tokens`` tokens of a prompt and nothing else, and every request takes
    that KV: pages are listed where they are and queries turned, or (``copies``) copied with their keys turned, and the
    image's first ``head`` tokens are computed again where they stand. With a ``layer``, its tokens are all computed up
    to that layer (counted from 0), where the KV that they have in their place is compared with the copied one, and
    those that it ``chooses`` are computed in the layers behind it, too. ``provenance`` marks the keys of pages that
    such an image has shaped.
    """

    @property
    def name(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def finds(self) -> bool: ...
    @property
    def copies(self) -> bool: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def provenance(self) -> str: ...

    def head(self, tokens: int, page_tokens: int) -> int:
        """Tokens of an image of ``tokens``, on pages of ``page_tokens``, that are computed where they stand."""
        ...

    @property
    def layer(self) -> int | None: ...

    def choose(self, deviations: Tensor) -> Tensor:
        """Tokens to compute, int64 ascending, by ``deviations`` fp32 [N]: squared distances of K and V, all heads."""
        ...


class Digest(Protocol):
    """A pure function of a full page's contents, made once when the page is sealed and shared with it.

    ``provenance`` names the digest and its parameters; engines keep one store for each.
    """

    @property
    def provenance(self) -> str: ...

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        """Shape of each part for one page of one layer, ``(Hkv, ...)``; parts have the dtype of the pool. Raises
        ValueError if the digest cannot be made of pages of this size, or of this model."""
        ...

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        """Parts ``[n, L, Hkv, ...]`` of n pages, in any dtype, from ``k, v [n, L, Hkv, p, D]`` of the L ``layers``."""
        ...


@dataclass(frozen=True)
class LayerTraits:
    """What one layer asks of attention. ``window`` and ``softcap`` are 0 when off; ``sinks [Hq]`` may be None."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class AttentionStep(Protocol):
    """Serves every attention layer of one forward pass."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
        """Store ``k, v [T, Hkv, D]`` and give the attention of ``q [T, Hq, D]``."""
        ...


class PageView(Protocol):
    """The pages of the sequences of one method, in one layer of one step. Nothing is read until it is asked for, and
    what is read is counted.

    ``away`` is None, or what there is to know of pages that are in the host tier alone (``Hosting``).

    ``n_pages [b]`` int32 counts the open page at the end, whose digest does not exist yet; ``max_pages`` is the
    largest of them, P. ``seeds [b]`` int64 are the requests' own. ``layers`` counts those of the model. ``prior`` fp32
    [b, P], 0 to 1, is what requests say of their pages beforehand; None where none says anything.

    A method leaves there what its parts need: ``budget``, the pages that a KV head of this layer may read (on average),
    and ``reusable``, a choice for the later layers of the same step.
    """

    layer: int
    traits: LayerTraits
    page_tokens: int
    n_pages: Tensor
    max_pages: int
    seeds: Tensor
    prior: Tensor | None
    budget: int
    reusable: Selection | TokenSelection | None

    @property
    def away(self) -> AwayPages | None: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def page_units(self) -> int: ...
    @property
    def group_layer(self) -> int:
        """The layer, counted over those that see everything."""
        ...

    @property
    def scores(self) -> Tensor:
        """fp32 [b, H, P], by which ``top`` chose last."""
        ...

    @property
    def lengths(self) -> Tensor:
        """int32 [b], tokens of each sequence, the one being decoded included."""
        ...

    def of_layer(self, layer: int, traits: LayerTraits) -> PageView:
        """The same pages as a later layer sees them, until one asks for another; its reads are counted apart."""
        ...

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """``make()``, which the first layer that asks under ``key`` works out for the later ones of the same step."""
        ...

    def digest(self, part: str, channels: Tensor | None = None) -> Tensor:
        """``[b, P, Hkv, ...]``; rows past a sequence's sealed pages are arbitrary, NaN included. Of a part of s vectors
        [Hkv, s, D], ``channels`` int64 [b, Hkv, r] of each alone: ``[b, P, Hkv, s, r]``."""
        ...

    def digest_at(self, part: str, at: Tensor) -> Tensor:
        """``[b, Hkv, S, ...]`` of pages ``at`` int64 [b, Hkv, S] alone; arbitrary where that is no full page."""
        ...

    def keys_at(self, at: Tensor) -> Tensor:
        """Keys ``[b, Hkv, S, p, D]`` of pages ``at`` int64 [b, Hkv, S]; arbitrary where that is no full page."""
        ...

    def keys(self, channels: Tensor) -> Tensor:
        """r ``channels`` int64 [b, Hkv, r] of every key: ``[b, Hkv, P * p, r]``, past ``lengths`` arbitrary or NaN."""
        ...

    def contents(self) -> tuple[Tensor, Tensor]:
        """K and V of every token, each ``[b, Hkv, P * p, D]``, zeros past ``lengths``."""
        ...

    def bounds(self, q: Tensor, per_query_head: bool = False) -> Tensor:
        """The largest dot product with ``q [b, Hq, D]`` that any key in a page's min-max box could have: the largest of
        each group, fp32 [b, Hkv, P], or that of every query head, [b, Hq, P]; minus infinity past the sealed pages.
        Reads the digest parts "min" and "max", once and in place."""
        ...

    def mass(self, q: Tensor) -> Tensor:
        """Exact softmax mass of each page, fp32 [b, Hkv, P], mean over the query heads of a group. Reads all of K."""
        ...

    def apart(self, q: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """Attention of sequence ``row``'s query, of ``q [b, Hq, D]``, to each of its n pages by itself: outputs
        [n, Hq, D] and log-sum-exps fp32 [n, Hq], without sinks. For instruments: it reads all of K and V, uncounted,
        and the host waits."""
        ...

    def top(self, scores: Tensor, budget: Tensor, keep: Tensor, most: int) -> Selection:
        """The open page, then pages in ``keep`` bool [b, P], then the best ``scores`` fp32 [b, H, P], until ``budget``
        integer [b, H], nowhere above ``most``, is spent. Equal scores go to the lower page, on every backend; NaN is
        the worst score."""
        ...

    def gather(self, selection: Selection) -> tuple[Tensor, Tensor]:
        """Table int32 [1, b, H, M] and slots int32 [1, b, H] with which a decode kernel reads a selection. Entries of
        pages that are away are 0."""
        ...

    def attend(self, q: Tensor, tokens: TokenSelection) -> Tensor:
        """Attention ``[b, Hq, D]`` of ``q`` over single tokens, in plain torch: for bounds, not for speed."""
        ...


@dataclass(frozen=True)
class Selection:
    """Pages to read: ``pages`` integer [b, H, S], ascending, the open page last, and ``counts`` integer [b, H] of them
    that are meant. H is Hkv, or 1 where all heads agree. Entries past the count may be any page."""

    pages: Tensor
    counts: Tensor


@dataclass(frozen=True)
class TokenSelection:
    """Single tokens to read, which no kernel can: ``tokens`` int64 [b, Hkv, S], positions in any order, and ``counts``
    int64 [b, Hkv] of them that are meant. Entries past the count may be any position of a page."""

    tokens: Tensor
    counts: Tensor


@dataclass(frozen=True)
class PagesRead:
    """Reads of one sequence in one layer: pages of K and V a KV head, and elements a KV head to choose them."""

    pages: int
    scoring_elements: int


class QueryBlocks(Protocol):
    """N blocks of queries of one sequence in one layer, and the P pages up to the end of the last of them, all full.
    Nothing is read until it is asked for, and what is read is counted.

    Block n holds ``block_tokens`` queries, m, from position ``(first + n) * block_tokens`` on: ``q [N, m, Hq, D]``.
    """

    layer: int
    traits: LayerTraits
    page_tokens: int
    block_tokens: int
    first: int
    q: Tensor

    @property
    def kv_heads(self) -> int: ...
    @property
    def ends(self) -> Tensor:
        """int64 [N], pages up to the end of each block."""
        ...

    def keys(self) -> Tensor:
        """K of all pages, ``[P, Hkv, p, D]``. Counted as if every block read those up to its end by itself."""
        ...


class PrefillPattern(Protocol):
    """Chooses, per layer and KV head, the pages that a block of a prompt's queries reads.

    Blocks begin at multiples of ``block_tokens``, wherever a step begins, and are computed whole, so neither the
    chunks of a prompt nor who else is in a step have a part in the choice. ``provenance`` marks the keys of pages
    whose KV was computed so. A pattern holds no state of a request or an engine.
    """

    @property
    def block_tokens(self) -> int: ...
    @property
    def provenance(self) -> str: ...
    @property
    def adaptive(self) -> bool:
        """Whether it may read less than is predicted, as scores demand."""
        ...

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        """Raises ValueError if the pattern cannot serve a model on pages of this size."""
        ...

    def choose(self, blocks: QueryBlocks) -> Tensor:
        """bool [N, H, P], H is Hkv, or 1 where all heads agree. A block reads its own pages whatever this says of
        them, and none that come later."""
        ...

    def predict(self, block: int, layer: int, spec: ModelSpec, page_tokens: int) -> PagesRead:
        """What block number ``block`` of a prompt will read in ``layer``, in closed form; the most, if ``adaptive``."""
        ...


class SparseMethod(Protocol):
    """Chooses, per sequence, layer and KV head, the pages that a decoding query reads.

    ``provenance`` marks the keys of pages whose KV this method has shaped. ``digest`` is None if the method chooses
    without one, ``prefill``, which may be left out, if prompts are computed densely. A method holds no state of a
    request or an engine.
    """

    @property
    def name(self) -> str: ...
    @property
    def prefill(self) -> PrefillPattern | None: ...
    @property
    def digest(self) -> Digest | None: ...
    @property
    def provenance(self) -> str: ...
    @property
    def draws(self) -> bool:
        """Whether what is chosen depends on ``PageView.seeds``."""
        ...

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device while pages are chosen; such steps are not replayed."""
        ...

    def reads_all(self, tokens: int, spec: ModelSpec, page_tokens: int) -> bool:
        """Whether a sequence of so many tokens is read whole in every layer, so that nothing has to be chosen."""
        ...

    def validate(self, spec: ModelSpec, page_tokens: int) -> None:
        """Raises ValueError if the method cannot serve a model on pages of this size."""
        ...

    def select(self, q: Tensor, pages: PageView) -> Selection | TokenSelection | None:
        """Pages, or single tokens, for ``q [b, Hq, D]``; None reads all pages."""
        ...

    def resolve(self, selection: Selection, pages: PageView) -> tuple[Tensor, Tensor]:
        """Table and slots (as ``PageView.gather``) of a selection, once its pages are where the kernel can read."""
        ...

    def hosting(self, spec: ModelSpec, page_tokens: int) -> Hosting | None:
        """How its pages lie in the host tier; None, which is also meant where a method has no such function: all stay
        in the pool."""
        ...

    def predict(self, tokens: int, layer: int, spec: ModelSpec, page_tokens: int) -> PagesRead:
        """What one decode step with ``tokens`` in the cache will read in ``layer``, in closed form."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """What a sparse method also has whose tokens are drafts (``octavo.core.execution.drafts``): ``draft`` chooses what
    they read, up to ``drafts`` of them at a time, and the full cache says which stand. ``forced_acceptance`` is None,
    or the probability of it."""

    @property
    def draft(self) -> SparseMethod: ...
    @property
    def drafts(self) -> int: ...
    @property
    def forced_acceptance(self) -> float | None: ...


# The parts that a method is made of (octavo.sparse.method.Method). H is Hkv, or 1 where all heads agree.


class Scorer(Protocol):
    """Rates pages: a larger score is read first. ``parts`` are the digest parts that it reads, each once; ``draws``:
    scores depend on ``PageView.seeds``; ``waits``: the host waits for the device; ``shares``: scores estimate shares of
    a head's attention, so they add up. ``elements_of`` counts the elements that it reads of a part of the shape [...]
    of one page and head."""

    @property
    def parts(self) -> frozenset[str]: ...
    @property
    def draws(self) -> bool: ...
    @property
    def waits(self) -> bool: ...
    @property
    def shares(self) -> bool: ...

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        """fp32 [b, H, P] for ``q [b, Hq, D]``; what stands past a sequence's pages is ignored, NaN included."""
        ...

    def elements(self, tokens: int, spec: ModelSpec, page_tokens: int) -> int:
        """Elements a KV head that scoring ``tokens`` tokens reads besides digests, in closed form."""
        ...

    def elements_of(self, shape: tuple[int, ...]) -> int: ...

    def narrowing(self, budget: int, tokens: int, spec: ModelSpec, page_tokens: int) -> int:
        """What it reads further of those pages that it looks at more closely, whose number depends on the layer's
        ``budget`` of pages."""
        ...


class Budget(Protocol):
    """Pages that each KV head may read. A budget in tokens rounds up to whole pages. ``needs_shares``: it can only
    divide scores that are shares of attention. ``adaptive``: it may spend less than ``pages`` as scores demand, so what
    is predicted is the most that is read."""

    @property
    def needs_shares(self) -> bool: ...
    @property
    def adaptive(self) -> bool: ...

    def pages(self, layer: int, layers: int, page_tokens: int) -> int:
        """Pages a KV head of ``layer`` (of ``layers``), on average; a sequence of no more pages is read whole."""
        ...

    def most(self, layer: int, layers: int, page_tokens: int, heads: int) -> int:
        """The most that any of ``heads`` gets; known without looking at scores, so that shapes are static."""
        ...

    def allocate(self, scores: Tensor, keep: Tensor, pages: PageView) -> Tensor:
        """int64 [b, H], for scores fp32 [b, H, P], NaN the worst, and pages to read in any case, ``keep`` bool [b, P].
        Both are arbitrary past a sequence's pages."""
        ...


class Prior(Protocol):
    """Joins what a request says of its pages beforehand to what a scorer says of them."""

    def favour(self, scores: Tensor, budget: Tensor, keep: Tensor, pages: PageView) -> Tensor:
        """``scores`` fp32 [b, H, P] with ``PageView.prior``; ``budget`` and ``keep`` as for ``Selector.select``."""
        ...


class Selector(Protocol):
    def select(
        self, scores: Tensor, budget: Tensor, keep: Tensor, pages: PageView, most: int
    ) -> Selection | TokenSelection:
        """Pick at most ``budget [b, H]`` (and at most ``most``) of each row's ``pages.n_pages [b]`` pages; those in
        ``keep`` bool [b, P] first, then by ``scores`` fp32 [b, H, P]. The open page is always picked."""
        ...


class Placement(Protocol):
    """Where pages are when they are not read, and how they come to where the kernel reads them."""

    def resolve(self, selection: Selection, pages: PageView) -> tuple[Tensor, Tensor]:
        """Table and slots for the decode kernel (``PageView.gather``)."""
        ...
