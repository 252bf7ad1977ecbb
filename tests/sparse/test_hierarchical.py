"""Page to sub-page to token, level by level, against plain arithmetic on the pages."""

import pytest
import torch

from octavo.core.interfaces import ModelSpec
from octavo.sparse.hierarchical import Hierarchy

from .method_cases import View, make
from .test_selection import captured, scores_of

SPEC = ModelSpec("m", 3, 4, 2, 8, torch.float32, 128, 256, (0, 0, 0))


def scores(view, budget, **parts):
    view.budget = budget
    return scores_of("hierarchical", view, **parts)


@pytest.mark.parametrize("seed", range(3))
def test_where_every_level_sees_all_pages_it_is_the_exact_mass(seed):
    view = View(seed)
    found = scores(view, 9)
    for b, full in enumerate((8, 5)):
        dots = view.dots()[b, :, :, :full] * view.traits.scale  # the open page has no part in it
        mass = dots.flatten(2).softmax(-1).unflatten(2, (full, 4)).sum(3).mean(1)
        torch.testing.assert_close(found[b, :, :full], mass)
        assert (found[b, :, full:] == -torch.inf).all()


@pytest.mark.parametrize("seed", range(3))
def test_each_level_passes_on_its_best(seed):
    """wide * budget by the boxes of pages, narrow * budget of these by the boxes of their parts."""
    view = View(seed)
    found = scores(view, 2, digest={"sub_pages": 2, "wide": 3, "narrow": 2})
    coarse, fine = scores_of("quest", view), scores_of("lserve", view)
    for b, full in enumerate((8, 5)):
        for head in range(2):
            wide = sorted(range(full), key=lambda p: -coarse[b, head, p])[:6]
            narrow = sorted(wide, key=lambda p: -fine[b, head, p])[:4]
            assert set(found[b, head].isfinite().nonzero().flatten().tolist()) == set(narrow)
            assert found[b, head, narrow].sum() == pytest.approx(1)


def test_what_the_last_level_has_not_seen_changes_nothing():
    view = View()
    before = scores(view, 1, digest={"wide": 2, "narrow": 2})
    keys_at = view.keys_at

    def watched(at):
        kept = torch.zeros(2, 2, 9, dtype=torch.bool).scatter_(2, at, True)
        view.k = view.k.where(kept.transpose(1, 2)[..., None, None], float("nan"))  # whatever the others hold
        return keys_at(at)

    view.keys_at = watched
    assert torch.equal(scores(view, 1, digest={"wide": 2, "narrow": 2}), before)


def test_looking_closer_captures_more():
    """Five pages each. Here the last level sees all pages, so that little but the open page's share is missing."""
    mass = {name: captured(name, tokens) for name, tokens in (("quest", 20), ("hierarchical", 14), ("oracle", 20))}
    assert mass["quest"] < mass["hierarchical"] <= mass["oracle"] * 1.0001
    whole = make("hierarchical", digest={"wide": 2, "narrow": 2})
    assert whole.provenance != make("hierarchical").provenance


@pytest.mark.parametrize(("tokens", "boxes", "pages"), [(400, 8, 4), (21, 5, 4), (9, 2, 2)])
def test_what_narrowing_reads_is_bounded_by_the_budget_and_by_what_there_is(tokens, boxes, pages):
    """A budget of 2 pages of 4 tokens, head size 8: 2 D elements a part of each wide page, p D of each narrow one."""
    hierarchy = Hierarchy(sub_pages=2, wide=4, narrow=2)
    assert hierarchy.narrowing(2, tokens, SPEC, 4) == boxes * 2 * 2 * 8 + pages * 4 * 8


def test_layers_have_budgets_of_their_own():
    chosen = make("hierarchical", 40, budget={"kept_tokens": 12, "first_layer": 0, "slope": 4})
    reads = [chosen.predict(200, layer, SPEC, 4) for layer in (1, 2)]
    assert reads[0].pages > reads[1].pages and reads[0].scoring_elements > reads[1].scoring_elements


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"wide": 1, "narrow": 2}, r"digest\.wide must be an integer of at least 2, got 1"),
        ({"narrow": 0}, r"digest\.narrow must be an integer of at least 1, got 0"),
        ({"sub_pages": 1}, r"digest\.sub_pages must be an integer of at least 2, got 1"),
    ],
)
def test_levels_must_narrow(parts, message):
    with pytest.raises(ValueError, match=message):
        Hierarchy(**parts)
    with pytest.raises(ValueError, match="must divide the page of 4 tokens"):
        Hierarchy(sub_pages=3).spec(4, SPEC)
