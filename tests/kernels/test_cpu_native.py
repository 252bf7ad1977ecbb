"""The compiled CPU decode: what it must not read, what it must say, and where it comes from."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
import torch
from kernel_cases import LARGE_PREFILL, PREFILL, Case, build, check

from octavo.kernels.cpu import backend as cpu
from octavo.kernels.cpu import compiler, native
from octavo.kernels.layout import ID_SHIFT, entry_units, pack_entries
from octavo.kernels.reference import backend as reference

pytestmark = pytest.mark.skipif(not compiler._compiler(), reason="there is no C compiler")

needs_bf16 = pytest.mark.skipif(not native._multiplies_bf16(), reason="the processor multiplies no bf16")

CASE = Case("native", (20, 37), mass=True)


def inputs_of(case=CASE, **changes):
    inputs = build(case, torch.float32)
    return replace(inputs, **{name: change(getattr(inputs, name)) for name, change in changes.items()})


def agrees(inputs):
    """The compiled decode gives what the reference gives, NaN included."""
    got, want = native.decode(*inputs.args()), reference.decode(*inputs.args())
    assert got is not None
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def set_element(where, value):
    def change(x):
        x[where] = value
        return x

    return change


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kv", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize("case", [CASE, Case("native-long", (900, 3), mass=True)], ids=lambda case: case.name)
def test_what_a_query_sees_shows(case, kv, value):
    """NaN in one token that a query sees is NaN in its output, not a token of weight zero; in its own row alone."""
    inputs = inputs_of(case)
    unit = int(entry_units(inputs.table)[0, 0, 0, 0])
    inputs.pool[unit, :, kv, 0, 3] = value
    agrees(inputs)
    out = native.decode(*inputs.args())[0]
    assert not out[0, :2].isfinite().any() and out[0, 2:].isfinite().all() and out[1].isfinite().all()


def compiled_prefill(inputs, **changes):
    """None where the torch path must serve it."""
    *args, _, want_lse = replace(inputs, **changes).args()
    return native.prefill(*args, want_lse, inputs.q_span)


@needs_bf16
@pytest.mark.parametrize("case", [c for c in PREFILL + LARGE_PREFILL if not c.stored], ids=lambda case: case.name)
def test_compiled_prefill(case):
    inputs = build(case, torch.bfloat16)
    got = compiled_prefill(inputs)
    assert got is not None
    check(got, reference.prefill(*inputs.args()), torch.bfloat16, "cpu", case.gain)
    silent = native.prefill(*inputs.args()[:-2], False, None)
    assert torch.equal(silent[0], got[0]) and silent[1].numel() == 0


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case("stored-order", (90,), (50,), stored=True), torch.bfloat16),
        (Case("spans", (60,), (60,), spans=((5, 12),)), torch.bfloat16),
        (Case("odd-head", (40,), (9,), head_dim=40), torch.bfloat16),
        (Case("fp32", (40,), (9,)), torch.float32),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_prefill_leaves_the_rest_to_torch(case, dtype):
    assert compiled_prefill(build(case, dtype)) is None


def test_prefill_without_the_instruction_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(native, "_multiplies_bf16", lambda: False)
    assert compiled_prefill(build(PREFILL[0], torch.bfloat16)) is None


@needs_bf16
@pytest.mark.parametrize("kv", [0, 1], ids=["k", "v"])
def test_nan_shows_in_the_queries_that_see_it(kv):
    inputs = build(Case("prefill-nan", (40,), (40,)), torch.bfloat16)
    inputs.pool[int(entry_units(inputs.table)[0, 0, 0, 1]), :, kv, 0, 3] = torch.nan  # position 19
    out = compiled_prefill(inputs)[0]
    assert out[19:, :2].isnan().all() and out[:, 2:].isfinite().all()
    assert kv == 1 or out[:19].isfinite().all()


@needs_bf16
def test_prefill_refuses_what_lies_outside():
    inputs = build(PREFILL[0], torch.bfloat16)
    with pytest.raises(IndexError, match="entries"):
        compiled_prefill(inputs, lengths=inputs.lengths + 1000)
    with pytest.raises(IndexError, match="units"):
        compiled_prefill(inputs, table=inputs.table + (len(inputs.pool) << ID_SHIFT))


@pytest.mark.parametrize("name", ["q", "sinks"])
def test_nan_in_queries_and_sinks_shows(name):
    agrees(inputs_of(Case("native-sinks", (20, 37), mass=True, sinks=True), **{name: lambda x: x * torch.nan}))


@pytest.mark.parametrize("units", [slice(None), slice(0, 20)], ids=["all", "some-pieces"])
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_of_minus_infinity(units, sinks):
    """They have no weight, in a whole piece of a row as in a whole row."""
    inputs = inputs_of(Case("native-minus-infinity", (700, 5), mass=True, sinks=sinks))
    inputs.q[..., 0] = 1.0
    inputs.pool[entry_units(inputs.table[0, :, 0, units]).flatten(), :, 0, :, :, 0] = -torch.inf
    agrees(inputs)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("window", [0, 7, 2**62])
def test_query_far_before_its_sequence(stored, window):
    """It sees nothing, and no row pays for it."""
    case = Case("native-behind", (3000, 40), page=1, stored=stored, window=window, mass=True)
    inputs = inputs_of(case, q_pos=set_element(0, -2000))
    agrees(inputs)
    assert not native.decode(*inputs.args())[0][0].any()


def test_valid_count_over_the_unit():
    """A unit ends where it ends, whatever its entry says."""
    agrees(inputs_of(Case("native-valid", (64, 64), page=8, mass=True), table=lambda table: table | 64))


LAYOUTS = {
    "transposed-q": {"q": lambda q: q.transpose(0, 1).contiguous().transpose(0, 1)},
    "strided-positions": {"q_pos": lambda x: torch.stack([x, x - 9], 1)[:, 0]},
    "strided-table": {"table": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)},
    "strided-lengths": {"lengths": lambda x: torch.stack([x, x - 9], 3)[..., 0]},
    **{f"int64-{name}": {name: torch.Tensor.long} for name in ("q_pos", "table", "lengths", "unit_pos")},
}


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_layout_of_the_arguments(changes):
    for stored in (False, True) if "unit_pos" not in changes else (True,):
        agrees(inputs_of(Case("native-strides", (20, 37, 5), tables="head", stored=stored, mass=True), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": lambda x: x + 3 * 16 + 64},
        {"lengths": lambda x: x - 40},
        {"table": set_element((0, 0, 0, 0), int(pack_entries(torch.tensor((1 << 31 - ID_SHIFT) - 1), 16)))},
        {"table": set_element((0, 0, 0, 0), -1)},
    ],
    ids=["length-past-the-table", "length-below-zero", "unit-past-the-pool", "unit-below-zero"],
)
def test_nothing_outside_is_read(changes):
    with pytest.raises(IndexError, match="past a table of"):
        cpu.decode(*inputs_of(**changes).args())


@pytest.mark.parametrize("pool", [torch.Tensor.double, lambda x: x.repeat_interleave(8, 4)], ids=["fp64", "unit-128"])
def test_torch_decodes_other_pools(pool):
    inputs = inputs_of(pool=pool)
    assert native.decode(*inputs.args()) is None
    check(cpu.decode(*inputs.args()), reference.decode(*inputs.args()), torch.float32)


@pytest.mark.parametrize(
    "changes",
    [{"pool": lambda x: x.mT.contiguous().mT}, {"q": lambda q: q[..., :32]}, {"q": lambda q: q[:, :3]}],
    ids=["strided-pool", "head-size", "heads"],
)
def test_torch_refuses_the_rest(changes):
    with pytest.raises(RuntimeError):
        cpu.decode(*inputs_of(**changes).args())


@pytest.mark.parametrize("unit", [1, 3, 5, 7, 31, 48, 63])
def test_units_of_any_size(unit):
    """A unit is a power of two today; nothing in C needs it to be."""
    inputs = build(Case("native-unit", (0, 1, 300), page=64, mass=True), torch.float32)
    units = -(-300 // unit)
    pool = torch.full((1 + units, *inputs.pool.shape[1:4], unit, inputs.pool.shape[5]), torch.nan)
    pool[1:] = torch.randn(pool[1:].shape, generator=torch.Generator().manual_seed(0))
    pool[-1, ..., 300 - (units - 1) * unit :, :] = torch.nan
    table = pack_entries(torch.arange(1, units + 1), unit).expand(1, 3, 1, units)
    agrees(replace(inputs, pool=pool, table=table))


def test_threads_change_no_bit():
    inputs = inputs_of(Case("native-threads", (0, 1, 900, 40), mass=True))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4, 64):
            torch.set_num_threads(threads)
            results.append(native.decode(*inputs.args()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache folder of its own, and nothing remembered."""

    def forget():
        for function in (native._function, compiler.library, compiler._compiler, compiler._version):
            function.cache_clear()

    folder = tmp_path / "a 'cache' of \"µ\"\n,@%"
    monkeypatch.setenv("OCTAVO_CACHE", str(folder))
    monkeypatch.delenv("CC", raising=False)
    forget()
    yield folder / "kernels"
    forget()


def script(path: Path, *lines: str) -> Path:
    path.write_bytes(b"\n".join(line.encode("latin-1") for line in ("#!/bin/sh", *lines)) + b"\n")
    path.chmod(0o755)
    return path


def test_threads_may_compile_at_once(fresh):
    inputs, start = inputs_of(), Barrier(2)

    def decode():
        start.wait()
        return native.decode(*inputs.args())

    with ThreadPoolExecutor(2) as pool:
        first, second = [call.result() for call in [pool.submit(decode) for _ in range(2)]]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [path.suffix for path in fresh.iterdir()] == [".so"]


@pytest.mark.parametrize("left", [0, 100, 4096, -100, -1])
def test_library_that_was_cut_short_is_made_again(fresh, left):
    """To load it could end the process."""
    inputs = inputs_of()
    agrees(inputs)
    (library,) = fresh.iterdir()
    whole = library.read_bytes()
    library.unlink()  # the file that this process has loaded stays as it is
    library.write_bytes(whole[:left])
    native._function.cache_clear()
    compiler.library.cache_clear()
    agrees(inputs)
    assert library.stat().st_size == len(whole)


def test_cc_may_bring_arguments(fresh, tmp_path, monkeypatch):
    wrapper = script(tmp_path / "wrapper", f"echo \"$@\" >> '{tmp_path}/log'", 'exec "$@"')
    monkeypatch.setenv("CC", f"{wrapper} {compiler._compiler()[0]}")
    compiler._compiler.cache_clear()
    agrees(inputs_of())
    version, build = (tmp_path / "log").read_text().split(" ", 2)[1:]
    assert version.startswith("--version") and str(native.SOURCE) in build


def test_compiler_may_speak_any_encoding(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", str(script(tmp_path / "latin", "echo 'gcc für alle'", 'exec cc "$@"')))
    compiler._compiler.cache_clear()
    agrees(inputs_of())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["exit 1"], "returned non-zero"),
        (["echo 'für nichts' >&2", "exit 1"], "r nichts"),
        (["exit 0"], "No such file"),
        (['for a; do [ "$o" = -o ] && echo empty > "$a"; o=$a; done'], "file too short|invalid ELF"),
    ],
    ids=["silent", "latin-1", "makes-nothing", "makes-no-library"],
)
def test_broken_compiler(fresh, tmp_path, monkeypatch, caplog, lines, said):
    falls_back(monkeypatch, caplog, "CC", str(script(tmp_path / "broken", *lines)), said)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CC", 'cc "', "quotation"),
        ("OCTAVO_CACHE", "~nobody-of-this-name/cache", "home"),
        ("OCTAVO_CACHE", "/dev/null", "Not a directory"),
    ],
)
def test_broken_environment(fresh, monkeypatch, caplog, variable, value, said):
    falls_back(monkeypatch, caplog, variable, value, said)


def test_program_of_no_format(fresh, tmp_path, monkeypatch, caplog):
    path = tmp_path / "noise"
    path.write_text("noise")
    path.chmod(0o755)
    falls_back(monkeypatch, caplog, "CC", str(path), "format")


def falls_back(monkeypatch, caplog, variable, value, said):
    """torch decodes, and one warning says why."""
    monkeypatch.setenv(variable, value)
    inputs = inputs_of()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check(cpu.decode(*inputs.args()), reference.decode(*inputs.args()), torch.float32)
    assert native.decode(*inputs.args()) is None
    (record,) = caplog.records
    assert re.search(said, record.getMessage())


def test_no_compiler(fresh, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    inputs = inputs_of()
    check(cpu.decode(*inputs.args()), reference.decode(*inputs.args()), torch.float32)
    assert native.decode(*inputs.args()) is None and not caplog.records
