"""``OCTAVO_LOG=kernels``: say which kernel serves which call, once for each distinct choice.

The environment is read when this module is imported. Callers ask ``KERNELS`` before they make anything up, so that an
engine whose log is off pays for one test of a module's attribute a call.
"""

import logging
import os

from torch import Tensor

KERNELS = "kernels" in os.environ.get("OCTAVO_LOG", "").split(",")

_log = logging.getLogger("octavo.kernels")
_said: set[tuple[object, ...]] = set()


def chosen(op: str, backend: str, kernel: str, pool: Tensor, **facts: object) -> None:
    """A call of ``op`` is about to run ``kernel``. What is new about that is logged: a line a distinct choice.

    ``facts`` are what the choice depends on (heads, rows, splits), in the words of the log.
    """
    choice = (op, backend, kernel, pool.dtype, pool.device, *pool.shape[1:], *facts.items())
    if choice in _said:
        return
    _said.add(choice)
    if not _log.hasHandlers():  # nobody listens, and whoever set the variable wants to see
        _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.INFO)
    _, layers, _, kv_heads, unit_tokens, head_dim = pool.shape
    said = "".join(f", {name.replace('_', ' ')} {value}" for name, value in facts.items())
    _log.info(
        "%s: %s, %s; pool of %s on %s, %d layers, %d KV heads of %d, units of %d tokens%s",
        op, backend, kernel, str(pool.dtype).removeprefix("torch."), pool.device, layers, kv_heads, head_dim,
        unit_tokens, said,
    )  # fmt: skip
