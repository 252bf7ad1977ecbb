"""Methods that drop tokens, and choose at every step among those that are left."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.compression.kept_pages import KeptPages
from octavo.core.inspection import probing
from octavo.scripts.build import method
from octavo.sparse.ada_kv import AdaHeads
from octavo.sparse.digests import MinMax
from octavo.sparse.eviction import Choosing, Times
from octavo.sparse.lserve import SubPageBound, SubPageBoxes
from octavo.sparse.mean_key import MeanDot, MeanKey
from octavo.sparse.method import Method
from octavo.sparse.probe import Probe
from octavo.sparse.rocketkv import ChunkBoxes, HybridBound, Split
from octavo.sparse.scorers import Random, Scored, TrueMass, UpperBound
from octavo.sparse.selectors import Unified
from octavo.sparse.sparq import LargestChannels

from .eviction_cases import PAGES, VISIBLE, evicting
from .method_cases import PROMPT, View

STAGES = {
    "quest": {"scorer": UpperBound(), "digest": MinMax()},
    "quest_shares": {"scorer": UpperBound("mean"), "digest": MinMax()},
    "one_list": {"scorer": UpperBound(), "digest": MinMax(), "selector": Unified()},
    "lserve": {"scorer": SubPageBound(), "digest": SubPageBoxes(2)},
    "mean_key": {"scorer": MeanDot(), "digest": MeanKey()},
    "sparq": {"scorer": LargestChannels(5)},
    "oracle": {"scorer": TrueMass()},
    "random": {"scorer": Random()},
    "hybrid": {"scorer": HybridBound(6), "digest": ChunkBoxes(2)},
}


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


def staged(stage, tokens=20, factor=1.6, base="snapkv", **parts):
    """``base``, of which a step reads ``tokens`` and keeps ``factor`` as many."""
    return replace(evicting(base, tokens, **parts), choosing=Choosing(Times(factor), **STAGES[stage]))


def params(**kwargs):
    return SamplingParams(**{"max_tokens": 14, "ignore_eos": True, "seed": 1, "logprobs": 1, **kwargs})


def run(engine, drain, chosen, prompt=PROMPT, **kwargs):
    request_id = engine.submit(prompt, params(**kwargs), method=chosen)
    return drain(engine).completions[request_id].samples[0]


@pytest.mark.parametrize("kind", [PAGES, VISIBLE], ids=["drop", "visible"])
@pytest.mark.parametrize("stage", STAGES)
def test_reading_all_that_is_kept_is_dropping_alone(stage, kind, model, engine_for, drain):
    """Until what has come since no longer fits the budget: 20 tokens are kept, and 5 are the least that come."""
    alone = run(engine_for(model), drain, evicting("snapkv", 28, **kind), max_tokens=5)
    full = run(engine_for(model), drain, staged(stage, 28, 1.0, **kind), max_tokens=3)
    assert full.logprobs == alone.logprobs[:3]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_reads_its_budget(stage, backend, model, engine_for, drain):
    alone = run(engine_for(model, backend=backend), drain, evicting("snapkv", 32))
    sample = run(engine_for(model, backend=backend), drain, staged(stage))
    assert sample.logprobs != alone.logprobs
    assert sample.kv_bytes_read < alone.kv_bytes_read
    layer_bytes = 2 * 2 * 16 * 4  # K and V of a token, KV heads, D, fp32
    # Five pages, of which the last is open and counts as a whole.
    assert sample.kv_bytes_read == 13 * 3 * 20 * layer_bytes


@dataclass(frozen=True)
class Among(Scored):
    """Another scorer, which knows of some pages alone: ``allowed`` bool [L, Hkv, P]."""

    parts: ClassVar[frozenset[str]] = frozenset()
    scorer: Scored
    allowed: torch.Tensor

    def score(self, q, pages):
        scores = self.scorer.score(q, pages)
        known = self.allowed.shape[2]
        scores[..., :known] = scores[..., :known].masked_fill(~self.allowed[pages.layer], -torch.inf)
        return scores


@pytest.mark.parametrize("kind", [PAGES, VISIBLE], ids=["drop", "visible"])
@pytest.mark.parametrize("stage", ["quest", "lserve", "mean_key"])
def test_choosing_is_as_if_the_others_had_never_been(stage, kind, model, engine_for, drain):
    """Against a method that sees the whole sequence, and has been told which pages those are."""
    chosen = staged(stage, **kind)
    engine = engine_for(model)
    engine.submit(PROMPT, params(), method=chosen, request_id="a")
    engine.step()
    (sequence,) = engine._scheduler.running
    allowed = torch.zeros((3, 2, 11), dtype=torch.bool)
    allowed.scatter_(2, sequence.kept.positions.clamp(min=0) // 4, True)
    assert allowed.sum(2).tolist() == [[7] * 2] * 3  # 32 tokens, the open page counts as one
    got = drain(engine).completions["a"].samples[0]
    told = Method("told", Among(chosen.choosing.scorer, allowed), chosen.budget, chosen.digest, keep=chosen.keep)
    told_sample = run(engine_for(model), drain, told)
    assert got.token_ids == told_sample.token_ids
    for one, other in zip(got.logprobs, told_sample.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("page_tokens", [4, 12])
@pytest.mark.parametrize("stage", ["quest", "hybrid", "mean_key"])
def test_digests_are_of_what_is_kept_and_of_what_came_since(stage, page_tokens, model, engine_for, drain, monkeypatch):
    looked = []
    select = Method.select

    def watched(self, q, pages):
        assert isinstance(pages, KeptPages)
        full = torch.arange(pages.max_pages - 1).expand(1, pages.kv_heads, -1)
        keys = pages.keys_at(full)[0].transpose(0, 1)[:, None]  # [P, one layer, Hkv, p, D]
        for part, expected in self.digest.compute(keys, keys, [pages.layer]).items():
            found = pages.digest(part)[0, :-1]
            torch.testing.assert_close(found, expected[:, 0], rtol=0, atol=1e-6)
            at = full.flip(2)
            torch.testing.assert_close(pages.digest_at(part, at)[0], expected[:, 0].transpose(0, 1).flip(1))
        looked.append(pages.max_pages)
        return select(self, q, pages)

    monkeypatch.setattr(Method, "select", watched)
    prompt = PROMPT * (page_tokens // 4)
    engine = engine_for(model, page_tokens=page_tokens, pool_tokens=100 * page_tokens)
    run(engine, drain, staged(stage, 5 * page_tokens), prompt, max_tokens=2 * page_tokens + 3)
    assert len(set(looked)) == 3  # two pages have come since


def test_sequences_of_all_lengths_share_a_batch(model, engine_for, drain, assert_idle):
    chosen, other, again = staged("hybrid"), staged("sparq", 24), staged("quest", base="h2o")
    asked = [(PROMPT, chosen), (PROMPT[:9], chosen), (PROMPT * 2, chosen), (PROMPT[:30], other), (PROMPT[:44], None)]
    asked += [(PROMPT, again), (PROMPT[:23], again)]
    alone = [run(engine_for(model), drain, one, prompt, max_tokens=20) for prompt, one in asked]
    engine = engine_for(model, pool_tokens=800)
    ids = [engine.submit(prompt, params(max_tokens=20), method=one) for prompt, one in asked]
    done = drain(engine).completions
    for request_id, single in zip(ids, alone, strict=True):
        sample = done[request_id].samples[0]
        assert sample.token_ids == single.token_ids
        assert (sample.kv_bytes_read, sample.digest_bytes_read) == (single.kv_bytes_read, single.digest_bytes_read)
    assert_idle(engine)


def test_layers_that_keep_everything_read_everything(model, engine_for, drain):
    sample = run(engine_for(model), drain, staged("quest", dense_layers=[1]))
    tokens = 13 * 2 * 20 + sum(-(-n // 4) * 4 for n in range(46, 59))
    assert sample.kv_bytes_read == tokens * 2 * 2 * 16 * 4


def test_recall_lies_between_chance_and_the_oracle_s(model, engine_for, drain):
    recall = {}
    for stage in ("random", "hybrid", "quest", "oracle"):
        engine = engine_for(model)
        probe = Probe(every=1)
        probing.attach(engine, probe)
        chosen = staged(stage, 16, 2.5)
        run(engine, drain, chosen, PROMPT * 2, max_tokens=30)
        found = probe.take(chosen)
        recall[stage] = sum(map(sum, found["page_recall"])) / 6
        assert all(0 < mass < 1 for heads in found["captured_mass"] for mass in heads)
    assert recall["oracle"] == 1.0 and recall["random"] + 0.05 < min(recall["hybrid"], recall["quest"])


def test_what_the_first_stage_keeps_follows_from_the_whole_compression():
    assert Split().tokens(256, 4096) == 1210  # c = 16, a = 0.44
    assert Split().tokens(256, 256 * 1024) == 1024  # c = 1024, a = 0.8
    assert Split().tokens(256, 100) == 100
    assert Times(1.5).tokens(10, 1000) == 15


def test_a_page_s_share_is_estimated_from_some_channels_of_its_chunks():
    view, scorer = View(digest=ChunkBoxes(2)), HybridBound(3)
    scores = scorer.score(view.q, view)
    for row, full in enumerate((8, 5)):
        for head in range(2):
            q = view.q[row, 2 * head : 2 * head + 2]  # [g, D]
            channels = q.abs().sum(0).argsort(descending=True)[:3]
            share = torch.zeros(full)
            for query in q:
                logits = torch.zeros(full, 2)
                for page in range(full):
                    for chunk in range(2):
                        keys = view.k[row, page, head, 2 * chunk : 2 * chunk + 2]
                        for d in channels:
                            bound = keys[:, d].max() if q[:, d].sum() > 0 else keys[:, d].min()
                            logits[page, chunk] += query[d] * bound
                scale = (8 * query[channels].abs().sum() / query.abs().sum()) ** 0.5
                share += (logits / scale).flatten().softmax(0).view(full, 2).sum(1) / 2
            torch.testing.assert_close(scores[row, head, :full], share)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rocketkv", "kvzip", "oracle_drop"])
def test_triton_agrees_with_the_reference(name, make_llama, engine_for, drain):
    """Heads of 64, since Triton's products want at least 16; what looks ahead does so on the card too."""
    model = make_llama(num_hidden_layers=3, hidden_size=128, head_dim=64)
    sizes = {"page_tokens": 16, "pool_tokens": 4000, "step_tokens": 256}
    chosen, prompt = evicting(name, 48), PROMPT * 4
    expected = run(engine_for(model, backend="reference", **sizes), drain, chosen, prompt)
    got = run(engine_for(model.to("cuda"), backend="triton", **sizes), drain, chosen, prompt)
    assert (got.token_ids, got.kv_bytes_read) == (expected.token_ids, expected.kv_bytes_read)


class TestRefusals:
    def test_heads_that_keep_differently(self, model, engine_for):
        chosen = replace(staged("quest_shares"), budget=AdaHeads(20))
        with pytest.raises(ValueError, match=r"lets one head keep more .*take octavo.sparse.budgets.Uniform"):
            engine_for(model).submit(PROMPT, method=chosen)

    def test_parts_that_do_not_fit(self, model, engine_for):
        chosen = replace(staged("quest"), choosing=Choosing(Times(2), UpperBound()))
        with pytest.raises(ValueError, match="needs digest parts"):
            engine_for(model).submit(PROMPT, method=chosen)
        with pytest.raises(ValueError, match="chunk_tokens=3 must divide the page of 4 tokens"):
            ChunkBoxes(3).spec(4, SimpleNamespace(kv_heads=1, head_dim=8))

    @pytest.mark.parametrize("factor", [0.5, True, "2", float("nan"), float("inf")])
    def test_less_than_is_read(self, factor):
        with pytest.raises(ValueError, match=r"choosing.kept.factor must be a number of at least 1"):
            Times(factor)

    def test_a_budget_below_what_is_kept_in_any_case(self, model, engine_for):
        with pytest.raises(ValueError, match="always reads 3 pages of 4 tokens, but the budget is 2 pages"):
            engine_for(model).submit(PROMPT, method=evicting("rocketkv", 8))

    def test_it_does_not_draft(self):
        with pytest.raises(ValueError, match="drops"):
            method("lossless", draft="rocketkv")
