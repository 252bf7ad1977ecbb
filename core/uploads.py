"""Small host arrays on their way to the device, without the host waiting for what the device does."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of an array on the device, in the order of the stream.

    A plain copy from pageable memory would wait until the device has done all that it was given before. Pinned memory
    comes from torch's cache, which keeps it until the copy has been made.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
