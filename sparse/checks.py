"""What the parts of a method ask of their parameters."""

from collections.abc import Sequence
from math import inf


def check_integer(name: str, value: int, least: int, most: float = inf) -> None:
    """Raises ValueError unless ``value`` is an integer of at least ``least`` and at most ``most``. ``name`` is as in
    YAML: budget.tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        bound = f" and at most {most}" if most < inf else ""
        raise ValueError(f"{name} must be an integer of at least {least}{bound}, got {value!r}")


def check_number(name: str, value: float, least: float = -inf, most: float = inf) -> None:
    """Raises ValueError unless ``value`` is a finite number, of at least ``least`` and at most ``most``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and least <= value <= most and abs(value) < inf):  # NaN is not
        bounds = f" {least} to {most}" if most < inf else f" of at least {least}" if least > -inf else ""
        raise ValueError(f"{name} must be a finite number{bounds}, got {value!r}")


def layer_numbers(name: str, layers: Sequence[int]) -> tuple[int, ...]:
    """``layers`` as they are kept. Raises ValueError unless it is a list of whole numbers."""
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    if not is_list or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        raise ValueError(f"{name} must be a list of layer numbers, as [0, 1], got {layers!r}")
    return tuple(layers)


def check_share(name: str, value: float) -> None:
    """Raises ValueError unless ``value`` is a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} must be a number above 0 and at most 1, got {value!r}")
