"""Linear layers of few rows: exact where sums are, whoever multiplies which piece; the same bits in every call."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from octavo.kernels import ops
from octavo.kernels.triton import linear as kernel
from octavo.kernels.triton import settings

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
TARGETS = [
    ("reference", "cpu"),
    ("cpu", "cpu"),
    pytest.param(("triton", "cpu"), marks=interpreted),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    n: int
    k: int
    bias: bool = False
    programs_per_sm: int = 1
    min_chunks: int = 1

    def inputs(self, dtype, device, whole=True):
        """x, weight and bias between numbers that nobody may read; whole numbers, so that sums are exact."""

        def surrounded(*shape):
            held = torch.full((shape[0] + 2, *shape[1:]), torch.nan)
            numbers = torch.randint(-2, 3, shape).float() if whole else torch.randn(shape)
            held[1:-1] = numbers
            return held.to(device, dtype)[1:-1]

        return surrounded(self.rows, self.k), surrounded(self.n, self.k), surrounded(self.n) if self.bias else None


CASES = [
    Case("one row, one piece", 1, 16, 32),
    Case("whole tiles", 3, 64, 64, programs_per_sm=2),
    Case("a tile cut in two", 8, 16, 128),
    Case("a tile cut in many", 5, 16, 256, bias=True, programs_per_sm=3),
    Case("shares across tiles", 9, 48, 160, bias=True, programs_per_sm=2),
    Case("a part at either end", 2, 80, 96, programs_per_sm=2),
    Case("a tile over the end", 17, 40, 64, bias=True),
    Case("a chunk over the end", 4, 32, 72, programs_per_sm=2),
    Case("both, and more tiles than programs", 33, 104, 104, bias=True),
    Case("the most rows", 64, 24, 64),
    Case("more rows than the kernel takes", 65, 24, 64, bias=True),
    Case("rows of an odd length", 3, 16, 33),
    Case("no row", 0, 16, 32),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def small_pieces():
    with settings.trial("linear", BLOCK_N=16, BLOCK_K=32, STAGES=2, PREFETCH=2):
        yield


def shared(case):
    return settings.trial("linear", programs_per_sm=case.programs_per_sm, min_chunks=case.min_chunks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact(case, target, dtype, small_pieces, poisoned_memory):
    backend, device = target
    x, weight, bias = case.inputs(dtype, device)
    with shared(case):
        got = ops.linear(x, weight, bias, backend)
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(dtype)
    assert torch.equal(got, want) and got.dtype == dtype and got.is_contiguous()


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_rounding(target, small_pieces, poisoned_memory):
    backend, device = target
    for dtype in DTYPES:
        x, weight, bias = Case("normal", 7, 40, 200, bias=True).inputs(dtype, device, whole=False)
        got = ops.linear(x, weight, bias, backend)
        want = F.linear(x.double(), weight.double(), bias.double())
        assert (got - want).norm() < TOLERANCE[dtype] * want.norm()


@pytest.mark.parametrize("target", TARGETS[2:], ids="-".join)
def test_counters_are_zero_again_and_calls_agree(target, small_pieces, poisoned_memory):
    case = Case("cut", 5, 48, 160, programs_per_sm=2)
    x, weight, _ = case.inputs(torch.float16, target[1], whole=False)
    with shared(case):
        first = ops.linear(x, weight, None, "triton")
        assert not kernel._counters_of(weight, 3).any()
        assert all(torch.equal(ops.linear(x, weight, None, "triton"), first) for _ in range(3))


@pytest.mark.parametrize("target", TARGETS[2:], ids="-".join)
def test_a_row_does_not_depend_on_its_neighbours(target, small_pieces, poisoned_memory):
    x, weight, _ = Case("padded", 16, 48, 160).inputs(torch.bfloat16, target[1], whole=False)
    together = ops.linear(x, weight, None, "triton")
    for rows in (9, 12):  # padded to 16 as well
        assert torch.equal(ops.linear(x[:rows], weight, None, "triton"), together[:rows])


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_leading_axes_and_strides(target, small_pieces):
    backend, device = target
    x, weight, _ = Case("strided", 6, 24, 64).inputs(torch.float16, device)
    want = ops.linear(x, weight, None, backend)
    wide = torch.stack([x, x * 0], 1)  # every other row
    apart = x.t().contiguous().t()  # no two elements of a row are neighbours
    for other in (x.view(1, 2, 3, 64), wide[:, 0], apart, wide.view(2, 3, 2, 64)[:, :, 0]):
        got = ops.linear(other, weight, None, backend)
        assert torch.equal(got.view(6, 24), want) and got.shape == (*other.shape[:-1], 24)


SETTINGS = {"programs_per_sm": 1, "min_chunks": 4}


@pytest.mark.parametrize(
    ("tiles", "chunks", "programs", "most_parts"),
    [
        (224, 32, 132, 2),  # gate and up of an 8B model in tiles of 128 x 128: shares of 54 or 55 pieces
        (48, 32, 132, 4),  # QKV: 11 or 12
        (32, 32, 132, 6),  # o: 7 or 8
        (32, 112, 132, 6),  # down: 27 or 28
        (132, 7, 132, 0),
        (264, 7, 132, 0),
        (36, 5, 36, 0),  # too short to be cut
        (10, 8, 20, 3),
    ],
)
def test_shares(tiles, chunks, programs, most_parts):
    assert kernel._shares(tiles, chunks, 132, SETTINGS) == (programs, most_parts)
    begins = [program * tiles * chunks // programs for program in range(programs + 1)]
    sharers = [
        sum(begin < (tile + 1) * chunks and end > tile * chunks for begin, end in pairwise(begins))
        for tile in range(tiles)
    ]
    assert max(sharers) <= max(most_parts, 1)


def test_every_number_of_rows_has_settings():
    most = settings.launch("linear", "any", torch.device("cpu"))["most_rows"]
    for rows in range(1, most + 1):
        for small in ("", " small"):
            settings.launch("linear", f"{max(1 << (rows - 1).bit_length(), 8)}{small}", torch.device("cpu"))


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=interpreted)])
def test_registered(backend, small_pieces):
    x, weight, bias = Case("opcheck", 3, 24, 64, bias=True).inputs(torch.float32, "cpu")
    torch.library.opcheck(torch.ops.octavo.linear.default, (x.view(1, 3, 64), weight, bias, backend))
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: ops.linear(x * 2, weight, None, backend) + 1, fullgraph=True, backend=counter, dynamic=True
    )
    for rows in (5, 6, 70):
        x = torch.randn(1, rows, 64)
        torch.testing.assert_close(compiled(x), F.linear(x * 2, weight) + 1)
    assert counter.frame_count == 1


LARGE = [
    (28672, 4096),
    (4096, 14336),
    (6144, 4096),
    (4096, 4096),
    (128256, 4096),
    (960, 576),
    (576, 1536),
    (49152, 576),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), LARGE)
@pytest.mark.parametrize("rows", [1, 8, 13, 32, 64, 65])
def test_gpu_real_sizes(rows, n, k, dtype, poisoned_memory):
    x, weight, bias = Case("large", rows, n, k, bias=True).inputs(dtype, "cuda")
    got = ops.linear(x, weight, bias, "triton")
    assert torch.equal(got, F.linear(x.float(), weight.float(), bias.float()).to(dtype))
    x, weight, _ = Case("large", rows, n, k).inputs(dtype, "cuda", whole=False)
    got = ops.linear(x, weight, None, "triton").double()
    want = F.linear(x.double(), weight.double())
    assert (got - want).norm() < TOLERANCE[dtype] * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 14336), (576, 1536)])
def test_gpu_a_graph_replays_the_same_bits(n, k):
    """Products in a row, each by the result of the one before: none may start on numbers that are not there yet."""
    x, down, _ = Case("graph", 5, n, k).inputs(torch.bfloat16, "cuda", whole=False)
    up = Case("graph", 5, k, n).inputs(torch.bfloat16, "cuda", whole=False)[1] / n**0.5
    down = down / k**0.5

    def chain(product):
        y = x
        for _ in range(4):
            y = product(product(y, down), up)
        return y

    def run():
        return chain(lambda y, weight: ops.linear(y, weight, None, "triton"))

    first = run()
    want = chain(lambda y, weight: F.linear(y.float(), weight.float()))
    assert (first - want).norm() < 0.05 * want.norm()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(50):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, first)
