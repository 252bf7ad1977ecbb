"""The table of all sparse methods, made small, and pages without an engine on which they choose."""

import random
from pathlib import Path

import torch

from octavo.core.interfaces import LayerTraits, Selection
from octavo.kernels import ops
from octavo.scripts.build import method

CALIBRATED = ("double_sparsity", "loki")  # they need a file of the model: test_projection.py
CONFIGS = Path(__file__).parents[2] / "configs" / "sparse"
VISUAL = sorted(path.stem for path in CONFIGS.glob("*.yaml") if "visual_eviction" in path.read_text())
"""Those that drop tokens of images: test_visual_eviction.py."""
DROPPING = sorted({path.stem for path in CONFIGS.glob("*.yaml") if "placement: drop\n" in path.read_text()} - {*VISUAL})
"""Those that drop tokens: test_eviction.py."""
WRAPPERS = ("lossless",)  # of another method: test_lossless.py
PRIORS = ("quest_structure",)  # test_prior.py
PATTERNS = ("a_shape", "flex_prefill", "top_pages", "vertical_slash", "xattention", "xattention_quest")
"""Of prompts: test_prefill_patterns.py."""
OTHERS = {*CALIBRATED, *DROPPING, *VISUAL, *WRAPPERS, *PATTERNS, *PRIORS}
NAMES = sorted({path.stem for path in CONFIGS.glob("*.yaml")} - OTHERS)
SMALL = {"keep": {"sink_tokens": 4, "recent_tokens": 4}, "dense_layers": [0]}
PYRAMIDS = ("hierarchical", "pyramid_kv")
SMALLER = {
    "hierarchical": {"digest": {"sub_pages": 2, "wide": 2, "narrow": 1}},
    "infllm": {"digest": {"count": 2}},
    "less_is_more": {"choosing_layers": [1]},
    "lserve": {"digest": {"sub_pages": 2}},
    "sparq": {"scorer": {"channels": 3}},
    "tidal": {"choosing_layers": [1]},
    "twilight": {"budget": {"mass": 0.6}},
}
"""What a model of 3 layers and pages of 4 tokens need besides."""
BUDGET = 20
PROMPT = random.Random(0).choices(range(3, 128), k=45)
_made = {}


def make(name, tokens=BUDGET, page_tokens=4, **parts):
    """A method for the small model. Composing YAML takes longer than running it, so equal ones are made once."""
    if name in PYRAMIDS:  # three pages are kept
        parts = {"budget": {"kept_tokens": 2 * page_tokens + 1, "first_layer": 1}, **parts}
    parts = {**SMALL, **SMALLER.get(name, {}), **parts}
    key = repr((name, tokens, parts))
    if key not in _made:
        _made[key] = method(name, budget_tokens=tokens, **parts)
    return _made[key]


class View:
    """Pages of two sequences, of 9 and 6 pages of 4 tokens (the open one included), 2 KV heads of size 8. Digests are
    those of a method."""

    layer, layers, page_tokens, max_pages, kv_heads = 1, 3, 4, 9, 2
    traits = LayerTraits(8**-0.5)
    reusable = None
    budget = 0

    def __init__(self, seed=0, digest=None):
        self.kind = digest
        generator = torch.Generator().manual_seed(seed)
        self.k = torch.randn(2, 9, 2, 4, 8, generator=generator)  # [b, P, Hkv, p, D]
        self.q = torch.randn(2, 4, 8, generator=generator)
        self.n_pages = torch.tensor([9, 6], dtype=torch.int32)
        self.lengths = torch.tensor([34, 23], dtype=torch.int32)
        self.seeds = torch.tensor([3, 4])

    def once(self, key, make):
        return make()

    def digest(self, part, channels=None):
        keys = self.k.flatten(0, 1)[:, None]  # [b * P, one layer, Hkv, p, D]
        digest = self.kind.compute(keys, keys, [1])[part].squeeze(1).unflatten(0, (2, 9))
        digest[0, 8:], digest[1, 5:] = float("nan"), 50.0  # whatever was there
        if channels is None:
            return digest
        return digest.take_along_dim(channels[:, None, :, None], 4)  # [b, P, Hkv, s, r]

    def digest_at(self, part, at):
        digest = self.digest(part).transpose(1, 2)  # [b, Hkv, P, ...]
        return digest[torch.arange(2)[:, None, None], torch.arange(2)[:, None], at]

    def keys_at(self, at):
        keys = self.k.transpose(1, 2)[torch.arange(2)[:, None, None], torch.arange(2)[:, None], at]
        return keys.where((at < self.n_pages[:, None, None] - 1)[..., None, None], float("nan"))

    def keys(self, channels):
        keys = self.k.transpose(1, 2).flatten(2, 3).take_along_dim(channels[:, :, None], 3)  # [b, Hkv, P * p, r]
        keys[0, :, 34:], keys[1, :, 23:] = float("nan"), float("nan")
        return keys

    def contents(self):
        keys = self.k.transpose(1, 2).flatten(2, 3).clone()  # [b, Hkv, P * p, D]
        keys[0, :, 34:], keys[1, :, 23:] = 0, 0
        return keys, 10 * keys

    def bounds(self, q, per_query_head=False):
        low, high = (self.digest(part).flatten(0, 1)[:, None] for part in ("min", "max"))  # a row a page, one layer
        return ops.page_score(q, low, high, 0, torch.arange(18).view(2, 9), self.n_pages, per_query_head, "reference")

    def top(self, scores, budget, keep, most):
        table = torch.zeros(2, 9, dtype=torch.int32)
        return Selection(
            *ops.page_topk(scores, budget, keep, self.n_pages, self.lengths, table, 4, 1, most, "reference")[:2]
        )

    def dots(self):
        """Dot products of each query head with each key: [b, Hkv, g, P, p]; -inf where there is no token."""
        dots = torch.einsum("bhgd,bphtd->bhgpt", self.q.view(2, 2, 2, 8), self.k)
        exists = torch.arange(36).view(9, 4) < self.lengths[:, None, None]
        return dots.masked_fill(~exists[:, None, None], float("-inf"))

    def mass(self, q):
        probs = (self.dots().flatten(3) * self.traits.scale).softmax(-1).unflatten(3, (9, 4))
        return probs.sum(4).mean(2)
