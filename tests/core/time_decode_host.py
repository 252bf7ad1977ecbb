"""The host's part of a decode step that is planned ahead, by hand: ``python tests/core/time_decode_host.py``.

On a CPU the program that the device replays is left out, so what is timed is the planning of the next step, its launch
but for CUDA's own calls, and the news of the last one. On a GPU the program of one small layer is replayed, and ends
before the host asks for its tokens, so that CUDA's own calls are timed as well and hardly any waiting. Calls are
counted, too: they depend on no machine.
"""

import torch
from host_time import spent, tiny_model

from octavo.core import Engine, EngineConfig, SamplingParams

STEPS = 96
"""Six pages of each sequence."""


def engine_of(sequences: int, prefix_cache: bool) -> Engine:
    """An engine in which so many sequences decode, at all places in their pages."""
    on_gpu = torch.cuda.is_available()
    engine = Engine(
        tiny_model().to("cuda", torch.bfloat16) if on_gpu else tiny_model(), None,
        EngineConfig(
            max_seqs=sequences, pool_tokens=512 * sequences, execution="graph", prefix_cache=prefix_cache
        ),
    )  # fmt: skip
    if not on_gpu:
        drawn = torch.randint(3, 400, (1, sequences))
        engine._runner._program._run = lambda variant: drawn[:, : variant.rows]
    for i in range(sequences):
        params = SamplingParams(max_tokens=400, temperature=0.6, seed=i, ignore_eos=True)
        engine.submit([(7 * i + at) % 500 for at in range(64 + i % 16)], params)
    running = engine._scheduler.running
    while len(running) < sequences or not all(sequence.generated > 4 for sequence in running):
        engine.step()
    return engine


def main() -> None:
    for sequences in (1, 32, 128, 256):
        for prefix_cache in (False, True):
            engine = engine_of(sequences, prefix_cache)
            print(f"{sequences} sequences, prefix cache {prefix_cache}: {spent(engine, STEPS, 1, 'step')}")


if __name__ == "__main__":
    main()
