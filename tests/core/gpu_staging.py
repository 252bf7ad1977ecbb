"""Speed of ``Staging`` over the bus of a GPU, by hand: ``python tests/core/gpu_staging.py --out DIR``.

Units lie in random order on the device and in one run, or in runs of 1 MiB, in pinned memory. Timing and floor are those
of ``tests/kernels/gpu_transfer.py``; every call's result is compared bit for bit. Writes ``DIR/gpu_staging.json``.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from octavo.core.memory.staging import Staging, host_runs

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from gpu_transfer import CALL_BYTES, SHAPES, Pools, gb_per_s

RUN_BYTES = {"one run": CALL_BYTES, "runs of 1 MiB": 1 << 20}


def pairs_of(pools: Pools, run_bytes: int) -> np.ndarray:
    """(device unit, host unit) int32 [n, 2], ascending on the host, in runs with gaps between them."""
    units = CALL_BYTES // pools.unit_bytes
    run = max(1, run_bytes // pools.unit_bytes)
    host = np.arange(units) + 1 + np.arange(units) // run
    device = torch.randperm(2 * units)[:units].numpy() + 1
    return np.stack([device, host], 1).astype(np.int32)


def measure(size: str, pools: Pools, name: str, way: str) -> dict:
    pairs = pairs_of(pools, RUN_BYTES[name])
    staging = Staging(pools.device)
    out = way == "out"
    device, host = (torch.from_numpy(pairs[:, side].astype(np.int64)) for side in (0, 1))
    (pools.host if out else pools.device)[host if out else device.cuda()] = -1.0
    torch.cuda.synchronize()
    large = pools.large_copy(way)

    def call() -> None:
        staging.move(pools.device, pools.host, pairs, out=out, backend="triton")

    call()
    torch.cuda.synchronize()
    same = torch.equal(pools.device[device.cuda()].view(torch.int16), pools.host[host].cuda().view(torch.int16))
    rate = gb_per_s(call, CALL_BYTES)
    large = max(large, pools.large_copy(way))
    return {
        "unit": size,
        "way": way,
        "host": name,
        "runs": len(host_runs(pairs[:, 1])),
        "correct": same,
        "gb_per_s": rate,
        "large_copy_gb_per_s": large,
        "percent_of_large_copy": 100 * rate / large,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for size, shape in SHAPES.items():
        pools = Pools(shape)
        for name in RUN_BYTES:
            for way in ("in", "out"):
                row = measure(size, pools, name, way)
                rows.append(row)
                print(
                    f"{size:>6s} {way:>4s} {name:14s} {row['gb_per_s']:6.1f} GB/s {row['percent_of_large_copy']:5.1f} % of "
                    f"{row['large_copy_gb_per_s']:.1f}  {'' if row['correct'] else 'WRONG'}"
                )
        del pools
        torch.cuda.empty_cache()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_staging.json").write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
