"""What the log of kernels says, how often, and that it says and does nothing when it is off."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from kernel_cases import Case, build

from octavo.kernels import log, ops
from octavo.kernels.cpu import attention, native
from octavo.kernels.layout import pool_shape

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")


@pytest.fixture
def said(monkeypatch, caplog):
    """The messages so far, with the log switched on and everything still to be said."""
    monkeypatch.setattr(log, "KERNELS", True)
    monkeypatch.setattr(log, "_said", set())
    caplog.set_level(logging.INFO, "octavo.kernels")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "octavo.kernels"]


def decode(tokens, backend, **shape):
    inputs = build(Case("log", tokens, head_dim=16, **shape), torch.float32)
    return ops.decode(*inputs.args(), backend)


def append(backend):
    pool = torch.zeros(pool_shape(4, 2, 2, 8, 16))
    k, v = torch.randn(2, 3, 2, 16)
    ops.append(k, v, pool, 1, torch.tensor([9, 20, 31]), backend)
    ops.copy_units(pool, torch.tensor([[1, 2]], dtype=torch.int32), backend)
    ops.transfer(pool, torch.zeros_like(pool), torch.tensor([[1, 2]], dtype=torch.int32), backend)


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [("reference", "torch"), ("cpu", "torch"), pytest.param("triton", "Triton", marks=interpreted)],
)
def test_every_op_says_what_runs_it(said, backend, kernel):
    append(backend)
    pool = "pool of float32 on cpu, 2 layers, 2 KV heads of 16, units of 8 tokens"
    assert said() == [f"{op}: {backend}, {kernel}; {pool}" for op in ("append", "copy_units", "transfer")]


def test_a_choice_is_said_once(said):
    for _ in range(3):
        decode((3, 20), "reference")
    assert len(said()) == 1
    decode((3, 20), "reference", heads=(6, 2))
    assert len(said()) == 2 and said()[1].endswith("query heads 6")


@pytest.mark.parametrize(("compiled", "kernel"), [(True, "compiled C"), (False, "gathered, torch")])
def test_the_cpu_says_whether_c_decodes(said, monkeypatch, compiled, kernel):
    done = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    monkeypatch.setattr(native, "decode", lambda *args: done if compiled else None)
    monkeypatch.setattr(attention, "decode_gathered", lambda *args: done)
    decode((3, 20), "cpu")
    assert said() == [
        f"decode: cpu, {kernel}; pool of float32 on cpu, 2 layers, 2 KV heads of 16, units of 16 tokens, "
        "query heads 4, rows 2"
    ]


@pytest.mark.parametrize(("compiled", "kernel"), [(True, "compiled C"), (False, "gathered, torch")])
def test_the_cpu_says_whether_c_prefills(said, monkeypatch, compiled, kernel):
    done = torch.zeros(1), torch.zeros(1)
    monkeypatch.setattr(native, "prefill", lambda *args: done if compiled else None)
    monkeypatch.setattr(attention, "prefill_gathered", lambda *args: done)
    inputs = build(Case("log", (3, 20), (3, 5), head_dim=16), torch.float32)
    ops.prefill(*inputs.args(), "cpu")
    assert said() == [
        f"prefill: cpu, {kernel}; pool of float32 on cpu, 2 layers, 2 KV heads of 16, units of 16 tokens, "
        "query heads 4, window 0"
    ]


@interpreted
@pytest.mark.parametrize(
    ("tokens", "kernel"),
    [((3, 20), "Triton, a program a row"), ((3, 520), "Triton, at most 3 programs a KV head, combined")],
)
def test_triton_says_how_many_splits_there_are(said, tokens, kernel):
    decode(tokens, "triton")
    [message] = said()
    assert f"decode: triton, {kernel};" in message and "rows 2, entries" in message


def test_nothing_is_said_or_made_up_when_it_is_off(said, monkeypatch):
    monkeypatch.setattr(log, "KERNELS", False)
    monkeypatch.setattr(log, "chosen", None)  # a call would fail
    for backend in ("reference", "cpu"):
        append(backend)
        decode((3, 20), backend)
    assert said() == []


@pytest.mark.parametrize(("value", "lines"), [("other,kernels", 2), ("kernel", 0)])
def test_the_environment_switches_it_on(value, lines):
    """In a process of its own, where nobody has set up logging: the lines go to standard error."""
    script = (
        "import torch; from octavo.kernels import ops; pool, k = torch.zeros(3, 1, 2, 1, 4, 8), torch.zeros(1, 1, 8)\n"
        "for _ in range(2): ops.copy_units(pool, torch.tensor([[1, 2]], dtype=torch.int32), 'cpu')\n"
        "ops.append(k, k, pool, 0, torch.arange(1), 'cpu')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "OCTAVO_LOG": value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == lines and done.stdout == ""
