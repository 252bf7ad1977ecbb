"""Scorers of kvpress through an adapter: what they make of keys and values rates pages here.

kvpress (https://github.com/NVIDIA/kvpress) drops tokens once, by ``press.score(module, hidden_states, keys, values,
attentions, kwargs) -> [b, Hkv, T]``. Here such an object, or one of the same form, rates pages at every decode step.
octavo has no hidden states or attention weights of past tokens, so that scorers that look at them are refused; and it
imports nothing of kvpress.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.core.interfaces import Budget, ModelSpec, PageView
from octavo.sparse.keep import Keep
from octavo.sparse.method import Method
from octavo.sparse.scorers import Scored

LABEL = "through an adapter"


@dataclass(frozen=True)
class PressScores(Scored):
    """The mean score of a page's tokens, as ``press`` scores all tokens of the sequence.

    ``press.score`` gets a stand-in for the attention module (``layer_idx``, ``head_dim``, ``num_key_value_groups`` and
    a ``config`` with the numbers of heads), keys after RoPE and values ``[1, Hkv, T, D]``, None for hidden states and
    attentions, and no keyword arguments. Deviations: pages instead of tokens, chosen anew at every step; nothing is
    dropped, and the press's own ratio has no part in it. It reads all K and V to choose, and the host waits for it.
    """

    press: Any
    waits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name = type(self.press).__name__
        if not callable(getattr(self.press, "score", None)):
            raise ValueError(f"scorer.press={name} has no method score(module, hidden_states, keys, values, ...)")
        keys, values = torch.randn((2, 1, 2, 8, 4), generator=torch.Generator().manual_seed(0))
        try:
            scores = self.press.score(_module(0, 2, 2, 4), None, keys, values, None, {})
        except Exception as error:  # whatever a user's scorer raises
            raise ValueError(
                f"scorer.press={name} cannot be used {LABEL}: with keys and values, and without hidden states and "
                f"attentions, its score() raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(scores, Tensor) or scores.shape != (1, 2, 8):
            found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"scorer.press={name}: score() gave {found} for keys of (1, 2, 8, 4), not (1, 2, 8)")

    def score(self, q: Tensor, pages: PageView) -> Tensor:
        keys, values = pages.contents()  # [b, Hkv, P * p, D]
        module = _module(pages.layer, q.shape[1], pages.kv_heads, q.shape[2])
        scores = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
        lengths = pages.lengths.tolist()
        for row, count in enumerate(lengths):
            own = slice(row, row + 1), slice(None), slice(count)
            scores[own] = self.press.score(module, None, keys[own], values[own], None, {}).float()
        page = torch.arange(pages.max_pages, device=q.device) * pages.page_tokens
        held = (pages.lengths[:, None] - page).clamp(1, pages.page_tokens)  # [b, P]
        return scores.unflatten(2, (pages.max_pages, pages.page_tokens)).sum(3) / held[:, None]

    def elements(self, tokens: int, spec: ModelSpec, page_tokens: int) -> int:
        return 2 * tokens * spec.head_dim


def adapted(press: Any, budget: Budget, keep: Keep | None = None, dense_layers: Sequence[int] = ()) -> Method:
    """A method that chooses by ``press``, with a name that says so.

    Raises:
        ValueError: ``press`` is no scorer, or needs what octavo does not have.
    """
    name = f"{type(press).__name__} ({LABEL})"
    return Method(name, PressScores(press), budget, keep=keep or Keep(), dense_layers=dense_layers)


def _module(layer: int, q_heads: int, kv_heads: int, head_dim: int) -> SimpleNamespace:
    """What stands for the attention module."""
    heads = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = SimpleNamespace(**heads, hidden_size=q_heads * head_dim)
    return SimpleNamespace(
        layer_idx=layer, head_dim=head_dim, num_key_value_groups=q_heads // kv_heads, config=config, training=False
    )
