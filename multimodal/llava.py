"""LLaVA-1.5 and LLaVA-NeXT in Hugging Face's layout, as a language model and an image encoder, and back. The only
importer of transformers in this folder.

=========================  ==============================================  ==================================
tensors                    Hugging Face                                    octavo
=========================  ==============================================  ==================================
language model and head    ``model.language_model``, ``lm_head``           ``AutoModelForCausalLM``'s own
CLIP                       ``model.vision_tower``                          open_clip's names, ``clip_weights``
projector                  ``model.multi_modal_projector``                 the same names
newline (NeXT)             ``model.image_newline``                         ``AnyresEncoder.newline``
=========================  ==============================================  ==================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.multimodal.anyres_encoder import AnyresEncoder
from octavo.multimodal.clip_weights import clip_config, clip_weights, load_clip, vision_config
from octavo.multimodal.image_encoder import ImageEncoder
from octavo.multimodal.image_policy import ImagePolicy
from octavo.multimodal.image_prompts import PLACEHOLDER, placeholder_token
from octavo.multimodal.llava_preprocessing import Preprocessing, processor_files, read_preprocessing
from octavo.multimodal.open_clip_encoder import OpenClipEncoder
from octavo.multimodal.projector import MlpConfig, MlpProjector
from octavo.multimodal.tensor_accounts import refuse_tensors, require_tensors

NEXT = "llava_next"

MODELS = {"llava": "LlavaForConditionalGeneration", NEXT: "LlavaNextForConditionalGeneration"}
CONFIGS = {"llava": "LlavaConfig", NEXT: "LlavaNextConfig"}
"""Classes of transformers, by ``model_type`` of a checkpoint."""

TOWER = "vision_tower."

NESTED = "vision_model."
"""A level of names inside the tower that came and went."""

DERIVED = ("position_ids", "rotary_emb.inv_freq")
"""Ends of names of what older releases saved, though it follows from the config."""


class Llava(NamedTuple):
    """What ``Engine(model, tokenizer, config, encoders={"image": encoder})`` takes.

    Attributes:
        model: the language model alone, as ``AutoModelForCausalLM`` would make it.
        tokenizer: None if the folder has none.
        encoder: tower and projector; an ``AnyresEncoder`` of LLaVA-NeXT.
    """

    model: Any
    tokenizer: Any
    encoder: ImageEncoder


def load_llava(
    path: str | PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    tower: OpenClipEncoder | None = None,
    policy: ImagePolicy | None = None,
    batch_images: int | None = None,
) -> Llava:
    """A LLaVA-1.5 or LLaVA-NeXT checkpoint that lies in a folder.

    1. transformers reads config and weights, whatever release wrote them. Every tensor must be there, and no other.
    2. The language model and its head move, uncopied, into a causal language model of their config.
    3. CLIP's weights are renamed into an open_clip tower, which is whole, so that ``save_llava`` loses nothing.

    Args:
        dtype: "auto" is the checkpoint's own, and fp32 on a CPU.
        device: "auto" is CUDA where there is one.
        tower: an open_clip tower in place of the checkpoint's, used as it is; its layer and class token are its own.
            The checkpoint need not have one then.
        policy: limits for images, and how they become square; None is what the checkpoint's image processor does. Tiles
            of LLaVA-NeXT are square already.
        batch_images: as ``ImageEncoder``.

    Raises:
        ImportError: open_clip is not installed.
        ValueError: no such folder, another kind of model, a part that octavo has not, a policy beside a tower;
            tensors that are missing, unexpected or of another shape, by name and with both shapes.
    """
    folder = Path(path)
    config = _config(folder)
    target = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if dtype == "auto" and target.type == "cpu":
        dtype = torch.float32
    own_tower = tower is None
    if tower is None:
        tower = _blank_tower(config, folder, policy)
    elif policy is not None:
        raise ValueError(f"policy={policy} is for the checkpoint's tower; a given tower has its own, {tower.policy}")
    whole = _whole_model(folder, config.model_type, dtype, with_tower=own_tower).to(target)
    if own_tower:
        weights = whole.model.vision_tower.state_dict()
        load_clip(tower.tower, {name.removeprefix(NESTED): tensor for name, tensor in weights.items()})
    with torch.device("meta"):
        projector = MlpConfig(bias=config.multimodal_projector_bias).build(
            config.vision_config.hidden_size, config.text_config.hidden_size, tower.grid
        )
    projector.load_state_dict(whole.model.multi_modal_projector.state_dict(), assign=True)
    encoder: ImageEncoder
    if config.model_type == NEXT:
        newline = whole.model.image_newline
        encoder = AnyresEncoder(tower, projector, newline, _canvases(config), batch_images=batch_images)
    else:
        encoder = ImageEncoder(tower, projector, batch_images=batch_images)
    return Llava(_language_model(whole), _tokenizer(folder), encoder)


def save_llava(
    path: str | PathLike[str],
    model: Any,
    encoder: ImageEncoder,
    *,
    tokenizer: Any = None,
    image_token_id: int | None = None,
) -> None:
    """Write a folder that ``LlavaForConditionalGeneration.from_pretrained`` reads (``LlavaNextFor...`` for an
    ``AnyresEncoder``), with the files of its processor.

    All that LLaVA computes with is kept, bit by bit. What it never reads is not: a tower's projection into the space of
    texts; and the blocks and the last norm that ``OpenClipEncoder`` cuts off behind its layer are gone already.

    Args:
        path: made, if there is no such folder.
        model: a causal language model of transformers; it is not changed.
        encoder: an open_clip tower and an MLP projector.
        tokenizer: saved beside it.
        image_token_id: the id of an image's positions in Hugging Face's prompts; None is the tokenizer's ``<image>``.

    Raises:
        ValueError: parts that LLaVA has not, or no id for images. Nothing has been written then.
    """
    import transformers

    folder = Path(path)
    tower, projector = _llava_parts(encoder)
    tiles = [*map(list, encoder.tiles.pinpoints)] if isinstance(encoder, AnyresEncoder) else None
    kind = "llava" if tiles is None else NEXT
    text_width = model.config.get_text_config().hidden_size
    if projector.hidden != text_width:
        raise ValueError(f"the projector's embeddings are {projector.hidden} wide, the language model's {text_width}")
    vision = vision_config(tower.tower)
    config = getattr(transformers, CONFIGS[kind])(
        vision_config=vision,
        text_config=model.config.to_dict(),
        image_token_index=_image_token(tokenizer, image_token_id),
        image_seq_length=tower.n_tokens,
        vision_feature_layer=tower.layer - len(tower.tower.transformer.resblocks),
        vision_feature_select_strategy="full" if tower.keep_cls else "default",
        multimodal_projector_bias=projector.config.bias,
        tie_word_embeddings=model.config.tie_word_embeddings,
        **({} if tiles is None else {"image_grid_pinpoints": tiles}),
    )
    with torch.device("meta"):
        whole = getattr(transformers, MODELS[kind])(config)
    due = _shapes(whole)
    whole.model.language_model, whole.lm_head = model.base_model, model.get_output_embeddings()
    _assign(whole.model.vision_tower, clip_weights(tower.tower))
    whole.model.multi_modal_projector.load_state_dict(projector.state_dict(), assign=True)
    if isinstance(encoder, AnyresEncoder):
        whole.model.image_newline = encoder.newline
    whole.generation_config = model.generation_config
    require_tensors(f"{type(model).__name__} in LLaVA", _shapes(whole), due)
    settings = json.loads(tower.preprocessing)["open_clip"]
    processor = processor_files(
        Preprocessing(settings, tower.policy),
        vision["image_size"],
        vision["patch_size"],
        keep_cls=tower.keep_cls,
        tiles=tiles,
    )
    whole.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name, content in processor.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _config(folder: Path) -> Any:
    """The checkpoint's config, if octavo can be what it says."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{str(folder)!r} is no folder with a config.json; give a LLaVA checkpoint that is on this machine"
        )
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.model_type not in MODELS:
        raise ValueError(
            f"{folder} holds a {config.model_type!r}; only {' and '.join(map(repr, MODELS))} are read here"
        )
    if config.projector_hidden_act != "gelu":
        raise ValueError(f"{folder} has projector_hidden_act={config.projector_hidden_act!r}; only 'gelu' is known")
    if not isinstance(config.vision_feature_layer, int):
        raise ValueError(
            f"{folder} has vision_feature_layer={config.vision_feature_layer!r}; a tower is read at one layer"
        )
    return config


def _whole_model(folder: Path, kind: str, dtype: str | torch.dtype, *, with_tower: bool) -> Any:
    """The checkpoint as transformers' own model, all of whose tensors came from the folder."""
    import transformers

    try:
        whole, report = getattr(transformers, MODELS[kind]).from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # no weights, half a file, another format: whatever it is, it is this folder
        raise ValueError(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error

    def counts(name: str) -> bool:
        return not name.endswith(DERIVED) and (with_tower or TOWER not in name)

    refuse_tensors(
        str(folder),
        missing=filter(counts, report["missing_keys"]),
        unexpected=filter(counts, report["unexpected_keys"]),
        other=[(name, tuple(found), tuple(due)) for name, found, due in report["mismatched_keys"] if counts(name)],
    )
    return whole


def _blank_tower(config: Any, folder: Path, policy: ImagePolicy | None) -> OpenClipEncoder:
    """The checkpoint's tower in open_clip, on "meta" until it gets its weights."""
    vision, layer = config.vision_config, config.vision_feature_layer
    if layer == 0 or not -vision.num_hidden_layers <= layer <= vision.num_hidden_layers:
        raise ValueError(
            f"{folder} has vision_feature_layer={layer}; its tower has {vision.num_hidden_layers} blocks, so "
            f"{-vision.num_hidden_layers} to -1 and 1 to {vision.num_hidden_layers} name the output of one"
        )
    preprocessing = read_preprocessing(folder, vision.image_size, tiles=config.model_type == NEXT)
    with torch.device("meta"):
        tower = OpenClipEncoder.from_config(clip_config(vision)).tower
    tower.preprocess_cfg = preprocessing.settings
    return OpenClipEncoder(
        tower,
        layer=layer if layer < 0 else layer - 1,  # hidden_states[0] is what goes into the first block
        keep_cls=config.vision_feature_select_strategy == "full",
        policy=policy or preprocessing.policy,
    )


def _language_model(whole: Any) -> Any:
    """The language model and its head, in eval mode, where a causal language model has them."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(whole.config.text_config)  # type: ignore[no-untyped-call]
    due = _shapes(model)
    setattr(model, model.base_model_prefix, whole.model.language_model)
    model.set_output_embeddings(whole.lm_head)
    require_tensors(type(model).__name__, _shapes(model), due)
    model.generation_config = whole.generation_config
    return model.eval()


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not (folder / "tokenizer_config.json").is_file():
        return None
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    template = folder / "chat_template.json"  # where processors of transformers 4 kept it
    if tokenizer.chat_template is None and template.is_file():
        tokenizer.chat_template = json.loads(template.read_text())["chat_template"]
    return tokenizer


def _canvases(config: Any) -> list[tuple[int, int]]:
    return [(height, width) for height, width in config.image_grid_pinpoints]


def _image_token(tokenizer: Any, image_token_id: int | None) -> int:
    if image_token_id is None and tokenizer is not None:
        return placeholder_token(tokenizer, PLACEHOLDER)
    if image_token_id is None:
        raise ValueError(
            f"a LLaVA checkpoint names the id of {PLACEHOLDER}; give image_token_id or a tokenizer that has it"
        )
    return image_token_id


def _llava_parts(encoder: ImageEncoder) -> tuple[OpenClipEncoder, MlpProjector]:
    """Tower and projector, if LLaVA has such."""
    tower: nn.Module = encoder.tower
    projector = encoder.projector
    if not isinstance(tower, OpenClipEncoder):
        raise ValueError(f"LLaVA's tower is a CLIP, here an OpenClipEncoder; got {type(tower).__name__}")
    if not isinstance(projector, MlpProjector) or projector.linear_1.out_features != projector.hidden:
        raise ValueError(
            f"LLaVA's projector is MlpConfig() with an inner width of {projector.hidden}; got {projector.config}"
        )
    if encoder.bidirectional:
        raise ValueError("LLaVA sees an image as it sees text, and this encoder is bidirectional")
    return tower, projector


def _assign(clip: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a ``CLIPVisionModel`` its weights. Some releases have them one level deeper."""
    nested = any(name.startswith(NESTED) for name in clip.state_dict())
    clip.load_state_dict({(NESTED if nested else "") + name: tensor for name, tensor in weights.items()}, assign=True)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
