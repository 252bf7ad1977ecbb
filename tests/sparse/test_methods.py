"""The contract of every sparse method, on one table that is read from ``configs/sparse``."""

import random
from pathlib import Path

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.costs import predict_decode
from octavo.core.interfaces import LayerTraits, Selection
from octavo.core.scheduler import StepPlan
from octavo.kernels import ops
from octavo.scripts.build import method
from octavo.sparse.placements import Resident

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "sparse").glob("*.yaml"))
SMALL = {"keep": {"sink_tokens": 4, "recent_tokens": 4}, "dense_layers": [0]}
BUDGET = 20
PROMPT = random.Random(0).choices(range(3, 128), k=45)


def make(name, budget=BUDGET, **parts):
    return method(name, budget_tokens=budget, **{**SMALL, **parts})


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


def params(**kwargs):
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 1, **kwargs})


def run(engine, drain, requests):
    """``requests``: id -> (prompt, params, method)."""
    for request_id, (prompt, sampling, one) in requests.items():
        engine.submit(prompt, sampling, method=one, request_id=request_id)
    return drain(engine).completions


@pytest.mark.parametrize("name", NAMES)
def test_a_full_budget_is_dense_bit_for_bit(name, model, engine_for, drain):
    sampling = params(logprobs=1)
    dense = run(engine_for(model), drain, {"a": (PROMPT, sampling, None)})["a"].samples[0]
    full = run(engine_for(model), drain, {"a": (PROMPT, sampling, make(name, 60))})["a"].samples[0]
    assert full.logprobs == dense.logprobs
    assert full.kv_bytes_read == dense.kv_bytes_read and full.digest_bytes_read == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_small_budget_reads_less_and_differs(name, model, engine_for, drain):
    sampling = params(logprobs=1)
    dense = run(engine_for(model), drain, {"a": (PROMPT, sampling, None)})["a"].samples[0]
    small = run(engine_for(model), drain, {"a": (PROMPT, sampling, make(name, 12))})["a"].samples[0]
    assert small.kv_bytes_read < 0.6 * dense.kv_bytes_read
    assert small.logprobs != dense.logprobs


@pytest.mark.parametrize("page_tokens", [4, 12, 16])
@pytest.mark.parametrize("name", ["dense", *NAMES])
def test_predicted_bytes_are_the_counted_ones(name, page_tokens, model, engine_for, drain):
    chosen = None if name == "dense" else make(name, 3 * page_tokens)
    engine = engine_for(model, page_tokens=page_tokens, pool_tokens=40 * page_tokens)
    sample = run(engine, drain, {"a": (PROMPT, params(max_tokens=30), chosen)})["a"].samples[0]
    cost = predict_decode(
        engine.spec, chosen, prompt_tokens=len(PROMPT), new_tokens=30, page_tokens=page_tokens,
        unit_tokens=engine.config.unit_tokens, itemsize=4,
    )  # fmt: skip
    assert (sample.decode_steps, sample.kv_bytes_read, sample.digest_bytes_read) == (
        cost.steps, cost.kv_bytes, cost.digest_bytes,
    )  # fmt: skip
    assert cost.steps == 29 and cost.kv_bytes > 0


@pytest.mark.parametrize("name", ["dense", *NAMES])
def test_predicted_bytes_with_a_window(name, w_model, engine_for, drain):
    """Layers with a window read their window, whatever the method."""
    chosen = None if name == "dense" else make(name, 12)
    engine = engine_for(w_model)
    sample = run(engine, drain, {"a": (PROMPT, params(), chosen)})["a"].samples[0]
    cost = predict_decode(
        engine.spec, chosen, prompt_tokens=len(PROMPT), new_tokens=12, page_tokens=4, unit_tokens=4, itemsize=4
    )
    assert (sample.kv_bytes_read, sample.digest_bytes_read) == (cost.kv_bytes, 0)
    assert cost.kv_bytes <= 11 * 2 * 3 * 2 * 2 * 4 * 16 * 4  # steps, layers, units of a window of 8, K and V, ...


@pytest.mark.parametrize("page_tokens", [4, 12])
@pytest.mark.parametrize("name", ["dense", *NAMES])
def test_predicted_bytes_beside_a_window(name, page_tokens, g_model, engine_for, drain):
    """The layer without a window reads what its method chooses, the others their window."""
    chosen = None if name == "dense" else make(name, 3 * page_tokens, dense_layers=[])
    engine = engine_for(g_model, page_tokens=page_tokens)
    sample = run(engine, drain, {"a": (PROMPT, params(), chosen)})["a"].samples[0]
    cost = predict_decode(
        engine.spec, chosen, prompt_tokens=len(PROMPT), new_tokens=12, page_tokens=page_tokens,
        unit_tokens=engine.config.unit_tokens, itemsize=4,
    )  # fmt: skip
    assert (sample.kv_bytes_read, sample.digest_bytes_read) == (cost.kv_bytes, cost.digest_bytes)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_methods_share_a_batch_and_a_prompt_without_noticing(backend, model, engine_for, drain):
    alone = {}
    methods = {"dense": None, **{name: make(name) for name in NAMES}}
    for name, one in methods.items():
        alone[name] = run(engine_for(model, backend=backend), drain, {"a": (PROMPT, params(), one)})["a"].samples[0]
    engine = engine_for(model, backend=backend, max_seqs=16)
    together = run(engine, drain, {name: (PROMPT, params(), one) for name, one in methods.items()})
    assert {n: c.samples[0].token_ids for n, c in together.items()} == {n: s.token_ids for n, s in alone.items()}
    assert {n: c.samples[0].kv_bytes_read for n, c in together.items()} == {
        n: s.kv_bytes_read for n, s in alone.items()
    }
    # One of them computed the prompt, the others found its 11 full pages.
    assert sorted(c.cached_tokens for c in together.values()) == [0] + [44] * (len(methods) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_preemption_and_pool_order_do_not_matter(name, model, engine_for, drain):
    chosen = make(name)
    alone = run(engine_for(model), drain, {"a": (PROMPT, params(), chosen)})["a"].samples[0].token_ids
    engine = engine_for(model, pool_tokens=25 * 4)
    other = random.Random(1).choices(range(3, 128), k=40)
    requests = {"b": (other, params(max_tokens=20), chosen), "a": (PROMPT, params(), chosen)}
    assert run(engine, drain, requests)["a"].samples[0].token_ids == alone
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("name", NAMES)
def test_shaped_pages_reach_their_own_method_only(name, model, engine_for, drain):
    engine = engine_for(model)
    chosen = make(name)
    first = run(engine, drain, {"a": (PROMPT, params(max_tokens=16), chosen)})["a"]
    longer = PROMPT + first.samples[0].token_ids
    dense_alone = run(engine_for(model), drain, {"a": (longer, params(), None)})["a"].samples[0].token_ids
    after = run(engine, drain, {"d": (longer, params(), None)})["d"]
    assert after.samples[0].token_ids == dense_alone
    assert after.cached_tokens == 44  # the exact pages of the first prompt, no page that the method shaped
    other = make(name, BUDGET + 4)
    assert other.provenance != chosen.provenance


def test_a_preempted_sequence_finds_the_pages_that_its_method_shaped(model, engine_for, drain):
    engine = engine_for(model)
    chosen = make("quest")
    engine.submit(PROMPT, params(max_tokens=16), method=chosen, request_id="a")
    for _ in range(12):
        engine.step()
    (sequence,) = engine._scheduler.running
    engine._scheduler._preempt(sequence, StepPlan())
    engine.check()
    tokens = drain(engine).completions["a"].samples[0].token_ids
    assert (
        tokens
        == run(engine_for(model), drain, {"a": (PROMPT, params(max_tokens=16), chosen)})["a"].samples[0].token_ids
    )
    assert engine.stats().hit_tokens == 56  # 44 of the prompt, and 12 in three pages that are full and shaped


@pytest.mark.parametrize("name", NAMES)
def test_forked_samples_equal_single_runs(name, model, engine_for, drain):
    chosen = make(name)
    sampling = {"temperature": 0.9, "max_tokens": 10}
    forked = run(engine_for(model), drain, {"a": (PROMPT, params(n=3, seed=5, **sampling), chosen)})["a"]
    singles = [
        run(engine_for(model), drain, {"a": (PROMPT, params(seed=5 + i, **sampling), chosen)})["a"].samples[0].token_ids
        for i in range(3)
    ]
    assert [sample.token_ids for sample in forked.samples] == singles


@pytest.mark.parametrize("name", NAMES)
def test_score_is_the_log_likelihood_of_decoding(name, model, engine_for, drain):
    chosen = make(name, 12)
    sample = run(engine_for(model), drain, {"a": (PROMPT, params(logprobs=0), chosen)})["a"].samples[0]
    decoded = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert engine_for(model).score(PROMPT, sample.token_ids, method=chosen) == pytest.approx(decoded, abs=1e-5)


class View:
    """Pages of two sequences, of 9 and 6 pages of 4 tokens (the open one included), 2 KV heads of size 8."""

    layer, page_tokens, max_pages, kv_heads = 1, 4, 9, 2
    traits = LayerTraits(8**-0.5)

    def __init__(self, seed=0, page_size=4):
        generator = torch.Generator().manual_seed(seed)
        self.k = torch.randn(2, 9, 2, 4, 8, generator=generator)  # [b, P, Hkv, p, D]
        self.q = torch.randn(2, 4, 8, generator=generator)
        self.n_pages = torch.tensor([9, 6], dtype=torch.int32)
        self.lengths = torch.tensor([34, 23], dtype=torch.int32)
        self.seeds = torch.tensor([3, 4])

    def digest(self, part):
        digest = self.k.amin(3) if part == "min" else self.k.amax(3)  # [b, P, Hkv, D]
        digest[0, 8:], digest[1, 5:] = float("nan"), float("nan")
        return digest

    def bounds(self, q, per_query_head=False):
        low, high = (self.digest(part).flatten(0, 1)[:, None] for part in ("min", "max"))  # a row a page, one layer
        return ops.page_score(q, low, high, 0, torch.arange(18).view(2, 9), self.n_pages, per_query_head, "reference")

    def top(self, scores, budget, keep, most):
        table = torch.zeros(2, 9, dtype=torch.int32)
        return Selection(
            *ops.page_topk(scores, budget, keep, self.n_pages, self.lengths, table, 4, 1, most, "reference")[:2]
        )

    def dots(self):
        """Dot products of each query head with each key: [b, Hkv, g, P, p]; -inf where there is no token."""
        dots = torch.einsum("bhgd,bphtd->bhgpt", self.q.view(2, 2, 2, 8), self.k)
        exists = torch.arange(36).view(9, 4) < self.lengths[:, None, None]
        return dots.masked_fill(~exists[:, None, None], float("-inf"))

    def mass(self, q):
        probs = (self.dots().flatten(3) * self.traits.scale).softmax(-1).unflatten(3, (9, 4))
        return probs.sum(4).mean(2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_selection(name, seed):
    """Ascending and distinct pages of the sequence, the kept and the open one among them, as many as the budget."""
    view = View(seed)
    selection = make(name).select(view.q, view)
    assert selection.counts.tolist() == [[5] * selection.counts.shape[1]] * 2
    for b, n_pages in enumerate((9, 6)):
        for head in range(selection.pages.shape[1]):
            pages = selection.pages[b, head, :5].tolist()
            assert pages == sorted(set(pages)) and pages[-1] == n_pages - 1
            assert {0, n_pages - 2} <= set(pages)


@pytest.mark.parametrize("name", ["quest", "oracle"])
def test_what_is_read_scores_highest_of_what_is_free_to_choose(name):
    view = View()
    chosen = make(name)
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
    view = View(seed)
    bound = make("quest").scorer.score(view.q, view)
    true = view.dots().amax(4).amax(2)
    assert (bound >= true - 1e-5)[0, :, :8].all() and (bound >= true - 1e-5)[1, :, :5].all()


@pytest.mark.parametrize("seed", range(3))
def test_quest_can_average_the_softmax_of_its_group(seed):
    view = View(seed)
    scores = make("quest", scorer={"group": "mean"}).scorer.score(view.q, view)
    box = torch.stack([view.digest("min"), view.digest("max")])  # [2, b, P, Hkv, D]
    for b, sealed in enumerate((8, 5)):
        corners = box[:, b, :sealed, :, None] * view.q[b].view(2, 2, 8)  # [2, P, Hkv, g, D]
        bounds = corners.amax(0).sum(-1) * view.traits.scale
        torch.testing.assert_close(scores[b, :, :sealed], bounds.softmax(0).mean(2).T)


@pytest.mark.parametrize("page_tokens", [4, 12])
def test_the_table_that_comes_with_a_choice_is_the_gathered_one(page_tokens, model, engine_for, drain, monkeypatch):
    """Page sizes of one unit and of three."""
    compared = []

    def resolve(self, selection, pages):
        table, slots = pages.gather(selection)
        gathered, same_slots = pages.gather(Selection(selection.pages, selection.counts))
        read = torch.arange(table.shape[3]) * pages.kv.shape[4] < slots[..., None]
        assert torch.equal(table.where(read, 0), gathered.where(read, 0)) and torch.equal(slots, same_slots)
        compared.append(table is not gathered)
        return table, slots

    monkeypatch.setattr(Resident, "resolve", resolve)
    engine = engine_for(model, page_tokens=page_tokens, pool_tokens=40 * page_tokens)
    run(engine, drain, {"a": (PROMPT, params(), make("quest", 3 * page_tokens)), "b": (PROMPT[:40], params(), None)})
    assert len(compared) == 11 * 2 and all(compared)


def test_oracle_captures_the_most_mass_and_random_the_least():
    captured = {}
    for name in ("oracle", "quest", "random"):
        total = 0.0
        for seed in range(20):
            view = View(seed)
            pages = make(name).select(view.q, view).pages
            total += view.mass(view.q).gather(2, pages.long()).sum().item()
        captured[name] = total
    assert captured["oracle"] > captured["quest"] > captured["random"]


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


def test_digests_are_of_the_pages_that_were_written(model, engine_for, drain):
    """What is kept beside the pool is what the pages hold, also when pages have been given to somebody else."""
    engine = engine_for(model, pool_tokens=25 * 4)
    chosen = make("quest")
    for seed in range(3):
        prompt = random.Random(seed).choices(range(3, 128), k=45)
        engine.submit(prompt, params(), method=chosen, request_id="a")
        for _ in range(8):
            engine.step()
        (sequence,) = engine._scheduler.running
        (store,) = engine._runner._digests.values()
        pages = torch.from_numpy(sequence.table.pages(0, (sequence.computed - 1) // 4)).long()
        keys = engine._runner.kv[pages][:, :, 0]  # one unit a page: [n, layers, Hkv, p, D]
        assert torch.equal(store.parts["min"][pages], keys.amin(3))
        assert torch.equal(store.parts["max"][pages], keys.amax(3))
        drain(engine)


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"budget_tokens": 8}, "always reads 3 pages of 4 tokens, but the budget is 2 pages"),
        ({"dense_layers": [0, 3]}, r"dense_layers \[3\] are not among the 3 layers"),
        ({"digest": None}, "needs digest parts"),
    ],
    ids=["keep_over_budget", "layer_outside", "digest_missing"],
)
def test_what_cannot_be_served_is_refused_at_the_door(parts, message, model, engine_for):
    engine = engine_for(model)
    bad = method("quest", **{"budget_tokens": BUDGET, **SMALL, **parts})
    with pytest.raises(ValueError, match=message):
        engine.submit(PROMPT, method=bad)
    with pytest.raises(ValueError, match=message):
        engine_for(model, method=bad)
    assert not engine.has_work()


@pytest.mark.parametrize("value", [0, -4])
def test_budgets_and_keeps_must_be_sensible(value):
    with pytest.raises(ValueError, match=rf"integer of at least 1, got {value}"):
        method("quest", budget_tokens=value)
    with pytest.raises(ValueError, match=r"sink_tokens must be an integer of at least 0, got -1"):
        method("quest", keep={"sink_tokens": -1})
