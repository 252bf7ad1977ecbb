"""What requests say of their own tokens, in scores, in keys and in the engine."""

import random

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.serving.scoring import score_many
from octavo.core.step_plan import StepPlan
from octavo.scripts.build import method
from octavo.sparse.prior import Favoured

from .method_cases import PROMPT, SMALL, View, make

PRIOR = {"_target_": "octavo.sparse.prior.Favoured", "weight": 1.0, "share": 0.5}


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


def with_prior(name, tokens=28, **changes):
    return make(name, tokens, prior={**PRIOR, **changes})


def view(prior, digest=None):
    found = View(0, digest)
    found.prior = torch.zeros(2, 9) if prior is None else torch.tensor(prior)
    return found


ROWS = [[0, 1.0, 0, 0.5, 1.0, 1.0, 0, 1.0, 0], [0.0, 1.0, 0, 0, 0, 1.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize("name", ["quest", "random", "streaming", "oracle"])
def test_pages_with_a_prior_come_first_up_to_their_share(name):
    """Of 7 pages 0 and 7 are kept and 8 is open; half of the budget, 3, goes to priors: 5 and 4 and 1 of the first."""
    chosen = with_prior(name)
    pages = chosen.select(view(ROWS).q, view(ROWS, chosen.digest)).pages
    for head in range(pages.shape[1]):
        assert {0, 1, 4, 5, 7, 8} <= set(pages[0, head].tolist())


def test_the_later_of_equal_priors_are_lifted():
    scores = torch.arange(9.0).expand(2, 2, 9)
    keep = torch.zeros(2, 9, dtype=torch.bool)
    lifted = Favoured(share=0.5).favour(scores, torch.full((2, 2), 4), keep, view(ROWS))
    assert lifted[0, 0].tolist() == [0, 1, 2, 3, 4, 5 + 7, 6, 7 + 7, 8]  # 0 to 7 is the range of what is no open page
    assert lifted[1, 0].tolist() == [0, 1 + 4, 2, 3, 4, 5, 6, 7, 8]  # 5 is open there


def test_a_weight_below_one_favours_and_scores_that_are_none_stay():
    scores = torch.tensor([[4.0, 0.0, float("nan"), 2.0, 8.0, float("-inf"), 1.0, 3.0, 5.0]]).expand(2, 1, 9)
    keep = torch.zeros(2, 9, dtype=torch.bool)
    keep[:, 4] = True
    lifted = Favoured(weight=0.5, share=1.0).favour(scores, torch.full((2, 1), 9), keep, view([[1.0] * 9] * 2))
    expected = torch.tensor([6.0, 2.0, float("nan"), 4.0, 8.0, float("-inf"), 3.0, 5.0, 5.0])
    torch.testing.assert_close(lifted[0, 0], expected, equal_nan=True)


def test_without_a_word_nothing_changes():
    scores = torch.randn(2, 2, 9)
    silent = view(None)
    silent.prior = None
    assert Favoured().favour(scores, torch.full((2, 2), 4), torch.zeros(2, 9, dtype=torch.bool), silent) is scores
    same = Favoured().favour(scores, torch.full((2, 2), 4), torch.zeros(2, 9, dtype=torch.bool), view(None))
    assert torch.equal(same, scores)


def params(**changes):
    return SamplingParams(**{"max_tokens": 10, "ignore_eos": True, "seed": 1, "logprobs": 1, **changes})


def run(engine, drain, requests):
    for request_id, (chosen, prior) in requests.items():
        engine.submit(PROMPT, params(), method=chosen, request_id=request_id, token_prior=prior)
    return {request_id: done.samples[0] for request_id, done in drain(engine).completions.items()}


def prior(*pages):
    return [float(token // 4 in pages) for token in range(len(PROMPT))]


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_each_request_of_a_batch_has_its_own(execution, model, engine_for, drain):
    chosen = with_prior("streaming", 20)
    requests = {"none": (chosen, None), "one": (chosen, prior(3)), "other": (chosen, prior(5)), "dense": (None, None)}
    alone = {key: run(engine_for(model), drain, {key: one})[key] for key, one in requests.items()}
    together = run(engine_for(model, execution=execution, max_seqs=8), drain, requests)
    for key, sample in alone.items():
        assert together[key].token_ids == sample.token_ids and together[key].kv_bytes_read == sample.kv_bytes_read
    assert len({str(sample.logprobs) for sample in alone.values()}) == 4
    plain = run(engine_for(model), drain, {"a": (make("streaming", 20), None)})["a"]
    assert plain.logprobs == alone["none"].logprobs and plain.kv_bytes_read == alone["one"].kv_bytes_read


def test_pages_shaped_under_another_prior_are_not_found(model, engine_for, drain):
    engine, chosen = engine_for(model), with_prior("streaming", 20)
    first = run(engine, drain, {"a": (chosen, prior(3))})["a"]
    longer = PROMPT + first.token_ids
    keys = []
    for said in (prior(3), prior(5), prior(3)):
        engine.submit(PROMPT, params(max_tokens=12), method=chosen, request_id="b", token_prior=said)
        for _ in range(8):
            engine.step()
        (sequence,) = engine._scheduler.running
        keys.append([sequence.provenance(page) for page in range(12)])
        drain(engine)
    assert keys[0] == keys[2] and keys[0][:11] == keys[1][:11] == [""] * 11 and keys[0][11] != keys[1][11]
    assert len(longer) == 55


def test_a_preempted_request_remembers(model, engine_for, drain):
    engine, chosen = engine_for(model), with_prior("quest", 20)
    alone = run(engine_for(model), drain, {"a": (chosen, prior(3))})["a"]
    engine.submit(PROMPT, params(), method=chosen, request_id="a", token_prior=prior(3))
    for _ in range(6):
        engine.step()
    engine._scheduler._preempt(engine._scheduler.running[0], StepPlan())
    engine.check()
    assert drain(engine).completions["a"].samples[0].token_ids == alone.token_ids


def test_score_takes_priors(model, engine_for, drain):
    chosen = with_prior("streaming", 20)
    sample = run(engine_for(model), drain, {"a": (chosen, prior(3))})["a"]
    decoded = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    items = [(PROMPT, sample.token_ids, chosen), (PROMPT, sample.token_ids, None)]
    assert score_many(engine_for(model), items, priors=[prior(3), None])[0] == pytest.approx(decoded, abs=1e-5)


@pytest.mark.parametrize(
    "chosen, said, message",
    [
        (None, [0.0] * 45, "token_prior goes with a method that has a prior, and dense has none"),
        ("quest", [0.0] * 45, "and quest has none"),
        ("prior", [0.0] * 44, r"token_prior has the shape \[44\], but the prompt has 45 tokens"),
        ("prior", [0.0] * 44 + [1.5], "token_prior must be 0 to 1, got 0.0 to 1.5"),
        ("prior", [float("nan")] * 45, "token_prior must be 0 to 1"),
    ],
)
def test_what_is_no_prior_is_refused(chosen, said, message, model, engine_for):
    engine = engine_for(model)
    named = {None: None, "quest": make("quest"), "prior": with_prior("quest")}[chosen]
    with pytest.raises(ValueError, match=message):
        engine.submit(PROMPT, method=named, token_prior=said)
    assert not engine.has_work()


def test_parameters_must_be_sensible():
    with pytest.raises(ValueError, match=r"prior.share must be a number above 0 and at most 1, got 0"):
        Favoured(share=0)
    with pytest.raises(ValueError, match=r"prior.weight must be a number above 0, got -1"):
        Favoured(weight=-1)
    with pytest.raises(ValueError, match="do not agree whether pages or single tokens"):
        method("oracle_token", prior=PRIOR, **SMALL).validate(_spec(), 4)


def _spec():
    from octavo.core.interfaces import ModelSpec

    return ModelSpec("m", 3, 4, 2, 16, torch.float32, 128, 256, (0, 0, 0))


class TestOracleToken:
    def test_it_reads_the_most_attended_tokens(self):
        """The kept pages' tokens, then the largest of exact attention; as many as the same budget of pages has."""
        chosen, page = make("oracle_token"), View(0)
        selection = chosen.select(page.q, page)
        probs = (page.dots().flatten(3) * page.traits.scale).softmax(-1).mean(2)  # [b, Hkv, P * p]
        for b, length in enumerate((34, 23)):
            n_pages = -(-length // 4)
            kept = {t for t in range(length) if t // 4 in (0, n_pages - 2, n_pages - 1)}
            count = 4 * 4 + length - 4 * (n_pages - 1)
            for head in range(2):
                assert selection.counts[b, head] == count
                best = sorted(set(range(length)) - kept, key=lambda t, at=(b, head): -probs[at][t])
                tokens = selection.tokens[b, head, :count].tolist()
                assert set(tokens) == kept | set(best[: count - len(kept)]) and len(set(tokens)) == count

    def test_its_attention_is_exact(self, model, engine_for):
        """The plain-torch read of chosen tokens against the reference, NaN in all that is not chosen or not there."""
        from octavo.core.execution.page_view import StepPages
        from octavo.core.interfaces import LayerTraits, TokenSelection
        from octavo.core.memory.layer_groups import LayerPlan

        engine = engine_for(model)
        kv = torch.randn(12, 3, 2, 2, 4, 16)
        table = torch.tensor([[7, 3, 9, 2, 5], [1, 4, 6, 8, 10]]) << 9 | 4
        tokens = torch.tensor([[[0, 18, 5, 9], [3, 1, 16, 0]], [[2, 7, 0, 0], [19, 4, 1, 1]]])
        counts = torch.tensor([[4, 3], [2, 4]])
        clean = kv.clone()
        used = torch.zeros(12, 2, 4, dtype=torch.bool)
        for b in range(2):
            for head in range(2):
                for token in tokens[b, head, : counts[b, head]].tolist():
                    used[table[b, token // 4] >> 9, head, token % 4] = True
        kv[:, 1] = kv[:, 1].where(used[:, None, :, :, None], torch.nan)
        plan: LayerPlan = engine._plan
        q = torch.randn(2, 4, 16)
        sinks = torch.randn(4)
        pages = StepPages(
            kv, "reference", plan, 4, table[None].to(torch.int32), torch.zeros(1, 2, 1), torch.zeros(2), torch.zeros(2),
            5, torch.zeros(2), torch.zeros(2, 5), {}, layer=1,
            traits=LayerTraits(0.3, softcap=2.0, sinks=sinks),
        )  # fmt: skip
        out = pages.attend(q, TokenSelection(tokens, counts))
        for b in range(2):
            for h in range(4):
                listed = tokens[b, h // 2, : counts[b, h // 2]]
                keys, values = (clean[table[b, listed // 4] >> 9, 1, part, h // 2, listed % 4] for part in (0, 1))
                scores = 2.0 * torch.tanh(keys @ q[b, h] * 0.3 / 2.0)
                probs = torch.cat([scores, sinks[h : h + 1]]).softmax(0)[:-1]
                torch.testing.assert_close(out[b, h], probs @ values)

    def test_it_is_nearer_to_dense_than_pages_of_the_same_bytes(self, model, engine_for, drain):
        target = random.Random(4).choices(range(3, 128), k=40)
        engine = engine_for(model, pool_tokens=2000, max_seqs=8)
        dense, token, page = engine.score_many(
            [(PROMPT, target, None), (PROMPT, target, make("oracle_token", 16)), (PROMPT, target, make("oracle", 16))]
        )
        far = [sum(abs(a - b) for a, b in zip(other, dense, strict=True)) for other in (token, page)]
        assert 0 < far[0] < far[1]
