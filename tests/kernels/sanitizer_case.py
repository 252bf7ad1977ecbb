"""Every Triton op once, on small cases, for ``compute-sanitizer``; by hand, on a GPU::

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/kernels/sanitizer_case.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/kernels/sanitizer_case.py

octavo must be importable (installed, or on PYTHONPATH). Results are compared with the reference's, which runs on the
CPU, so that the sanitizer has nothing else to watch. ``--only decode,append`` runs some. An op without a case fails.
"""

import os

if __name__ == "__main__":
    # Every tensor is an allocation of its own then: an access past its end leaves it, and is seen.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import Case, build, check

from octavo.kernels import ops
from octavo.kernels.layout import pool_shape

DTYPE = torch.bfloat16
HEADS = {"heads": (8, 2), "head_dim": 128}
ATTENTION = {
    "decode": (
        Case("sanitized", (0, 1, 300), mass=True, **HEADS),
        Case("sanitized-direct", (0, 33, 100), sinks=True, **HEADS),
        Case("sanitized-stored", (0, 300), page=24, segments=(13, 30), stored=True, window=50, mass=True, **HEADS),
        Case("sanitized-tables", (5, 300), page=8, tables="layer+head", softcap=30.0, heads=(5, 1), head_dim=80),
    ),
    "prefill": (
        Case("sanitized-prefill", (150, 33), queries=(70, 33), padding=5, **HEADS),
        Case("sanitized-prefill-sealed", (100,), queries=(40,), page=24, segments=(13, 30), stored=True, sinks=True),
        Case("sanitized-prefill-window", (100,), queries=(40,), window=20, heads=(5, 1), head_dim=80),
    ),
}


def attention(op: str, device: str) -> None:
    for case in ATTENTION[op]:
        on_device, on_cpu = build(case, DTYPE, device), build(case, DTYPE)
        check(getattr(ops, op)(*on_device.args(), "triton"), getattr(ops, op)(*on_cpu.args(), "reference"), DTYPE)


def equal_after(op: Callable[..., None], pool: torch.Tensor, device: str, *arguments: torch.Tensor | int) -> None:
    """``op(*arguments)`` changes its pool as the reference changes its own; ``pool`` is among the arguments."""
    want, got = pool.clone(), pool.to(device)

    def given(pool_in_place: torch.Tensor, device: str) -> list:
        moved = [x.to(device) if isinstance(x, torch.Tensor) and x is not pool else x for x in arguments]
        return [pool_in_place if x is pool else x for x in moved]

    op(*given(want, "cpu"), "reference")
    op(*given(got, device), "triton")
    assert torch.equal(got.cpu().view(torch.int16), want.view(torch.int16))


def random_pool(units: int, head_dim: int = 80) -> torch.Tensor:
    return torch.randn(pool_shape(units, 2, 2, 16, head_dim)).to(DTYPE)


def append(device: str) -> None:
    for tokens in (1, 37):
        k, v = torch.randn((2, tokens, 2, 80)).to(DTYPE)
        pool = random_pool(4)
        equal_after(ops.append, pool, device, k, v, pool, 1, torch.randperm(64)[:tokens] + 16)


def copy_units(device: str) -> None:
    pool = random_pool(7)
    equal_after(ops.copy_units, pool, device, pool, torch.tensor([[1, 4], [1, 7], [3, 2], [0, 0]], dtype=torch.int32))


def transfer(device: str) -> None:
    near, host = random_pool(5), random_pool(6)
    if device == "cuda":
        host = host.pin_memory()
    pairs = torch.tensor([[1, 6], [5, 2], [2, 1]], dtype=torch.int32)
    out, untouched = near.to(device), host[0].clone()
    ops.transfer(out, host, pairs.to(device), "triton")
    ops.transfer(host, out, pairs.flip(1).contiguous()[:1].to(device), "triton")
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[[6, 2, 1]].view(torch.int16), near[[1, 5, 2]].view(torch.int16))
    assert torch.equal(host[0].view(torch.int16), untouched.view(torch.int16))
    assert torch.equal(out.cpu().view(torch.int16), near.view(torch.int16))


CASES: dict[str, Callable[[str], None]] = {
    "append": append,
    "copy_units": copy_units,
    "decode": lambda device: attention("decode", device),
    "prefill": lambda device: attention("prefill", device),
    "transfer": transfer,
}


def main() -> int:
    from octavo.kernels.triton import backend

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(backend.__all__), help="ops, separated by commas")
    options = parser.parse_args()
    wrong = []
    for op in options.only.split(","):
        try:
            CASES[op]("cuda")
            torch.cuda.synchronize()
            print(f"{op}: right", flush=True)
        except KeyError:
            wrong.append(f"{op}: no case")
        except Exception as problem:
            wrong.append(f"{op}: {type(problem).__name__}: {str(problem)[-300:]}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
