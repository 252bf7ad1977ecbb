"""Speed of ``transfer`` over the bus of a GPU, by hand: ``python tests/kernels/gpu_transfer.py --out DIR``.

octavo must be importable (installed, or on PYTHONPATH); pytest is not needed. Writes ``DIR/gpu_transfer.json``.

Rules of the timing: every call moves ``CALL_BYTES`` of random data, in units that lie in random order in pools of twice
as much, far more than L2 holds; medians of 9 calls between device events. The floor is one contiguous pinned copy of as
many bytes, timed before and after each row, the faster one counting. What a call moved is compared bit for bit, into
memory that held something else. The rival is one ``copy_`` a unit, on fewer units, because it is slow.

Targets: runs of 8 KB at 90 % of the large copy and runs of 64 KB at 97 %, each way.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import triton
from torch import Tensor

from octavo.kernels.layout import pool_shape
from octavo.kernels.triton import settings, transfer

CALL_BYTES = 256 << 20
RIVAL_UNITS = 2048
DTYPE = torch.bfloat16
SHAPES = {"8 KB": (1, 1, 16, 128), "64 KB": (1, 8, 16, 128), "2 MB": (32, 8, 16, 128)}
"""Layers, KV heads, unit_tokens and head_dim of units of each size."""

TARGETS = {"8 KB": 0.90, "64 KB": 0.97}
PROGRAMS = (8, 16, 32, 64)
TILE_BYTES = (16384, 32768, 65536)


def gb_per_s(call: Callable[[], object], nbytes: int) -> float:
    """Rate of the median of 9 calls, after two that compile and warm up."""
    for _ in range(2):
        call()
    times = []
    for _ in range(9):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return nbytes / statistics.median(times) / 1e9


class Pools:
    """A pool on the device and one in pinned memory, and the pairs of a call, host unit second."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.unit_bytes = torch.Size(pool_shape(0, *shape)).numel() * DTYPE.itemsize
        units = 2 * CALL_BYTES // self.unit_bytes
        self.device = torch.empty(pool_shape(units, *shape), device="cuda", dtype=DTYPE).normal_()
        self.host = torch.empty(self.device.shape, dtype=DTYPE, pin_memory=True)
        self.host.copy_(torch.empty_like(self.device).normal_())
        order = torch.stack([torch.randperm(units) + 1, torch.randperm(units) + 1], 1)
        self.pairs = order[: units // 2].int()

    def ways(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Source, target and pairs of each direction."""
        return {
            "in": (self.host, self.device, self.pairs.flip(1).contiguous().cuda()),
            "out": (self.device, self.host, self.pairs.contiguous().cuda()),
        }

    def large_copy(self, way: str) -> float:
        """GB/s of one contiguous pinned copy."""
        pools = {"in": (self.host, self.device), "out": (self.device, self.host)}
        source, target = (pool.view(-1)[: CALL_BYTES // DTYPE.itemsize] for pool in pools[way])
        return gb_per_s(lambda: target.copy_(source, non_blocking=True), CALL_BYTES)


def arrived(source: Tensor, target: Tensor, pairs: Tensor) -> bool:
    """Whether one call moves every listed unit, bit for bit; the target's units are overwritten first."""
    listed = pairs.long().cpu()
    target[listed[:, 1].to(target.device)] = -1.0
    torch.cuda.synchronize()
    transfer.transfer(source, target, pairs)
    torch.cuda.synchronize()
    got, want = (pool[unit.to(pool.device)].cuda() for pool, unit in ((target, listed[:, 1]), (source, listed[:, 0])))
    return torch.equal(got.view(torch.int16), want.view(torch.int16))


def unit_by_unit(source: Tensor, target: Tensor, pairs: Tensor, unit_bytes: int) -> float:
    """GB/s of one ``copy_`` a unit."""
    listed = pairs[:RIVAL_UNITS].tolist()

    def copy_each() -> None:
        for one, other in listed:
            target[other].copy_(source[one], non_blocking=True)

    return gb_per_s(copy_each, len(listed) * unit_bytes)


def measure(size: str, pools: Pools, way: str) -> dict:
    """One size in one direction: the large copy, every launch setting, and one copy a unit."""
    source, target, pairs = pools.ways()[way]
    row: dict = {"unit": size, "way": way, "settings": []}
    large = pools.large_copy(way)
    for tile, programs in product(TILE_BYTES, PROGRAMS):
        setting: dict = {"tile_bytes": tile, "programs": programs}
        try:
            with settings.trial("transfer", TILE_BYTES=tile, PROGRAMS=programs):
                setting["correct"] = arrived(source, target, pairs)
                setting["gb_per_s"] = gb_per_s(
                    lambda: transfer.transfer(source, target, pairs), len(pairs) * pools.unit_bytes
                )
        except Exception as problem:  # a setting that does not compile must not cost the others
            setting |= {"correct": False, "error": f"{type(problem).__name__}: {str(problem)[-300:]}"}
        row["settings"].append(setting)
    row["large_copy_gb_per_s"] = max(large, pools.large_copy(way))
    row["unit_by_unit_gb_per_s"] = unit_by_unit(source, target, pairs, pools.unit_bytes)
    return row


def report_of(row: dict) -> str:
    """The row as lines of a table, a line a tile size; percentages are of the large copy."""
    large = row["large_copy_gb_per_s"]
    lines = []
    for tile in TILE_BYTES:
        cells = [
            f"{s['gb_per_s']:6.1f} {100 * s['gb_per_s'] / large:4.0f} %" if s["correct"] else "        WRONG"
            for s in row["settings"]
            if s["tile_bytes"] == tile
        ]
        lines.append(f"{row['unit']:>6s} {row['way']:>4s} {tile // 1024:4d} KB " + " ".join(cells))
    lines.append(f"{'':12s} one large copy {large:.1f}, a copy_ a unit {row['unit_by_unit_gb_per_s']:.1f} GB/s")
    return "\n".join(lines)


def missed(row: dict, setting: tuple[int, int]) -> str | None:
    """What the module's own launch setting does not reach, or None."""
    share = next(
        s.get("gb_per_s", 0.0) / row["large_copy_gb_per_s"]
        for s in row["settings"]
        if (s["tile_bytes"], s["programs"]) == setting
    )
    if row["unit"] not in TARGETS or share >= TARGETS[row["unit"]]:
        return None
    return (
        f"{row['unit']} {row['way']}: {100 * share:.1f} % of the large copy, {100 * TARGETS[row['unit']]:.0f} % wanted"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_transfer.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tuned = settings.launch("transfer", "any", torch.device("cuda"))
    defaults = tuned["TILE_BYTES"], tuned["PROGRAMS"]
    assert defaults[0] in TILE_BYTES and defaults[1] in PROGRAMS, "the sweep leaves out the module's own settings"
    environment = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "tile_bytes": defaults[0],
        "programs": defaults[1],
    }
    print(environment, flush=True)
    print(f"{'unit':>6s} {'way':>4s} {'tile':>7s} " + " ".join(f"{f'{n} programs':>13s}" for n in PROGRAMS), flush=True)
    rows = []
    for size, shape in SHAPES.items():
        pools = Pools(shape)
        for way in ("in", "out"):
            rows.append(measure(size, pools, way))
            print(report_of(rows[-1]), flush=True)
        del pools
        torch.cuda.empty_cache()
    short = [line for row in rows if (line := missed(row, defaults))]
    print("\n".join(f"missed: {line}" for line in short) or "the module's own settings reach every target")
    (options.out / "gpu_transfer.json").write_text(
        json.dumps({"environment": environment, "rows": rows, "missed": short}, indent=1)
    )
    return 0 if all(setting["correct"] for row in rows for setting in row["settings"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
