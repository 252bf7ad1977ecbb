"""What a decode step, and a batch of requests, take at least on a device: its bytes and operations over its rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

READ_BYTES = 256 << 20
PRODUCT = 1024
ROUNDS = 7


@dataclass(frozen=True)
class DeviceRates:
    """Bytes a second of a plain read of memory, operations a second of a large product."""

    read_bytes_per_s: float
    product_flop_per_s: float


@dataclass(frozen=True)
class Floor:
    """The least time of a dense model's steps::

        t(B rows, n tokens of KV) = max(W / R, 2 P B / F) + n k / R

    Attributes:
        weight_bytes: W, of all that a step reads: every parameter, but for an input embedding of its own, of which a
            step reads a row a token.
        parameters: P, as many as W is the bytes of; each is multiplied once a token.
        head_parameters: those among them of the output layer, which of a prompt only the last token passes.
        kv_bytes_per_token: k, K and V of a token in all layers.
        read_bytes_per_s, product_flop_per_s: R and F, as measured.
    """

    weight_bytes: int
    parameters: int
    head_parameters: int
    kv_bytes_per_token: int
    read_bytes_per_s: float
    product_flop_per_s: float

    @classmethod
    def of(cls, model: Any, rates: DeviceRates) -> Floor:
        """That of a transformers model with K and V in its own dtype, on a device with these rates."""
        text, head = model.config.get_text_config(), model.get_output_embeddings().weight
        read = weights_read(model)
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            weight_bytes=sum(weight.nbytes for weight in read),
            parameters=sum(weight.numel() for weight in read),
            head_parameters=head.numel(),
            kv_bytes_per_token=2 * text.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize,
            read_bytes_per_s=rates.read_bytes_per_s,
            product_flop_per_s=rates.product_flop_per_s,
        )

    def byte_s(self, kv_tokens: float) -> float:
        """Seconds to read the weights once, and K and V of so many tokens."""
        return (self.weight_bytes + kv_tokens * self.kv_bytes_per_token) / self.read_bytes_per_s

    def step_s(self, rows: int, kv_tokens: float) -> float:
        """Seconds of a step that decodes one token in each of ``rows`` sequences of ``kv_tokens`` tokens in all."""
        product_s = 2 * self.parameters * rows / self.product_flop_per_s
        return max(self.byte_s(0), product_s) + self.byte_s(kv_tokens) - self.byte_s(0)

    def batch_s(self, prompts: Sequence[int], new_tokens: Sequence[int]) -> float:
        """Seconds of requests of these lengths: their prompts are computed first, without what attention takes there;
        then all decode together, each to its last token. The first new token comes out of the prompt."""
        body = self.parameters - self.head_parameters
        seconds = 2 * (body * sum(prompts) + self.head_parameters * len(prompts)) / self.product_flop_per_s
        requests = list(zip(prompts, new_tokens, strict=True))
        for step in range(1, max(new_tokens)):
            running = [prompt + step for prompt, new in requests if new > step]
            seconds += self.step_s(len(running), sum(running))
        return seconds


def weights_read(model: Any) -> list[torch.Tensor]:
    """The weights of a transformers model that a decode step reads whole: every parameter, but for an input embedding
    of its own, of which it reads a row a token."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return [weight for weight in model.parameters() if weight is not embedding or embedding is head]


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """The rates of a device, each the best of some rounds; products are of ``dtype`` on a CPU, of bf16 on CUDA."""
    if device.type == "cuda":
        from octavo.scripts.kernel_races import rates
        from octavo.scripts.kernel_races.timing import GraphClock

        found = rates.measure(device, [], GraphClock())
        torch.cuda.empty_cache()
        return DeviceRates(found.read, found.product_flop_per_s)
    x = torch.ones(READ_BYTES // 4)  # no zeros, which the system maps to one page
    a, b = torch.ones((2, PRODUCT, PRODUCT), dtype=dtype)
    return DeviceRates(x.nbytes / _best(x.sum), 2 * PRODUCT**3 / _best(lambda: a @ b))


def _best(call: Callable[[], object]) -> float:
    """The fewest seconds of a call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
