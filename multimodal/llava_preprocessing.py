"""How a LLaVA checkpoint wants its pixels: files of Hugging Face's processors, as open_clip's settings and a policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.multimodal.image_policy import ImagePolicy

BICUBIC = 3
"""Pillow's number, which the files hold. ``fit`` and tiles know no other filter."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of Radford et al. 2021 (arXiv 2103.00020): what the processors take where a file says nothing."""


class Preprocessing(NamedTuple):
    """``settings`` of open_clip's PreprocessCfg, and a policy where images are not fitted as they say."""

    settings: dict[str, Any]
    policy: ImagePolicy | None


def read_preprocessing(folder: Path, side: int, *, tiles: bool) -> Preprocessing:
    """What ``processor_config.json`` or ``preprocessor_config.json`` says; CLIP's way, if there is neither.

    Args:
        side: pixels of the tower's images.
        tiles: of LLaVA-NeXT, whose tiles are square before they are resized.

    Raises:
        ValueError: another size than the tower's, another filter than bicubic, or a step of CLIP's left out.
    """
    config = _read(folder)
    for name, due in (("do_resize", True), ("do_rescale", True), ("do_normalize", True), ("resample", BICUBIC)):
        if config.get(name, due) != due:
            raise ValueError(f"the image processor in {folder} has {name}={config[name]!r}; only {due!r} is known")
    size = _sides(config.get("size", side))
    crop = _sides(config.get("crop_size", side))
    if size | crop != {side}:
        raise ValueError(
            f"the image processor in {folder} makes images of {sorted(size | crop)}, the tower takes {side}"
        )
    mean, std = (
        tuple(config.get(key, default)) for key, default in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD))
    )
    settings = {"mean": mean, "std": std, "interpolation": "bicubic", "resize_mode": "shortest"}
    if tiles:
        return Preprocessing(settings, None)
    if config.get("do_pad"):
        return Preprocessing(settings, ImagePolicy(resize="pad", background=_mean_colour(mean)))
    if isinstance(config.get("size"), Mapping) and "height" in config["size"]:
        settings["resize_mode"] = "squash"
    return Preprocessing(settings, None)


def processor_files(
    preprocessing: Preprocessing, side: int, patch: int, *, keep_cls: bool, tiles: Any = None
) -> dict[str, Any]:
    """The other way: both files, by name, for a tower whose images have ``side`` pixels and ``patch`` pixels a patch.

    Args:
        keep_cls: whether the class token is among an image's tokens.
        tiles: LLaVA-NeXT's canvases, for its processor.

    Raises:
        ValueError: Hugging Face's processors have no such way of resizing.
    """
    settings, policy = preprocessing
    way = policy.resize if policy is not None else {"shortest": "crop"}.get(settings["resize_mode"], "squash")
    due = _mean_colour(settings["mean"])
    odd_border = policy is not None and policy.resize == "pad" and policy.background != due
    if (
        settings["interpolation"] != "bicubic"
        or (policy is None and settings["resize_mode"] == "longest")
        or odd_border
    ):
        raise ValueError(
            f"Hugging Face's image processors have no {settings['resize_mode']!r}, {settings['interpolation']!r} with "
            f"{policy}; they crop, squash, or pad with the mean colour {due}, by the bicubic filter"
        )
    squash = way == "squash" and tiles is None
    image_processor = {
        "image_processor_type": "LlavaImageProcessor" if tiles is None else "LlavaNextImageProcessor",
        "crop_size": {"height": side, "width": side},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_pad": way == "pad" or tiles is not None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": settings["mean"],
        "image_std": settings["std"],
        "resample": BICUBIC,
        "rescale_factor": 1 / 255,
        "size": {"height": side, "width": side} if squash else {"shortest_edge": side},
    }
    processor = {
        "processor_class": "LlavaProcessor" if tiles is None else "LlavaNextProcessor",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,  # CLIP's class token, which "default" takes off again
        "patch_size": patch,
        "vision_feature_select_strategy": "full" if keep_cls else "default",
    }
    grid = {} if tiles is None else {"image_grid_pinpoints": tiles}
    image_processor |= {"processor_class": processor["processor_class"], **grid}
    return {"preprocessor_config.json": image_processor, "processor_config.json": processor}


def _read(folder: Path) -> dict[str, Any]:
    """The image processor's settings: newer files hold it in the processor's."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            found: dict[str, Any] = json.loads((folder / name).read_text())
            config = found.get("image_processor") if name.startswith("processor") else found
            if config:
                return dict(config)
    return {}


def _sides(size: Any) -> set[int]:
    """Of an image processor's size: an integer, or integers by name."""
    return {side for side in size.values() if side is not None} if isinstance(size, Mapping) else {size}


def _mean_colour(mean: Any) -> tuple[int, int, int]:
    """What padding has: the colour that the tower sees as about zero, as Hugging Face rounds it."""
    red, green, blue = (int(part * 255) for part in mean)
    return red, green, blue
