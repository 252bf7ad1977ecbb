"""Products of an 8B Llama shape by every proposal, by hand, on a GPU: ``python tests/kernels/time_products.py 1 64``.

Microseconds of a launch in a row of six weights, as a step meets them: the fastest of each kind, and which it is. Gate
and up are timed with the activation. docs/kernels/product.md has figures that were measured so.
"""

import os
import sys
import tempfile

import torch

from octavo.kernels.products import product as products
from octavo.kernels.products.cublaslt import Shape

WEIGHTS = 6
PRODUCTS = {  # outputs, inputs, whether a residual is added, activation
    "QKV": (6144, 4096, False, ""),
    "output": (4096, 4096, True, ""),
    "gate, up": (28_672, 4096, False, "silu"),
    "down": (4096, 14_336, True, ""),
}


def times(rows: int, outputs: int, inputs: int, adds: bool, gate: str) -> dict[str, float]:
    """Microseconds of one launch by each proposal that runs."""
    torch.manual_seed(0)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    x, weights = torch.randn(rows, inputs, **like), [torch.randn(outputs, inputs, **like) / 64 for _ in range(WEIGHTS)]
    shape = Shape(rows, outputs, inputs, torch.bfloat16, adds, gate)
    residual = torch.randn(rows, outputs, **like) if adds else None
    out = torch.empty(rows, shape.given, **like)
    if gate:
        with products.choosing():  # of what it may come behind
            for weight in weights:
                products.product(x, weight, None)
    found, proposals = {}, products._proposals(0, shape)
    products._prepare(proposals, (x, weights[0], residual))
    for name, proposal in proposals.items():
        try:
            seconds = products._seconds(
                lambda run=proposal.run: [run(x, weight, residual, out) for weight in weights],
                products.SUSTAINED_S if rows > products.MOST_ROWS else 0.0,
            )
        except RuntimeError:
            continue
        found[name] = 1e6 * seconds / WEIGHTS
    return found


def kind(name: str) -> str:
    return next(
        (kind for kind in ("streams", "tiles", "waves", "a product, then its gate") if kind in name), "cuBLASLt"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:  # what is chosen here is nobody's choice
        os.environ["OCTAVO_CACHE"] = folder
        race()


def race() -> None:
    for rows in map(int, sys.argv[1:] or ("1", "16", "32", "64", "96", "128", "192", "256")):
        for name, given in PRODUCTS.items():
            best: dict[str, tuple[float, str]] = {}
            for proposal, us in times(rows, *given).items():
                best[kind(proposal)] = min(best.get(kind(proposal), (us, proposal)), (us, proposal))
            print(rows, name, *(f"| {of} {us:.1f} ({by[:60]})" for of, (us, by) in sorted(best.items())), flush=True)


if __name__ == "__main__":
    main()
