"""Activations that products on Hopper gate with (``gates.h``)."""

from __future__ import annotations

GATES = ("silu", "gelu_tanh")


def number(gate: str) -> int:
    """Of a gate, as the macro ``GATE`` has it; 0 of none."""
    return 1 + GATES.index(gate) if gate else 0
