"""What each method chooses, on pages without an engine."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.sparse.digests import MinMax

from .method_cases import NAMES as ALL
from .method_cases import PYRAMIDS, View, make

NAMES = [name for name in ALL if name != "oracle_token"]  # it chooses tokens: test_prior.py


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_selection(name, seed):
    """Ascending and distinct pages of the sequence, the kept and the open one among them, as many as the budget."""
    chosen = make(name, 14 if name in PYRAMIDS else 20)
    view = View(seed, chosen.digest)
    selection = chosen.select(view.q, view)
    heads = selection.counts.shape[1]
    budget = chosen.budget.pages(1, 3, 4)
    assert budget == 5
    total = selection.counts.sum(1)
    assert (total <= budget * heads).all() if chosen.budget.adaptive else (total == budget * heads).all()
    for b, n_pages in enumerate((9, 6)):
        for head in range(heads):
            pages = selection.pages[b, head, : selection.counts[b, head]].tolist()
            assert pages == sorted(set(pages)) and pages[-1] == n_pages - 1
            assert {0, n_pages - 2} <= set(pages)


@pytest.mark.parametrize("name", ["quest", "oracle"])
def test_what_is_read_scores_highest_of_what_is_free_to_choose(name):
    chosen = make(name)
    view = View(0, chosen.digest)
    scores = chosen.scorer.score(view.q, view)
    selection = chosen.select(view.q, view)
    for b, n_pages in enumerate((9, 6)):
        for head in range(2):
            free = [page for page in range(n_pages) if page not in (0, n_pages - 1, n_pages - 2)]
            best = sorted(free, key=lambda p: -scores[b, head, p])[:2]
            assert set(selection.pages[b, head].tolist()) == {0, n_pages - 1, n_pages - 2, *best}


def test_streaming_reads_sinks_and_the_latest():
    selection = make("streaming").select(View().q, View())
    assert selection.pages.tolist() == [[[0, 5, 6, 7, 8]], [[0, 2, 3, 4, 5]]]


def test_heads_choose_for_themselves():
    view = View(1)
    pages = make("oracle").select(view.q, view).pages
    assert pages[0, 0].tolist() != pages[0, 1].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_quest_bounds_every_key_of_a_page(seed):
    view = View(seed, MinMax())
    bound = make("quest").scorer.score(view.q, view)
    true = view.dots().amax(4).amax(2)
    assert (bound >= true - 1e-5)[0, :, :8].all() and (bound >= true - 1e-5)[1, :, :5].all()


@pytest.mark.parametrize("seed", range(3))
def test_quest_can_average_the_softmax_of_its_group(seed):
    view = View(seed, MinMax())
    scores = make("quest", scorer={"group": "mean"}).scorer.score(view.q, view)
    box = torch.stack([view.digest("min"), view.digest("max")])  # [2, b, P, Hkv, D]
    for b, sealed in enumerate((8, 5)):
        corners = box[:, b, :sealed, :, None] * view.q[b].view(2, 2, 8)  # [2, P, Hkv, g, D]
        bounds = corners.amax(0).sum(-1) * view.traits.scale
        torch.testing.assert_close(scores[b, :, :sealed], bounds.softmax(0).mean(2).T)


def captured(name, tokens=20):
    """Attention mass that a method's choices hold, over 20 draws."""
    total, chosen = 0.0, make(name, tokens)
    for seed in range(20):
        view = View(seed, chosen.digest)
        pages = chosen.select(view.q, view).pages
        total += view.mass(view.q).gather(2, pages.expand(-1, 2, -1).long()).sum().item()
    return total


@pytest.mark.parametrize("name", ["quest", "arkvale", "arkvale_ball", "lserve", "mean_key", "sparq", "less_is_more"])
def test_scores_of_a_query_capture_more_than_chance_and_less_than_the_oracle(name):
    assert captured("random") < captured(name) < captured("oracle")


def test_random_depends_on_the_request_and_the_step_only():
    view = View()
    scores = make("random").scorer.score(view.q, view)
    swapped = View()
    for field in ("n_pages", "lengths", "seeds"):
        setattr(swapped, field, getattr(view, field).flip(0))
    assert torch.equal(make("random").scorer.score(swapped.q, swapped), scores.flip(0))
    later = View()
    later.lengths = view.lengths + 1
    assert not torch.equal(make("random").scorer.score(later.q, later), scores)
    uniform = torch.stack([make("random").scorer.score(v.q, v) for v in map(View, range(2))]) / 2**24
    assert 0.3 < uniform.mean() < 0.7


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_that_fits_is_read_whole_beside_one_that_does_not(name):
    chosen = make(name, 15 if name in PYRAMIDS else 24)
    assert chosen.budget.pages(1, 3, 4) == 6
    view = View(0, chosen.digest)
    assert (chosen.select(view.q, view).counts[1] == 6).all()


def by_tokens(view):
    """Query heads [b, Hkv, g, D] and the keys of each full page, [Hkv, p, D], of each sequence."""
    for b, full in enumerate((8, 5)):
        yield b, view.q[b].view(2, 2, 8), view.k[b, :full]


def scores_of(name, view, **parts):
    chosen = make(name, **parts)
    view.kind = chosen.digest
    return chosen.scorer.score(view.q, view)


@pytest.mark.parametrize("seed", range(3))
def test_arkvale_adds_the_mean_distance_to_the_mean(seed):
    view = View(seed)
    box, ball = scores_of("arkvale", view), scores_of("arkvale_ball", view)
    for b, q, pages in by_tokens(view):
        for page, k in enumerate(pages):
            for head in range(2):
                centre = k[head].mean(0)
                away = k[head] - centre
                of_box = [one @ centre + one.abs() @ away.abs().mean(0) for one in q[head]]
                of_ball = [one @ centre + one.norm() * away.norm(dim=1).mean() for one in q[head]]
                torch.testing.assert_close(box[b, head, page], max(of_box))
                torch.testing.assert_close(ball[b, head, page], max(of_ball))


@pytest.mark.parametrize("seed", range(3))
def test_infllm_adds_up_the_keys_least_like_their_page(seed):
    view = View(seed)
    scores = scores_of("infllm", view)
    assert scores.shape == (2, 1, 9)
    for b, q, pages in by_tokens(view):
        for page, k in enumerate(pages):
            total = 0.0
            for head in range(2):
                likeness = torch.cosine_similarity(k[head], k[head].mean(0, keepdim=True))
                first, second = sorted(range(4), key=lambda t: likeness[t])[:2]
                total = total + (q[head] @ (k[head, first] + k[head, second])).sum()
            torch.testing.assert_close(scores[b, 0, page], total)


@pytest.mark.parametrize("seed", range(3))
def test_a_mean_key_gives_the_mean_dot_product(seed):
    view = View(seed)
    scores, dots = scores_of("mean_key", view), view.dots().mean(4).amax(2)
    torch.testing.assert_close(scores[0, :, :8], dots[0, :, :8])
    torch.testing.assert_close(scores[1, :, :5], dots[1, :, :5])


@pytest.mark.parametrize("seed", range(3))
def test_key_scores_are_the_page_means_of_token_scores(seed):
    view = View(seed)
    norms, differences = scores_of("knorm", view), scores_of("keydiff", view)
    for b, _, pages in by_tokens(view):
        k = pages.transpose(0, 1)  # [Hkv, P, p, D]
        torch.testing.assert_close(norms[b, :, : len(pages)], -k.norm(dim=-1).mean(2))
        anchor = (k / k.norm(dim=-1, keepdim=True)).flatten(1, 2).mean(1)[:, None, None]
        tokens = -torch.cosine_similarity(k, anchor, dim=-1)
        torch.testing.assert_close(differences[b, :, : len(pages)], tokens.mean(2))


@pytest.mark.parametrize("seed", range(3))
def test_smaller_boxes_bound_tighter(seed):
    view = View(seed)
    whole, halves = scores_of("quest", view), scores_of("lserve", view)
    single = scores_of("lserve", view, digest={"sub_pages": 4})
    true = view.dots().amax(4).amax(2)
    for b, full in enumerate((8, 5)):
        assert (halves <= whole + 1e-5)[b, :, :full].all() and (halves < whole - 0.1)[b, :, :full].any()
        assert (halves >= true - 1e-5)[b, :, :full].all()
        torch.testing.assert_close(single[b, :, :full], true[b, :, :full])


@pytest.mark.parametrize("seed", range(3))
def test_sparq_with_all_channels_is_exact(seed):
    view = View(seed)
    torch.testing.assert_close(scores_of("sparq", view, scorer={"channels": 8}), view.mass(view.q))


def test_sparq_reads_the_largest_channels_of_a_group():
    view = View()
    view.q.mul_(0.1)
    view.q[:, :, 2] = torch.tensor([5.0, -5.0, 5.0, -5.0])  # the heads of a group do not cancel
    kept = scores_of("sparq", view, scorer={"channels": 1})
    view.k[..., [0, 1, *range(3, 8)]] = 100.0  # what is not read
    assert torch.equal(scores_of("sparq", view, scorer={"channels": 1}), kept)


@pytest.mark.parametrize("mass", [0.3, 0.6, 0.9, 1.0])
def test_twilight_reads_as_few_pages_as_hold_the_mass(mass):
    chosen = make("twilight", 28, budget={"mass": mass})
    view = View(2, chosen.digest)
    shares = chosen.scorer.score(view.q, view)
    counts = chosen.select(view.q, view).counts
    for head in range(2):
        held, needed = shares[0, head, [0, 7]].sum(), 3  # sinks, the recent page, and the open one
        for share in sorted(shares[0, head, 1:7].tolist(), reverse=True):
            if held < mass:
                held, needed = held + share, needed + 1
        assert counts[0, head] == min(needed, 7)


@pytest.mark.parametrize("floor", [0.0, 0.8])
def test_ada_kv_gives_heads_what_their_best_pages_win(floor):
    chosen = make("ada_kv", 24, budget={"floor": floor}, keep={"sink_tokens": 4, "recent_tokens": 0})
    view = View(0, chosen.digest)
    scores = torch.linspace(0.1, 0.9, 9).repeat(2, 2, 1)
    scores[:, 0] += 1  # all pages of the first head are better than all of the second
    keep = chosen.keep.mask(view)
    budget = chosen.budget.allocate(scores, keep, view)
    assert budget[0].tolist() == ([9, 3] if floor == 0 else [8, 4])
    assert chosen.budget.most(1, 3, 4, heads=2) >= budget.max()


@given(
    st.lists(st.floats(-2, 2, width=16) | st.just(float("nan")), min_size=36, max_size=36),
    st.integers(3, 8),
    st.floats(0, 1),
)
def test_ada_kv_spends_its_budget_whatever_the_scores(values, pages, floor):
    chosen = make("ada_kv", 4 * pages, budget={"floor": floor})
    view = View()
    scores = torch.tensor(values).view(2, 2, 9)
    budget = chosen.budget.allocate(scores, chosen.keep.mask(view), view)
    for row, n_pages in zip(budget.clamp(max=view.n_pages[:, None]).tolist(), (9, 6), strict=True):
        assert sum(row) == 2 * min(pages, n_pages)
        assert min(row) >= min(max(3, int(floor * pages)), n_pages)
        assert max(row) <= chosen.budget.most(1, 3, 4, heads=2)


def test_pyramid_kv_falls_in_a_straight_line():
    budget = make("pyramid_kv", 240, budget={"kept_tokens": 40, "slope": 20, "first_layer": 2}).budget
    pages = [budget.pages(layer, 22, 1) for layer in range(22)]
    assert pages[2:] == list(range(430, 49, -20)) and sum(pages[2:]) == 20 * 240
    assert budget.pages(21, 22, 16) == 4 and budget.pages(0, 3, 1) == 240  # one layer left: no line


def test_less_is_more_takes_turns():
    chosen = make("less_is_more", 24)
    view = View()
    scores = torch.zeros(2, 2, 9)
    scores[0, 0, [3, 4, 5]] = torch.tensor([9.0, 8.0, 7.0])
    scores[0, 1, [6, 2, 3]] = torch.tensor([0.9, 0.8, 0.7])
    budget = torch.full((2, 2), 6)
    selection = chosen.selector.select(scores, budget, chosen.keep.mask(view), view, 6)
    # Kept: 0, 7, 8. First choices: 3 and 6. Second choices: 4, and then 2.
    assert selection.pages[0].tolist() == [[0, 3, 4, 6, 7, 8]]


def test_later_layers_read_what_a_layer_chose():
    chosen, view = make("tidal", dense_layers=[1]), View()
    assert chosen.select(view.q, view) is None  # it is dense itself
    first = view.reusable
    view.layer, view.mass = 2, None  # nothing is scored again
    assert chosen.select(view.q, view) is first
    assert torch.equal(first.pages, make("oracle").select(View().q, View()).pages)
