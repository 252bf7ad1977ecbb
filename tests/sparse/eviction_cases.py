"""The table of the methods that drop tokens, made small."""

from octavo.scripts.build import method

from .method_cases import EVICTING

__all__ = ["EVICTING", "PAGES", "VISIBLE", "evicting"]
SMALL = {"keep": {"sink_tokens": 4, "recent_tokens": 4}}
SMALLER = {
    "snapkv": {"scorer": {"window": 4, "kernel": 3}},
}
"""What a model of 3 layers, pages of 4 tokens and a budget of 20 need besides."""
_made = {}


def evicting(name, tokens=20, **parts):
    """A method for the small model."""
    parts = {**SMALL, **SMALLER.get(name, {}), **parts}
    key = repr((name, tokens, parts))
    if key not in _made:
        _made[key] = method(name, budget_tokens=tokens, **parts)
    return _made[key]


VISIBLE = {"grain": "page", "placement": "visible"}
PAGES = {"grain": "page", "placement": "drop"}
