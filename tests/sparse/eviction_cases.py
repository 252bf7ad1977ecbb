"""The table of the methods that drop tokens, made small."""

import pytest

from octavo.scripts.build import method

from .method_cases import DROPPING

EVICTING = [name for name in DROPPING if name != "duo_attention"]  # it has no budget: TestDuoAttention
FEW = ("ada_snapkv", "h2o", "knorm_drop", "kvzip", "random_drop", "rocketkv", "snapkv")
"""One of each kind: heads that share, deciding again, keys alone, looking ahead with layers that share, drawing,
choosing among what is kept, and queries that are observed."""


def every(names, cases):
    """A test of every one of ``cases``; those of methods that are none of ``FEW`` with ``-m slow``."""
    names = names.split(", ")

    def name_of(case):
        return case if isinstance(case, str) else case[0]

    marked = [
        pytest.param(
            *([case] if isinstance(case, str) else case), marks=() if name_of(case) in FEW else pytest.mark.slow
        )
        for case in cases
    ]
    return pytest.mark.parametrize(names, marked)


SMALL = {"keep": {"sink_tokens": 4, "recent_tokens": 4}}
WINDOW = {"scorer": {"window": 4, "kernel": 3}}
SMALLER = {
    "ada_snapkv": WINDOW,
    "criticalkv": {"scorer": {"attention": {"window": 4, "kernel": 3}}},
    "expected_attention": {"scorer": {"window": 8}},
    "h2o": {"every": 4},
    "kvzip": {"scorer": {"chunk_tokens": 16, "tail_tokens": 2, "repeat": [5, 6, 7], "go_on": [8, 9]}},
    "oracle_drop": {"scorer": {"lookahead_tokens": 6, "given": False}},
    "pyramid_snapkv": {**WINDOW, "budget": {"kept_tokens": 12}},
    "r_kv": {**WINDOW, "every": 8},
    "rocketkv": {**WINDOW, "choosing": {"digest": {"chunk_tokens": 2}, "scorer": {"channels": 6}}},
    "snapkv": WINDOW,
    "tova": {"every": 4},
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
