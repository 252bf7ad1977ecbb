"""Loki (arXiv 2406.02542) and Double Sparsity (arXiv 2408.07092): keys in few dimensions, known from calibration."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces import ModelSpec, PageView
from octavo.sparse.basis_files import BasisFile, model_identity, read, shipped
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
        file: what ``octavo experiment=calibrate`` wrote for this model (``octavo.sparse.basis_files``).
        shipped: the method whose file is taken, of those that come with octavo, where ``file`` is None.
    """

    parts: ClassVar[frozenset[str]] = frozenset({"reduced"})
    shares: ClassVar[bool] = True
    file: str | None = field(default=None, compare=False, repr=False)
    shipped: str = ""
    checksum: str = field(default="", init=False)
    """Of the files that may be used, so that pages shaped with others have another provenance."""

    def __post_init__(self) -> None:
        if self.file is not None and not Path(str(self.file)).is_file():
            raise ValueError(f"digest.file={self.file}: no such calibration file")
        object.__setattr__(self, "checksum", self._checksum())

    def spec(self, page_tokens: int, model: ModelSpec) -> Mapping[str, tuple[int, ...]]:
        found = self._files.get((model.kv_heads, model.head_dim))
        if self.file is None and (found is None or found.provenance["model"] != model_identity(model)):
            raise ValueError(
                f"digest.file is not set, and this method needs calibration: none comes with octavo for this "
                f"{model.name} of {model.layers} layers; `octavo experiment=calibrate` makes a file"
            )
        if found is None or len(found.basis) != model.layers:
            (shape,) = [tuple(one.basis.shape) for one in self._files.values()]
            raise ValueError(
                f"digest.file={self.file} is of {shape[0]} layers, {shape[1]} KV heads and head size {shape[2]}; "
                f"{model.name} has {model.layers}, {model.kv_heads} and {model.head_dim}"
            )
        return {"reduced": (model.kv_heads, page_tokens, found.basis.shape[3])}

    @cached_property
    def _files(self) -> Mapping[tuple[int, int], BasisFile]:
        """By number and size of KV heads, which say whose file it is: ``compute`` and ``score`` see no more."""
        if self._checksum() != self.checksum:
            raise ValueError(f"digest.file={self.file} has changed since the method was made; make it again")
        read_ones = [read(path.read_bytes(), str(path)) for path in self._paths()]
        return {(one.basis.shape[1], one.basis.shape[2]): one for one in read_ones}

    @cached_property
    def _placed(self) -> dict[tuple[int, int, torch.device], Tensor]:
        return {}

    def _basis(self, kv_heads: int, head_dim: int, device: torch.device) -> Tensor:
        """[layers, Hkv, D, r], on a device for good: a captured step reads it there, and cannot copy."""
        at = kv_heads, head_dim, device
        if at not in self._placed:
            self._placed[at] = self._files[kv_heads, head_dim].basis.to(device)
        return self._placed[at]

    def _paths(self) -> list[Path]:
        return shipped(self.shipped) if self.file is None else [Path(self.file)]

    def _checksum(self) -> str:
        return hashlib.sha256(b"".join(path.read_bytes() for path in self._paths())).hexdigest()

    def compute(self, k: Tensor, v: Tensor, layers: Sequence[int]) -> Mapping[str, Tensor]:
        basis = self._basis(k.shape[2], k.shape[4], k.device)
        return {"reduced": k.float() @ basis[list(layers)]}

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        basis = self._basis(pages.kv_heads, q.shape[2], q.device)[pages.layer]
        queries = grouped(q, pages.kv_heads) @ basis  # [b, Hkv, g, r]
        keys = pages.digest("reduced").float()  # [b, P, Hkv, p, r]
        logits = torch.einsum("bhgr,bphtr->bhgpt", queries, keys) * pages.traits.scale
        logits = logits.masked_fill(~sealed(pages)[:, :, None, :, None], -torch.inf)
        return logits.flatten(3).softmax(-1).view_as(logits).sum(4).mean(2)
