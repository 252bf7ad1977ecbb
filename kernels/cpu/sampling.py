"""Sampling on a CPU: a row at a time, and no sort."""

import torch
from torch import Tensor

from octavo.kernels.reference.sampling import exponentials, row_keys, scales


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    draws: Tensor,
) -> Tensor:
    """See ``reference.sample``; how the kept set is found without a sort is told in ``triton/sample.py``."""
    x = logits.float()
    chosen = x.argmax(1)
    if x.gather(1, chosen[:, None]).isnan().any():  # NaN is the largest to torch
        x = x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        chosen = x.argmax(1)
    scale, keys = scales(temperature), row_keys(seeds, draws)
    for b in (temperature > 0).nonzero()[:, 0].tolist():
        chosen[b] = _draw(x[b], scale[b], int(top_k[b]), top_p[b], min_p[b], keys[b : b + 1])
    return chosen


def _draw(x: Tensor, scale: Tensor, k: int, p: Tensor, min_p: Tensor, key: Tensor) -> Tensor:
    """The token drawn from one row, int64 []."""
    top = x.max()
    limited = 0 < k < len(x)
    last = x.topk(k).values[-1] if limited else top.new_tensor(-torch.inf)  # the k-th largest
    least = torch.maximum(last, top + min_p.log2() / scale)
    ids = torch.arange(len(x))
    if least > -torch.inf:
        ids = (x >= least).nonzero()[:, 0]
    few = x[ids]
    scores = few * scale - exponentials(key, ids.int())[0].log2()
    if not limited and p >= 1:
        return ids[scores.argmax()]

    inside = x[x > last]
    weights = torch.exp2((few - top) * scale).double()
    mass = torch.exp2((inside - top) * scale).double().sum()
    if limited:
        mass += (k - len(inside)) * torch.exp2((last - top) * scale)
    while True:
        at = scores.argmax()
        before = (few > few[at]) | ((few == few[at]) & (ids < ids[at]))
        count = int(before.sum())
        cut = (limited and count >= k) or (p < 1 and weights[before].sum() >= p * mass)
        if count == 0 or not cut:
            return ids[at]
        scores = scores.where(before, -torch.inf)
