"""A vision tower and a projector as the engine's ``SegmentEncoder``: images in, embeddings out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from octavo.core.interfaces import Encoded
from octavo.multimodal.fingerprints import weights_fingerprint
from octavo.multimodal.identity import image_id, second_digest
from octavo.multimodal.image_policy import ImagePolicy
from octavo.multimodal.images import RgbImage, load_image
from octavo.multimodal.projector import Projector


class VisionTower(Protocol):
    """An ``nn.Module`` as ``OpenClipEncoder`` documents it. I images, N tokens an image, W the tower's width."""

    width: int
    grid: tuple[int, int]
    n_tokens: int
    policy: ImagePolicy | None
    settings: str
    preprocessing: str

    def check(self, image: RgbImage) -> None: ...
    def preprocess(self, images: Sequence[RgbImage]) -> Tensor: ...
    def __call__(self, pixels: Tensor) -> Tensor: ...


class ScoringTower(VisionTower, Protocol):
    """A tower that may know what its tokens are worth; ``scored`` gives tokens [I, N, W] and scores fp32 [I, N]."""

    scores_tokens: bool

    def scored(self, pixels: Tensor) -> tuple[Tensor, Tensor]: ...


class ImageEncoder:
    """What ``Engine(encoders={"image": ...})`` takes. An item is whatever ``load_image`` reads, or its ``RgbImage``;
    one that comes back in several calls is best read once (``read``).

    Both modules are put into eval mode. Images that were named before their weights changed have another name
    afterwards (``weights_fingerprint`` says which changes it sees).

    An image's embeddings do not depend on its batch mates where ``batch_images`` is 1, which is the default on a CPU
    and costs nothing there. On a GPU larger batches are faster, and the kernels that are chosen for another batch may
    round otherwise: ask for 1 where a later run has to give the same bits.

    Args:
        bidirectional: whether the language model's queries inside an image see all of it (Gemma 3), or only what is in
            front of them (LLaVA).
        batch_images: images a forward pass; None is 1 on a CPU and 16 elsewhere.

    Attributes:
        policy: limits for the images, and what is done where one leaves a choice; the tower's, or the default.
        hidden: width of the embeddings, D.

    Raises:
        ValueError: ``batch_images`` below 1, or a projector for another width or number of tokens.
    """

    def __init__(
        self,
        tower: VisionTower,
        projector: Projector,
        *,
        bidirectional: bool = False,
        batch_images: int | None = None,
    ) -> None:
        assert isinstance(tower, nn.Module)
        if batch_images is not None and batch_images < 1:
            raise ValueError(f"batch_images must be at least 1, got {batch_images}")
        if projector.width != tower.width:
            raise ValueError(f"the projector takes tokens of width {projector.width}, the tower gives {tower.width}")
        self.tower = tower.eval()
        self.projector = projector.eval()
        self.policy = tower.policy or ImagePolicy()
        self.bidirectional = bidirectional
        self.hidden = projector.hidden
        self._weight = next(projector.parameters())
        self._batch_images = batch_images or (1 if self._weight.device.type == "cpu" else 16)
        self._n_tokens = projector.n_tokens(tower.n_tokens)
        self._preprocessing = tower.preprocessing
        self._modules = nn.ModuleList([tower, projector])

    def read(self, item: Any) -> RgbImage:
        """The item's pixels, checked.

        Raises:
            ImageError: not an image, or one beyond the policy's limits.
            ValueError: nothing of it would be left after resizing.
        """
        image = load_image(item, self.policy)
        self.tower.check(image)
        return image

    def identity(self, item: Any) -> bytes:
        """32 bytes that stand for the embeddings: pixels, preprocessing, weights, and how the weights are used."""
        return image_id(self.read(item), self._preprocessing, self._encoder())

    def witness(self, item: Any) -> bytes:
        """32 bytes of another digest of the same, by which a hit is verified (``CachedEncoder``)."""
        return second_digest(self.read(item), self._preprocessing, self._encoder())

    def n_tokens(self, item: Any) -> int:
        """Tokens that the item takes in a prompt; the same for every image, known before it is encoded."""
        return self._n_tokens

    @torch.no_grad()
    def encode(self, items: Sequence[Any]) -> Tensor:
        """Embeddings [I, N, D] of I items, in the projector's dtype and on its device."""
        return self._embeddings([self.read(item) for item in items])

    @property
    def scores_tokens(self) -> bool:
        """Whether the tower knows what its tokens are worth, and ``encode_scored`` can be asked."""
        return bool(getattr(self.tower, "scores_tokens", False))

    @torch.no_grad()
    def encode_scored(self, items: Sequence[Any]) -> Encoded:
        """Embeddings as ``encode``, bit for bit, and what the tower says of each token (``OpenClipEncoder.scored``), as
        the projector pools them: fp32 [I, N]."""
        tower = cast(ScoringTower, self.tower)
        embeddings, scores = [self._weight.new_empty(0, self._n_tokens, self.hidden)], [torch.empty(0, self._n_tokens)]
        for pixels in self._batches([self.read(item) for item in items]):
            tokens, worth = tower.scored(pixels)
            embeddings.append(self.projector(tokens.to(self._weight)))
            scores.append(self.projector.pool(worth).to(scores[0]))
        return Encoded(torch.cat(embeddings), torch.cat(scores))

    def _embeddings(self, images: Sequence[RgbImage]) -> Tensor:
        """[I, N, D] of I images as the tower takes them."""
        rows = [self.projector(self.tower(pixels).to(self._weight)) for pixels in self._batches(images)]
        return torch.cat(rows) if rows else self._weight.new_empty(0, self._n_tokens, self.hidden)

    def _batches(self, images: Sequence[RgbImage]) -> Iterator[Tensor]:
        """Pixels of ``batch_images`` images at a time."""
        for at in range(0, len(images), self._batch_images):
            yield self.tower.preprocess(images[at : at + self._batch_images])

    def _encoder(self) -> bytes:
        return weights_fingerprint(self._modules) + f"{self.tower.settings} {self.projector.config}".encode()
