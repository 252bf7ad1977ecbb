"""Making an image square, as encoders want it."""

from __future__ import annotations

import numpy as np

from octavo.multimodal.image_policy import DEFAULT_POLICY, ImagePolicy
from octavo.multimodal.images import RgbImage


def fit(image: RgbImage, side: int, policy: ImagePolicy = DEFAULT_POLICY) -> RgbImage:
    """``image`` as ``[side, side, 3]``, resized as ``policy.resize`` says, with Pillow's bicubic filter like CLIP's.

    ========  ================================================================  =========================
    "pad"     longer side to ``side``, centred on ``policy.background``          all of it, in proportion
    "crop"    shorter side to ``side``, the middle kept                          loses the ends
    "squash"  both sides to ``side``                                             loses the proportions
    ========  ================================================================  =========================
    """
    from PIL import Image

    assert side >= 1
    reference = max(image.height, image.width) if policy.resize == "pad" else min(image.height, image.width)
    if policy.resize == "squash":
        width = height = side
    else:
        width, height = (max(1, round(length * side / reference)) for length in (image.width, image.height))
    resized = Image.fromarray(image.pixels).resize((width, height), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (side, side), policy.background)
    square.paste(resized, ((side - width) // 2, (side - height) // 2))
    return RgbImage(np.asarray(square), image.mode, image.format, image.frames)
