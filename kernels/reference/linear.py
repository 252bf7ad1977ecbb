"""Truth of the Linear layers."""

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x weight^T + bias``, accumulated in fp32.

    Args:
        x: [..., K], fp16, bf16 or fp32.
        weight: [N, K], the same dtype, as ``nn.Linear`` has it.
        bias: [N] or None, the same dtype.

    Returns:
        [..., N], the same dtype, contiguous.
    """
    return F.linear(x, weight, bias)
