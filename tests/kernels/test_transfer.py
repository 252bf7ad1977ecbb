"""Transfer between two pools: the listed units arrive bit by bit, and nothing else changes."""

import mmap

import pytest
import torch
from kernel_cases import bits

from octavo.kernels import ops
from octavo.kernels.layout import pool_shape

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
TARGETS = [
    ("reference", "cpu"),
    ("cpu", "cpu"),
    pytest.param(("triton", "cpu"), marks=interpreted),
    pytest.param(("reference", "cuda"), marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]
SHAPES = {  # layers, kv_heads, unit_tokens, head_dim
    "several-pairs": (1, 2, 1, 20),
    "odd": (3, 1, 1, 80),
    "tiny": (1, 1, 1, 3),
    "several-tiles": (2, 2, 16, 48),
}
PAIRS = {
    "none": [],
    "one": [(1, 4)],
    "from-one-to-two": [(2, 5), (2, 1), (6, 3)],
    "scratch": [(0, 0), (3, 6)],
    "all": list(zip(range(8), (5, 2, 7, 0, 1, 6, 3, 4), strict=True)),
}


@pytest.fixture
def small_tiles():
    """Tiles of 1 KB and three programs, so that small units fill many of them."""
    from octavo.kernels.triton import settings

    with settings.trial("transfer", TILE_BYTES=1024, PROGRAMS=3):
        yield


def random_pool(shape, units, dtype):
    pool = torch.randn(pool_shape(units, *shape), dtype=torch.float32)
    pool[2] = torch.nan  # a NaN must move like any other value
    return pool.to(dtype)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("way", ["out", "in"])
def test_transfer(target, dtype, shape, pairs, way):
    """Out of the device and into it; the two pools have different numbers of units."""
    backend, device = target
    near, host = random_pool(shape, 7, dtype).to(device), random_pool(shape, 9, dtype)
    if device == "cuda":
        host = host.pin_memory()
    source, destination = (near, host) if way == "out" else (host, near)
    want, before = bits(destination).clone(), bits(source).clone()
    for one, other in pairs:
        want[other] = before[one]
    ops.transfer(source, destination, torch.tensor(pairs, dtype=torch.int32, device=device).view(-1, 2), backend)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(bits(destination), want)
    assert torch.equal(bits(source), before)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_counted_list_ends_where_the_device_says(target, count):
    """Runs of one layer, K or V and head, by a list whose rest names units that there are not."""
    backend, device = target
    near, host = random_pool((3, 2, 2, 20), 7, torch.float16).to(device), random_pool((3, 2, 2, 20), 9, torch.float16)
    if device == "cuda":
        host = host.pin_memory()
    runs = host.view(-1, 1, 1, 1, 2, 20), near.view(-1, 1, 1, 1, 2, 20)  # [units * layers * 2 * heads, ...]
    pairs = [(3 * 12 + 5, 7 * 12 + 5), (11, 60), (100, 1), (2, 2), (3 * 12 + 5, 0)]
    want = bits(runs[1]).clone()
    for one, other in pairs[:count]:
        want[other] = bits(runs[0])[one]
    listed = torch.tensor(pairs[:count] + [(1 << 30, -5)] * (8 - count), dtype=torch.int32, device=device)
    ops.transfer_counted(*runs, listed, torch.tensor([count], dtype=torch.int32, device=device), backend)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(bits(runs[1]), want)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_with_the_tiles_of_a_real_run(target):
    backend, device = target
    near, host = (
        random_pool((2, 2, 16, 64), 7, torch.bfloat16).to(device),
        random_pool((2, 2, 16, 64), 7, torch.bfloat16),
    )
    if device == "cuda":
        host = host.pin_memory()
    ops.transfer(near, host, torch.tensor([[7, 1], [2, 3]], dtype=torch.int32, device=device), backend)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(bits(host)[[1, 3]], bits(near)[[7, 2]])


def far_pool(shape):
    """An fp16 pool of over 2^31 elements, of which only the pages that are touched take memory."""
    units = 2**31 // torch.Size(pool_shape(0, *shape)).numel() + 2
    whole = torch.Size(pool_shape(units, *shape))
    return torch.frombuffer(mmap.mmap(-1, 2 * whole.numel()), dtype=torch.float16).view(whole)


@pytest.mark.parametrize("target", TARGETS[:3], ids="-".join)
def test_units_beyond_two_to_the_31_elements(target):
    shape = 1, 2, 8, 64
    far, near = far_pool(shape), random_pool(shape, 3, torch.float16)
    last = len(far) - 1
    assert last * far.stride(0) > 2**31
    before = bits(near).clone()
    ops.transfer(near, far, torch.tensor([[1, last], [3, last - 1]], dtype=torch.int32), target[0])
    assert torch.equal(bits(far[[last, last - 1]]), before[[1, 3]])
    ops.transfer(far, near, torch.tensor([[last, 0], [last - 1, 2]], dtype=torch.int32), target[0])
    assert torch.equal(bits(near), before[[1, 1, 3, 3]])


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=interpreted)])
def test_opcheck(backend):
    source, target = torch.randn(2, *pool_shape(4, 2, 2, 8, 16))
    pairs = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    torch.library.opcheck(torch.ops.octavo.transfer.default, (source, target, pairs, backend))
    count = torch.tensor([1], dtype=torch.int32)
    torch.library.opcheck(torch.ops.octavo.transfer_counted.default, (source, target, pairs, count, backend))


@pytest.mark.parametrize(
    "other",
    [torch.zeros(pool_shape(4, 2, 2, 8, 8)), torch.zeros(pool_shape(4, 2, 2, 8, 16)).half()],
    ids=["shape", "dtype"],
)
@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=interpreted)])
def test_pools_of_different_units_are_refused(backend, other):
    with pytest.raises(AssertionError):
        ops.transfer(torch.zeros(pool_shape(4, 2, 2, 8, 16)), other, torch.tensor([[1, 2]], dtype=torch.int32), backend)
