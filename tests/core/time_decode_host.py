"""The host's part of a decode step that is planned ahead, by hand: ``python tests/core/time_decode_host.py``.

The program that the device replays is left out, so what is timed is the planning of the next step, its launch but for
CUDA's own calls, and the news of the last one. Calls are counted as well: they depend on no machine.
"""

import cProfile
import pstats
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.core import Engine, EngineConfig, SamplingParams

STEPS = 96
"""Six pages of each sequence."""


def engine_of(sequences: int, prefix_cache: bool) -> Engine:
    """An engine in which so many sequences decode, at all places in their pages."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048,
    )  # fmt: skip
    engine = Engine(
        LlamaForCausalLM(config).eval(), None,
        EngineConfig(
            max_seqs=sequences, pool_tokens=512 * sequences, execution="graph", prefix_cache=prefix_cache
        ),
    )  # fmt: skip
    drawn = torch.randint(3, 400, (1, sequences))
    engine._runner._program._replay = lambda variant: drawn[:, : variant.rows]
    for i in range(sequences):
        params = SamplingParams(max_tokens=400, temperature=0.6, seed=i, ignore_eos=True)
        engine.submit([(7 * i + at) % 500 for at in range(64 + i % 16)], params)
    while not all(sequence.generated > 4 for sequence in engine._scheduler.running):
        engine.step()
    return engine


def milliseconds(engine: Engine) -> list[float]:
    times = []
    for _ in range(STEPS):
        start = time.process_time()
        engine.step()
        times.append(1e3 * (time.process_time() - start))
    return sorted(times)


def calls(engine: Engine) -> float:
    """Calls a step, of Python's functions and of those in C."""
    profile = cProfile.Profile()
    with profile:
        for _ in range(STEPS):
            engine.step()
    return pstats.Stats(profile).total_calls / STEPS  # type: ignore[attr-defined]


def main() -> None:
    for sequences in (1, 32, 128, 256):
        for prefix_cache in (False, True):
            engine = engine_of(sequences, prefix_cache)
            took = milliseconds(engine)
            print(
                f"{sequences} sequences, prefix cache {prefix_cache}: {calls(engine):.0f} calls a step, "
                f"{statistics.median(took):.2f} ms (least {took[0]:.2f}, p90 {took[STEPS * 9 // 10]:.2f})"
            )


if __name__ == "__main__":
    main()
