"""Launch settings of the Triton kernels: a small table per chip, kept as data in ``settings/``.

A file ``settings/<chip>.json`` maps a kernel to the settings of each key, the most specific first::

    {"decode": {"128x2": {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3, ...}, ...}, ...}

The key says what the best settings depend on: mostly the padded head dimension and the bytes of an element. A chip
without a file of its own, and whatever its file leaves out, takes ``default.json``. Nothing is tuned at import or in a
request; ``octavo experiment=kernels tune=true`` makes the table of a chip again (docs/kernels.md).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "settings"
_trial: dict[str, Mapping[str, int]] = {}


def launch(kernel: str, key: str, device: torch.device) -> Mapping[str, int]:
    """Settings of a kernel for a key such as ``"128x2"`` (padded head dimension x bytes of an element)."""
    tuned = _tables(chip(device))[kernel][key]
    return {**tuned, **_trial[kernel]} if kernel in _trial else tuned


@contextmanager
def trial(kernel: str, **values: int) -> Iterator[None]:
    """Within the block the kernel runs with these settings in place of the table's: for tuning and for tests."""
    before = _trial.get(kernel)
    _trial[kernel] = {**(before or {}), **values}
    try:
        yield
    finally:
        if before is None:
            del _trial[kernel]
        else:
            _trial[kernel] = before


def in_trial(*kernels: str) -> bool:
    """Whether the settings of one of these kernels are being tried."""
    return any(kernel in _trial for kernel in kernels)


@cache
def chip(device: torch.device) -> str:
    """Name of a device's chip as its file has it: ``nvidia-h200``; ``default`` where there is none (the CPU)."""
    if device.type != "cuda":
        return "default"
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


@cache
def _tables(name: str) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    tables = json.loads((FOLDER / "default.json").read_text())
    own = FOLDER / f"{name}.json"
    if own.exists():
        for kernel, entries in json.loads(own.read_text()).items():
            tables.setdefault(kernel, {}).update(entries)
    return tables  # type: ignore[no-any-return]
