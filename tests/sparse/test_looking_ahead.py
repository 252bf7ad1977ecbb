"""Scorers that compute tokens behind the context to decide what is kept: KVzip, and the oracle of dropping."""

import copy
from dataclasses import dataclass, field, fields, replace

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.scheduler import StepPlan
from octavo.scripts.build import method
from octavo.sparse.budgets import Uniform
from octavo.sparse.kvzip import AllLayers
from octavo.sparse.token_scores import Rated

from .eviction_cases import evicting
from .method_cases import PROMPT, make

CONTEXT = PROMPT[:44]
ANSWER = PROMPT[5:12]


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


@pytest.fixture(scope="module")
def sinks_model():
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=8, num_local_experts=2,
        num_experts_per_tok=1, eos_token_id=2, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    return GptOssForCausalLM(config).eval()


def params(**kwargs):
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 1, **kwargs})


def run(engine, drain, chosen, prompt=PROMPT, *, unseen_tokens=0, **kwargs):
    request_id = engine.submit(prompt, params(**kwargs), method=chosen, unseen_tokens=unseen_tokens)
    return drain(engine).completions[request_id].samples[0]


def attention(model, tokens):
    """What transformers says that each token attends to: fp32 [L, Hq, T, T]."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        found = eager(torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    return torch.cat(found)


@dataclass(frozen=True)
class Spy(Rated):
    """Goes on greedily behind the context, and writes the tokens down."""

    tokens: list[int] = field(default_factory=list)
    overlap: int = 1

    def behind(self, tokens, read):
        return 20

    def score_all(self, context):
        ahead = context.continuation(self.overlap)
        token = ahead.compute(context.token_ids[-self.overlap :])
        for _ in range(12):
            self.tokens.append(token)
            token = ahead.compute([token])
        return torch.zeros(len(context.layers), context.spec.kv_heads, context.tokens)


@pytest.mark.parametrize(
    "kind, overlap", [("model", 1), ("model", 9), ("model", 45), ("g_model", 1), ("sinks_model", 1)]
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_is_computed_behind_is_what_dense_decoding_computes(backend, kind, overlap, request, engine_for, drain):
    """With windows too, what has left them being gone from the pool, and with learned sinks."""
    model, spy = request.getfixturevalue(kind), Spy(overlap=overlap)
    dense = run(engine_for(model, backend=backend), drain, None)
    run(engine_for(model, backend=backend), drain, replace(evicting("snapkv"), scorer=spy))
    assert spy.tokens == dense.token_ids


def scored(model, engine_for, chosen, *, context=CONTEXT, answer=None, unseen=0, **options):
    """The scores [L, Hkv, N] of a method's scorer, at a context on which an engine decides."""
    taken, scorer = [], chosen.scorer

    class Taking(type(scorer)):
        def score_all(self, context):
            taken.append(super().score_all(context))
            return taken[-1]

    watched = replace(chosen, scorer=Taking(**{f.name: getattr(scorer, f.name) for f in fields(scorer)}))
    engine = engine_for(model, **options)
    if answer is not None:
        engine.score(context, answer, method=watched)
    else:
        engine.submit(context, params(), method=watched, unseen_tokens=unseen)
        engine.step()
    engine.check()
    return taken[0]


def test_the_oracle_adds_up_what_the_given_answer_attends_to(model, engine_for):
    chosen = method("oracle_drop", budget_tokens=20, scorer={"lookahead_tokens": 5})
    paid = attention(model, CONTEXT + ANSWER)[:, :, len(CONTEXT) :, : len(CONTEXT)]
    expected = paid.sum(2).unflatten(1, (2, -1)).mean(2)
    torch.testing.assert_close(scored(model, engine_for, chosen, answer=ANSWER), expected, rtol=1e-4, atol=1e-4)
    blind = replace(chosen, scorer=replace(chosen.scorer, given=False))
    assert not torch.allclose(scored(model, engine_for, blind, answer=ANSWER), expected, atol=1e-2)


@pytest.mark.parametrize("unseen", [0, 6])
def test_without_one_it_looks_ahead_greedily(unseen, model, engine_for, drain):
    chosen = method("oracle_drop", budget_tokens=20, scorer={"lookahead_tokens": 5})
    ahead = run(engine_for(model), drain, None, CONTEXT, max_tokens=5, ignore_eos=False).token_ids
    known = len(CONTEXT) - unseen
    paid = attention(model, CONTEXT + ahead)[:, :, known:, :known]
    expected = paid.sum(2).unflatten(1, (2, -1)).mean(2)
    torch.testing.assert_close(scored(model, engine_for, chosen, unseen=unseen), expected, rtol=1e-4, atol=1e-4)


def test_nothing_that_is_kept_holds_more_of_the_attention_to_come(model, engine_for):
    """Of an equal number of tokens a head, under the answer that is known to come."""
    paid = attention(model, PROMPT + ANSWER)[:, :, len(PROMPT) :, : len(PROMPT)]
    paid = paid.sum(2).unflatten(1, (2, -1)).mean(2)
    kept = {}
    for name in ("oracle_drop", "kvzip", "snapkv", "h2o", "expected_attention", "random_drop"):
        chosen = replace(evicting(name, 16, every=0), budget=Uniform(16))
        if name == "oracle_drop":
            chosen = replace(chosen, scorer=replace(chosen.scorer, given=True))
        engine = engine_for(model)
        found = []
        drop = engine._compaction._drop

        def dropped(choice, drop=drop, found=found):
            drop(choice)
            found.append(choice.sequence.kept.positions)

        engine._compaction._drop = dropped
        engine.score(PROMPT, ANSWER, method=chosen)
        kept[name] = paid.gather(2, found[0].clamp(min=0)).masked_fill(found[0] < 0, 0.0).sum((1, 2))
    for name in ("kvzip", "snapkv", "h2o", "expected_attention", "random_drop"):
        assert (kept["oracle_drop"] >= kept[name] - 1e-4).all()
    assert kept["oracle_drop"].sum() > kept["snapkv"].sum() > 0
    assert min(kept["kvzip"].sum(), kept["snapkv"].sum()) > kept["random_drop"].sum()


@pytest.mark.parametrize("chunk_tokens", [44, 64, 16])
def test_kvzip_is_the_most_that_a_token_gets_while_its_chunk_is_repeated(chunk_tokens, model, engine_for):
    chosen = evicting("kvzip", 16, scorer={"chunk_tokens": chunk_tokens, "sink_tokens": 3, "tail_tokens": 2,
                                           "repeat": [5, 6, 7], "go_on": [8, 9]})  # fmt: skip
    expected = torch.zeros(3, 2, 44)
    for start in range(0, 44, chunk_tokens):
        end = min(44, start + chunk_tokens)
        before = [8, 9, *CONTEXT[start - 2 : start]] if start else [5, 6, 7]
        attended = attention(model, CONTEXT + before + CONTEXT[start:end])[:, :, 44:]
        among = torch.zeros(attended.shape[3], dtype=torch.bool)
        among[:3], among[start:end], among[44:] = True, True, True
        shares = attended * among
        shares = shares / shares.sum(3, keepdim=True)
        expected[..., start:end] = shares.amax(2).unflatten(1, (2, -1)).amax(2)[..., start:end]
    torch.testing.assert_close(scored(model, engine_for, chosen), expected, rtol=1e-3, atol=1e-4)


def test_extra_tokens_are_counted(model, engine_for, drain):
    """Three chunks of at most 16 tokens, an instruction each, and two tokens of the chunk before."""
    assert run(engine_for(model), drain, evicting("kvzip")).extra_tokens == 45 + 3 + 4 + 4
    assert run(engine_for(model), drain, evicting("oracle_drop")).extra_tokens == 1 + 6
    assert run(engine_for(model), drain, evicting("kvzip", 45)).extra_tokens == 0  # everything is kept
    assert run(engine_for(model), drain, evicting("snapkv")).extra_tokens == 0
    engine = engine_for(model)
    request_id = engine.submit(PROMPT, params(), method=evicting("kvzip"))
    engine.step()
    (sequence,) = engine._scheduler.running
    engine._scheduler._preempt(sequence, StepPlan())
    assert drain(engine).completions[request_id].samples[0].extra_tokens == 2 * (45 + 3 + 4 + 4)


def test_a_session_s_turn_counts_its_own(model, engine_for):
    session = engine_for(model).session(PROMPT, method=evicting("oracle_drop"))
    assert session.generate(params(max_tokens=4)).samples[0].extra_tokens == 7
    session.append(PROMPT[:9])  # what was kept is kept, and only the decision at the new end is made
    assert session.generate(params(max_tokens=4)).samples[0].extra_tokens == 7
    session.close()


def test_nothing_of_it_stays(model, engine_for, drain):
    """Neither in the pool, which has no room for it, nor for others in the batch."""
    units = {}
    for name in ("kvzip", "oracle_drop", "snapkv"):
        engine = engine_for(model, prefix_cache=False, pool_tokens=56)
        engine.submit(PROMPT, params(), method=replace(evicting(name), budget=Uniform(20)))
        engine.step()
        units[name] = engine.stats().units_held
    assert units["kvzip"] == units["oracle_drop"] == units["snapkv"]


def test_all_layers_share_one_budget():
    scores = torch.tensor([[[9.0, 1.0, 8.0, 0.0], [0.5, 0.4, 0.3, 0.2]], [[7.0, 6.0, 5.0, 4.0], [torch.inf, 0, 0, 0]]])
    assert AllLayers(2).divide(scores, 1).tolist() == [[3, 0], [4, 1]]


def test_layers_keep_what_they_need(model, engine_for):
    engine = engine_for(model)
    engine.submit(PROMPT, params(), method=evicting("kvzip"), request_id="a")
    engine.step()
    (sequence,) = engine._scheduler.running
    counts = (sequence.kept.positions >= 0).sum(2)  # besides the open page's one
    assert int(counts.sum()) == 3 * 2 * 19 and counts.unique().numel() > 2
    engine.check()


class TestRefusals:
    def test_a_text_without_a_tokenizer(self, model, engine_for):
        with pytest.raises(ValueError, match=r"needs a tokenizer, and the engine has none; give token ids"):
            engine_for(model).submit(PROMPT, method=method("kvzip", budget_tokens=20))

    def test_no_positions_left(self, model, engine_for):
        engine = engine_for(model, pool_tokens=400)
        message = "20 tokens are computed behind the 240 in front of it, and LlamaForCausalLM has 256 positions"
        with pytest.raises(ValueError, match=message):
            engine.submit([3] * 240, params(), method=evicting("kvzip"))
        assert not engine.has_work()

    def test_no_positions_left_behind_a_later_decision(self, model, engine_for):
        engine = engine_for(model, pool_tokens=400)
        message = "20 tokens are computed behind the 248 in front of it, and LlamaForCausalLM has 256 positions"
        with pytest.raises(ValueError, match=message):
            engine.submit([3] * 228, params(max_tokens=20), method=evicting("kvzip", every=4))
        engine.submit([3] * 228, params(max_tokens=8), method=evicting("kvzip", every=4))

    def test_a_choice_at_every_step_for_all_layers(self, model, engine_for):
        with pytest.raises(ValueError, match=r"divided among all layers at once.*methods that drop tokens"):
            engine_for(model).submit(PROMPT, method=replace(make("oracle"), budget=AllLayers(20)))
