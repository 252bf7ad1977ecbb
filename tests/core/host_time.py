"""What scripts that time the host's part of steps share: a model that is next to nothing, milliseconds, and calls."""

import cProfile
import pstats
import statistics
import time

from transformers import LlamaConfig, LlamaForCausalLM

from octavo.core import Engine


def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def spent(engine: Engine, times: int, steps: int, unit: str) -> str:
    """What an engine's host does in so many steps, which are a ``unit``, over so many ``times``: calls of Python's
    functions and of those in C, and milliseconds of process time."""
    took = []
    for _ in range(times):
        start = time.process_time()
        for _ in range(steps):
            engine.step()
        took.append(1e3 * (time.process_time() - start))
    took.sort()
    profile = cProfile.Profile()
    with profile:
        for _ in range(times * steps):
            engine.step()
    calls = pstats.Stats(profile).total_calls / times  # type: ignore[attr-defined]
    return (
        f"{calls:.0f} calls a {unit}, {statistics.median(took):.3f} ms "
        f"(least {took[0]:.3f}, p90 {took[times * 9 // 10]:.3f})"
    )
