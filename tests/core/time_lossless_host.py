"""The host's part of a round of drafts, by hand: ``python tests/core/time_lossless_host.py``.

What the device replays is left out, and the model where the host calls it, so what is timed is planning, launching but
for CUDA's own calls, judging drafts and the news of a round: four drafts and the step that verifies them. Calls are
counted as well: they depend on no machine.
"""

import cProfile
import pstats
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.scripts.build import method

DRAFTS, ROUNDS = 4, 24


def engine_of(sequences: int) -> Engine:
    """An engine in which so many sequences are in a round, at all places in their pages."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048,
    )  # fmt: skip
    engine = Engine(
        LlamaForCausalLM(config).eval(), None,
        EngineConfig(max_seqs=sequences, pool_tokens=1024 * sequences, execution="graph"),
    )  # fmt: skip
    drawn = torch.randint(3, 400, (2 * DRAFTS + 2, sequences))
    logits = torch.rand(sequences * (DRAFTS + 1), 512)
    engine._runner._program._replay = lambda variant: drawn[: 2 * variant.places or 3, : variant.rows]
    chosen = method("lossless", draft={"dense_layers": []}, drafts=DRAFTS, forced_acceptance=0.8, budget_tokens=96)
    for i in range(sequences):
        params = SamplingParams(max_tokens=600, seed=i, ignore_eos=True)
        engine.submit([(7 * i + at) % 500 for at in range(128 + i % 16)], params, method=chosen)
    while not all(sequence.drafts.counts.verifications > 1 for sequence in engine._scheduler.running):
        engine.step()
    engine._model.forward = lambda *args: logits[: len(args[2])]
    return engine


def milliseconds(engine: Engine) -> list[float]:
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(DRAFTS + 1):
            engine.step()
        times.append(1e3 * (time.process_time() - start))
    return sorted(times)


def calls(engine: Engine) -> float:
    """Calls a round, of Python's functions and of those in C."""
    profile = cProfile.Profile()
    with profile:
        for _ in range(ROUNDS * (DRAFTS + 1)):
            engine.step()
    return pstats.Stats(profile).total_calls / ROUNDS  # type: ignore[attr-defined]


def main() -> None:
    for sequences in (1, 12, 64, 256):
        engine = engine_of(sequences)
        took = milliseconds(engine)
        print(
            f"{sequences} sequences: {calls(engine):.0f} calls a round, {statistics.median(took):.2f} ms "
            f"(least {took[0]:.2f}, p90 {took[ROUNDS * 9 // 10]:.2f})"
        )


if __name__ == "__main__":
    main()
