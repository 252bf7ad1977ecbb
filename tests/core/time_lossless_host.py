"""The host's part of a round of drafts, by hand: ``python tests/core/time_lossless_host.py``.

What the device replays is left out, and the model where the host calls it, so what is timed is planning, launching but
for CUDA's own calls, judging drafts and the news of a round: four drafts and the step that verifies them. Calls are
counted as well: they depend on no machine.
"""

import torch
from host_time import spent, tiny_model

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.scripts.build import method

DRAFTS, ROUNDS = 4, 24


def engine_of(sequences: int) -> Engine:
    """An engine in which so many sequences are in a round, at all places in their pages."""
    engine = Engine(
        tiny_model(), None,
        EngineConfig(max_seqs=sequences, pool_tokens=1024 * sequences, execution="graph"),
    )  # fmt: skip
    drawn = torch.randint(3, 400, (2 * DRAFTS + 2, sequences))
    logits = torch.rand(sequences * (DRAFTS + 1), 512)
    engine._runner._program._run = lambda variant: drawn[: 2 * variant.places or 3, : variant.rows]
    chosen = method("lossless", draft={"dense_layers": []}, drafts=DRAFTS, forced_acceptance=0.8, budget_tokens=96)
    for i in range(sequences):
        params = SamplingParams(max_tokens=600, seed=i, ignore_eos=True)
        engine.submit([(7 * i + at) % 500 for at in range(128 + i % 16)], params, method=chosen)
    while not all(sequence.drafts.counts.verifications > 1 for sequence in engine._scheduler.running):
        engine.step()
    engine._model.forward = lambda *args: logits[: len(args[2])]
    return engine


def main() -> None:
    for sequences in (1, 12, 64, 256):
        print(f"{sequences} sequences: {spent(engine_of(sequences), ROUNDS, DRAFTS + 1, 'round')}")


if __name__ == "__main__":
    main()
