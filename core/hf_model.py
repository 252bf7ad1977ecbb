"""Any Hugging Face causal language model, unmodified, behind one forward call. The only importer of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from octavo.core import interrupts
from octavo.core.errors import UnsupportedModelError
from octavo.core.execution.attention import PagedStep, octavo_attention
from octavo.core.execution.compiled import CompiledLayers
from octavo.core.execution.foresight import Foresight
from octavo.core.execution.joined_linears import JoinedLinears
from octavo.core.interfaces import AttentionStep, LayerTraits, ModelSpec
from octavo.kernels.cpu import processor
from octavo.kernels.cpu.linear import PackedLinears, linear_layers

PROBE_TOKENS = 3

_one_pass = RLock()
"""Held around every forward pass. What is put up for one (an attention implementation, packed weights, hooks, who
serves compiled attention) is the model's, or the process's, so passes of several threads take turns."""


def load(path: str, dtype: str | torch.dtype, device: str) -> tuple[nn.Module, Any]:
    """A model and its tokenizer from a folder or a hub id, ready for inference.

    ``dtype="auto"`` is the checkpoint's own type, except on a CPU without bf16 arithmetic, where it is fp32.
    ``device="auto"`` is CUDA where there is one.

    Raises:
        ValueError: nothing can be loaded from ``path``.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        looked = (
            f"folder {Path(path).resolve()}" if Path(path).exists() else f"{path!r} (no such folder; taken as a hub id)"
        )
        raise ValueError(f"no causal language model could be loaded from {looked}: {error}") from error
    if dtype == "auto" and target == "cpu" and not processor.multiplies_bf16():
        model = model.to(torch.float32)
    return model.to(target).eval(), tokenizer


class HFModel:
    """Runs a model on one packed row of tokens, with attention served by an ``AttentionStep``.

    The model is left as it was between calls: the attention implementation is switched for the length of a forward
    pass only.

    Raises:
        UnsupportedModelError: the model's attention does not go through the interface, or needs something that the
            paged path cannot give.
    """

    def __init__(self, model: nn.Module) -> None:
        # Here and not on top: importing transformers takes seconds, and registering changes its state.
        from transformers import AttentionInterface

        AttentionInterface.register("octavo", octavo_attention)
        if model.training:
            raise ValueError("the model is in training mode; call model.eval() before making an engine")
        self.model = model
        self.device = next(model.parameters()).device
        self._config: Any = model.config
        self._configs = _attention_configs(model)
        with _one_pass:
            self._linears: PackedLinears | JoinedLinears = PackedLinears(model)
        self._lent: Callable[[], AbstractContextManager[None]] = self._linears.used
        self._compiled: CompiledLayers | None = None
        self._foresight: Foresight | None = None
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        _refuse_unsupported(self._config, type(model).__name__)
        self.spec = self._probe()
        self.eos_token_ids = self._eos_ids()

    def prepare(self, execution: str, join_linears: bool) -> None:
        """Make ready for an execution other than "eager". What is compiled is compiled by the first passes. On a CPU
        the layers keep their packed weights.

        Raises:
            UnsupportedModelError: the model cannot be compiled.
        """
        if join_linears and execution != "eager" and self.device.type == "cuda":
            ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device=self.device)
            positions = torch.arange(PROBE_TOKENS, device=self.device)
            self._linears = JoinedLinears(self.model, lambda: self.forward(ids, positions, None, _Probe()))
            self._lent = self._linears.used
        if execution == "compiled":
            layers = self.layers("they cannot be compiled one by one; use execution='graph'")
            packed = self._linears if isinstance(self._linears, PackedLinears) and self.device.type == "cpu" else None
            self._compiled = CompiledLayers(
                layers, type(self.model).__name__, self._beside(layers), self._head(), packed
            )
            if packed is not None:
                inside = {linear for layer in layers for linear in linear_layers(layer)}
                self._lent = partial(packed.used, [one for one in linear_layers(self.model) if one not in inside])

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        rows: Tensor | None,
        step: AttentionStep,
        embedded: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Logits [R, vocabulary], in the model's dtype, of the ``rows`` int64 [R] among the T packed tokens, or of all
        of them; ids and positions [T].

        ``embedded``: indices int64 [E] of tokens that are no token ids, and their embeddings [E, D].
        """
        with self._serving(step):
            named: dict[str, Any] = {} if self._compiled is not None else {"octavo_step": step}
            if self._keeps_logits and rows is not None:
                named["logits_to_keep"] = rows
            inputs = {"input_ids": input_ids[None]}
            if embedded is not None:
                inputs = {"inputs_embeds": self._embed(input_ids, *embedded)[None]}
            output = self.model(**inputs, position_ids=position_ids[None], use_cache=False, **named)
            logits: Tensor = output.logits[0]
            return logits if self._keeps_logits or rows is None else logits[rows]

    @contextmanager
    def foreseeing(self, step: PagedStep) -> Iterator[None]:
        """Around ``forward``: the next layer's queries are foretold (``Foresight.used``)."""
        with _one_pass, self.foresight().used(step):
            yield

    @contextmanager
    def _serving(self, step: AttentionStep) -> Iterator[None]:
        """Around a forward pass. Ctrl-C may end the pass, and not what is put up for it and taken down again."""
        plain = torch.autocast(self.device.type, enabled=False)  # the caller's autocast is not meant for octavo
        with ExitStack() as stack:
            stack.enter_context(_one_pass)
            stack.enter_context(torch.inference_mode())
            stack.enter_context(plain)
            stack.enter_context(self._octavo_attention())
            stack.enter_context(self._lent())
            if self._compiled is not None:
                stack.enter_context(self._compiled.used(step, self._linears.packings))
            stack.enter_context(interrupts.let_through())
            yield

    def layers(self, consequence: str) -> list[nn.Module]:
        """The model's own layers, in order.

        Raises:
            UnsupportedModelError: they are in no list, "so" what ``consequence`` says.
        """
        count, name = self.spec.layers, type(self.model).__name__
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count and all(map(_attends, module, range(count))):
                return list(module)
        raise UnsupportedModelError(f"{name} keeps its {count} layers in no list, so {consequence}")

    def _beside(self, layers: list[nn.Module]) -> list[nn.Module]:
        """Modules that stand beside the layers and multiply nothing: a rotary embedding, a last norm."""
        for module in self.model.modules():
            children = list(module.children())
            if any(isinstance(child, nn.ModuleList) and list(child) == layers for child in children):
                return [child for child in children if not any(map(_multiplies, child.modules()))]
        return []

    def _head(self) -> nn.Linear | None:
        """The output layer, if it is torch's and has no bias."""
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        return head if type(head) is nn.Linear and head.bias is None else None

    def foresight(self) -> Foresight:
        """Raises UnsupportedModelError as ``layers`` does."""
        if self._foresight is None:
            consequence = "what the next one asks cannot be foretold; set another placement.prefetch than next_query"
            self._foresight = Foresight(self.layers(consequence), self.spec.windows)
        return self._foresight

    def attention(self, layer: int) -> nn.Module:
        """The model's own attention module of a layer, for its weights."""
        found = (m for m in self.model.modules() if getattr(m, "layer_idx", None) == layer and hasattr(m, "o_proj"))
        module = next(found, None)
        if module is None:
            raise UnsupportedModelError(f"layer {layer} of {self.spec.name} has no attention module with an o_proj")
        return module

    def embedding_width(self) -> int:
        """Width of the rows that stand for what is no text.

        Raises:
            UnsupportedModelError: the model takes token ids only.
        """
        if "inputs_embeds" not in inspect.signature(self.model.forward).parameters:
            raise UnsupportedModelError(f"{self.spec.name} takes no inputs_embeds, so it can see no images")
        return int(self._embedding().weight.shape[1])

    def _embedding(self) -> Any:
        return self.model.get_input_embeddings()  # type: ignore[operator]

    def _embed(self, input_ids: Tensor, at: Tensor, rows: Tensor) -> Tensor:
        """Inputs [T, D]: ``rows`` at the indices ``at``, and elsewhere what the model's own layer makes of the ids."""
        embeds: Tensor = self._embedding()(input_ids.index_fill(0, at, 0))
        return embeds.index_copy(0, at, rows.to(embeds))

    @contextmanager
    def _octavo_attention(self) -> Iterator[None]:
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = "octavo"
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation = name

    def _probe(self) -> ModelSpec:
        """Learn the shapes from one tiny pass, and make sure that every layer's attention comes to octavo."""
        name = type(self.model).__name__
        text = self._config.get_text_config()
        probe = _Probe()
        ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device=self.device)
        rows = torch.tensor([PROBE_TOKENS - 1], device=self.device)
        try:
            logits = self.forward(ids, torch.arange(PROBE_TOKENS, device=self.device), rows, probe)
        except (RuntimeError, TypeError, AttributeError) as error:
            ignored = not probe.shapes and not isinstance(error, RuntimeError)
            if not ignored and "octavo" not in str(error):
                raise
            raise UnsupportedModelError(
                f"{name} cannot be served: its attention does not follow transformers' AttentionInterface, or not "
                f"completely ({type(error).__name__}: {error})"
            ) from error
        layers = text.num_hidden_layers
        if sorted(probe.calls) != list(range(layers)) or len(probe.shapes) != layers:
            raise UnsupportedModelError(
                f"{name} has {layers} layers but sent {len(probe.shapes)} attention calls to octavo; its attention "
                "does not follow transformers' AttentionInterface, so its KV cannot be paged"
            )
        if len(set(probe.shapes)) > 1:
            raise UnsupportedModelError(f"{name} has attention layers of different shapes: {sorted(set(probe.shapes))}")
        q_heads, kv_heads, k_dim, v_dim = probe.shapes[0]
        if k_dim != v_dim:
            raise UnsupportedModelError(
                f"{name} has keys of {k_dim} and values of {v_dim} elements a head; they must agree"
            )
        if q_heads % kv_heads:
            raise UnsupportedModelError(f"{name}: {q_heads} query heads are no multiple of {kv_heads} KV heads")
        return ModelSpec(
            name=name,
            layers=layers,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=k_dim,
            kv_dtype=probe.dtype,
            vocab_size=logits.shape[-1],
            max_tokens=getattr(text, "max_position_embeddings", None) or 1 << 20,
            windows=tuple(probe.calls[layer].window for layer in range(layers)),
            sinks=any(traits.sinks is not None for traits in probe.calls.values()),
        )

    def _eos_ids(self) -> frozenset[int]:
        """The union of what the generation config and the model config name."""
        sources = (getattr(self.model, "generation_config", None), self._config, self._config.get_text_config())
        ids: set[int] = set()
        for source in sources:
            found = getattr(source, "eos_token_id", None)
            ids.update(found if isinstance(found, list | tuple) else [] if found is None else [found])
        return frozenset(ids)


class _Probe:
    """Serves a pass by plain causal attention and writes down what each layer asked for."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerTraits] = {}
        self.shapes: list[tuple[int, int, int, int]] = []
        self.dtype = torch.float32

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: LayerTraits) -> Tensor:
        self.calls[layer] = traits
        self.shapes.append((q.shape[1], k.shape[1], k.shape[2], v.shape[2]))
        self.dtype = k.dtype
        group = q.shape[1] // k.shape[1] or 1
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=traits.scale).transpose(0, 1)


def _attends(layer: nn.Module, number: int) -> bool:
    """Whether a module has the attention of the model's layer of that number; one of an image tower has not."""
    return any(getattr(part, "layer_idx", None) == number for part in layer.modules())


def _multiplies(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def _attention_configs(model: nn.Module) -> list[Any]:
    """Every distinct config object in the model that names an attention implementation."""
    found = {
        id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")
    }
    return list(found.values())


def _refuse_unsupported(config: Any, name: str) -> None:
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; octavo serves causal decoders")
    if getattr(text, "attention_chunk_size", None):
        raise UnsupportedModelError(
            f"{name} attends in chunks of {text.attention_chunk_size}, which octavo cannot mask yet"
        )
    if getattr(text, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{name} attends in both directions; octavo serves causal models")
