"""Patch tokens from an open_clip vision tower, with weights that lie on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from octavo.multimodal.fitting import fit
from octavo.multimodal.image_policy import ImagePolicy
from octavo.multimodal.images import RgbImage
from octavo.multimodal.open_clip_towers import (
    OpenClip,
    Tower,
    load_tower,
    named_config,
    require_vit,
    require_vit_config,
)

RESIZE_MODES = ("shortest", "longest", "squash")
INTERPOLATIONS = ("bicubic", "bilinear")


class OpenClipEncoder(nn.Module):
    """A native ViT of open_clip, read at one layer. I images, N tokens an image, W the tower's width.

    The default is LLaVA-1.5's (Liu et al. 2023, arXiv 2310.03744): the patches' hidden states before the last block,
    without the class token and without a norm. That is ``hidden_states[-2][:, 1:]`` of Hugging Face's CLIP.

    The trap of QuickGELU: OpenAI's weights, and some later ones, were trained with ``x * sigmoid(1.702 x)`` in place of
    GELU. A file of weights does not say so, they load into either tower, and in the wrong one the tokens are quietly
    worse. So nothing is guessed here: see ``quick_gelu``.

    Args:
        model: a name of ``open_clip.list_models()``; ``local-dir:PATH``, a folder with ``open_clip_config.json`` and
            weights; or a tower (``open_clip``'s ``model.visual``), which is used as it is and not copied.
        weights: for a name, the file: OpenAI's archive, or a state dict (.pt, .bin, .safetensors). Never a tag, since a
            tag is downloaded. For random weights see ``from_config``.
        layer: block whose output is taken, from 0, or from -1 for the last.
        keep_cls: keep the class token, in front of the patches.
        quick_gelu: None takes what is certain: the archive's or the folder's, or the name's where all published weights
            of that name agree with it. Otherwise say what the file was trained with.
        policy: images are made square by ``fit``, as its ``resize`` and ``background`` say; None leaves that to the
            tower's own config, which crops as a rule. Size, mean and deviation are the tower's in any case.
        dtype, device: None leaves a given tower as it is; loaded ones are fp32 on the CPU.

    Attributes:
        width: W.
        image_size: rows and columns of pixels.
        grid: rows and columns of patches.
        layer: the block whose output is taken, from 0.
        n_tokens: N, the same for every image.
        settings: what the tokens depend on beside the weights, the modules and the preprocessing.
        preprocessing: how images are resized and normalised, as canonical JSON.

    Raises:
        ImportError: open_clip is not installed, or not with a matching torchvision.
        ValueError: no such model, no such file, a tag or a hub id, weights that do not fit, QuickGELU in doubt, a tower
            other than open_clip's ViT, a layer that does not exist, a way of resizing that open_clip does not know, a
            policy for a tower that is not square.
    """

    def __init__(
        self,
        model: str | nn.Module,
        weights: str | PathLike[str] | None = None,
        *,
        layer: int = -2,
        keep_cls: bool = False,
        quick_gelu: bool | None = None,
        policy: ImagePolicy | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        open_clip = _open_clip()
        if loaded := isinstance(model, str):
            tower = load_tower(open_clip, model, weights, quick_gelu)
        elif weights is not None or quick_gelu is not None:
            raise ValueError(f"a tower that is in memory has its weights and activation; got {weights=}, {quick_gelu=}")
        else:
            tower = require_vit(open_clip, model)
        blocks = len(tower.transformer.resblocks)
        if not -blocks <= layer < blocks:
            raise ValueError(f"layer={layer}, but the tower has {blocks} blocks: from {-blocks} to {blocks - 1}")
        self.layer = layer % blocks
        self.policy = policy
        self._config = _preprocessing(open_clip, tower)
        rows, columns = self.image_size = self._config.size
        if policy is not None and rows != columns:
            raise ValueError(f"an ImagePolicy makes images square, and the tower takes {rows} x {columns} pixels")
        if loaded:
            tower.prune_intermediate_layers([self.layer], prune_norm=True, prune_head=True)  # the rest is never run
        self.tower: Tower = tower.to(device=device, dtype=dtype).eval()
        self.keep_cls = keep_cls
        self.width: int = tower.transformer.width
        self.grid: tuple[int, int] = tower.grid_size
        self.n_tokens = self.grid[0] * self.grid[1] + keep_cls
        heads = tower.transformer.resblocks[0].attn.num_heads
        self.settings = f"open_clip layer={self.layer} keep_cls={keep_cls} heads={heads}"
        fitted = None if policy is None else {"resize": policy.resize, "background": policy.background}
        self.preprocessing = json.dumps({"open_clip": asdict(self._config), "fit": fitted}, sort_keys=True)
        self._transform = open_clip.transform.image_transform_v2(self._config, is_train=False)

    @classmethod
    def from_config(cls, config: str | Mapping[str, Any], *, seed: int = 0, **options: Any) -> OpenClipEncoder:
        """A whole tower with random weights, to be trained or timed.

        Args:
            config: a name of ``open_clip.list_models()``, or the contents of such a config, of which ``embed_dim``,
                ``vision_cfg`` and ``quick_gelu`` are read.
            seed: of the weights; the caller's random state is not touched.
            options: as in the constructor, but for ``weights`` and ``quick_gelu``.
        """
        open_clip = _open_clip()
        name, config = (config, named_config(open_clip, config)) if isinstance(config, str) else ("config", config)
        require_vit_config(name, config)
        no_text = {"context_length": 1, "vocab_size": 1, "width": 1, "heads": 1, "layers": 1}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = open_clip.CLIP(
                config["embed_dim"], config["vision_cfg"], no_text, quick_gelu=bool(config.get("quick_gelu"))
            )
        return cls(model.visual, **options)

    def check(self, image: RgbImage) -> None:
        """Raises ValueError for an image of which nothing would be left when open_clip fits its longest side."""
        if self.policy is not None or self._config.resize_mode != "longest":
            return
        (rows, columns), (height, width) = self._config.size, image.pixels.shape[:2]
        scale = max(height / rows, width / columns)
        if not round(height / scale) or not round(width / scale):
            raise ValueError(
                f"an image of {width} x {height} pixels is too narrow to be fitted into {columns} x {rows}: its "
                f"shorter side would have 0 pixels; crop it, or give the encoder an ImagePolicy"
            )

    def preprocess(self, images: Sequence[RgbImage]) -> Tensor:
        """Pixels fp32 [I, 3, rows, columns] on the CPU, by open_clip's validation transform: resized, normalised."""
        from PIL import Image

        if self.policy is not None:
            images = [fit(image, self._config.size[0], self.policy) for image in images]
        return torch.stack([self._transform(Image.fromarray(image.pixels)) for image in images])

    def forward(self, pixels: Tensor) -> Tensor:
        """Tokens [I, N, W] in row-major order of ``pixels`` [I, 3, rows, columns], which may be of any dtype and on
        any device. Differentiable."""
        out = self.tower.forward_intermediates(
            pixels.to(self.tower.conv1.weight),
            indices=[self.layer],
            stop_early=True,
            normalize_intermediates=False,
            intermediates_only=True,
            output_fmt="NLC",
            output_extra_tokens=True,
        )
        (patches,), (cls_token,) = out["image_intermediates"], out["image_intermediates_prefix"]
        return torch.cat([cls_token, patches], 1) if self.keep_cls else patches

    @property
    def scores_tokens(self) -> bool:
        """Whether ``scored`` can be asked: open_clip's own blocks with plain attention, and not those with norms of
        queries and keys, or a cosine in place of the dot product."""
        return isinstance(self._read_block.attn, nn.MultiheadAttention)

    def scored(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of ``forward``, bit for bit, and the attention of the class token to each of them in the block
        that is read, the mean over heads: fp32 [I, N]."""
        seen: list[Tensor] = []
        hook = self._read_block.ln_1.register_forward_hook(lambda module, given, normed: seen.append(normed))
        try:
            tokens = self(pixels)
        finally:
            hook.remove()
        scores = _class_attention(self._read_block.attn, seen[0])
        return tokens, scores if self.keep_cls else scores[:, 1:]

    @property
    def _read_block(self) -> Any:
        return self.tower.transformer.resblocks[self.layer]


def _class_attention(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """The attention of the first token to all of ``x`` [I, 1 + patches, W], fp32 [I, 1 + patches]."""
    (q_weight, k_weight, _), (q_bias, k_bias, _) = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    q = nn.functional.linear(x[:, :1], q_weight, q_bias).float().unflatten(2, (attention.num_heads, -1))
    k = nn.functional.linear(x, k_weight, k_bias).float().unflatten(2, (attention.num_heads, -1))
    logits = torch.einsum("iqhd,inhd->ihn", q, k) * attention.head_dim**-0.5
    return logits.softmax(2).mean(1)


def _open_clip() -> OpenClip:
    try:
        import open_clip
    except (ImportError, RuntimeError) as error:  # a torchvision built for another torch raises RuntimeError
        raise ImportError(
            f"images need open_clip, which cannot be imported ({error}); pip install 'octavo[vision]', with the "
            f"torchvision that belongs to torch {torch.__version__}"
        ) from error
    return open_clip


def _preprocessing(open_clip: OpenClip, tower: Tower) -> Any:
    """The tower's ``PreprocessCfg``; what it leaves open is open_clip's default."""
    own = {key: value for key, value in open_clip.get_model_preprocess_cfg(tower).items() if value is not None}
    config = open_clip.transform.PreprocessCfg(**{**own, "size": tuple(tower.image_size)})
    if config.resize_mode not in RESIZE_MODES or config.interpolation not in INTERPOLATIONS:
        raise ValueError(
            f"the tower's config has resize_mode={config.resize_mode!r} and interpolation={config.interpolation!r}; "
            f"known: {', '.join(RESIZE_MODES)} and {', '.join(INTERPOLATIONS)}"
        )
    return config
