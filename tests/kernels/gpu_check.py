"""Parity and speed of the Triton kernels on a GPU, by hand: ``python tests/kernels/gpu_check.py --out DIR``.

octavo must be importable (installed, or on PYTHONPATH); pytest is not needed. Writes ``DIR/gpu_check.json``.
``--sweep`` times the launch settings instead: edit the tables in ``decode.py`` and ``prefill.py`` after
its figures.

Rules of the timing: CUDA-graph replay, at least 20 calls a graph, each on another layer of a page-major pool of over
500 MB with randomly permuted pages, so that nothing is found in L2; medians of 15 replays. The floor of a decode is its
KV bytes over the read rate that a plain streaming kernel reaches in the same process; of a prefill, its arithmetic over
the rate of an 8192^3 bf16 product. The rival reads contiguous K and V, which no paged kernel can: torch's SDPA.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.layout import pack_entries, pool_shape
from octavo.kernels.reference import backend as reference
from octavo.kernels.triton import backend

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import DECODE, LARGE_DECODE, LARGE_PREFILL, PREFILL, build, check, error

HEADS, KV_HEADS, DIM, UNIT = 32, 8, 128, 16
DTYPE = torch.bfloat16
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
COLD_BYTES = 500e6

DECODES = {  # name: (lengths, capacity of the table in tokens)
    "decode 32 x 8k": ([8192] * 32, 8192),
    "decode 8 x 32k": ([32768] * 8, 32768),
    "decode 1 x 1k": ([1024], 1024),
    "decode 1 x 1k, table for 128k": ([1024], 131072),
    "decode 1 x 32k": ([32768], 32768),
    "decode 8 x 8k": ([8192] * 8, 8192),
    "decode 1 x 128k": ([131072], 131072),
    "decode 32, ragged 256-32k": ([round(256 * 128 ** (i * 13 % 32 / 31)) for i in range(32)], 32768),
}
PREFILLS = {"prefill 4k": (4096, 4096), "prefill 16k": (16384, 16384), "prefill 512 on 32k": (512, 32768)}


@triton.jit
def _read_kernel(x, out, n, BLOCK: tl.constexpr):
    """Stream n elements, keep one maximum a program."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        best = tl.maximum(best, tl.load(x + start + tl.arange(0, BLOCK)).to(tl.float32))
    tl.store(out + tl.program_id(0), tl.max(best))


def timed(calls: list[Callable[[], object]]) -> float:
    """Microseconds a call: the calls in turn in one graph, at least 20 of them, the median of 15 replays."""
    for call in calls[:2]:  # compile
        call()
    torch.cuda.synchronize()
    repeats = math.ceil(20 / len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(15):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (repeats * len(calls)))
    return statistics.median(times)


def rates() -> tuple[float, float]:
    """Bytes a second of a streaming read, and FLOP a second of a large bf16 product."""
    x = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(132 * 16, device="cuda")
    read = min(
        timed([lambda block=block: _read_kernel[len(out),](x, out, len(x), BLOCK=block, num_warps=8)])
        for block in (4096, 8192, 16384)
    )
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    matmul = timed([lambda: a @ b])
    return x.nbytes / read * 1e6, 2 * 8192**3 / matmul * 1e6


class Paged:
    """A page-major pool with enough layers to be cold, and a table of randomly permuted pages."""

    def __init__(self, lengths: list[int], capacity: int, queries: int = 1) -> None:
        entries = capacity // UNIT
        held = [math.ceil(n / UNIT) for n in lengths]
        self.layers = min(max(math.ceil(COLD_BYTES / (sum(lengths) * TOKEN_BYTES)), 4), 128)
        shape = pool_shape(sum(held), self.layers, KV_HEADS, UNIT, DIM)
        self.pool = torch.empty(shape, device="cuda", dtype=DTYPE).normal_()
        self.table = torch.zeros((1, len(lengths), 1, entries), device="cuda", dtype=torch.int32)
        ids = (torch.randperm(sum(held), device="cuda") + 1).split(held)
        for b, row in enumerate(ids):
            self.table[0, b, 0, : len(row)] = pack_entries(row, UNIT)
        self.lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32).view(1, -1, 1)
        self.q = torch.randn((len(lengths) * queries, HEADS, DIM), device="cuda", dtype=DTYPE)
        last = torch.arange(-queries, 0, device="cuda", dtype=torch.int32)
        self.q_pos = (self.lengths.view(-1, 1) + last).flatten()
        self.cu_q = torch.arange(len(lengths) + 1, device="cuda", dtype=torch.int32) * queries
        self.queries = queries

    def args(self, layer: int) -> tuple:
        where = (self.q, self.pool, layer, self.table, self.lengths)
        scores = (None, None, DIM**-0.5, 0, 0.0)
        if self.queries > 1:
            return (*where, self.cu_q, self.q_pos, *scores, self.queries, False)
        return (*where, self.q_pos, *scores, False, False)

    def contiguous(self, layer: int, context: int) -> tuple[Tensor, Tensor]:
        """K and V [B, Hkv, context, D] of a uniform batch."""
        units = (self.table[0, :, 0, : context // UNIT] >> 9).long()
        runs = self.pool[units, layer]  # [B, M, 2, Hkv, u, D]
        return tuple(x.transpose(1, 2).reshape(len(units), KV_HEADS, context, DIM) for x in runs.unbind(2))


def time_kernel(paged: Paged, op: str) -> float:
    function = getattr(backend, op)
    return timed([lambda layer=layer: function(*paged.args(layer)) for layer in range(paged.layers)])


def time_rival(paged: Paged, lengths: list[int]) -> float | None:
    """SDPA on contiguous K and V; in a decode the query heads of a group stand as queries, its fastest form here."""
    if len(set(lengths)) > 1:
        return None
    layers = min(paged.layers, math.ceil(COLD_BYTES / (sum(lengths) * TOKEN_BYTES)) + 1)
    kv = [paged.contiguous(layer, lengths[0]) for layer in range(layers)]
    if paged.queries == 1:
        q = paged.q.view(len(lengths), KV_HEADS, HEADS // KV_HEADS, DIM)
        return timed([lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v) for k, v in kv])
    if paged.queries < lengths[0]:
        return None
    q = paged.q.view(len(lengths), paged.queries, HEADS, DIM).transpose(1, 2)
    return timed(
        [lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for k, v in kv]
    )


def work(name: str) -> tuple[str, list[int], int, int]:
    """op, lengths, capacity, queries of a timed shape."""
    if name in DECODES:
        return ("decode", *DECODES[name], 1)
    queries, context = PREFILLS[name]
    return "prefill", [context], context, queries


def floor(lengths: list[int], queries: int, read: float, matmul: float) -> tuple[float, float]:
    """KV bytes, and the floor in microseconds."""
    count = sum(lengths) * TOKEN_BYTES
    if queries == 1:
        return count, count / read * 1e6
    pairs = sum(queries * (n - (queries - 1) / 2) for n in lengths)
    return count, 4 * HEADS * DIM * pairs / matmul * 1e6


def time_all(read: float, matmul: float) -> list[dict]:
    rows = []
    for name in (*DECODES, *PREFILLS):
        op, lengths, capacity, queries = work(name)
        paged = Paged(lengths, capacity, queries)
        last = paged.args(paged.layers - 1)
        found = error(getattr(backend, op)(*last)[0], getattr(reference, op)(*last)[0])
        us = time_kernel(paged, op)
        rival = time_rival(paged, lengths)
        count, floor_us = floor(lengths, queries, read, matmul)
        row = {"name": name, "us": us, "kv_bytes": count, "floor_us": floor_us, "percent_of_floor": 100 * floor_us / us}
        rows.append(row | {"sdpa_contiguous_us": rival, "relative_error": found})
        print(
            f"{name:32s} {us:9.1f} us   {count / 1e6:8.1f} MB   floor {floor_us:8.1f} us   {100 * floor_us / us:5.1f} %"
            f"   sdpa {'-' if rival is None else f'{rival:.1f} us':>10s}   error {found:.1e}",
            flush=True,
        )
        del paged
        torch.cuda.empty_cache()
    return rows


def time_writes(read: float) -> list[dict]:
    """Append and copy: bytes are read and written once each."""
    rows = []
    pool = torch.empty(pool_shape(2048, 16, KV_HEADS, UNIT, DIM), device="cuda", dtype=DTYPE).normal_()
    for tokens in (32, 8192):
        k, v = torch.randn((2, 16, tokens, KV_HEADS, DIM), device="cuda", dtype=DTYPE)
        slots = torch.randperm(2048, device="cuda")[: math.ceil(tokens / UNIT), None] * UNIT + UNIT
        slots = (slots + torch.arange(UNIT, device="cuda")).flatten()[:tokens]
        us = timed([lambda i=i, k=k, v=v, slots=slots: backend.append(k[i], v[i], pool, i, slots) for i in range(16)])
        rows.append({"name": f"append {tokens}", "us": us, "bytes": 2 * tokens * TOKEN_BYTES})
    for count in (1, 64):
        order = (torch.randperm(2048, device="cuda") + 1).int()
        pairs = [order[i * 2 * count :][: 2 * count].view(count, 2).contiguous() for i in range(16)]
        us = timed([lambda p=p: backend.copy_units(pool, p) for p in pairs])
        rows.append({"name": f"copy {count} units", "us": us, "bytes": 2 * count * pool[0].nbytes})
    for row in rows:
        share = 100 * row["bytes"] / row["us"] * 1e6 / read
        print(f"{row['name']:32s} {row['us']:9.1f} us   {row['bytes'] / 1e6:8.1f} MB   {share:5.1f} % of the read rate")
    return rows


def parity(job: tuple[int, torch.dtype]) -> str | None:
    """One case on the GPU; what is wrong with it, or None."""
    index, dtype = job
    case = (DECODE + PREFILL + LARGE_DECODE + LARGE_PREFILL)[index]
    op = "prefill" if case.queries else "decode"
    inputs = build(case, dtype, "cuda")
    try:
        check(getattr(backend, op)(*inputs.args()), getattr(reference, op)(*inputs.args()), dtype, gain=case.gain)
    except Exception as problem:
        return f"{case.name} {dtype}: {type(problem).__name__}: {str(problem)[-300:]}"
    return None


def parity_all(workers: int) -> dict:
    """Every case in every dtype, in several processes: most of the time goes into compiling."""
    count = len(DECODE + PREFILL + LARGE_DECODE + LARGE_PREFILL)
    jobs = list(product(range(count), (torch.bfloat16, torch.float16, torch.float32)))
    begin = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failures = [problem for problem in pool.map(parity, jobs) if problem]
    for problem in failures:
        print("FAILED", problem)
    print(
        f"parity: {len(jobs) - len(failures)} of {len(jobs)} cases agree, {time.monotonic() - begin:.0f} s", flush=True
    )
    return {"cases": len(jobs), "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile and check in parallel")
    parser.add_argument("--only", choices=["parity", "time"], help="half of the check")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    properties = torch.cuda.get_device_properties(0)
    report: dict = {
        "environment": {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
    }
    print(report["environment"], flush=True)
    if options.only != "time":
        report["parity"] = parity_all(options.workers)
    if options.only != "parity":
        read, matmul = rates()
        print(f"read {read / 1e12:.2f} TB/s, bf16 product {matmul / 1e12:.0f} TFLOP/s", flush=True)
        report |= {"read_bytes_per_s": read, "matmul_flop_per_s": matmul}
        report["rows"] = time_all(read, matmul) + time_writes(read)
    (options.out / "gpu_check.json").write_text(json.dumps(report, indent=1))
    return 1 if report.get("parity", {}).get("failures") else 0


if __name__ == "__main__":
    raise SystemExit(main())
