"""The demo model: an open_clip ViT, a projector and a small Llama, trained here on scenes. How it is built, saved and
loaded; ``scripts/train_demo.py`` trains it.

::

    pixels [I, 3, 96, 96] -> tower -> [I, 144, 256] -> projector -> [I, 144, 384] -+
                                                                                   v  in the places of <image>
    token ids [B, L] ------> embeddings of the Llama -------------------> [B, L, 384] -> logits [B, L, words]

A saved folder holds, side by side, what transformers, open_clip and octavo read::

    config.json generation_config.json model.safetensors       LlamaForCausalLM
    tokenizer.json tokenizer_config.json                       PreTrainedTokenizerFast
    open_clip_config.json open_clip_model.safetensors          OpenClipEncoder("local-dir:...")
    projector.safetensors                                      MlpConfig()
    README.md                                                  the model card
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.multimodal.demo_tokenizer import BOS, EOS, PAD, VOCABULARY, build_tokenizer
from octavo.multimodal.image_encoder import ImageEncoder
from octavo.multimodal.open_clip_encoder import OpenClipEncoder
from octavo.multimodal.projector import MlpConfig
from octavo.multimodal.scenes import SIDE
from octavo.multimodal.scenes_prompts import prompt_parts

FOLDER = Path(__file__).parent / "demo"
"""Where the trained model lies that comes with octavo."""

MAX_BYTES = 36_000_000
"""What a saved folder may hold in all."""

LAST = -1
"""The tower is read behind its last block: it is trained together with the rest, so none is spared."""

NO_TEXT = {"context_length": 1, "vocab_size": 1, "width": 1, "heads": 1, "layers": 1}
"""open_clip's format wants a text tower; the smallest there is."""


TRAINING_ATTENTION = "octavo_demo"
"""Name of the attention in training. transformers builds no mask for it: the check whether one is needed would wait for
the device at every batch, and when compiled it would always find that one is."""


@dataclass(frozen=True)
class DemoConfig:
    """Sizes. The defaults make 16.5 million parameters."""

    patch: int = 8
    tower_width: int = 256
    tower_layers: int = 6
    hidden: int = 384
    inner: int = 896
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    max_tokens: int = 2048

    @property
    def open_clip(self) -> dict[str, Any]:
        """As open_clip's ``model_cfg``."""
        tower = {
            "image_size": SIDE,
            "patch_size": self.patch,
            "width": self.tower_width,
            "layers": self.tower_layers,
            "head_width": min(64, self.tower_width),
        }
        return {"embed_dim": 8, "vision_cfg": tower, "text_cfg": NO_TEXT}

    @property
    def image_tokens(self) -> int:
        return (SIDE // self.patch) ** 2


class DemoModel(nn.Module):
    """The three parts, to be trained together; fp32, on the CPU until it is moved.

    Args:
        seed: of the weights; the caller's random state is not touched.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, config: DemoConfig, seed: int = 0) -> None:
        super().__init__()
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

        AttentionInterface.register(TRAINING_ATTENTION, _training_attention)
        self.config = config
        self.tower = OpenClipEncoder.from_config(config.open_clip, seed=seed, layer=LAST)
        shape: dict[str, Any] = {
            "vocab_size": len(VOCABULARY),
            "hidden_size": config.hidden,
            "intermediate_size": config.inner,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "max_position_embeddings": config.max_tokens,
            "tie_word_embeddings": True,
            "bos_token_id": VOCABULARY[BOS],
            "eos_token_id": VOCABULARY[EOS],
            "pad_token_id": VOCABULARY[PAD],
            "attn_implementation": TRAINING_ATTENTION,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.language: Any = LlamaForCausalLM(LlamaConfig(**shape))
            _fuse_norms(self.language)
            self.projector = MlpConfig().build(self.tower.width, config.hidden, self.tower.grid)
        preprocessing = json.loads(self.tower.preprocessing)["open_clip"]
        for name, key in (("mean", "mean"), ("deviation", "std")):
            self.register_buffer(name, torch.tensor(preprocessing[key])[:, None, None] * 255, persistent=False)

    def forward(self, token_ids: Tensor, pixels: Tensor, places: Tensor, alone: bool = False) -> Tensor:
        """Logits [B, L, words].

        Args:
            token_ids: int64 [B, L], padded at the end, with ``image_tokens`` N times ``<image>`` for each image.
            pixels: uint8 [I, SIDE, SIDE, 3], the images of all rows in order; normalised here as
                ``OpenClipEncoder.preprocess`` does it.
            places: int64 [I * N], where ``<image>`` stands in the flattened ``token_ids``. It follows from them, but
                not without waiting for the device.
            alone: an image's tokens attend to those of the same image only, as ``ZeroCopyReuse(context_tokens=0)``
                computes it; text attends to all in front of it either way.
        """
        normal = (pixels.permute(0, 3, 1, 2) - self.mean) / self.deviation
        images = self.projector(self.tower(normal))
        words = self.language.get_input_embeddings()(token_ids)
        embeddings = words.flatten(0, 1).index_copy(0, places, images.flatten(0, 1).to(words.dtype)).view_as(words)
        each_alone = places.view(len(pixels), self.config.image_tokens) if alone else None
        logits: Tensor = self.language(inputs_embeds=embeddings, use_cache=False, octavo_alone=each_alone).logits
        return logits


class Demo(NamedTuple):
    """What ``Engine(model, tokenizer, config, encoders={"image": encoder})`` takes."""

    model: Any
    tokenizer: Any
    encoder: ImageEncoder


def demo_prompt(images: Sequence[Any], question: str) -> list[Any]:
    """A prompt for the engine, in the form that the model was trained on."""
    return [part if isinstance(part, str) else images[part] for part in prompt_parts(question, len(images))]


def save_demo(folder: str | PathLike[str], model: DemoModel, card: str) -> int:
    """Write the folder, in bf16, with ``card`` as its README.md.

    Returns:
        its size in bytes.

    Raises:
        ValueError: the weights alone are larger than ``MAX_BYTES``. Nothing has been written then.
    """
    from open_clip import CLIP
    from safetensors.torch import save_file

    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    if weights > MAX_BYTES:
        raise ValueError(f"the weights are {weights:,} bytes in bf16, and the folder may have {MAX_BYTES:,}; shrink it")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    model_cfg = model.config.open_clip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the text tower is never read, and yet it is the same in every file
        clip = CLIP(**model_cfg)
    clip.visual.load_state_dict(model.tower.tower.state_dict())
    settings = json.loads(model.tower.preprocessing)["open_clip"]
    preprocess_cfg = {key: settings[key] for key in ("mean", "std", "interpolation", "resize_mode")}
    config = {"model_cfg": model_cfg, "preprocess_cfg": preprocess_cfg}
    (path / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(_bf16(clip), path / "open_clip_model.safetensors")
    save_file(_bf16(model.projector), path / "projector.safetensors")
    language = type(model.language)(model.language.config).to(torch.bfloat16)
    language.load_state_dict(model.language.state_dict())
    language.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    (path / "README.md").write_text(card)
    return sum(file.stat().st_size for file in path.iterdir())


def load_weights(folder: str | PathLike[str], model: DemoModel) -> None:
    """Those of a saved folder, into a model of the same sizes, to be trained further.

    Raises:
        ValueError: no model is there, or one of other sizes.
    """
    from safetensors.torch import load_file

    path = _saved(folder)

    def part(file: str, prefix: str = "") -> dict[str, Tensor]:
        tensors = load_file(path / file).items()
        return {name.removeprefix(prefix): tensor for name, tensor in tensors if name.startswith(prefix)}

    parts = {
        model.tower.tower: part("open_clip_model.safetensors", "visual."),
        model.projector: part("projector.safetensors"),
        model.language.model: part("model.safetensors", "model."),  # its embeddings are the output layer as well
    }
    try:
        for module, weights in parts.items():
            module.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path} holds a demo model of other sizes: {error}") from error


def load_demo(
    folder: str | PathLike[str] = FOLDER,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "auto",
    batch_images: int | None = None,
) -> Demo:
    """The trained model, ready for an engine.

    Args:
        dtype: None is bf16, and fp32 on a CPU.
        device: "auto" is CUDA where there is one.
        batch_images: as ``ImageEncoder``.

    Raises:
        ImportError: open_clip is not installed.
        ValueError: no model is there.
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = _saved(folder)
    target = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    dtype = dtype or (torch.float32 if target.type == "cpu" else torch.bfloat16)
    tower = OpenClipEncoder(f"local-dir:{path}", layer=LAST, dtype=dtype, device=target)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    projector = MlpConfig().build(tower.width, model.config.hidden_size, tower.grid)
    projector.load_state_dict(load_file(path / "projector.safetensors"))
    encoder = ImageEncoder(tower, projector.to(target, dtype), batch_images=batch_images)
    return Demo(model.to(target).eval(), AutoTokenizer.from_pretrained(path, local_files_only=True), encoder)


def _saved(folder: str | PathLike[str]) -> Path:
    """A folder that ``save_demo`` has written."""
    path = Path(folder)
    lacking = [name for name in ("config.json", "projector.safetensors") if not (path / name).is_file()]
    if lacking:
        raise ValueError(f"{path} holds no demo model, it has no {lacking[0]}; make one with scripts/train_demo.py")
    return path


def _fuse_norms(module: nn.Module) -> None:
    """torch's norms, one kernel each, in place of transformers', which are six and as many again backwards. Weights
    keep their names."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for name, child in module.named_children():
        if isinstance(child, LlamaRMSNorm):
            setattr(module, name, nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
        else:
            _fuse_norms(child)


def _training_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    octavo_alone: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention, as ``AttentionInterface`` wants it: out [B, L, heads, D] of query [B, heads, L, D], key and
    value [B, KV heads, L, D]. Padding comes last, so that being causal is all the mask there is.

    Images that are alone, whose N tokens each are at ``octavo_alone`` int64 [I, N] of the flattened [B, L], become rows
    of their own, [I, heads, N, D]; what comes out replaces what their tokens have read in their places. Keys keep the
    angles of those places: only differences of positions count. This is the block attention of Ma et al. (arXiv
    2409.15355) with images for blocks, in two causal passes: a mask [B, L, L] would rule fast kernels out.
    """
    assert mask is None
    out = _causal(query, key, value, scaling)
    if octavo_alone is not None:
        places = octavo_alone.flatten()

        def rows(tensor: Tensor) -> Tensor:
            tokens = tensor.transpose(1, 2).flatten(0, 1).index_select(0, places)
            return tokens.view(*octavo_alone.shape, *tokens.shape[1:]).transpose(1, 2)

        own = _causal(rows(query), rows(key), rows(value), scaling)
        out = out.flatten(0, 1).index_copy(0, places, own.flatten(0, 1)).view_as(out)
    return out, None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[B, L, heads, D], contiguous; arguments as of ``_training_attention``."""
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def _bf16(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in module.state_dict().items()}
