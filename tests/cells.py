"""Tables of tests that would be products of several axes."""

from collections import Counter
from itertools import combinations, product

import pytest


def covering(*axes, together=1):
    """The product of some axes, for ``parametrize``: a covering array of strength ``together`` runs by default (every
    value of every axis; with 2, every pair of values of every two axes), and the rest is ``slow``.

    Chosen greedily ("The AETG system", Cohen et al., 1997): next is the cell that shows most of what is missing, and
    among equals the one whose values were seen least.
    """
    axes = [list(axis) for axis in axes]
    shown = {
        cell: {tuple((axis, cell[axis]) for axis in some) for some in combinations(range(len(axes)), together)}
        for cell in product(*(range(len(axis)) for axis in axes))
    }
    chosen, missing, used = set(), set().union(*shown.values()), Counter()
    while missing:
        best = max(shown, key=lambda cell: (len(shown[cell] & missing), -sum(used[value] for value in enumerate(cell))))
        chosen.add(best)
        missing -= shown[best]
        used.update(enumerate(best))
    return [
        pytest.param(*map(list.__getitem__, axes, cell), marks=() if cell in chosen else pytest.mark.slow)
        for cell in shown
    ]
