"""The contract of every sparse method, on one table that is read from ``configs/sparse``."""

import random
import re
from dataclasses import replace

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.costs import predict_decode
from octavo.core.interfaces import Selection
from octavo.core.step_plan import StepPlan
from octavo.scripts.build import method
from octavo.sparse.placements import Resident

from ..cells import covering
from .method_cases import BUDGET, NAMES, PROMPT, PYRAMIDS, SMALL, SMALLER, make


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


def choosing(name, layers):
    return {"choosing_layers": layers} if "choosing_layers" in SMALLER.get(name, {}) else {}


def params(**kwargs):
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 1, **kwargs})


@pytest.fixture(scope="module")
def alone(model, engine_for, drain):
    """``alone(name, budget)``: a sample of PROMPT under a method that has an engine for itself."""
    known = {}

    def sample(name, budget=BUDGET):
        if (name, budget) not in known:
            chosen = None if name == "dense" else make(name, budget)
            request = {"a": (PROMPT, params(logprobs=1), chosen)}
            known[name, budget] = run(engine_for(model), drain, request)["a"].samples[0]
        return known[name, budget]

    return sample


def run(engine, drain, requests):
    """``requests``: id -> (prompt, params, method)."""
    for request_id, (prompt, sampling, one) in requests.items():
        engine.submit(prompt, sampling, method=one, request_id=request_id)
    return drain(engine).completions


@pytest.mark.parametrize("name", NAMES)
def test_a_full_budget_is_dense_bit_for_bit(name, alone):
    dense, full = alone("dense"), alone(name, 2000)
    assert full.logprobs == dense.logprobs
    assert full.kv_bytes_read == dense.kv_bytes_read and full.digest_bytes_read == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_small_budget_reads_less_and_differs(name, alone):
    dense, small = alone("dense"), alone(name, 12)
    assert small.kv_bytes_read < 0.6 * dense.kv_bytes_read
    assert small.logprobs != dense.logprobs


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_captured_steps_choose_what_eager_ones_do(name, make_llama, engine_for, drain):
    model = make_llama(num_hidden_layers=3).to("cuda")
    found = []
    for execution in ("eager", "graph"):
        engine = engine_for(model, backend="triton", execution=execution)
        sample = run(engine, drain, {"a": (PROMPT, params(), make(name, 12))})["a"].samples[0]
        found.append((sample.token_ids, sample.kv_bytes_read, sample.digest_bytes_read))
    assert found[0] == found[1]


def test_a_dense_layer_that_chooses_for_others_reads_both(model, engine_for, drain):
    chosen = make("tidal", 12, dense_layers=[0, 1])
    sample = run(engine_for(model), drain, {"a": (PROMPT, params(), chosen)})["a"].samples[0]
    cost = predict_decode(
        engine_for(model).spec, chosen, prompt_tokens=len(PROMPT), new_tokens=12, page_tokens=4, unit_tokens=4,
        itemsize=4,
    )  # fmt: skip
    assert_read(chosen, sample, cost)
    keys = sum(tokens * 16 * 2 * 4 for tokens in range(46, 57))  # of one layer, to choose: D, KV heads, bytes
    assert sample.digest_bytes_read == keys


def test_layers_that_all_choose_are_the_oracle_s(model, engine_for, drain):
    """Reuse changes nothing but who chooses."""
    oracle = run(engine_for(model), drain, {"a": (PROMPT, params(logprobs=1), make("oracle"))})["a"].samples[0]
    for layers, same in (([1, 2], True), ([1], False)):
        chosen = make("tidal", choosing_layers=layers)
        tidal = run(engine_for(model), drain, {"a": (PROMPT, params(logprobs=1), chosen)})["a"].samples[0]
        assert (tidal.logprobs == oracle.logprobs) is same
        assert (tidal.digest_bytes_read == oracle.digest_bytes_read) is same


def assert_read(chosen, sample, cost):
    """What was predicted is what was read, or the most that could be where the budget depends on scores."""
    assert sample.digest_bytes_read == cost.digest_bytes
    if chosen is not None and chosen.budget.adaptive:
        assert 0 < sample.kv_bytes_read <= cost.kv_bytes
    else:
        assert sample.kv_bytes_read == cost.kv_bytes


@pytest.mark.parametrize("name, page_tokens", covering(["dense", *NAMES], [12, 4, 16]))
def test_predicted_bytes_are_the_counted_ones(name, page_tokens, model, engine_for, drain):
    chosen = None if name == "dense" else make(name, 3 * page_tokens, page_tokens)
    engine = engine_for(model, page_tokens=page_tokens, pool_tokens=40 * page_tokens)
    sample = run(engine, drain, {"a": (PROMPT, params(max_tokens=30), chosen)})["a"].samples[0]
    cost = predict_decode(
        engine.spec, chosen, prompt_tokens=len(PROMPT), new_tokens=30, page_tokens=page_tokens,
        unit_tokens=engine.config.unit_tokens, itemsize=4,
    )  # fmt: skip
    assert_read(chosen, sample, cost)
    assert sample.decode_steps == cost.steps == 29 and cost.kv_bytes > 0


@pytest.mark.parametrize("name", ["dense", *NAMES])
def test_predicted_bytes_with_a_window(name, w_model, engine_for, drain):
    """Layers with a window read their window, whatever the method."""
    chosen = None if name == "dense" else make(name, 12, dense_layers=[], **choosing(name, []))
    engine = engine_for(w_model)
    sample = run(engine, drain, {"a": (PROMPT, params(), chosen)})["a"].samples[0]
    cost = predict_decode(
        engine.spec, chosen, prompt_tokens=len(PROMPT), new_tokens=12, page_tokens=4, unit_tokens=4, itemsize=4
    )
    assert (sample.kv_bytes_read, sample.digest_bytes_read) == (cost.kv_bytes, 0)
    assert cost.kv_bytes <= 11 * 2 * 3 * 2 * 2 * 4 * 16 * 4  # steps, layers, units of a window of 8, K and V, ...


@pytest.mark.parametrize("name, page_tokens", covering(["dense", *NAMES], [4, 12]))
def test_predicted_bytes_beside_a_window(name, page_tokens, g_model, engine_for, drain):
    """The layer without a window reads what its method chooses, the others their window."""
    parts = {"dense_layers": [], **choosing(name, [2])}
    chosen = None if name == "dense" else make(name, 3 * page_tokens, page_tokens, **parts)
    engine = engine_for(g_model, page_tokens=page_tokens)
    sample = run(engine, drain, {"a": (PROMPT, params(), chosen)})["a"].samples[0]
    cost = predict_decode(
        engine.spec, chosen, prompt_tokens=len(PROMPT), new_tokens=12, page_tokens=page_tokens,
        unit_tokens=engine.config.unit_tokens, itemsize=4,
    )  # fmt: skip
    assert_read(chosen, sample, cost)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_methods_share_a_batch_and_a_prompt_without_noticing(backend, model, engine_for, drain):
    alone = {}
    methods = {"dense": None, **{name: make(name) for name in NAMES}}
    for name, one in methods.items():
        alone[name] = run(engine_for(model, backend=backend), drain, {"a": (PROMPT, params(), one)})["a"].samples[0]
    engine = engine_for(model, backend=backend, max_seqs=32, pool_tokens=1200)
    together = run(engine, drain, {name: (PROMPT, params(), one) for name, one in methods.items()})
    assert {n: c.samples[0].token_ids for n, c in together.items()} == {n: s.token_ids for n, s in alone.items()}
    assert {n: c.samples[0].kv_bytes_read for n, c in together.items()} == {
        n: s.kv_bytes_read for n, s in alone.items()
    }
    # One of them computed the prompt, the others found its 11 full pages.
    assert sorted(c.cached_tokens for c in together.values()) == [0] + [44] * (len(methods) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_preemption_and_pool_order_do_not_matter(name, model, engine_for, drain, alone):
    chosen = make(name)
    engine = engine_for(model, pool_tokens=25 * 4)
    other = random.Random(1).choices(range(3, 128), k=40)
    requests = {"b": (other, params(max_tokens=20), chosen), "a": (PROMPT, params(), chosen)}
    assert run(engine, drain, requests)["a"].samples[0].token_ids == alone(name).token_ids
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
    engine = engine_for(model, prefix_cache=False)
    singles = [
        run(engine, drain, {"a": (PROMPT, params(seed=5 + i, **sampling), chosen)})["a"].samples[0].token_ids
        for i in range(3)
    ]
    assert [sample.token_ids for sample in forked.samples] == singles


@pytest.mark.parametrize("name", NAMES)
def test_score_is_the_log_likelihood_of_decoding(name, model, engine_for, alone):
    chosen, sample = make(name, 12), alone(name, 12)
    decoded = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert engine_for(model).score(PROMPT, sample.token_ids, method=chosen) == pytest.approx(decoded, abs=1e-5)


@pytest.mark.parametrize("page_tokens", [4, 12])
def test_sparq_with_all_channels_reads_what_the_oracle_reads(page_tokens, model, engine_for, drain):
    engine = engine_for(model, page_tokens=page_tokens, pool_tokens=40 * page_tokens)
    free = {"keep": {"sink_tokens": 0, "recent_tokens": 0}}
    exact = make("oracle", 3 * page_tokens, **free)
    all_channels = make("sparq", 3 * page_tokens, scorer={"channels": 16}, **free)
    read = run(engine, drain, {"a": (PROMPT, params(), exact), "b": (PROMPT[:40], params(), all_channels)})
    again = run(engine, drain, {"a": (PROMPT, params(), all_channels), "b": (PROMPT[:40], params(), exact)})
    for request_id in "ab":
        one, other = read[request_id].samples[0], again[request_id].samples[0]
        assert one.token_ids == other.token_ids and one.digest_bytes_read == other.digest_bytes_read


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


@pytest.mark.parametrize(
    "name, kv_dtype", covering([name for name in NAMES if make(name).digest is not None], ["fp32", "bf16"])
)
def test_digests_are_of_the_pages_that_were_written(name, kv_dtype, model, engine_for, drain):
    """What is kept beside the pool is what the pages hold, also when pages have been given to somebody else."""
    engine = engine_for(model, pool_tokens=25 * 4, kv_dtype=kv_dtype)
    chosen = make(name)
    for seed in range(3):
        prompt = random.Random(seed).choices(range(3, 128), k=45)
        engine.submit(prompt, params(), method=chosen, request_id="a")
        for _ in range(8):
            engine.step()
        (sequence,) = engine._scheduler.running
        (store,) = engine._runner._digests.values()
        pages = torch.from_numpy(sequence.table.pages(0, (sequence.computed - 1) // 4)).long()
        k, v = engine._runner.kv[pages].unbind(2)  # one unit a page: [n, layers, Hkv, p, D]
        expected = chosen.digest.compute(k, v, range(3))
        assert expected.keys() == store.parts.keys()
        for part, values in expected.items():
            torch.testing.assert_close(store.parts[part][pages], values.to(k.dtype), atol=1e-6, rtol=1e-6)
        drain(engine)


def test_no_two_methods_are_the_same_composition():
    assert len({replace(make(name), name="").provenance for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"budget_tokens": 8}, "always reads 3 pages of 4 tokens, but the budget is 2 pages"),
        ({"dense_layers": [0, 3]}, r"dense_layers \[3\] are not among the 3 layers"),
        ({"digest": None}, "needs digest parts"),
        ({"name": "tidal", "choosing_layers": [2, 3]}, r"choosing_layers \[3\] are not among the 3 layers"),
        ({"name": "tidal", "choosing_layers": [2]}, r"layers \[1\] come before the first of choosing_layers \[2\]"),
        ({"name": "ada_kv", "scorer": {"group": "max"}}, "divides shares of attention"),
        ({"name": "infllm", "digest": {"count": 5}}, "count=5 keys cannot stand for a page of 4 tokens"),
        ({"name": "lserve", "digest": {"sub_pages": 3}}, "sub_pages=3 must divide the page of 4 tokens"),
    ],
    ids=[
        "keep_over_budget", "layer_outside", "digest_missing", "chooser_outside", "no_chooser", "no_shares",
        "page_small", "page_indivisible",
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_at_the_door(parts, message, model, engine_for):
    engine = engine_for(model)
    bad = method(parts.get("name", "quest"), **{"budget_tokens": BUDGET, **SMALL, **parts})
    with pytest.raises(ValueError, match=message):
        engine.submit(PROMPT, method=bad)
    with pytest.raises(ValueError, match=message):
        engine_for(model, method=bad)
    assert not engine.has_work()


def test_a_layer_with_a_window_cannot_choose(g_model, engine_for):
    bad = make("tidal", choosing_layers=[1])
    with pytest.raises(ValueError, match=r"choosing_layers \[1\] .* see only a window; .* everything are \[2\]"):
        engine_for(g_model).submit(PROMPT, method=bad)


@pytest.mark.parametrize("value", [0, -4])
def test_budgets_and_keeps_must_be_sensible(value):
    with pytest.raises(ValueError, match=rf"integer of at least 1, got {value}"):
        method("quest", budget_tokens=value)
    with pytest.raises(ValueError, match=r"sink_tokens must be an integer of at least 0, got -1"):
        method("quest", keep={"sink_tokens": -1})


@pytest.mark.parametrize("value", ["", "x", 2, 1.5, True, [True], ["x"]])
@pytest.mark.parametrize("name", ["quest", "snapkv", "visual_knorm", "xattention"])
def test_layers_are_lists_of_numbers(name, value):
    parts = {"prefill": {"dense_layers": value}} if name == "xattention" else {"dense_layers": value}
    with pytest.raises(ValueError, match=r"dense_layers must be a list of layer numbers, as \[0, 1\], got"):
        method(name, **parts)


NO_NUMBERS = [float("nan"), float("inf"), "x", True, []]


@pytest.mark.parametrize(
    "name, part, setting, values",
    [
        ("ada_kv", "budget", "floor", [-0.1, 1.1, *NO_NUMBERS]),
        ("criticalkv", "scorer", "first_share", [-0.1, 1.1, *NO_NUMBERS]),
        ("expected_attention", "scorer", "epsilon", [-1, *NO_NUMBERS]),
        ("pyramid_kv", "budget", "first_layer", [-1, 1.5, *NO_NUMBERS]),
        ("quest_structure", "prior", "weight", [0, *NO_NUMBERS]),
        ("r_kv", "scorer", "threshold", [-1.1, 1.1, *NO_NUMBERS]),
        ("r_kv", "scorer", "weight", [-0.1, 1.1, *NO_NUMBERS]),
        ("random_drop", "scorer", "seed", [-1, 1 << 15, 1.5, *NO_NUMBERS]),
    ],
)
def test_numbers_of_parts_are_refused_when_the_method_is_made(name, part, setting, values):
    """And not by the arithmetic of a step."""
    for value in values:
        with pytest.raises(ValueError, match=rf"{part}.{setting} must be an? .*, got {re.escape(repr(value))}"):
            method(name, **{part: {setting: value}})


@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_give_the_tokens_and_the_bytes_of_eager_ones(name, model, engine_for, drain):
    """Requests below and above the budget, sampled and greedy, that come and go; one under the method, one batch of
    two methods, and a dense request that arrives in between."""
    chosen, other = make(name), make("streaming" if name != "streaming" else "quest")
    got = []
    for execution in ("eager", "graph"):
        engine = engine_for(model, page_tokens=4, max_seqs=5, execution=execution)
        ids = [
            engine.submit(PROMPT[:count], SamplingParams(max_tokens=new, ignore_eos=True, **hot), method=chosen)
            for count, new, hot in ((9, 30, {}), (45, 9, {"temperature": 0.8, "seed": 4}), (44, 12, {}), (1, 26, {}))
        ]
        news = {}
        for step in range(200):
            if step == 6:
                ids.append(engine.submit(PROMPT[:30], SamplingParams(max_tokens=4, ignore_eos=True), method=other))
            if step == 14:
                ids.append(engine.submit(PROMPT[:7], SamplingParams(max_tokens=3, ignore_eos=True)))
            for output in engine.step() if engine.has_work() else []:
                if output.completion is not None:
                    sample = output.completion.samples[0]
                    read = sample.kv_bytes_read, sample.digest_bytes_read, sample.decode_steps
                    news[output.request_id] = sample.token_ids, *read
            engine.check()
        got.append([news[request_id] for request_id in ids])
    alone = []
    for execution in ("eager", "graph"):  # it decodes densely first, so that no digest is there when it must choose
        engine = engine_for(model, page_tokens=4, execution=execution)
        if chosen.digest is not None:
            engine._runner._digest_store(chosen)._store.fill_(torch.nan)
        alone.append(run(engine, drain, {"a": (PROMPT[:9], params(max_tokens=30), chosen)})["a"].samples[0].token_ids)
    assert alone[0] == alone[1]
    if name in PYRAMIDS:  # eager steps score no layer whose budget all rows fit; a program does not know lengths
        got = [[(tokens, read, steps) for tokens, read, _, steps in each] for each in got]
    assert got[0] == got[1]
