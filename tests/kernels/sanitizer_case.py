"""Every op of a GPU once, on small cases, for ``compute-sanitizer``; by hand, on a GPU::

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/kernels/sanitizer_case.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/kernels/sanitizer_case.py

octavo must be importable (installed, or on PYTHONPATH). Results are compared with the reference's, which runs on the
CPU, so that the sanitizer has nothing else to watch. ``--only decode,append`` runs some. An op without a case fails.
``--report-api-errors no`` passes over cuda-bindings' asking the driver for functions that it may not have.
"""

import os

if __name__ == "__main__":
    # Every tensor is an allocation of its own then: an access past its end leaves it, and is seen.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import test_append_decode
import test_decode_shared
import test_sample
from kernel_cases import LAYER, Case, bits, build, check
from test_append_copy import Fused, FusedStep
from test_rotation import frequencies, pairs, states
from test_select import ScoreCase, TopkCase, boxes, ranked
from test_step import State

from octavo.kernels import ops
from octavo.kernels.hopper import product_streams, product_tiles, product_waves
from octavo.kernels.layout import pool_shape
from octavo.kernels.products.product import ACTIVATIONS, gated_product

DTYPE = torch.bfloat16
SLACK = {torch.bfloat16: 2**-6, torch.float32: 3e-5}
HEADS = {"heads": (8, 2), "head_dim": 128}
ATTENTION = {
    "decode": (
        Case("sanitized", (0, 1, 300), mass=True, **HEADS),
        Case("sanitized-plain", (0, 1, 64, 0, 300), **HEADS),
        Case("sanitized-direct", (0, 33, 100), sinks=True, **HEADS),
        Case("sanitized-stored", (0, 300), page=24, segments=(13, 30), stored=True, window=50, mass=True, **HEADS),
        Case("sanitized-tables", (5, 300), page=8, tables="layer+head", softcap=30.0, heads=(5, 1), head_dim=80),
    ),
    "prefill": (
        Case("sanitized-prefill", (150, 33), queries=(70, 33), padding=5, **HEADS),
        Case("sanitized-prefill-sealed", (100,), queries=(40,), page=24, segments=(13, 30), stored=True, sinks=True),
        Case("sanitized-prefill-short", (300, 33, 0), queries=(3, 2, 0), padding=5, sinks=True, **HEADS),
        Case("sanitized-prefill-window", (100,), queries=(40,), window=20, heads=(5, 1), head_dim=80),
    ),
}


def attention(op: str, device: str) -> None:
    for case in ATTENTION[op]:
        on_device, on_cpu = build(case, DTYPE, device), build(case, DTYPE)
        check(getattr(ops, op)(*on_device.args(), "triton"), getattr(ops, op)(*on_cpu.args(), "reference"), DTYPE)


def agree(op: Callable[..., Any], make: Callable[[str], tuple], device: str, rounded: bool = False) -> None:
    """What ``op`` returns, and what it leaves in its arguments, is what the reference makes of the same numbers.

    ``make(device)`` gives the arguments but the backend, from random numbers drawn on the CPU. Results are compared bit
    by bit; if they are ``rounded``, each number may differ by a small part of its own size and of the others'.
    """
    seed = torch.seed()
    kept = []
    for backend, where in (("reference", "cpu"), ("triton", device)):
        torch.manual_seed(seed)
        random.seed(seed)
        arguments = make(where)
        returned = op(*arguments, backend)
        results = returned if isinstance(returned, tuple | list) else (returned,)
        kept.append([x.cpu() for x in (*results, *arguments) if isinstance(x, Tensor)])
    for want, got in zip(*kept, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if rounded and got.is_floating_point():
            size = want[want.isfinite()].double().square().mean().sqrt().item()
            part = SLACK[got.dtype]
            torch.testing.assert_close(got, want, rtol=part, atol=part * size, equal_nan=True)
        else:
            assert torch.equal(bits(got), bits(want))


def fresh_seed() -> int:
    """For builders that take one; the same for both calls of ``make``."""
    return int(torch.randint(2**31, ()))


def random_pool(units: int, device: str = "cpu", head_dim: int = 80) -> Tensor:
    return torch.randn(pool_shape(units, 2, 2, 16, head_dim)).to(device, DTYPE)


def append(device: str) -> None:
    for tokens in (1, 37):

        def make(device: str, tokens: int = tokens) -> tuple:
            k, v = torch.randn((2, tokens, 2, 80)).to(device, DTYPE)
            return k, v, random_pool(4, device), 1, (torch.randperm(64)[:tokens] + 16).to(device)

        agree(ops.append, make, device)


def append_decode(device: str) -> None:
    for case in (
        Case("sanitized-fresh", (0, 1, 300), sinks=True, **HEADS),
        Case("sanitized-fresh-direct", (17, 33), window=20, heads=(5, 1), head_dim=80),
    ):

        def make(device: str, case: Case = case) -> tuple:
            q, k, v, pool, args = test_append_decode.inputs_of(case, DTYPE, device, case.head_dim)
            pool.nan_to_num_(0.5)  # K and V of padding may be stored in the scratch unit, or not
            pool[0] = 0
            return q, k, v, pool, *args

        def run(*arguments: Any) -> Tensor:
            out: Tensor = ops.append_decode(*arguments)
            arguments[3][0] = 0
            return out

        agree(run, make, device, rounded=True)


def append_fused(device: str) -> None:
    """Pages that fill at decode, bit by bit; pages that fill in chunks, half of the keys' dimensions turned."""
    for case in (
        Fused("decode", ((15, 1), (31, 1), (40, 1)), head_dim=80),
        Fused("chunks, turned", ((0, 37), (5, 30)), page=24, unit=8, rotary=32),
    ):

        def make(device: str, case: Fused = case) -> tuple:
            step = FusedStep(case, DTYPE, device, fresh_seed())
            where = (step.k, step.v, step.pool, step.layer, step.slots, step.cos, step.sin, step.digests, 2)
            return *where, step.tables, step.table_slice, step.rows, step.q_pos, case.page

        agree(ops.append_fused, make, device, rounded=bool(case.rotary))


def copy_units(device: str) -> None:
    moves = torch.tensor([[1, 4], [1, 7], [3, 2], [0, 0]], dtype=torch.int32)
    agree(ops.copy_units, lambda device: (random_pool(7, device), moves.to(device)), device)


def decode_shared(device: str) -> None:
    for case in (
        test_decode_shared.Case("split", (192, 16, 0), ((5, 170, 1), (40, 0), (9, 0)), sinks=True, **HEADS),
        test_decode_shared.Case("many members", (64,), (tuple(range(33)),), heads=(4, 1), head_dim=80, unit=8),
    ):

        def make(device: str, case: test_decode_shared.Case = case) -> tuple:
            return test_decode_shared.build(case, DTYPE, device).shared_args()

        agree(ops.decode_shared, make, device, rounded=True)


def gather(device: str) -> None:
    for case in (
        Case("gathered", (70, 0, 1), tables="layer+head", head_dim=80),
        Case("gathered-holes", (100, 30), page=24, segments=(45, 13, 33)),
    ):

        def make(device: str, case: Case = case) -> tuple:
            inputs = build(case, DTYPE, device)
            return inputs.pool, LAYER, inputs.table, inputs.lengths, 128

        agree(ops.gather, make, device)


def merge_states(device: str) -> None:
    """Rows of 1, 0, 10 and 2 states; the last state belongs to nobody."""
    bounds = torch.tensor([0, 1, 1, 11, 13], dtype=torch.int32)

    def make(device: str) -> tuple:
        return *states(14, 3, 80, DTYPE, device), bounds.to(device), torch.randn(3).to(device, DTYPE)

    agree(ops.merge_states, make, device, rounded=True)


def page_score(device: str) -> None:
    for case in (ScoreCase("wide", (0, 1, 200, 33), (8, 2), 128), ScoreCase("padded", (9, 40), (5, 1), 80, width=70)):
        for per_query_head in (False, True):

            def make(device: str, case: ScoreCase = case, last: bool = per_query_head) -> tuple:
                return *boxes(case, DTYPE, device), last

            agree(ops.page_score, make, device, rounded=True)


def page_topk(device: str) -> None:
    for case in (
        TopkCase("budgets", (40, 0, 600, 1), most=20, budgets=(0, 1, 20, 19, 7)),
        TopkCase("ties", (300, 17), most=39, values="few", page_units=2),
    ):
        agree(ops.page_topk, lambda device, case=case: ranked(case, device), device)


def rotate_keys(device: str) -> None:
    """Moved, turned in place, one source twice, padding; half of a head's dimensions turned in one of two layers."""
    units = pairs((2, 5), (3, 3), (2, 7), (0, 0), (1, 4))
    deltas = torch.tensor([700, -5, -131_072, 0, 1], dtype=torch.int32)
    kinds = torch.tensor([0, 1], dtype=torch.int32)
    for interleaved in (False, True):

        def make(device: str, interleaved: bool = interleaved) -> tuple:
            moves = (x.to(device) for x in (units, deltas, frequencies(40), kinds))
            return random_pool(7, device), *moves, 1, 2, interleaved

        agree(ops.rotate_keys, make, device, rounded=True)


def rotate_queries(device: str) -> None:
    rows = torch.tensor([2, 0, 2, 1], dtype=torch.int32)
    deltas = torch.tensor([0, 17, -4000, 90_000], dtype=torch.int32)

    def make(device: str) -> tuple:
        fused = torch.randn(3, 11, 80).to(device, DTYPE)  # queries are a slice of it
        return fused[:, :9], *(x.to(device) for x in (rows, deltas, frequencies(64)[0])), False

    agree(ops.rotate_queries, make, device, rounded=True)


def sample(device: str) -> None:
    """All ways through the kernel: greedy, no filter, a walk, a list, and a k that no list holds."""
    rows = test_sample.random_rows(
        5, 5000, DTYPE, fresh_seed(),
        temperature=[0.0, 1.0, 3.0, 1.0, 2.0], top_k=[0, 0, 0, 50, 4000], top_p=[1.0, 1.0, 0.2, 0.9, 0.5],
    )  # fmt: skip
    test_sample.check(rows.sample(("triton", device)), rows)


def scatter_tokens(device: str) -> None:
    def make(device: str) -> tuple:
        state = State(device, [7, 0, 300], 16, padding=2, seed=fresh_seed())
        return state.rows, torch.randint(2**40, (5,)).to(device), state.tokens, state.lengths

    agree(ops.scatter_tokens, make, device)


def step_decode(device: str) -> None:
    def make(device: str) -> tuple:
        return State(device, [15, 16, 0, 99], 16, slices=3, padding=2, seed=fresh_seed()).args()

    agree(ops.step_decode, make, device)


def transfer(device: str) -> None:
    near, host = random_pool(5), random_pool(6)
    if device == "cuda":
        host = host.pin_memory()
    pairs = torch.tensor([[1, 6], [5, 2], [2, 1]], dtype=torch.int32)
    out, untouched = near.to(device), host[0].clone()
    ops.transfer(out, host, pairs.to(device), "triton")
    count = torch.ones(1, dtype=torch.int32, device=device)
    ops.transfer_counted(host, out, pairs.flip(1).contiguous().to(device), count, "triton")
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[[6, 2, 1]].view(torch.int16), near[[1, 5, 2]].view(torch.int16))
    assert torch.equal(host[0].view(torch.int16), untouched.view(torch.int16))
    assert torch.equal(out.cpu().view(torch.int16), near.view(torch.int16))


def product(device: str) -> None:
    """octavo's own ways of multiplying, where there are any."""
    x, residual = torch.randn(5, 328).to(device, DTYPE), torch.randn(5, 200).to(device, DTYPE)
    weight, out = (torch.randn(200, 328) / 18).to(device, DTYPE), torch.empty_like(residual)
    want = residual.double() + x.double() @ weight.double().T
    for way in product_streams.ways(x.device, 5, 200, 328):
        product_streams.run(way, x, weight, residual, out)
        assert (out.double() - want).norm() <= SLACK[DTYPE] * want.norm(), way
    for rows, gate, adds in ((40, "", True), (130, "silu", False), (70, "", False), (250, "gelu_tanh", False)):
        x = torch.randn(rows, 328).to(device, DTYPE)
        residual = torch.randn(rows, 200).to(device, DTYPE) if adds else None
        want = gated(x.double() @ weight.double().T, gate) + (0 if residual is None else residual.double())
        out = torch.empty_like(want, dtype=DTYPE)
        for tiling in product_tiles.tilings(x.device, rows, 200, 328, gate):
            product_tiles.run(tiling, gate, x, weight, residual, out)
            assert (out.double() - want).norm() <= SLACK[DTYPE] * want.norm(), tiling
        if gate:
            got = gated_product(x, weight, gate)  # in two launches, as nobody has chosen
            assert (got.double() - want).norm() <= SLACK[DTYPE] * want.norm(), gate

    for rows, gate, adds in ((130, "", True), (600, "silu", False), (300, "", False), (700, "gelu_tanh", False)):
        x, weight = torch.randn(rows, 328).to(device, DTYPE), (torch.randn(208, 328) / 18).to(device, DTYPE)
        residual = torch.randn(rows, 208).to(device, DTYPE) if adds else None
        want = gated(x.double() @ weight.double().T, gate) + (0 if residual is None else residual.double())
        if product_waves.serves(x.device, rows, 208, 328, gate):
            out = torch.empty_like(want, dtype=DTYPE)
            product_waves.run(gate, x, weight, residual, out)
            assert (out.double() - want).norm() <= SLACK[DTYPE] * want.norm(), f"waves, {rows}, {gate}"


def gated(both: Tensor, gate: str) -> Tensor:
    gates, passed = both.chunk(2, -1)
    return ACTIVATIONS[gate](gates) * passed if gate else both


CASES: dict[str, Callable[[str], None]] = {
    "append": append,
    "append_decode": append_decode,
    "append_fused": append_fused,
    "copy_units": copy_units,
    "decode": lambda device: attention("decode", device),
    "decode_shared": decode_shared,
    "gather": gather,
    "merge_states": merge_states,
    "page_score": page_score,
    "page_topk": page_topk,
    "prefill": lambda device: attention("prefill", device),
    "product": product,
    "rotate_keys": rotate_keys,
    "rotate_queries": rotate_queries,
    "sample": sample,
    "scatter_tokens": scatter_tokens,
    "step_decode": step_decode,
    "transfer": transfer,
    "transfer_counted": transfer,
}


def main() -> int:
    from octavo.kernels.triton import backend

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join([*backend.__all__, "product"]), help="ops, separated by commas")
    options = parser.parse_args()
    wrong = []
    for op in options.only.split(","):
        if op not in CASES:
            wrong.append(f"{op}: no case")
            continue
        try:
            CASES[op]("cuda")
            torch.cuda.synchronize()
            print(f"{op}: right", flush=True)
        except Exception as problem:
            wrong.append(f"{op}: {type(problem).__name__}: {str(problem)[-300:]}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
