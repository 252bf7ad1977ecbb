"""What the parts of a method ask of their parameters."""


def check_integer(name: str, value: int, least: int) -> None:
    """Raises ValueError unless ``value`` is an integer of at least ``least``. ``name`` is as in YAML: budget.tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_share(name: str, value: float) -> None:
    """Raises ValueError unless ``value`` is a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} must be a number above 0 and at most 1, got {value!r}")
