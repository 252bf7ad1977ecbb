"""Kernel tests: without a GPU, Triton's kernels run in its interpreter (switched on before Triton is imported)."""

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))  # kernel_cases, interpreter_fix

import interpreter_fix

if not torch.cuda.is_available():
    interpreter_fix.install()


def pytest_configure(config):
    # On an entry without a visible token the kernel means log2(0) = -inf; numpy, under the interpreter, remarks on it.
    config.addinivalue_line("filterwarnings", "ignore:divide by zero encountered in log2:RuntimeWarning")


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Memory that torch hands out uninitialised holds NaN."""

    def poisoned(create):
        def wrapper(*args, **kwargs):
            x = create(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def small_tiles():
    """Tiles of 16 slots, so that short sequences have many of them, and units that are larger than a tile."""
    from octavo.kernels.triton import settings

    with (
        settings.trial("decode", BLOCK_N=16, num_stages=1, min_split_tokens=16),
        settings.trial("prefill", BLOCK_M=16, BLOCK_N=16, num_stages=1),
    ):
        yield
