"""Towers of open_clip whose weights lie on this machine, with the activation that they were trained with.

open_clip itself is an argument: it is imported in ``open_clip_encoder``, and there only when a tower is made.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from octavo.core.errors import closest

OpenClip = Any
Tower = Any
"""The module open_clip, and its VisionTransformer, which are known only once open_clip is imported."""

LOCAL_DIR = "local-dir:"


def load_tower(open_clip: OpenClip, model: str, weights: str | PathLike[str] | None, quick_gelu: bool | None) -> Tower:
    """The tower of a model on this machine.

    1. A folder brings config, weights and activation.
    2. OpenAI's archive (TorchScript) brings weights, shape and QuickGELU; the name must only agree on the shape.
    3. Any other file is a state dict: the name brings the shape, and the activation has to be certain.
    """
    if model.startswith(LOCAL_DIR):
        if weights is not None:
            raise ValueError(f"{model!r} brings its own weights; got weights={str(weights)!r} as well")
        folder = Path(model.removeprefix(LOCAL_DIR))
        if not (folder / "open_clip_config.json").is_file():
            raise ValueError(f"{model!r}: there is no file {folder / 'open_clip_config.json'}")
        config = open_clip.get_model_config(model)
        require_vit_config(model, config)
        _require_offline(model, config)
        if quick_gelu not in (None, bool(config.get("quick_gelu"))):
            raise ValueError(f"quick_gelu={quick_gelu}, but {folder / 'open_clip_config.json'} says otherwise")
        return _created(open_clip, model, require_pretrained=True)

    config = named_config(open_clip, model)
    require_vit_config(model, config)
    _require_offline(model, config)
    if weights is None:
        raise ValueError(
            f"{model!r} needs weights=, a file on this machine: octavo downloads none. "
            f"OpenClipEncoder.from_config makes random ones"
        )
    file = Path(weights).resolve()
    if not file.is_file():
        tags = open_clip.list_pretrained_tags_by_model(model)
        why = "is a tag, which would be downloaded" if str(weights) in tags else "is no file"
        raise ValueError(f"weights={str(weights)!r} {why}; give the path of a file that is on this machine")
    if _is_torchscript(file):
        if quick_gelu is False:
            raise ValueError(f"quick_gelu=False, but {file} is OpenAI's archive: its weights need QuickGELU")
        return _from_archive(open_clip, model, config, file)
    return _created(
        open_clip, model, pretrained=str(file), quick_gelu=_activation(open_clip, model, config, quick_gelu)
    )


def named_config(open_clip: OpenClip, name: str) -> dict[str, Any]:
    if name.startswith("hf-hub:"):
        raise ValueError(f"{name!r} would be downloaded; give {LOCAL_DIR}PATH of a copy on this machine")
    if name not in open_clip.list_models():
        raise ValueError(f"open_clip has no model {name!r}; {closest(name, open_clip.list_models())}")
    config: dict[str, Any] = open_clip.get_model_config(name)
    return config


def require_vit_config(name: str, config: Mapping[str, Any]) -> None:
    """Only towers whose tokens are known to be a class token and a grid."""
    if not {"embed_dim", "vision_cfg"} <= config.keys():
        raise ValueError(f"{name!r} is no config of a CLIP: it needs embed_dim and vision_cfg, and has {[*config]}")
    vision = config["vision_cfg"]
    timm = vision.get("timm_model_name")
    if timm or isinstance(vision.get("layers"), list | tuple):
        kind = f"timm's {timm}" if timm else "a ResNet"
        raise ValueError(f"the vision tower of {name!r} is {kind}; only open_clip's own ViTs are read by layer")


def _require_offline(name: str, config: Mapping[str, Any]) -> None:
    """open_clip asks the hub for the config of a text tower of Hugging Face."""
    if text := config.get("text_cfg", {}).get("hf_model_name"):
        raise ValueError(
            f"the text tower of {name!r} is {text}, whose config open_clip would download; build the model yourself "
            f"and give its .visual"
        )


def _activation(open_clip: OpenClip, name: str, config: Mapping[str, Any], quick_gelu: bool | None) -> bool:
    """Whether a state dict for ``name`` was trained with QuickGELU."""
    named = bool(config.get("quick_gelu"))
    if quick_gelu is not None or named:
        if quick_gelu is False and named:
            raise ValueError(f"quick_gelu=False, but {name!r} is a model with QuickGELU; take the name without it")
        return True if quick_gelu is None else quick_gelu
    quick = [
        tag
        for tag in open_clip.list_pretrained_tags_by_model(name)
        if open_clip.get_pretrained_cfg(name, tag).get("quick_gelu")
    ]
    if quick:
        raise ValueError(
            f"weights of {name!r} may have been trained with QuickGELU ({', '.join(quick)} were), and a file does not "
            f"say so; pass quick_gelu=True or quick_gelu=False"
        )
    return False


def _is_torchscript(file: Path) -> bool:
    """TorchScript is a zip of weights and code, a state dict a zip without code, safetensors no zip."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any("/code/" in name for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _from_archive(open_clip: OpenClip, name: str, config: Mapping[str, Any], file: Path) -> Tower:
    try:
        model = open_clip.load_openai_model(str(file), precision="fp32", device="cpu")
    except Exception as error:  # whatever is wrong with the file, it is the file that cannot be used
        raise ValueError(f"{file} is TorchScript, but not a CLIP of OpenAI: {error}") from error
    tower = require_vit(open_clip, model.visual)
    found = {
        "image_size": tower.image_size[0],
        "patch_size": tower.patch_size[0],
        "width": tower.transformer.width,
        "layers": tower.transformer.layers,
    }
    wanted = {key: config["vision_cfg"].get(key) for key in found}
    if found != wanted:
        raise ValueError(f"{name!r} has {wanted}, but {file} has {found}; give the name that belongs to it")
    return tower


def _created(open_clip: OpenClip, model: str, **options: Any) -> Tower:
    try:
        return require_vit(open_clip, open_clip.create_model(model, weights_only=True, **options).visual)
    except Exception as error:  # unreadable, other shapes, other names: whatever it is, these weights do not fit
        raise ValueError(f"open_clip cannot load {model!r} with {options}: {error}") from error


def require_vit(open_clip: OpenClip, tower: nn.Module) -> Tower:
    if not isinstance(tower, open_clip.transformer.VisionTransformer):
        raise ValueError(f"a tower must be open_clip's VisionTransformer (model.visual), got {type(tower).__name__}")
    return tower
