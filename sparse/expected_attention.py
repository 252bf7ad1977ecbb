"""Expected Attention (arXiv 2510.00636): what queries that are still to come will attend to."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.core.compression.interfaces import Context, LayerContext
from octavo.sparse.checks import check_integer, check_number
from octavo.sparse.ranking import grouped
from octavo.sparse.token_scores import Rated


@dataclass(frozen=True)
class ExpectedAttention(Rated):
    """The attention of a query that is drawn like those seen, at a position to come (Expected Attention, arXiv
    2510.00636, section 3):

    1. mean m and covariance C of the last ``window`` queries of the prompt, before RoPE;
    2. both turned by the mean rotation of the next ``future_tokens`` positions;
    3. z = m . k / sqrt(D) + k C k / 2 D, the logarithm of what exp(q . k / sqrt(D)) is on average if q is Gaussian; its
       softmax over tokens, the mean over the query heads of a KV head;
    4. plus ``epsilon``, times |v|.

    The first ``sink_tokens`` have no part in the mean, the covariance and the softmax: keep them by ``keep``.

    RoPE must turn the first half of a head against the second, as in Llama, Qwen and their kin.
    """

    window: int = 512  # type: ignore[misc]
    future_tokens: int = 512
    epsilon: float = 0.02
    sink_tokens: int = 0
    shares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer("scorer.window", self.window, 2)
        check_integer("scorer.future_tokens", self.future_tokens, 1)
        check_number("scorer.epsilon", self.epsilon, 0)
        check_integer("scorer.sink_tokens", self.sink_tokens, 0)

    def score(self, layer: LayerContext, context: Context) -> Tensor:
        rates = rope_rates(context, layer.layer).to(layer.queries.device)
        first = max(context.tokens - len(layer.queries), min(self.sink_tokens, context.tokens - 1))
        seen = torch.arange(first, context.tokens, device=rates.device)
        queries = turned(layer.queries[-len(seen) :].float(), -seen[:, None, None] * rates)  # before RoPE
        queries = grouped(queries, len(layer.keys)).permute(1, 2, 0, 3)  # [Hkv, g, w, D]
        mean = queries.mean(2, keepdim=True)
        coming = context.tokens + torch.arange(self.future_tokens, device=rates.device)
        angles = coming[:, None] * rates
        cos, sin = angles.cos().mean(0), angles.sin().mean(0)
        spread = _turn(queries - mean, cos, sin)  # the covariance is its square over w
        mean = _turn(mean, cos, sin)
        keys = layer.keys.float().unsqueeze(1)  # [Hkv, 1, N, D]
        scale = layer.traits.scale
        z = scale * (mean @ keys.mT).squeeze(2)  # [Hkv, g, N]
        covariance = spread.mT @ spread / queries.shape[2]  # [Hkv, g, D, D]
        z = z + scale**2 / 2 * ((keys @ covariance) * keys).sum(3)
        exists = (layer.positions >= self.sink_tokens).unsqueeze(1)
        expected = z.masked_fill(~exists, -torch.inf).softmax(2).mean(1)
        norms: Tensor = layer.values.float().norm(dim=-1)
        return (expected + self.epsilon) * norms


def rope_rates(context: Context, layer: int) -> Tensor:
    """Radians that each pair of a head's elements turns by from one position to the next in a layer, fp32
    [at most D / 2].

    Models that turn their layers by several kinds of RoPE, as Gemma 3, name the buffers after the layers' kinds.

    Raises:
        ValueError: the model has several kinds, and does not say which is the layer's.
    """
    found = {name: rates for name, rates in context.model.named_buffers() if name.endswith("inv_freq")}
    kinds = getattr(context.model.config.get_text_config(), "layer_types", None)
    own = [rates for name, rates in found.items() if kinds and name.endswith(f"{kinds[layer]}_inv_freq")]
    own = own or list(found.values())
    if not own or any(not torch.equal(rates, own[0]) for rates in own):
        raise ValueError(f"{context.spec.name} has {len(own)} kinds of RoPE, and the queries to come need one")
    return own[0].float()


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """``x`` [..., D], each pair of its elements turned by ``angles`` [..., at most D / 2]."""
    return _turn(x, angles.cos(), angles.sin())


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)
