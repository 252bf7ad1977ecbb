"""Bases in which a few dimensions say most of what a model's keys have to say to its queries, for ``Projection``.

``octavo experiment=calibrate method=loki`` makes a model's file from texts that are on every machine; with texts of
one's own::

    model, tokenizer = load("path-or-hub-id", "auto", "auto")  # octavo.core.hf_model
    queries, keys = queries_and_keys(model, [tokenizer(text).input_ids for text in texts])
    basis_files.write("loki.npz", principal_directions(keys, 16), {"method": "loki"})
    basis_files.write("double_sparsity.npz", heavy_channels(queries, keys, 16), {"method": "double_sparsity"})

A few thousand tokens of text like that of the task are enough: the bases describe the model more than the text.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from octavo.core.hf_model import HFModel
from octavo.core.interfaces import LayerTraits
from octavo.sparse.ranking import grouped


class _Recorder:
    """Serves one forward pass by plain attention over its T tokens and keeps what every layer was asked."""

    def __init__(self) -> None:
        self.queries: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
        if traits.sinks is not None:
            raise ValueError(f"layer {layer} has attention sinks, with which a model cannot be calibrated yet")
        self.queries[layer], self.keys[layer] = q.float(), k.float()
        logits = torch.einsum("shgd,thd->hgst", grouped(q, k.shape[1]), k.float()) * traits.scale
        if traits.softcap:
            logits = traits.softcap * (logits / traits.softcap).tanh()
        position = torch.arange(len(q), device=q.device)
        behind = position[:, None] - position
        seen = (behind >= 0) & (behind < (traits.window or len(q)))
        probs = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hgst,thd->shgd", probs, v.float()).flatten(1, 2).to(q.dtype)


def queries_and_keys(model: nn.Module, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Queries fp32 [layers, T, Hq, D] and keys fp32 [layers, T, Hkv, D] after RoPE, of the T tokens of all ``texts``,
    each a list of token ids that is read by itself (its attention takes memory in the square of its length)."""
    runner = HFModel(model)
    queries, keys = [], []
    for text in texts:
        recorder = _Recorder()
        ids = torch.tensor(text, device=runner.device)
        positions = torch.arange(len(text), device=runner.device)
        runner.forward(ids, positions, positions[-1:], recorder)
        layers = range(runner.spec.layers)
        queries.append(torch.stack([recorder.queries[layer] for layer in layers]).cpu())
        keys.append(torch.stack([recorder.keys[layer] for layer in layers]).cpu())
    return torch.cat(queries, 1), torch.cat(keys, 1)


def principal_directions(keys: Tensor, rank: int) -> Tensor:
    """The ``rank`` directions in which the keys of each head vary most, fp32 [layers, Hkv, D, rank] (Loki, arXiv
    2406.02542, section 4): what all keys have in common changes no softmax."""
    _check_rank(rank, keys.shape[3])
    spread = keys - keys.mean(1, keepdim=True)
    covariance = torch.einsum("lthd,lthe->lhde", spread, spread)
    return torch.linalg.eigh(covariance).eigenvectors.flip(-1)[..., :rank]


def heavy_channels(queries: Tensor, keys: Tensor, rank: int) -> Tensor:
    """Unit vectors of the ``rank`` channels d of largest mean |q_d k_d|, fp32 [layers, Hkv, D, rank] (Double Sparsity,
    arXiv 2408.07092, section 3.1); a mean over all pairs of tokens, so it is the product of two means."""
    dim = keys.shape[3]
    _check_rank(rank, dim)
    channels = _channel_weight(queries, keys).argsort(dim=-1, descending=True, stable=True)[..., :rank]
    return one_hot(channels, dim).transpose(2, 3).float()


def variance_kept(keys: Tensor, basis: Tensor) -> Tensor:
    """The share of the variance of keys [layers, T, Hkv, D] that lies in an orthonormal basis [layers, Hkv, D, rank]:
    [layers, Hkv], 0 to 1. It is what ``principal_directions`` makes largest."""
    spread = keys - keys.mean(1, keepdim=True)
    within = torch.einsum("lthd,lhdr->lthr", spread, basis)
    return within.square().sum((1, 3)) / spread.square().sum((1, 3))


def products_kept(queries: Tensor, keys: Tensor, basis: Tensor) -> Tensor:
    """The share of the mean |q_d k_d| that lies in the channels which a basis [layers, Hkv, D, rank] of unit vectors
    picks: [layers, Hkv], 0 to 1. It is what ``heavy_channels`` makes largest."""
    weight = _channel_weight(queries, keys)
    return (weight[..., None] * basis).sum((2, 3)) / weight.sum(2)


def weights_sha256(model: nn.Module) -> str:
    """A hash of all parameters, as fp32, by name: the same in whatever precision a checkpoint was loaded that holds its
    values exactly."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)}".encode())
        digest.update(memoryview(parameter.detach().cpu().float().numpy()).cast("B"))
    return digest.hexdigest()


def _channel_weight(queries: Tensor, keys: Tensor) -> Tensor:
    """Mean |q_d| of a KV head's queries, added up, times mean |k_d|: [layers, Hkv, D]."""
    layers, _, kv_heads, dim = keys.shape
    return queries.abs().mean(1).view(layers, kv_heads, -1, dim).sum(2) * keys.abs().mean(1)


def _check_rank(rank: int, dim: int) -> None:
    if not 1 <= rank <= dim:
        raise ValueError(f"rank={rank} must be 1 to the head size of {dim}")
