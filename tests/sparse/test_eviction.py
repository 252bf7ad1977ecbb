"""The contract of every method that drops tokens, on one table that is read from ``configs/sparse``."""

import random
from dataclasses import replace
from pkgutil import resolve_name
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.costs import predict_decode
from octavo.core.step_plan import StepPlan
from octavo.scripts.build import method
from octavo.sparse.expected_attention import ExpectedAttention, rope_rates

from .eviction_cases import EVICTING, PAGES, VISIBLE, every, evicting
from .method_cases import PROMPT
from .method_cases import make as selecting

KINDS = {"token": {}, "page": PAGES, "visible": VISIBLE}
CASES = [*((name, "token") for name in EVICTING), ("snapkv", "page"), ("snapkv", "visible"), ("knorm_drop", "page")]
OTHER = random.Random(1).choices(range(3, 128), k=40)


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


def params(**kwargs):
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 1, **kwargs})


def run(engine, drain, requests, **options):
    """``requests``: id -> (prompt, params, method)."""
    for request_id, (prompt, sampling, one) in requests.items():
        engine.submit(prompt, sampling, method=one, request_id=request_id, **options)
    return drain(engine).completions


def alone(engine, drain, chosen, prompt=PROMPT, **sampling):
    options = {key: sampling.pop(key) for key in ("unseen_tokens",) if key in sampling}
    return run(engine, drain, {"a": (prompt, params(**sampling), chosen)}, **options)["a"].samples[0]


@pytest.fixture(scope="module")
def single(model, engine_for, drain):
    """``single(name, **parts)``: a sample of PROMPT under a method, or dense, that has an engine for itself."""
    known = {}

    def sample(name=None, backend="reference", **parts):
        key = name, backend, repr(parts)
        if key not in known:
            chosen = evicting(name, **parts) if name else None
            known[key] = alone(engine_for(model, backend=backend), drain, chosen, logprobs=2)
        return known[key]

    return sample


def retained(model, prompt, positions, tokens):
    """Greedy tokens and their log-probabilities of transformers itself, after a dense prefill of which some layers keep
    only ``positions``: layer -> int64 [Hkv, n]."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits[0, -1]
        for number, kept in positions.items():
            layer = cache.layers[number]
            wide = kept[None, :, :, None].expand(1, -1, -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.gather(2, wide), layer.values.gather(2, wide)
        drawn, logprobs = [], []
        for step in range(tokens):
            drawn.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1).max()))
            at = torch.tensor([[len(prompt) + step]])
            logits = model(
                torch.tensor([drawn[-1:]]), past_key_values=cache, position_ids=at, cache_position=at[0], use_cache=True
            ).logits[0, -1]
    return drawn, logprobs


@every("name", EVICTING)
def test_a_full_budget_is_dense_bit_for_bit(name, model, engine_for, drain, single):
    dense = single()
    full = alone(engine_for(model), drain, evicting(name, 2000), logprobs=2)
    assert full.logprobs == dense.logprobs and full.kv_bytes_read == dense.kv_bytes_read


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@every("name", EVICTING)
def test_br55_what_is_kept_is_attended_to_at_its_own_positions(name, backend, model, engine_for, drain):
    chosen = replace(evicting(name, every=0), choosing=None)
    attends_to_what_is_kept(engine_for(model, backend=backend), drain, model, chosen)


@pytest.mark.parametrize("name", ["snapkv", "expected_attention"])
def test_br55_of_layers_that_see_everything_beside_windows(name, g_model, engine_for, drain):
    attends_to_what_is_kept(engine_for(g_model), drain, g_model, evicting(name))


def attends_to_what_is_kept(engine, drain, model, chosen):
    """Dense attention over the retained (token, position) pairs, computed by transformers."""
    engine.submit(PROMPT, params(logprobs=0), method=chosen, request_id="a")
    engine.step()
    (sequence,) = engine._scheduler.running
    kept = sequence.kept.positions
    if len({int(n) for n in (kept >= 0).sum(2).flatten()}) > 1:
        pytest.skip("transformers cannot keep a different number in each head")
    opened = torch.arange(sequence.kept.end, len(PROMPT)).expand(*kept.shape[:2], -1)
    layers = [layer for layer, window in enumerate(engine.spec.windows) if not window]
    retaining = dict(zip(layers, torch.cat([kept, opened], 2), strict=True))
    tokens, logprobs = retained(model, PROMPT, retaining, 12)
    sample = drain(engine).completions["a"].samples[0]
    assert sample.token_ids == tokens
    got = [entry[token] for entry, token in zip(sample.logprobs, tokens, strict=True)]
    assert got == pytest.approx(logprobs, abs=5e-4)


@every("name", EVICTING)
def test_hidden_and_dropped_pages_give_the_same_bits(name, single):
    visible, dropped, dense = single(name, **VISIBLE), single(name, **PAGES), single()
    assert visible.logprobs == dropped.logprobs != dense.logprobs
    assert visible.kv_bytes_read == dropped.kv_bytes_read < dense.kv_bytes_read


@pytest.mark.parametrize("kind, page_tokens", [("token", 4), ("token", 12), ("page", 12), ("visible", 4)])
@every("name", EVICTING)
def test_predicted_bytes_are_the_counted_ones(name, kind, page_tokens, model, engine_for, drain):
    parts = KINDS[kind]
    if name == "pyramid_snapkv":  # its last layer keeps little more
        parts = {**parts, "budget": {"kept_tokens": 3 * page_tokens}}
    chosen = evicting(name, 5 * page_tokens, **parts, dense_layers=[0])
    prompt = PROMPT * 2
    engine = engine_for(model, page_tokens=page_tokens, pool_tokens=60 * page_tokens)
    sample = alone(engine, drain, chosen, prompt, max_tokens=30)
    cost = predict_decode(
        engine.spec, chosen, prompt_tokens=len(prompt), new_tokens=30, page_tokens=page_tokens,
        unit_tokens=engine.config.unit_tokens, itemsize=4,
    )  # fmt: skip
    dense = predict_decode(
        engine.spec, None, prompt_tokens=len(prompt), new_tokens=30, page_tokens=page_tokens,
        unit_tokens=engine.config.unit_tokens, itemsize=4,
    )  # fmt: skip
    uniform = chosen.budget.most(1, 3, page_tokens, 2) == chosen.budget.pages(1, 3, page_tokens)
    if uniform or parts:
        assert sample.kv_bytes_read == cost.kv_bytes
    else:  # heads share a budget of tokens
        assert 0.8 * cost.kv_bytes <= sample.kv_bytes_read <= cost.kv_bytes
    assert cost.kv_bytes < 0.9 * dense.kv_bytes and sample.decode_steps == cost.steps == 29


@every("name", EVICTING)
def test_dropped_units_are_free_for_others(name, model, engine_for, drain):
    """Without a prefix cache, which would hold on to them: what is held is what was predicted."""
    held = {}
    for placement, parts in (("dense", None), ("visible", VISIBLE), ("drop", PAGES)):
        engine = engine_for(model, prefix_cache=False)
        engine.submit(PROMPT, params(), method=parts and evicting(name, **parts), request_id="a")
        engine.step()
        (sequence,) = engine._scheduler.running
        held[placement] = engine.stats().units_held
        if placement == "drop":
            runs = np.concatenate(sequence.kept.slabs)
            assert len(runs) == int(sequence.kept.counts.sum())
            assert engine._compaction.split.free_runs == 6 * len(sequence.kept.units) - len(runs)
        drain(engine)
        assert engine.stats().units_held == 0 and not len(engine._compaction.split.units)
    least = 9 if evicting(name).choosing is None else 11  # more is kept than a step reads
    assert held["dense"] == held["visible"] == 12 and held["drop"] < least


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_mixed_batch_equals_singles(backend, model, engine_for, drain, assert_idle, single):
    chosen = {f"{name} {kind}": evicting(name, **KINDS[kind]) for name, kind in CASES}
    singles = {f"{name} {kind}": single(name, backend, **KINDS[kind]) for name, kind in CASES}
    others = {"quest": selecting("quest"), "streaming": selecting("streaming")}
    singles |= {n: alone(engine_for(model, backend=backend), drain, one) for n, one in others.items()}
    singles["dense"] = single(backend=backend)
    chosen |= {"dense": None, **others}
    engine = engine_for(model, backend=backend, max_seqs=64, pool_tokens=3000)
    together = run(engine, drain, {name: (PROMPT, params(), one) for name, one in chosen.items()})
    for name, one in singles.items():
        sample = together[name].samples[0]
        assert (name, sample.token_ids, sample.kv_bytes_read) == (name, one.token_ids, one.kv_bytes_read)
    assert_idle(engine)


@every("name, kind", CASES)
class TestWhatDoesNotMatter:
    def test_how_the_prompt_is_cut(self, name, kind, model, engine_for, drain, single):
        for step_tokens in (1, 7):
            cut = alone(engine_for(model, step_tokens=step_tokens), drain, evicting(name, **KINDS[kind]))
            assert cut.token_ids == single(name, **KINDS[kind]).token_ids

    def test_who_is_preempted_and_where_units_lie(self, name, kind, model, engine_for, drain, assert_idle, single):
        chosen = evicting(name, **KINDS[kind])
        engine = engine_for(model, pool_tokens=25 * 4, allocator="first_fit")
        requests = {"b": (OTHER, params(max_tokens=24), None), "a": (PROMPT, params(), chosen)}
        for request_id, (prompt, sampling, one) in requests.items():
            engine.submit(prompt, sampling, method=one, request_id=request_id)
        for _ in range(4):
            engine.step()
            engine.check()
        for sequence in list(engine._scheduler.running):
            engine._scheduler._preempt(sequence, StepPlan())
            engine.check()
        assert drain(engine).completions["a"].samples[0].token_ids == single(name, **KINDS[kind]).token_ids
        assert engine.stats().preemptions > 0
        assert_idle(engine)

    def test_what_its_pages_held_before(self, name, kind, model, engine_for, drain, single):
        chosen = evicting(name, **KINDS[kind])
        engine = engine_for(model, pool_tokens=100)
        for seed in range(3):
            alone(engine, drain, chosen, random.Random(seed).choices(range(3, 128), k=50))
        assert alone(engine, drain, chosen).token_ids == single(name, **KINDS[kind]).token_ids

    def test_whether_samples_share_what_is_kept(self, name, kind, model, engine_for, drain, assert_idle):
        chosen = evicting(name, **KINDS[kind])
        sampling = {"temperature": 0.9, "max_tokens": 10}
        engine = engine_for(model)
        forked = run(engine, drain, {"a": (PROMPT, params(n=3, seed=5, **sampling), chosen)})["a"]
        roomy = engine_for(model, prefix_cache=False)
        singles = [alone(roomy, drain, chosen, seed=5 + i, **sampling).token_ids for i in range(3)]
        assert [sample.token_ids for sample in forked.samples] == singles
        assert_idle(engine)

    def test_whether_the_prompt_was_cached(self, name, kind, model, engine_for, drain, single):
        chosen = evicting(name, **KINDS[kind])
        engine = engine_for(model)
        dense = alone(engine, drain, None).token_ids
        got = run(engine, drain, {"a": (PROMPT, params(), chosen)})["a"]
        assert got.samples[0].token_ids == single(name, **KINDS[kind]).token_ids
        window = min(max(1, chosen.compressor.window), len(PROMPT))  # these are computed in any case
        assert got.cached_tokens == (len(PROMPT) - window) // 4 * 4
        assert alone(engine, drain, None).token_ids == dense  # and what was dropped never wrote to shared pages

    def test_whether_a_session_s_pages_survived(self, name, kind, model, engine_for, assert_idle):
        outputs = []
        for reclaimed in (False, True):
            engine = engine_for(model, pool_tokens=160)
            session = engine.session(PROMPT, method=evicting(name, **KINDS[kind]))
            tokens = [session.generate(params(max_tokens=9)).samples[0].token_ids]
            twin = session.fork()
            for number in range(2):
                if reclaimed:
                    while engine._scheduler.parked:
                        engine._scheduler._reclaim()
                for each, added in ((session, OTHER[:6]), (twin, OTHER[6:9])):
                    each.append([*added, 5 + number])
                    tokens.append(each.generate(params(max_tokens=9)).samples[0].token_ids)
                    engine.check()
            outputs.append(tokens)
            session.close(), twin.close()
            assert_idle(engine)
        assert outputs[0] == outputs[1]

    def test_whether_steps_are_replayed(self, name, kind, model, engine_for, drain):
        chosen, got = evicting(name, **KINDS[kind]), []
        for execution in ("eager", "graph"):
            engine = engine_for(model, execution=execution)
            requests = {"a": (PROMPT, params(), chosen), "b": (OTHER, params(max_tokens=20), None)}
            got.append({k: c.samples[0].token_ids for k, c in run(engine, drain, requests).items()})
        assert got[0] == got[1]


@every("name", EVICTING)
def test_shaped_pages_are_never_found(name, model, engine_for, drain):
    engine, chosen = engine_for(model), evicting(name)
    first = alone(engine, drain, chosen, max_tokens=16)
    longer = PROMPT + first.token_ids
    expected = alone(engine_for(model), drain, None, longer).token_ids
    after = run(engine, drain, {"d": (longer, params(), None)})["d"]
    assert after.samples[0].token_ids == expected and after.cached_tokens == 44
    assert evicting(name, 24).provenance != chosen.provenance


@every("name", EVICTING)
def test_score_is_the_log_likelihood_of_decoding(name, model, engine_for, drain):
    chosen = evicting(name)
    sample = alone(engine_for(model), drain, chosen, logprobs=0)
    decoded = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert engine_for(model).score(PROMPT, sample.token_ids, method=chosen) == pytest.approx(decoded, abs=1e-5)


@every("name, kind", CASES)
class TestUnseen:
    """The last tokens of the prompt come after the decision, and read what it has left them."""

    def test_the_question_reads_what_was_kept(self, name, kind, model, engine_for, drain):
        if name == "oracle_drop":
            pytest.skip("it decides by the question")
        chosen = replace(evicting(name, **KINDS[kind]), choosing=None)  # which would begin behind the question
        for step_tokens in (64, 5):
            engine = engine_for(model, step_tokens=step_tokens, pool_tokens=80)
            sample = alone(engine, drain, chosen, unseen_tokens=9, logprobs=0)
            decoded = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
            given = PROMPT[-9:] + sample.token_ids
            expected = engine_for(model).score(PROMPT[:-9], given, method=chosen)[9:]
            assert decoded == pytest.approx(expected, abs=1e-4)
            engine.check()

    def test_it_makes_a_difference(self, name, kind, model, engine_for, drain):
        chosen = evicting(name, **KINDS[kind])
        seen = alone(engine_for(model), drain, chosen, logprobs=0)
        unseen = alone(engine_for(model), drain, chosen, unseen_tokens=9, logprobs=0)
        assert seen.logprobs != unseen.logprobs

    def test_a_dense_request_does_not_find_the_question(self, name, kind, model, engine_for, drain):
        engine = engine_for(model)
        engine.submit(PROMPT, params(), method=evicting(name, **KINDS[kind]), unseen_tokens=9, request_id="a")
        engine.step()
        dense = run(engine, drain, {"d": (PROMPT, params(), None)})["d"]
        assert dense.cached_tokens == 36
        assert dense.samples[0].token_ids == alone(engine_for(model), drain, None).token_ids


FAILING = {
    "deciding": ("octavo.sparse.eviction._Eviction.keep", 1),
    "deciding_for_another": ("octavo.sparse.eviction._Eviction.keep", 2),
    "deciding_again": ("octavo.sparse.eviction._Eviction.keep", 5),
    "reading": ("octavo.core.compression.sequence_context.SequenceContext.gathered", 2),
    "making_room": ("octavo.core.scheduler.Scheduler.make_room", 1),
    "making_room_again": ("octavo.core.scheduler.Scheduler.make_room", 3),
    "writing": ("octavo.core.compression.compaction.Compaction._write", 2),
    "publishing": ("octavo.core.execution.publisher.Publisher.publish", 1),
}


@pytest.mark.parametrize("unseen", [0, 9])
@pytest.mark.parametrize("case", FAILING)
def test_a_compression_that_fails_is_made_again(case, unseen, model, engine_for, drain, assert_idle, monkeypatch):
    """Of one of two requests, at any of its stages, as Ctrl-C and a full memory may end it, also where the question is
    still to be computed."""
    asked = {name: (prompt, params(), evicting("h2o")) for name, prompt in (("a", PROMPT), ("b", OTHER))}
    expected = run(engine_for(model), drain, asked, unseen_tokens=unseen)
    engine = engine_for(model)
    for name, (prompt, sampling, chosen) in asked.items():
        engine.submit(prompt, sampling, method=chosen, request_id=name, unseen_tokens=unseen)
    where, call = FAILING[case]
    owner, name = resolve_name(where.rpartition(".")[0]), where.rpartition(".")[2]
    works, calls = getattr(owner, name), []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return works(*args)

    monkeypatch.setattr(owner, name, fail_once)
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    engine.check()
    done = drain(engine).completions
    assert {name: done[name].samples[0].token_ids for name in done} == {
        name: expected[name].samples[0].token_ids for name in asked
    }
    assert_idle(engine)


@pytest.mark.parametrize("name", ["snapkv", "expected_attention"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_a_window_keep_it(kind, name, g_model, engine_for, drain, assert_idle):
    engine, chosen = engine_for(g_model), evicting(name, **KINDS[kind])
    sample = alone(engine, drain, chosen, logprobs=0)
    assert sample.logprobs != alone(engine_for(g_model), drain, None, logprobs=0).logprobs
    cost = predict_decode(
        engine.spec, chosen, prompt_tokens=len(PROMPT), new_tokens=12, page_tokens=4, unit_tokens=4, itemsize=4
    )
    assert sample.kv_bytes_read == cost.kv_bytes
    assert_idle(engine)


class TestExpectedAttention:
    def test_a_layer_turns_as_its_kind_does(self, model, g_model):
        own = {name.rpartition(".")[2]: rates for name, rates in g_model.named_buffers() if name.endswith("inv_freq")}
        assert not torch.equal(own["full_attention_inv_freq"], own["sliding_attention_inv_freq"])
        for layer, kind in enumerate(g_model.config.layer_types):
            assert torch.equal(rope_rates(SimpleNamespace(model=g_model), layer), own[f"{kind}_inv_freq"])
        assert torch.equal(rope_rates(SimpleNamespace(model=model), 1), model.model.rotary_emb.inv_freq)

    def test_sinks_have_no_part_in_the_scores_of_others(self, model):
        def score(scorer, first):
            generator = torch.Generator().manual_seed(0)
            queries, keys, values = torch.randn((3, 12, 2, 16), generator=generator)
            layer = SimpleNamespace(
                layer=0,
                positions=torch.arange(first, 12).expand(2, -1),
                keys=keys.transpose(0, 1)[:, first:],
                values=values.transpose(0, 1)[:, first:],
                queries=queries[max(0, 12 - scorer.window) :],
                traits=SimpleNamespace(scale=0.25),
            )
            return scorer.score(layer, SimpleNamespace(tokens=12, model=model, spec=None))

        with_sinks = score(ExpectedAttention(window=32, sink_tokens=3), 0)[:, 3:]
        without = score(ExpectedAttention(window=9), 3)
        torch.testing.assert_close(with_sinks, without)
        assert not torch.allclose(with_sinks, score(ExpectedAttention(window=32), 0)[:, 3:])


def test_a_model_of_windows_alone_keeps_everything(w_model, engine_for, drain):
    dense = alone(engine_for(w_model), drain, None, logprobs=0)
    assert alone(engine_for(w_model), drain, evicting("knorm_drop"), logprobs=0).logprobs == dense.logprobs


def test_no_two_methods_are_the_same_composition():
    assert len({replace(evicting(name), name="").provenance for name in EVICTING}) == len(EVICTING)


@pytest.mark.parametrize("length", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 8, 12)), 4, 13])
@every("name", EVICTING)
def test_br53_a_short_prompt_keeps_something(name, length, model, engine_for, drain):
    """The least budget that is not refused, on prompts of a few tokens and of a few pages."""
    dense = alone(engine_for(model), drain, None, PROMPT[:length], logprobs=0, max_tokens=1)
    for parts in KINDS.values():
        chosen = evicting(name, 12, **parts)
        sample = alone(engine_for(model), drain, chosen, PROMPT[:length], logprobs=0)
        assert all(value > -100 for entry in sample.logprobs for value in entry.values())
        if length <= 12:
            assert sample.logprobs[0] == dense.logprobs[0]


class TestDuoAttention:
    """Which heads keep everything, and what the others keep."""

    def duo(self, **parts):
        return method("duo_attention", keep={"sink_tokens": 4, "recent_tokens": 6}, window=4, **parts)

    def kept(self, engine, chosen):
        engine.submit(PROMPT, params(), method=chosen, request_id="a")
        engine.step()
        (sequence,) = engine._scheduler.running
        positions = sequence.kept.positions
        engine.check()
        return [[[t for t in head if t >= 0] for head in layer] for layer in positions.tolist()]

    def test_gates_of_a_file(self, tmp_path, model, engine_for, drain, assert_idle):
        """Half of six heads. Streaming ones keep the first page, and from token 39 on whole pages: 36 to 43."""
        file = tmp_path / "gates.txt"
        file.write_text("0.9 0.1\n0.2 0.3\n0.8 0.7\n")
        engine = engine_for(model, prefix_cache=False)
        found = self.kept(engine, self.duo(file=str(file)))
        everything, stream = list(range(44)), [*range(4), *range(36, 44)]
        assert found == [[everything, stream], [stream, stream], [everything, everything]]
        # Head 0 keeps 11 + 3 + 11 runs, head 1 keeps 3 + 3 + 11, in parts of 3 layers: 9 units, and the open one.
        assert engine.stats().units_held == 10
        drain(engine)
        assert_idle(engine)

    def test_a_head_that_looks_back_retrieves(self, model, engine_for):
        found = self.kept(engine_for(model), self.duo())
        everything = [len(head) == 44 for layer in found for head in layer]
        assert sum(everything) == 3 and {len(head) for layer in found for head in layer} == {44, 12}

    @pytest.mark.parametrize("share, tokens", [(1.0, 44), (0.0, 12)])
    def test_all_or_none(self, share, tokens, model, engine_for, drain):
        chosen = self.duo(retrieval_share=share)
        sample = alone(engine_for(model), drain, chosen, logprobs=0)
        dense = alone(engine_for(model), drain, None, logprobs=0)
        assert (sample.logprobs == dense.logprobs) is (share == 1.0)
        if share == 0.0:
            assert {len(head) for layer in self.kept(engine_for(model), chosen) for head in layer} == {tokens}

    def test_it_contracts_like_the_others(self, model, engine_for, drain):
        dropped = alone(engine_for(model), drain, self.duo(), logprobs=0)
        hidden = alone(engine_for(model, step_tokens=7), drain, self.duo(placement="visible"), logprobs=0)
        assert dropped.token_ids == hidden.token_ids and dropped.kv_bytes_read == hidden.kv_bytes_read

    def test_refusals(self, tmp_path, model, engine_for):
        (tmp_path / "gates.txt").write_text("0.9 0.1\n")
        with pytest.raises(ValueError, match=r"gates of 1 x 2 layers and heads; LlamaForCausalLM has 3 x 2"):
            engine_for(model).submit(PROMPT, method=self.duo(file=str(tmp_path / "gates.txt")))
        with pytest.raises(ValueError, match=r"no such file of gates"):
            self.duo(file=str(tmp_path / "none.txt"))
        with pytest.raises(ValueError, match=r"retrieval_share must be 0 to 1, got 2"):
            self.duo(retrieval_share=2)


class TestRefusals:
    def test_what_cannot_be_built(self):
        with pytest.raises(ValueError, match=r"placement=visible moves nothing.*set grain=page"):
            method("snapkv", placement="visible")
        with pytest.raises(ValueError, match="grain must be 'token' or 'page', got 'head'"):
            method("snapkv", grain="head")
        with pytest.raises(ValueError, match="every must be an integer of at least 0, got -1"):
            method("snapkv", every=-1)

    @pytest.mark.parametrize(
        "parts, message",
        [
            ({"tokens": 7}, "the open page of 4 tokens are 8 tokens, but the budget is 7"),
            ({"dense_layers": [3]}, r"dense_layers \[3\] are not among the 3 layers"),
        ],
        ids=["budget", "layer"],
    )
    def test_what_cannot_be_served(self, parts, message, model, engine_for):
        engine = engine_for(model)
        with pytest.raises(ValueError, match=message):
            engine.submit(PROMPT, method=evicting("snapkv", **parts))
        assert not engine.has_work()

    def test_tables_that_layers_share(self, g_model, engine_for):
        with pytest.raises(ValueError, match=r"layers with a window and layers without.*layer_groups=True"):
            engine_for(g_model, layer_groups=False).submit(PROMPT, method=evicting("knorm_drop"))

    @pytest.mark.parametrize("value", [-1, 45, True, 1.5])
    def test_unseen_tokens(self, value, model, engine_for):
        with pytest.raises(ValueError, match=f"unseen_tokens={value!r} must be 0 or more, and fewer than"):
            engine_for(model).submit(PROMPT, unseen_tokens=value)
