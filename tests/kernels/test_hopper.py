"""CUDA kernels for Hopper: that they compile with whatever they are asked for, and on such a card what they compute.

Their results as parts of ops are in test_append_decode.py, test_attention.py and test_product.py.
"""

import math
import re
from contextlib import nullcontext
from itertools import product as combinations

import pytest
import torch

from octavo.kernels import ops
from octavo.kernels.hopper import compiler, decode, gates, product_streams, product_tiles, product_waves
from octavo.kernels.layout import ID_SHIFT, VALID_MASK, pack_entries
from octavo.kernels.products import product as products
from octavo.kernels.products.cublaslt import Shape
from octavo.kernels.triton import settings

pytest.importorskip("cuda.bindings.nvrtc", reason="octavo[cuda] is not installed")

PLAIN = {
    "D": 128, "GROUP": 4, "KV_HEADS": 8, "HEADS": 1, "U": 16, "STAGES": decode.STAGES, "DIRECT": 0, "WINDOW": 0,
    "CAPPED": 0, "SINKS": 0, "WIDE_SINKS": 0, "FRESH": 1, "ROTARY": 128, "WIDE_ANGLES": 0, "BF16": 1,
    "ID_SHIFT": ID_SHIFT, "VALID_MASK": VALID_MASK,
}  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {}, {"FRESH": 0, "ROTARY": 0}, {"DIRECT": 1}, {"D": 64, "GROUP": 3, "KV_HEADS": 3, "ROTARY": 16},
        {"U": 8, "WIDE_ANGLES": 1}, {"U": 64, "HEADS": 8, "FRESH": 0}, {"GROUP": 1}, {"GROUP": 8, "BF16": 0},
        {"WINDOW": 33, "CAPPED": 1}, {"SINKS": 1}, {"SINKS": 1, "WIDE_SINKS": 1},
    ],
    ids=str,
)  # fmt: skip
def test_decode_compiles(other):
    assert compiler.compiled("decode", {**PLAIN, **other}).startswith(b"\x7fELF")


@pytest.mark.parametrize("way", product_streams.WAYS, ids=str)
@pytest.mark.parametrize("rows", [1, 33, 64])
def test_streams_compile(way, rows):
    assert product_streams._code(True, product_streams._padded(rows), way)


@pytest.mark.parametrize("gate", ["", *gates.GATES])
@pytest.mark.parametrize(("outputs", "at_once"), [(28_672, 132), (6144, 66), (40, 132), (40_000, 30)])
@pytest.mark.parametrize("rows", [1, 128, 192, 256])
def test_tiles_compile(rows, outputs, at_once, gate):
    """The largest and the smallest; the first tiling that fits, and the last."""
    groups = math.ceil(rows / 64)
    tile = product_tiles._tile(outputs, at_once, groups, gate)
    fitting = [tiling for tiling in product_tiles.TILINGS if product_tiles._memory(groups, tile, tiling)]
    for tiling in {fitting[0], fitting[-1]}:
        assert product_tiles._code(True, groups, tile, tiling, gate)


@pytest.mark.parametrize("gate", ["", *gates.GATES])
@pytest.mark.parametrize("outputs", [32, 96, 224, 256])
def test_waves_compile(outputs, gate):
    assert product_waves._code(True, outputs, gate)


@pytest.mark.parametrize(
    ("rows", "outputs", "gate", "want"),
    [
        (8192, 28_672, "silu", (256, 128, 66)),
        (1024, 6144, "", (192, 128, 66)),  # 128 tiles in two waves, where 96 of 256 take two as well
        (256, 28_672, "silu", (224, 128, 66)),
        (248, 4096, "", (64, 124, 64)),
        (300, 8, "", (16, 75, 2)),
        (8193, 6144, "", (256, 125, 66)),
    ],
)
def test_waves_are_full(rows, outputs, gate, want, monkeypatch):
    monkeypatch.setattr(product_waves, "clusters", lambda device, blocks: 66)
    found = product_waves._layout.__wrapped__(torch.device("cuda"), rows, outputs, gate)
    assert (found.outputs, found.box, found.clusters) == want


def test_waves_serve_many_rows_of_whole_groups(monkeypatch):
    monkeypatch.setattr(product_waves, "usable", lambda device: True)
    device = torch.device("cuda")
    assert product_waves.serves(device, 129, 8, 8) and product_waves.serves(device, 129, 16, 8, "silu")
    for rows, outputs, inputs, gate in (
        (128, 8, 8, ""),
        (129, 0, 8, ""),
        (129, 8, 0, ""),
        (129, 12, 8, ""),
        (129, 8, 4, ""),
    ):
        assert not product_waves.serves(device, rows, outputs, inputs, gate)
    assert not product_waves.serves(device, 129, 8, 8, "silu")


def test_waves_fit():
    for outputs, gate in combinations(range(16, 257, 16), ("", "silu")):
        if gate and outputs % 32:
            continue
        stages = product_waves._stages(outputs, gate)
        written = product_waves._written_bytes(outputs, gate)
        assert 4 <= stages <= 8 and written % 16 == 0
        assert stages * product_waves._stage_bytes(outputs) + written <= compiler.BLOCK_BYTES


def test_tiles_take_all_outputs_in_the_fewest_waves():
    for outputs, at_once, groups, gate in combinations(
        (8, 40, 4096, 6144, 28_672, 250_000), (15, 30, 66, 132), (1, 2, 3, 4), ("", "silu")
    ):
        tile = product_tiles._tile(outputs, at_once, groups, gate)
        most, grain = product_tiles._MOST_OUTPUTS[groups], 16 if gate or groups > 2 else 8
        assert tile % grain == 0 and grain <= tile <= most
        waves = math.ceil(math.ceil(outputs / tile) / at_once)
        assert waves == 1 or outputs > (waves - 1) * at_once * most
        assert tile // 2 // product_tiles._halves(tile, groups) <= product_tiles._ENTRY_SUMS.get(groups, 128)
        for tiling in product_tiles.TILINGS:
            memory = product_tiles._memory(groups, tile, tiling)
            if memory is not None:
                assert memory.shared <= compiler.BLOCK_BYTES and memory.stages >= tiling.ahead + tiling.burst - 1


def test_tiles_of_rows_hold_all_of_them(monkeypatch):
    monkeypatch.setattr(product_tiles, "clusters", lambda device, blocks: {1: 132, 2: 66, 4: 30}[blocks])
    for rows, tiling in combinations(range(1, product_tiles.MOST_ROWS + 1), product_tiles.TILINGS):
        if tiling.groups < math.ceil(rows / 64):
            layout = product_tiles._layout(torch.device("cpu"), rows, 4096, tiling, "")
            box = math.ceil(rows / layout.tiles_of_rows)
            assert box <= 64 * layout.groups and (layout.tiles_of_rows - 1) * box < rows <= layout.tiles_of_rows * box
    product_tiles._layout.cache_clear()


def test_what_does_not_compile_is_said_with_the_compilers_words():
    with pytest.raises(compiler.HopperError, match=r'(?s)does not compile decode\.cu.*identifier "GROUP"') as caught:
        compiler.compiled("decode", {"D": 128})
    assert caught.value.__notes__ == ["decode.cu with {'D': 128}"]


class TestWhatIsCompiledIsKept:
    @pytest.fixture(autouse=True)
    def folder(self, monkeypatch, tmp_path):
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
        return tmp_path / "hopper"

    def test_and_not_compiled_again(self, monkeypatch, folder):
        code = compiler.compiled("decode", PLAIN)
        (file,) = folder.iterdir()
        assert file.read_bytes()[: len(code)] == code
        monkeypatch.setattr(compiler, "_compile", lambda *given: pytest.fail("compiled again"))
        assert compiler.compiled("decode", PLAIN) == code

    def test_by_what_it_was_made_from(self, folder):
        compiler.compiled("decode", PLAIN)
        compiler.compiled("decode", {**PLAIN, "WINDOW": 5})
        assert len(list(folder.iterdir())) == 2

    @pytest.mark.parametrize("damaged", [b"", b"short", None], ids=["empty", "short", "a byte"])
    def test_unless_it_is_damaged(self, folder, damaged):
        code = compiler.compiled("decode", PLAIN)
        (file,) = folder.iterdir()
        whole = file.read_bytes()
        file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:] if damaged is None else damaged)
        assert compiler.compiled("decode", PLAIN) == code and file.read_bytes() == whole

    def test_where_a_file_can_be(self, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
        assert compiler.compiled("decode", PLAIN)


@pytest.mark.parametrize("error", [ImportError("no cuda"), RuntimeError("no libnvrtc"), compiler.HopperError("old")])
def test_a_card_that_could_and_cannot_is_said_once(monkeypatch, caplog, error):
    def missing():
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(compiler, "_bindings", missing)
    compiler.usable.cache_clear()
    card = torch.device("cuda", 0)
    try:
        assert not compiler.usable(card) and not compiler.usable(card)
    finally:
        compiler.usable.cache_clear()
    (record,) = caplog.records
    assert str(error) in record.getMessage() and "slower" in record.getMessage()


def test_arguments_are_laid_out_as_the_kernel_reads_them():
    text = (compiler.HERE / "decode_arguments.h").read_text()
    body = re.search(r"struct Arguments \{(.*?)\};", text, re.DOTALL).group(1)
    names = [name for line in body.split(";") for name in re.findall(r"\*?(\w+)(?=,|$)", line.replace("\n", " "))]
    assert names == [name for name, _ in decode._Arguments._fields_]


def test_blocks_find_room():
    for head_dim, group, unit in combinations((64, 128), range(1, 9), (8, 16, 32, 64)):
        shared = decode._shared_bytes(head_dim, group, unit)
        blocks = settings.launch("decode_hopper", str(head_dim), torch.device("cpu"))["programs_per_sm"]
        assert blocks * (shared + 1024) <= compiler.SHARED_BYTES
    for rows, way in combinations(range(1, product_streams.MOST_ROWS + 1), product_streams.WAYS):
        tokens = product_streams._padded(rows)
        assert rows <= tokens and tokens % 8 == 0
        stages = product_streams._stages(tokens, way)
        assert stages >= product_streams.LEAST_STAGES or way.blocks > 1  # there is always one
        assert way.blocks * (product_streams._shared_bytes(tokens, way, stages) + 1024) <= compiler.SHARED_BYTES


def test_a_cpu_has_none_of_it():
    cpu = torch.device("cpu")
    assert not compiler.usable(cpu) and product_streams.ways(cpu, 1, 64, 64) == []
    assert product_tiles.tilings(cpu, 64, 64, 64) == []
    x = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    assert not decode.serves(x, None, torch.zeros(2, 1, 2, 8, 16, 128, dtype=torch.bfloat16), None)


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 14336), (200, 328), (8, 8), (136, 72), (40_000, 520)]
)
def test_every_way_gives_the_product(dtype, adds, outputs, inputs):
    """Padding is neither read nor written, and sums do not depend on what runs beside them."""
    torch.manual_seed(0)
    for rows in (1, 2, 8, 9, 31, 48, 50, 64):
        x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
        weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype) / inputs**0.5
        residual = torch.randn(rows, outputs, device="cuda", dtype=dtype) if adds else None
        want = x.double() @ weight.double().T + (residual.double() if adds else 0)
        ways = product_streams.ways(x.device, rows, outputs, inputs)
        assert ways
        for way in ways:
            room = torch.full((rows + 2, outputs), float("nan"), device="cuda", dtype=dtype)
            product_streams.run(way, x, weight, residual, room[1:-1])
            error = (room[1:-1].double() - want).norm() / want.norm()
            assert error < 4e-3, f"{rows} rows, {way}: {error}"
            assert room[0].isnan().all() and room[-1].isnan().all()
            again = torch.empty_like(want, dtype=dtype)
            product_streams.run(way, x, weight, residual, again)
            assert torch.equal(again, room[1:-1])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["alone", "adds", *gates.GATES])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 14336), (200, 328), (8, 8), (136, 72), (40_000, 520), (28_672, 1024)]
)
def test_every_tiling_gives_the_product(dtype, kind, outputs, inputs):
    """Padding is neither read nor written, and sums do not depend on what runs beside them."""
    torch.manual_seed(0)
    gate = kind if kind in gates.GATES else ""
    for rows in (1, 7, 33, 64, 65, 100, 128, 129, 192, 205, 250, 256):
        x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
        weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype) / inputs**0.5
        want, residual = x.double() @ weight.double().T, None
        if gate:
            opened, passed = want.chunk(2, -1)
            want = products.ACTIVATIONS[gate](opened) * passed
        if kind == "adds":
            residual = torch.randn(rows, outputs, device="cuda", dtype=dtype)
            want += residual
        tilings = product_tiles.tilings(x.device, rows, outputs, inputs, gate)
        assert tilings
        for tiling in tilings:
            room = torch.full((rows + 2, want.shape[1]), float("nan"), device="cuda", dtype=dtype)
            product_tiles.run(tiling, gate, x, weight, residual, room[1:-1])
            error = (room[1:-1].double() - want).norm() / want.norm()
            assert error < 6e-3, f"{rows} rows, {tiling}: {error}"
            assert room[0].isnan().all() and room[-1].isnan().all()
            again = torch.empty_like(want, dtype=dtype)
            product_tiles.run(tiling, gate, x, weight, residual, again)
            assert torch.equal(again, room[1:-1])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["alone", "adds", *gates.GATES])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 1032), (208, 328), (16, 8), (272, 40), (40_000, 520), (28_672, 1024)]
)
def test_waves_give_the_product(dtype, kind, outputs, inputs):
    """Padding is neither read nor written, and sums do not depend on what runs beside them."""
    torch.manual_seed(0)
    gate = kind if kind in gates.GATES else ""
    weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype) / inputs**0.5
    for rows in (129, 130, 250, 256, 257, 300, 513, 1000, 2049, 5000):
        x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
        want, residual = x.double() @ weight.double().T, None
        if gate:
            opened, passed = want.chunk(2, -1)
            want = products.ACTIVATIONS[gate](opened) * passed
        if kind == "adds":
            residual = torch.randn(rows, outputs, device="cuda", dtype=dtype)
            want += residual
        assert product_waves.serves(x.device, rows, outputs, inputs, gate)
        room = torch.full((rows + 2, want.shape[1]), float("nan"), device="cuda", dtype=dtype)
        product_waves.run(gate, x, weight, residual, room[1:-1])
        error = (room[1:-1].double() - want).norm() / want.norm()
        assert error < 6e-3, f"{rows} rows: {error}"
        assert room[0].isnan().all() and room[-1].isnan().all()
        again = torch.empty_like(want, dtype=dtype)
        product_waves.run(gate, x, weight, residual, again)
        assert torch.equal(again, room[1:-1])


@pytest.mark.gpu
@hopper
def test_products_in_a_row_wait_for_each_other():
    """Each begins before the one before it has ended, and needs what that writes."""
    torch.manual_seed(0)
    weights = [torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(24)]
    for rows in (1, 16, 100, 200, 700):
        x = start = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        ways = product_streams.ways(x.device, rows, 1024, 1024) + product_tiles.tilings(x.device, rows, 1024, 1024)
        ways += ["waves"] if product_waves.serves(x.device, rows, 1024, 1024) else []
        one_by_one = start
        for i, weight in enumerate(weights):
            one_by_one = run(ways[i % len(ways)], one_by_one, weight)
            torch.cuda.synchronize()
        for _ in range(20):
            x = start
            for i, weight in enumerate(weights):
                x = run(ways[i % len(ways)], x, weight)
            assert torch.equal(x, one_by_one)


def run(way, x, weight):
    out = torch.empty(len(x), len(weight), device=x.device, dtype=x.dtype)
    if way == "waves":
        product_waves.run("", x, weight, x, out)
    elif isinstance(way, product_streams.Way):
        product_streams.run(way, x, weight, x, out)
    else:
        product_tiles.run(way, "", x, weight, x, out)
    return out


@pytest.mark.gpu
@hopper
def test_a_choice_that_was_kept_can_be_captured(monkeypatch, tmp_path):
    """As in the second process on a machine, which has compiled and loaded nothing yet."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    weights = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(4)]
    x = torch.randn(3, 4096, device="cuda", dtype=torch.bfloat16)
    own = next(name for name in products._proposals(0, Shape(3, 4096, 4096, x.dtype, False)) if "hopper" in name)
    for _ in range(2):
        monkeypatch.setattr(products, "_chosen", {})
        product_streams._kernel.cache_clear()
        products._keep(0, str(Shape(3, 4096, 4096, x.dtype, False)), own)
        with products.choosing():
            want = products.product(x, weights[0], None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = products.product(x, weights[0], None)
        graph.replay()
        assert (out - want).float().norm() < 0.01 * want.float().norm()


@pytest.mark.gpu
@hopper
def test_triton_is_what_its_settings_are_tried_on():
    x = torch.zeros(1, 8, 128, dtype=torch.bfloat16, device="cuda")
    pool = torch.zeros(2, 1, 2, 8, 16, 128, dtype=torch.bfloat16, device="cuda")
    assert decode.serves(x, None, pool, None) and not decode.serves(x[:0], None, pool, None)
    for kernel in ("decode", "combine"):
        with settings.trial(kernel):
            assert not decode.serves(x, None, pool, None)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("unit", [8, 16, 32, 64])
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((7, 1), 64), ((8, 8), 128)])
def test_decode_gives_what_triton_gives(monkeypatch, heads, head_dim, unit):
    """Ragged, with sealed units and empty rows, of as many parts as there can be; and leaves its counts at zero."""
    torch.manual_seed(unit)
    q_heads, kv_heads = heads
    lengths = torch.tensor([0, 1, 5, 64, 65, 700, 4097, 0, 129, 3000])
    entries = -(-int(lengths.max()) // unit)
    ids = 1 + torch.randperm(len(lengths) * entries).view(1, len(lengths), 1, entries)
    valid = (lengths[:, None] - unit * torch.arange(entries)).clamp(0, unit)[None, :, None]
    valid = torch.where(torch.rand(valid.shape) < 0.2, (valid // 2).clamp(min=0), valid)  # sealed, partly filled
    pool = torch.randn(len(lengths) * entries + 1, 2, 2, kv_heads, unit, head_dim).to("cuda", torch.bfloat16)
    nan = torch.arange(unit) >= valid[0, :, 0].flatten()[:, None]  # [units, U]
    where = nan[:, None, None, None, :, None].expand(-1, *pool.shape[1:]).cuda()
    pool[ids.flatten().cuda()] = pool[ids.flatten().cuda()].masked_fill(where, float("nan"))
    table = pack_entries(ids, valid).cuda()
    q = torch.randn(len(lengths), q_heads, head_dim).to("cuda", torch.bfloat16)
    state = (1, table, lengths.int()[None, :, None].cuda(), (lengths - 1).int().cuda(), None, None)

    def attend():
        return ops.decode(q, pool, *state, head_dim**-0.5, 0, 0.0, False, True, "triton")[:2]

    got = [attend() for _ in range(5)]
    serves = decode.serves
    monkeypatch.setattr(decode, "serves", lambda *given: False)
    want = attend()
    monkeypatch.setattr(decode, "serves", serves)
    assert serves(q, None, pool, None)
    for out, lse in got:
        assert torch.equal(out, got[0][0]) and torch.equal(lse, got[0][1])
    assert (got[0][0].float() - want[0].float()).norm() / want[0].float().norm() < 6e-3
    torch.testing.assert_close(got[0][1], want[1], atol=2e-2, rtol=2e-3)
    assert not decode._arrivals(pool.data_ptr(), q.device).any()
