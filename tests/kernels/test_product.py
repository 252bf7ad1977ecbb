"""Products: torch's own until an algorithm is chosen, the same numbers with any, and choices that last."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.hopper.compiler import usable
from octavo.kernels.products import cublaslt, kept
from octavo.kernels.products import product as products
from octavo.kernels.products.product import choosing, gated_product, product


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(products, "_chosen", {})
    products._untried.cache_clear()
    yield
    products._untried.cache_clear()


def inputs(rows=3, outputs=64, width=128, dtype=torch.bfloat16, device="cpu"):
    torch.manual_seed(0)
    x, weight, residual = torch.randn(1, rows, width), torch.randn(outputs, width) / 8, torch.randn(1, rows, outputs)
    return tuple(t.to(device, dtype) for t in (x, weight, residual))


class TestOnACpu:
    def test_it_is_a_linear_layer(self):
        x, weight, residual = inputs()
        assert torch.equal(product(x, weight, None), F.linear(x, weight))
        assert torch.equal(product(x, weight, residual), residual + F.linear(x, weight))

    @pytest.mark.parametrize("shape", [(1, 64, 3), (1, 64, 1)])
    def test_it_is_laid_out_as_the_compiler_was_told(self, shape):
        x, weight, _ = inputs(shape[2])
        assert product(x, weight, torch.randn(shape).bfloat16().mT).is_contiguous()

    def test_nothing_in_nothing_out(self):
        assert product(torch.ones(0, 4), torch.ones(5, 4), None).shape == (0, 5)
        assert torch.equal(product(torch.ones(2, 0), torch.ones(5, 0), None), torch.zeros(2, 5))

    def test_nothing_is_chosen(self):
        with choosing():
            product(*inputs())
        assert not products._chosen

    def test_opcheck(self):
        for residual in (None, inputs()[2]):
            torch.library.opcheck(torch.ops.octavo.product.default, (*inputs()[:2], residual))
        torch.library.opcheck(torch.ops.octavo.gated_product.default, (*inputs()[:2], "silu"))

    @pytest.mark.parametrize(
        ("gate", "act"), [("silu", F.silu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))]
    )
    def test_a_gate_lets_its_second_half_through(self, gate, act):
        x, weight, _ = inputs()
        gates, passed = F.linear(x, weight).chunk(2, -1)
        assert torch.equal(gated_product(x, weight, gate), act(gates) * passed)

    def test_an_unknown_gate_is_refused(self):
        with pytest.raises(ValueError, match=r"gate='relu': it is one of \['gelu_tanh', 'silu'\]"):
            gated_product(*inputs()[:2], "relu")
        with pytest.raises(ValueError, match="a weight of 63 outputs has no two halves"):
            gated_product(inputs()[0], inputs()[1][:63], "silu")


NAME = str(cublaslt.Shape(3, 64, 128, torch.bfloat16, True))
"""Of what ``inputs()`` are, in the file of choices."""


def the_choice():
    """The fake that was chosen, and its algorithm."""
    (run,) = products._chosen.values()
    return run.func.__self__, run.args[0]


class FakeProduct:
    """In place of cuBLASLt: proposals whose times are given."""

    times = (3.0, 2.99, 1.0, 0.0, 1.0)
    refused = 3
    made: ClassVar[list] = []

    def __init__(self, shape, device):
        self.shape, self.ran = shape, []
        FakeProduct.made.append(self)

    def proposals(self):
        return [bytes([number]) * 64 for number in range(len(self.times))]

    def run(self, algorithm, x, weight, residual, out):
        if algorithm[0] == self.refused:
            raise RuntimeError("refused")
        self.ran.append(algorithm[0])
        made = F.linear(x, weight) if residual is None else residual + F.linear(x, weight)
        out.copy_(made.view(out.shape))


class TestChoosing:
    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch):
        FakeProduct.made = []
        key = products._key

        def on_cuda(*parts):
            """As if the tensors were where they are not."""
            rows = parts[0].numel() // parts[0].shape[-1]
            assert key(*parts) is None
            return 0, cublaslt.Shape(rows, *parts[1].shape, parts[0].dtype, parts[2] is not None, *parts[3:])

        def seconds(run, sustained):
            run()
            return FakeProduct.times[FakeProduct.made[-1].ran[-1]]

        monkeypatch.setattr(products, "_key", on_cuda)
        monkeypatch.setattr(products, "Product", FakeProduct)
        monkeypatch.setattr(products.streams, "ways", lambda *shape: [])
        monkeypatch.setattr(products.tiles, "tilings", lambda *shape: [])
        monkeypatch.setattr(products.waves, "serves", lambda *shape: False)
        monkeypatch.setattr(products, "_seconds", seconds)
        monkeypatch.setattr(kept, "file", lambda device: kept.cache_dir() / "products.json")

    def test_the_fastest_that_runs_is_taken(self):
        with choosing():
            product(*inputs())
        made, algorithm = the_choice()
        assert algorithm[0] == 2
        made.ran.clear()
        product(*inputs())
        assert made.ran == [2]

    def test_several_weights_are_timed_and_shapes_apart(self):
        x, weight, residual = inputs()
        with choosing():
            for other in (weight, weight + 1, weight + 2):
                product(x, other, residual)
            product(x, weight, None)
            product(x[:, :1], weight, None)
        assert len(products._chosen) == 3
        assert FakeProduct.made[0].ran[:3] == [0, 0, 0]

    def test_what_is_only_a_little_faster_is_not_preferred(self, monkeypatch):
        monkeypatch.setattr(FakeProduct, "times", (3.0, 2.98, 3.5))
        with choosing():
            product(*inputs())
        _, algorithm = the_choice()
        assert algorithm[0] == 0

    def test_a_choice_outlives_the_process(self, monkeypatch):
        with choosing():
            product(*inputs())
        monkeypatch.setattr(products, "_chosen", {})
        monkeypatch.setattr(products, "_seconds", lambda *given: pytest.fail("timed again"))
        with choosing():
            product(*inputs())
        _, algorithm = the_choice()
        assert algorithm[0] == 2

    def test_a_choice_that_was_kept_has_run_before_it_is_captured(self, monkeypatch):
        """For that loads its kernel; and if it does not run any more, another one is chosen."""
        with choosing():
            product(*inputs())
        monkeypatch.setattr(products, "_chosen", {})
        with choosing():
            product(*inputs())
        assert the_choice()[0].ran == [2]
        monkeypatch.setattr(products, "_chosen", {})
        monkeypatch.setattr(FakeProduct, "refused", 2)
        with choosing():
            product(*inputs())
        assert the_choice()[1][0] == 3 and json.loads(kept.file(0).read_text()) == {NAME: "03" * 64}

    @pytest.mark.parametrize(
        "text", ["", "[]", "{", *(json.dumps({name: kept}) for name in ("x", NAME) for kept in ("zz", 7, None))]
    )
    def test_a_damaged_file_is_no_choice(self, text):
        kept.file(0).parent.mkdir(parents=True, exist_ok=True)
        kept.file(0).write_text(text)
        with choosing():
            product(*inputs())
        assert len(products._chosen) == 1

    def test_an_algorithm_that_is_no_longer_proposed_is_no_choice(self):
        kept.file(0).parent.mkdir(parents=True, exist_ok=True)
        kept.file(0).write_text(json.dumps({NAME: "ff" * 64}))
        with choosing():
            product(*inputs())
        _, algorithm = the_choice()
        assert algorithm[0] == 2

    def test_other_kernels_are_chosen_from_anew(self, monkeypatch):
        kept.own_kernels.cache_clear()
        name = kept.own_kernels()
        kept.own_kernels.cache_clear()
        monkeypatch.setattr(kept.tiles, "TILINGS", kept.tiles.TILINGS[1:])
        try:
            assert kept.own_kernels() != name
        finally:
            kept.own_kernels.cache_clear()

    @pytest.mark.parametrize("error", [OSError("no libcublasLt"), RuntimeError("proposes nothing")], ids=str)
    def test_without_the_library_or_a_proposal_it_is_torch(self, monkeypatch, error):
        def missing(shape, device):
            raise error

        monkeypatch.setattr(products, "Product", missing)
        with choosing():
            got = product(*inputs())
        x, weight, residual = inputs()
        assert torch.equal(got, residual + F.linear(x, weight)) and not products._chosen

    @pytest.mark.parametrize("missing", [False, True])
    def test_octavos_own_ways_are_proposed_too(self, monkeypatch, missing):
        """And without cuBLASLt, they alone."""
        ways, ran, prepared = ["slow", "fast"], [], []

        def run(way, x, weight, residual, out):
            ran.append(way)
            out.copy_(torch.full_like(out, ways.index(way)))

        def no_library(shape, device):
            raise OSError("no libcublasLt")

        def seconds(timed, sustained):
            ran.clear()
            timed()
            return {"slow": 2.0, "fast": 0.5}[ran[-1]] if ran else 1.0

        monkeypatch.setattr(products.streams, "ways", lambda device, rows, outputs, inputs: ways)
        monkeypatch.setattr(products.streams, "run", run)
        monkeypatch.setattr(products.streams, "prepare", lambda way, x, weight: prepared.append(way))
        monkeypatch.setattr(products, "_seconds", seconds)
        if missing:
            monkeypatch.setattr(products, "Product", no_library)
        for _ in range(2):
            with choosing():
                product(*inputs())
            assert torch.equal(product(*inputs()), torch.ones(1, 3, 64))
            assert json.loads(kept.file(0).read_text()) == {NAME: "hopper: fast"}
            products._chosen.clear()
        assert sorted(prepared) == ["fast", "slow"]  # once, as the second time the choice was kept

    @pytest.mark.parametrize("gates", [False, True])
    def test_a_gate_is_the_products_own_or_a_launch_behind_it(self, monkeypatch, gates):
        x, weight, _ = inputs()
        opened, passed = F.linear(x, weight).chunk(2, -1)
        want = F.silu(opened) * passed
        names = {False: "a product, then its gate", True: "hopper: tiles"}

        def run(tiling, gate, x, weight, residual, out):
            assert (tiling, gate, residual) == ("tiles", "silu", None)
            out.fill_(7)

        monkeypatch.setattr(products.tiles, "tilings", lambda *shape: ["tiles"] if shape[4] else [])
        monkeypatch.setattr(products.tiles, "run", run)
        monkeypatch.setattr(products.tiles, "prepare", lambda *given: None)
        times = iter([3.0, 2.99, 1.0, 0.0, 1.0, 2.0, 1.0 if gates else 3.0])
        monkeypatch.setattr(products, "_seconds", lambda run, sustained: (run(), next(times))[1])
        monkeypatch.setattr(FakeProduct, "refused", 9)
        with choosing():
            assert torch.equal(gated_product(x, weight, "silu"), want)
        choices = json.loads(kept.file(0).read_text())
        assert len(products._chosen) == 2 and choices.popitem()[1] == names[gates] and len(choices) == 1
        assert torch.equal(gated_product(x, weight, "silu"), torch.full_like(want, 7) if gates else want)

    def test_other_rows_than_those_asked_for_are_passed_over(self):
        x, weight, residual = inputs()
        with choosing(rows=3):
            product(x[:, :2], weight, None)
            product(x, weight, residual)
        assert [shape.rows for _, shape in products._chosen] == [3]

    def test_many_rows_are_timed_for_long_with_one_weight(self, monkeypatch):
        x, weight, residual = inputs(products.MOST_ROWS + 1)
        sustained, fake = [], products._seconds
        monkeypatch.setattr(products, "_seconds", lambda run, long: sustained.append(long) or fake(run, long))
        monkeypatch.setattr(products.waves, "serves", lambda device, *sizes: True)
        monkeypatch.setattr(products.waves, "run", lambda gate, x, weight, residual, out: out.fill_(7))
        monkeypatch.setattr(products.waves, "prepare", lambda *given: None)
        FakeProduct.made[:] = [FakeProduct(None, 0)]
        with choosing():
            for other in (weight, weight + 1, weight + 2):
                product(x, other, residual)
        assert set(sustained) == {products.SUSTAINED_S}
        assert len(sustained) == len(FakeProduct.times) + 1, "the waves, too"
        assert FakeProduct.made[-1].ran == [0, 1, 2, 4]  # once each

    def test_many_rows_add_and_gate_though_nothing_is_chosen(self, monkeypatch):
        x, weight, residual = inputs(products.MOST_ROWS + 1)
        alone, few = F.linear(x, weight), x[:, :3]
        product(few, weight, residual[:, :3])
        assert not FakeProduct.made, "few rows are torch's"
        assert torch.equal(product(x, weight, residual), residual + alone)
        assert FakeProduct.made[-1].ran == [0], "the library's favourite"
        opened, passed = alone.chunk(2, -1)
        assert torch.equal(gated_product(x, weight, "silu"), F.silu(opened) * passed)
        products._untried.cache_clear()
        monkeypatch.setattr(products.waves, "serves", lambda device, *sizes: sizes == (513, 64, 128, "silu"))
        monkeypatch.setattr(products.waves, "run", lambda gate, x, weight, residual, out: out.fill_(7))
        assert torch.equal(gated_product(x, weight, "silu"), torch.full_like(opened, 7))
        assert torch.equal(product(x, weight, None), alone)

    def test_what_does_not_compile_is_refused_when_it_is_run(self, monkeypatch):
        def refused(*given):
            raise RuntimeError("not on this machine")

        monkeypatch.setattr(products.streams, "ways", lambda device, rows, outputs, inputs: ["broken"])
        monkeypatch.setattr(products.streams, "run", refused)
        monkeypatch.setattr(products.streams, "prepare", refused)
        with choosing():
            product(*inputs())
        assert the_choice()[1][0] == 2

    def test_what_another_process_has_chosen_meanwhile_stays(self):
        x, weight, residual = inputs()
        with choosing():
            product(x, weight, residual)
        others = {**json.loads(kept.file(0).read_text()), "another shape": "ff"}
        kept.file(0).write_text(json.dumps(others))
        with choosing():
            product(x, weight, None)
        assert json.loads(kept.file(0).read_text()).items() > others.items()

    def test_what_another_process_has_chosen_meanwhile_is_taken(self):
        x, weight, residual = inputs()
        with choosing():
            product(x, weight, None)
        kept.file(0).write_text(json.dumps({NAME: FakeProduct(None, 0).proposals()[4].hex()}))
        with choosing():
            product(x, weight, residual)
        assert products._chosen[0, cublaslt.Shape(3, 64, 128, torch.bfloat16, True)].args[0][0] == 4

    def test_a_folder_that_cannot_be_written_is_none(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
        with choosing():
            product(*inputs())
        assert len(products._chosen) == 1

    def test_where_no_proposal_runs_it_is_torch_and_nothing_is_kept(self, monkeypatch):
        monkeypatch.setattr(FakeProduct, "times", (1.0,))
        monkeypatch.setattr(FakeProduct, "refused", 0)
        with choosing():
            product(*inputs())
        assert not products._chosen and not kept.file(0).exists()

    def test_two_threads_choose_apart(self):
        """The first ends while the second is within its block, and a third notes nothing of theirs."""
        x, weight, residual = inputs()
        both, first_is_done = Barrier(2), Event()

        def first():
            with choosing():
                product(x, weight, residual)
                both.wait(10)
            first_is_done.set()

        def second():
            with choosing():
                both.wait(10)
                assert first_is_done.wait(10)
                product(x, weight, None)

        with ThreadPoolExecutor(2) as pool, choosing():
            for running in [pool.submit(first), pool.submit(second)]:
                running.result(20)
            assert len(products._chosen) == 2 and not products._noted.get().calls
        assert products._noted.get() is None

    def test_an_error_within_the_block_chooses_nothing(self):
        with pytest.raises(KeyError), choosing():
            product(*inputs())
            raise KeyError
        assert not products._chosen and products._noted.get() is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "width"), [(1, 6144, 4096), (3, 64, 128), (130, 4096, 14336), (256, 576, 1536)]
)
def test_every_proposal_gives_the_product(dtype, adds, rows, outputs, width):
    x, weight, residual = inputs(rows, outputs, width, dtype, "cuda")
    residual = residual if adds else None
    want = F.linear(x.double(), weight.double()) + (residual.double() if adds else 0)
    made = cublaslt.Product(cublaslt.Shape(rows, outputs, width, dtype, adds), 0)
    proposals = made.proposals()
    assert proposals
    for algorithm in proposals:
        out = torch.full((1, rows, outputs), torch.nan, dtype=dtype, device="cuda")
        made.run(algorithm, x, weight, residual, out)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2 * float(want.std()))


@pytest.mark.gpu
def test_chosen_products_are_replayed(tmp_path):
    x, weight, residual = inputs(64, 4096, 4096, device="cuda")
    want = residual + F.linear(x, weight)
    with choosing():
        product(x, weight, residual)
    assert len(products._chosen) == 1 and list(tmp_path.glob("products-*.json"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = product(x, weight, residual)
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    products._chosen.clear()
    with choosing():
        product(x, weight, residual)
    assert torch.cuda.is_available() and len(products._chosen) == 1


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_of_its_own(gate, dtype):
    """Triton's, behind products that do not gate."""
    from octavo.kernels.triton.gating import gate as let_through

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    both = 3 * torch.randn(2, 5, 2 * 301, device=device).to(dtype)
    room = torch.full((4, 5, 301), torch.nan, device=device, dtype=dtype)
    let_through(both, gate, room[1:-1])
    want = products.ACTIVATIONS[gate](both[..., :301]) * both[..., 301:]
    torch.testing.assert_close(room[1:-1], want, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6)
    assert room[0].isnan().all() and room[-1].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 64, 200, 300, 600])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_a_chosen_gate_is_replayed(gate, rows):
    x, weight, _ = inputs(rows, 8192, 1024, device="cuda")
    gates, passed = F.linear(x.double(), weight.double() / 4).chunk(2, -1)
    want = products.ACTIVATIONS[gate](gates) * passed
    with choosing():
        first = gated_product(x, weight / 4, gate)
    graph = torch.cuda.CUDAGraph()
    weight = weight / 4
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = gated_product(x, weight, gate)
    graph.replay()
    for out in (first, got):
        assert out.shape == want.shape and (out.double() - want).norm() < 6e-3 * want.norm()
    plain = {""} if rows <= products.MOST_ROWS or not usable(x.device) else set()  # many rows are gated on the way
    assert {shape.gate for _, shape in products._chosen} == {*plain, gate}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [lambda x, w, r: (x.float(), w.float(), r.float()), lambda x, w, r: (x[:, :, :64], w[:, :64], r),
     lambda x, w, r: (x.expand(700, -1, -1), w, None), lambda x, w, r: (x, w, r[:, :1])],
    ids=["fp32", "with gaps", "many rows", "broadcast"],
)  # fmt: skip
def test_what_cannot_be_chosen_for_is_torch(change):
    x, weight, residual = change(*inputs(device="cuda"))
    with choosing():
        got = product(x, weight, residual)
    want = F.linear(x, weight)
    assert torch.equal(got, want if residual is None else residual + want) and not products._chosen
