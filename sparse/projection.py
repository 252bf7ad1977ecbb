"""Loki (arXiv 2406.02542) and Double Sparsity (arXiv 2408.07092): keys in few dimensions, known from calibration."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec, PageView
from octavo.sparse.digests import Digested
from octavo.sparse.ranking import grouped, sealed
from octavo.sparse.scorers import Scored


@dataclass(frozen=True)
class Projection(Digested, Scored):
    """Digest and scorer in one: every key in r dimensions, and a page's share of attention estimated with them.

    1. A page's digest is K B, with a basis B [D, r] of each layer and KV head.
    2. softmax over tokens of (q B) . (k B), times the layer's scale; its sum over each full page, the mean of a group.

    Loki (arXiv 2406.02542, section 4): B are the first principal components of keys after RoPE. Double Sparsity (arXiv
    2408.07092, section 3.1): B picks the channels that matter most. Deviations: pages instead of tokens; Loki keeps K
    itself in its basis and so needs no copy; Double Sparsity's copy is int4, here it has the dtype of the pool; tokens
    of the open page have no digest and no part in the softmax.

    Args:
        file: what ``octavo.sparse.calibration.save`` wrote for this model.
    """

    parts: ClassVar[frozenset[str]] = frozenset({"reduced"})
    shares: ClassVar[bool] = True
    file: str | None = field(default=None, compare=False, repr=False)
    checksum: str = field(default="", init=False)
    """Of the file, so that pages shaped with another one have another provenance."""

    def __post_init__(self) -> None:
        if self.file is not None:
            if not Path(self.file).is_file():
                raise ValueError(f"digest.file={self.file}: no such calibration file")
            object.__setattr__(self, "checksum", hashlib.sha256(Path(self.file).read_bytes()).hexdigest())

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        if self.file is None:
            raise ValueError("digest.file is not set, and this method needs calibration: octavo.sparse.calibration")
        shape = tuple(self.basis.shape)
        if shape[:3] != (model.layers, model.kv_heads, model.head_dim):
            raise ValueError(
                f"digest.file={self.file} is of {shape[0]} layers, {shape[1]} KV heads and head size {shape[2]}; "
                f"{model.name} has {model.layers}, {model.kv_heads} and {model.head_dim}"
            )
        return {"reduced": (model.kv_heads, page_tokens, shape[3])}

    @cached_property
    def basis(self) -> Tensor:
        """fp32 [layers, Hkv, D, r]."""
        assert self.file is not None
        data = Path(self.file).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.checksum:
            raise ValueError(f"digest.file={self.file} has changed since the method was made; make it again")
        return torch.from_numpy(np.load(BytesIO(data), allow_pickle=False)).float()

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        return {"reduced": k.float() @ self.basis[list(layers)].to(k.device)}

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        queries = grouped(q, pages.kv_heads) @ self.basis[pages.layer].to(q.device)  # [b, Hkv, g, r]
        keys = pages.digest("reduced").float()  # [b, P, Hkv, p, r]
        logits = torch.einsum("bhgr,bphtr->bhgpt", queries, keys) * pages.traits.scale
        logits = logits.masked_fill(~sealed(pages)[:, :, None, :, None], -torch.inf)
        return logits.flatten(3).softmax(-1).view_as(logits).sum(4).mean(2)
