"""Group decode on a CPU against decoding row by row, by hand: ``python tests/kernels/time_decode_shared.py``. The shape
is a layer of SmolLM2-135M, one thread."""

import statistics
import time

import torch

from octavo.kernels.cpu.attention import decode, decode_gathered
from octavo.kernels.cpu.shared import decode_shared_gathered
from octavo.kernels.layout import pack_entries, pool_shape

UNIT, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 9, 3, 64


def milliseconds(call) -> float:
    times = []
    for layer in range(3 * LAYERS):
        began = time.perf_counter()
        call(layer % LAYERS)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def race(n: int, shared: int, own: int, dtype: torch.dtype) -> None:
    run, rest = shared // UNIT, own // UNIT
    pool = torch.randn(pool_shape(run + n * rest, LAYERS, KV_HEADS, UNIT, HEAD_DIM)).to(dtype)
    order = torch.randperm(run + n * rest) + 1
    table = torch.cat([order[:run].expand(n, run), order[run:].view(n, rest)], 1)
    table = pack_entries(table, UNIT)[None, :, None]
    lengths = torch.full((1, n, 1), shared + own, dtype=torch.int32)
    groups = torch.zeros((4, n + 1), dtype=torch.int32)
    groups[0, :n], groups[1, 1:], groups[2, 0], groups[3, :n] = torch.arange(n), n, shared, shared
    q = torch.randn(n, HEADS, HEAD_DIM).to(dtype)

    def where(layer):
        return q, pool, layer, table, lengths, lengths.view(-1) - 1

    plain = (None, None, HEAD_DIM**-0.5, 0, 0.0, False, False)
    calls = {
        "each by itself": lambda layer: decode(*where(layer), *plain),
        "gathered, each by itself": lambda layer: decode_gathered(*where(layer), *plain),
        "gathered, run once": lambda layer: decode_shared_gathered(
            *where(layer), groups, None, HEAD_DIM**-0.5, 0.0
        ),
    }  # fmt: skip
    for _ in range(2):
        took = ", ".join(f"{name} {milliseconds(call):.2f} ms" for name, call in calls.items())
        print(f"{n} sequences, {shared} shared, {own} own, {str(dtype).removeprefix('torch.')}: {took}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((16, 2048, 256), (4, 2048, 64), (2, 8192, 64)):
            race(*shape, dtype)
