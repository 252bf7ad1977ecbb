"""The contract of prefill patterns, on one table that is read from ``configs/sparse``."""

import dataclasses
import random

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.inspection.pattern_watch import PatternWatch
from octavo.core.inspection.prefill_cost import predict_prefill
from octavo.core.interfaces import LayerTraits
from octavo.core.step_plan import StepPlan
from octavo.scripts.build import method
from octavo.sparse.flex_prefill import FlexPrefill
from octavo.sparse.placements import Resident
from octavo.sparse.prefill import AShape, TopPages, VerticalSlash, XAttention

from ..cells import covering
from .method_cases import PATTERNS, SMALL

SPARSE = {
    "a_shape": {"sink_tokens": 4, "window_tokens": 8},
    "flex_prefill": {"mass": 0.3, "divergence": 0.4, "least_tokens": 4},
    "top_pages": {"budget_tokens": 16},
    "vertical_slash": {"queries": 4, "vertical_tokens": 4, "slash_tokens": 4},
    "xattention": {"stride": 2, "mass": 0.5},
    "xattention_quest": {"stride": 2, "mass": 0.5},
}
FULL = {
    "a_shape": {"sink_tokens": 4, "window_tokens": 1000},
    "flex_prefill": {"mass": 1.0},
    "top_pages": {"budget_tokens": 1000},
    "vertical_slash": {"queries": 4, "vertical_tokens": 1000, "slash_tokens": 4},
    "xattention": {"stride": 2, "mass": 1.0},
    "xattention_quest": {"stride": 2, "mass": 1.0},
}
PROMPT = random.Random(0).choices(range(3, 128), k=61)  # seven blocks of 8, and 5 tokens


def make(name, sizes=SPARSE, **prefill):
    parts = dict(SMALL, budget={"tokens": 20}) if name == "xattention_quest" else {}
    return method(name, prefill={"block_tokens": 8, "dense_layers": [0], **sizes[name], **prefill}, **parts)


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


def params(**kwargs):
    return SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "seed": 1, "logprobs": 2, **kwargs})


def run(engine, drain, chosen, prompt=PROMPT, **kwargs):
    request_id = engine.submit(prompt, params(**kwargs), method=chosen)
    return drain(engine).completions[request_id]


def close(one, other):
    """The same tokens, and log-probabilities that differ by rounding alone."""
    assert one.token_ids == other.token_ids
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("name, backend", covering(PATTERNS, ["reference", "cpu"]))
def test_full_coverage_is_dense_bit_for_bit(name, backend, model, engine_for, drain):
    engine = engine_for(model, backend=backend)
    decode = None if name != "xattention_quest" else method("quest", budget_tokens=20, **SMALL)
    # The engine computes a prompt's unfinished block in a step of its own, which rounds a matrix product otherwise.
    dense = run(engine_for(model, backend=backend, step_tokens=56), drain, decode).samples[0]
    full = run(engine, drain, make(name, FULL)).samples[0]
    assert full.logprobs == dense.logprobs and full.kv_bytes_read == dense.kv_bytes_read
    assert full.prefill_bytes_read == predicted(engine, make(name, FULL)).dense_kv_bytes


def predicted(engine, chosen):
    return predict_prefill(
        engine.spec, chosen.prefill, prompt_tokens=len(PROMPT), page_tokens=engine.config.text_page_tokens, itemsize=4
    )


@pytest.mark.parametrize("name, page_tokens", covering(PATTERNS, [4, 8]))
def test_what_is_read_is_less_and_predicted(name, page_tokens, model, engine_for, drain):
    engine = engine_for(model, page_tokens=page_tokens)
    chosen = make(name, block_tokens=8)
    sample = run(engine, drain, chosen).samples[0]
    cost = predicted(engine, chosen)
    assert cost.blocks == 7 and cost.kv_bytes <= cost.dense_kv_bytes
    assert sample.prefill_scoring_bytes_read == cost.scoring_bytes
    assert sample.prefill_bytes_read < 0.85 * cost.dense_kv_bytes
    if chosen.prefill.adaptive:
        assert 0 < sample.prefill_bytes_read <= cost.kv_bytes
    else:
        assert sample.prefill_bytes_read == cost.kv_bytes < 0.85 * cost.dense_kv_bytes
    dense = run(engine_for(model, page_tokens=page_tokens), drain, None).samples[0]
    assert sample.logprobs != dense.logprobs and dense.prefill_bytes_read == 0


@pytest.mark.parametrize("name, backend", covering(PATTERNS, ["reference", "cpu"]))
def test_chunks_do_not_matter(name, backend, model, engine_for, drain):
    whole = run(engine_for(model, backend=backend), drain, make(name)).samples[0]
    for step_tokens in (8, 15, 24):
        engine = engine_for(model, backend=backend, step_tokens=step_tokens)
        chunked = run(engine, drain, make(name)).samples[0]
        close(whole, chunked)
        assert chunked.prefill_bytes_read == whole.prefill_bytes_read
        assert chunked.prefill_scoring_bytes_read == whole.prefill_scoring_bytes_read


@pytest.mark.parametrize("name", PATTERNS)
def test_batch_mates_do_not_matter(name, model, engine_for, drain):
    alone = {None: run(engine_for(model), drain, None), **{n: run(engine_for(model), drain, make(n)) for n in PATTERNS}}
    engine = engine_for(model, max_seqs=16, pool_tokens=1000, step_tokens=100)
    ids = {engine.submit(PROMPT, params(), method=None if n is None else make(n)): n for n in (name, None, *PATTERNS)}
    done = drain(engine).completions
    for request_id, other in ids.items():
        close(done[request_id].samples[0], alone[other].samples[0])


@pytest.mark.parametrize("name", PATTERNS)
def test_shaped_prompts_reach_their_own_pattern_only(name, model, engine_for, drain):
    engine = engine_for(model)
    first = run(engine, drain, make(name))
    assert first.cached_tokens == 0
    dense = run(engine, drain, None)
    assert dense.cached_tokens == 0
    close(dense.samples[0], run(engine_for(model), drain, None).samples[0])
    other = run(engine, drain, make(name, block_tokens=12))
    assert other.cached_tokens == 0
    again = run(engine, drain, make(name))
    assert again.cached_tokens == 56 + 4  # seven blocks, and the full page of the unfinished one
    close(again.samples[0], first.samples[0])
    assert again.samples[0].prefill_bytes_read == 0
    engine.check()


def test_two_methods_share_the_pages_of_one_pattern(model, engine_for, drain):
    engine = engine_for(model)
    alone = run(engine_for(model), drain, make("xattention_quest")).samples[0]
    run(engine, drain, make("xattention"), max_tokens=1)
    both = run(engine, drain, make("xattention_quest"))
    assert both.cached_tokens == 60
    close(both.samples[0], alone)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_block_is_found_whole_or_not_at_all(name, model, engine_for, drain):
    """The choice of a block depends on all of its queries, so half of it says nothing of another prompt."""
    engine = engine_for(model)
    run(engine, drain, make(name))
    other = [*PROMPT[:44], *random.Random(2).choices(range(3, 128), k=17)]  # differs within the sixth block
    found = run(engine, drain, make(name), other)
    assert found.cached_tokens == 40
    close(found.samples[0], run(engine_for(model), drain, make(name), other).samples[0])
    longer = run(engine, drain, make(name), [*PROMPT, *other[:20]])  # the unfinished block is a block here
    assert longer.cached_tokens == 56
    close(longer.samples[0], run(engine_for(model), drain, make(name), [*PROMPT, *other[:20]]).samples[0])


@pytest.mark.parametrize("name", PATTERNS)
def test_later_tokens_do_not_matter(name, model, engine_for, drain):
    """Causality: what is computed of a block depends on nothing behind it."""
    first = run(engine_for(model), drain, make(name), prompt_logprobs=1).prompt_logprobs
    other = [*PROMPT[:40], *random.Random(3).choices(range(3, 128), k=21)]
    second = run(engine_for(model), drain, make(name), other, prompt_logprobs=1).prompt_logprobs
    for at in range(1, 40):
        assert first[at][PROMPT[at]] == pytest.approx(second[at][PROMPT[at]], abs=1e-5)


@pytest.mark.parametrize("name", PATTERNS)
def test_preemption_and_pool_order_do_not_matter(name, model, engine_for, drain):
    chosen = make(name)
    alone = run(engine_for(model), drain, chosen, max_tokens=14).samples[0]
    engine = engine_for(model, pool_tokens=33 * 4, prefix_cache=False)
    engine.submit(random.Random(1).choices(range(3, 128), k=50), params(max_tokens=20), method=chosen)
    request_id = engine.submit(PROMPT, params(max_tokens=14), method=chosen)
    done = drain(engine).completions
    close(done[request_id].samples[0], alone)
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("name", PATTERNS)
def test_a_prompt_that_is_preempted_between_blocks_goes_on(name, model, engine_for, drain):
    chosen = make(name)
    engine = engine_for(model, step_tokens=16)
    request_id = engine.submit(PROMPT, params(), method=chosen)
    for _ in range(2):
        engine.step()
    (sequence,) = engine._scheduler.running
    assert sequence.computed == 32
    engine._scheduler._preempt(sequence, StepPlan())
    engine.check()
    done = drain(engine).completions[request_id]
    close(done.samples[0], run(engine_for(model), drain, chosen).samples[0])
    assert engine.stats().hit_tokens == 32


@pytest.mark.parametrize("name", PATTERNS)
def test_forked_samples_equal_single_runs(name, model, engine_for, drain):
    chosen = make(name)
    forked = run(engine_for(model), drain, chosen, n=3, seed=5, temperature=0.9)
    for i in range(3):
        single = run(engine_for(model), drain, chosen, seed=5 + i, temperature=0.9).samples[0]
        close(forked.samples[i], single)


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("name", PATTERNS)
def test_sessions_compute_the_blocks_that_are_new(name, execution, model, engine_for, drain):
    """A second turn has its own blocks behind what the first has computed, and is the same after a preemption."""
    turns = []
    for preempt in (False, True):
        engine = engine_for(model, execution=execution, max_seqs=4)
        session = engine.session(PROMPT[:21], method=make(name))
        session.generate(SamplingParams(max_tokens=5, ignore_eos=True))
        session.append(PROMPT[21:50])
        request_id = session.submit(SamplingParams(max_tokens=6, ignore_eos=True))
        if preempt:
            for _ in range(3):
                engine.step()
            (sequence,) = engine._scheduler.running
            assert [span[:2] for span in sequence.sparse_spans[:3]] == [(0, 16), (21, 26), (32, 48)]
            engine._scheduler._preempt(sequence, StepPlan())
        turns.append(drain(engine).completions[request_id].samples[0].token_ids)
        engine.check()
    assert turns[0] == turns[1]


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("name", PATTERNS)
def test_short_prompts(name, tokens, model, engine_for, drain):
    dense = run(engine_for(model), drain, None, PROMPT[:tokens], max_tokens=3).samples[0]
    close(run(engine_for(model), drain, make(name), PROMPT[:tokens], max_tokens=3).samples[0], dense)


@pytest.mark.parametrize("name", PATTERNS)
def test_layers_with_a_window_read_their_window(name, g_model, engine_for, drain):
    """Two layers have a window; the pattern chooses in the third alone."""
    chosen = make(name, dense_layers=[])
    engine = engine_for(g_model)
    sample = run(engine, drain, chosen).samples[0]
    assert 0 < sample.prefill_bytes_read <= predicted(engine, chosen).kv_bytes
    close(sample, run(engine_for(g_model, step_tokens=16), drain, chosen).samples[0])


@pytest.mark.parametrize(
    "pattern, message",
    [
        ({"block_tokens": 10}, "blocks of 10 queries are no multiple of the page of 4 tokens"),
        ({"block_tokens": 8, "dense_layers": [3]}, r"dense_layers \[3\] are not among the 3 layers"),
        ({"block_tokens": 256}, "blocks of 256 tokens, but a step has at most step_tokens=100"),
        ({"block_tokens": 24, "stride": 3}, "stride=3 must divide the page of 4 tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_door(pattern, message, model, engine_for):
    bad = make("xattention", **pattern)
    with pytest.raises(ValueError, match=message):
        engine_for(model, step_tokens=100).submit(PROMPT, method=bad)
    with pytest.raises(ValueError, match=message):
        engine_for(model, step_tokens=100, method=bad)


@pytest.fixture(scope="module")
def sinks_model():
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=8, num_local_experts=2,
        num_experts_per_tok=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return GptOssForCausalLM(config).eval()


def test_a_model_with_sinks_is_refused(sinks_model, engine_for):
    engine = engine_for(sinks_model)
    assert engine.spec.sinks
    with pytest.raises(ValueError, match=r"XAttention: .* has attention sinks, .* compute its prompts densely"):
        engine.submit(PROMPT, method=make("xattention"))
    assert not engine.has_work()


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: XAttention(mass=0), "prefill.mass must be a number above 0 and at most 1, got 0"),
        (lambda: FlexPrefill(mass=1.5), "prefill.mass must be a number above 0 and at most 1, got 1.5"),
        (lambda: FlexPrefill(divergence=-1), "prefill.divergence must be a number of at least 0, got -1"),
        (lambda: FlexPrefill(divergence=float("nan")), "prefill.divergence must be a number of at least 0, got nan"),
        (lambda: XAttention(block_tokens=12, stride=8), "stride=8 must divide the block of 12 queries"),
        (lambda: VerticalSlash(queries=129), "queries=129: a block has 128 queries"),
        (lambda: TopPages(budget_tokens=0), "budget_tokens must be an integer of at least 1, got 0"),
        (lambda: AShape(block_tokens=1), "block_tokens must be an integer of at least 2, got 1"),
    ],
)
def test_parameters_must_be_sensible(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


class Blocks:
    """Three blocks of 8 queries, from the third of a sequence on: 20 pages of 4 tokens, 2 KV heads, 4 query heads."""

    layer, page_tokens, block_tokens, first, kv_heads = 1, 4, 8, 2, 2
    traits = LayerTraits(8**-0.5)
    ends = torch.tensor([6, 8, 10])

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(3, 8, 4, 8, generator=generator)
        self.k = torch.randn(10, 2, 4, 8, generator=generator)  # [P, Hkv, p, D]

    def keys(self):
        return self.k

    def probs(self, n):
        """Exact attention of the queries of block n, mean over a group: [Hkv, 8, 40], 0 for what is not seen."""
        keys = self.k.transpose(1, 2).reshape(40, 2, 8)
        scores = torch.einsum("whgd,shd->hgws", self.q[n].view(8, 2, 2, 8), keys) * self.traits.scale
        position = (self.first + n) * 8 + torch.arange(8)
        return scores.masked_fill(torch.arange(40) > position[:, None], -torch.inf).softmax(3).mean(1)


def test_a_shape_is_sinks_and_a_window_before_the_block():
    chosen = AShape(block_tokens=8, sink_tokens=3, window_tokens=6).choose(Blocks())
    assert chosen.shape == (3, 1, 10)
    assert [row.nonzero().flatten().tolist()[:4] for row in chosen[:, 0]] == [[0, 2, 3, 4], [0, 4, 5, 6], [0, 6, 7, 8]]


def test_top_pages_are_the_means_nearest_the_mean_query():
    blocks = Blocks()
    chosen = TopPages(block_tokens=8, budget_tokens=20).choose(blocks)  # 5 pages, two of them the block's own
    for n, end in enumerate((6, 8, 10)):
        for head in range(2):
            query = blocks.q[n].mean(0)[2 * head : 2 * head + 2]
            score = (blocks.k[:, head].mean(1) @ query.T).amax(1)
            best = sorted(range(end - 2), key=lambda page, score=score: -score[page])[:3]
            assert set(chosen[n, head].nonzero().flatten().tolist()) == set(best)


def test_vertical_lines_are_the_most_attended_pages():
    blocks = Blocks()
    chosen = VerticalSlash(block_tokens=8, queries=4, vertical_tokens=8, slash_tokens=0).choose(blocks)
    for n, end in enumerate((6, 8, 10)):
        for head in range(2):
            by_page = blocks.probs(n)[head, 4:].sum(0).view(10, 4).sum(1)
            best = sorted(range(end - 2), key=lambda page, by_page=by_page: -by_page[page])[:2]
            assert set(chosen[n, head].nonzero().flatten().tolist()) == set(best)


def test_a_slash_is_a_distance():
    """All queries attend to what lies 12 to 15 tokens before them: the pages that this band crosses are read."""
    blocks = Blocks()
    blocks.q, blocks.k = torch.zeros(3, 8, 4, 8), torch.zeros(10, 2, 4, 8)
    for token in range(40):  # a key and the queries that look for it share a direction, if they are a band apart
        blocks.k[token // 4, :, token % 4, token % 8] = 20.0
    for n in range(3):
        for i in range(8):
            blocks.q[n, i, :, (i + 16 - 13) % 8] = 20.0
    chosen = VerticalSlash(block_tokens=8, queries=8, vertical_tokens=0, slash_tokens=4).choose(blocks)
    for n, end in enumerate((6, 8, 10)):
        pages = set(chosen[n, 0].nonzero().flatten().tolist())
        # Keys of one direction lie 8 apart, so the best band is that of 5, 13, 21 ... tokens with the most of them.
        bands = torch.zeros(end)
        probs = blocks.probs(n)[0]
        for i in range(8):
            for token in range(end * 4):
                bands[max(0, (end - 2) * 4 + i - token) // 4] += probs[i, token]
        best = int(bands.argmax())
        assert pages == {end - 1 - best - back for back in range(3)} - {-1, -2, -3}


def test_xattention_reads_the_fewest_pages_with_the_mass_of_antidiagonals():
    blocks, stride, mass = Blocks(), 2, 0.6
    chosen = XAttention(block_tokens=8, stride=stride, mass=mass).choose(blocks)
    keys = blocks.k.transpose(1, 2).reshape(40, 2, 8)
    for n, end in enumerate((6, 8, 10)):
        for head in range(2):
            share = torch.zeros(end)
            for h in (2 * head, 2 * head + 1):
                for row in range(4):
                    sees = ((end - 2) * 4) // stride + row + 1
                    scores = torch.zeros(sees)
                    for square in range(sees):
                        for i in range(stride):  # the antidiagonal of a square of queries and keys
                            query = blocks.q[n, row * stride + stride - 1 - i, h]
                            scores[square] += query @ keys[square * stride + i, head]
                    probs = (scores * blocks.traits.scale / stride).softmax(0)
                    for square in range(sees):
                        share[square * stride // 4] += probs[square] / 8
            order = sorted(range(end), key=lambda page, share=share: -share[page])
            needed = next(count for count in range(1, end + 1) if share[order[:count]].sum() >= mass)
            assert set(chosen[n, head].nonzero().flatten().tolist()) == set(order[:needed])


class TestFlexPrefill:
    """Each head by what it attends to, ``a``, and by what pooled queries and keys make of it, ``e``."""

    @staticmethod
    def shares(blocks, n, head):
        end = (6, 8, 10)[n]
        a = blocks.probs(n)[head].sum(0).view(10, 4).sum(1)[:end] / 8
        queries, means = blocks.q[n].mean(0)[2 * head : 2 * head + 2], blocks.k[:end, head].mean(1)
        return a, (queries @ means.T * blocks.traits.scale).softmax(1).mean(0)

    @staticmethod
    def reached(shares, mass):
        order = sorted(range(len(shares)), key=lambda page: -shares[page])
        return set(order[: next(n for n in range(1, len(order) + 1) if shares[order[:n]].sum() >= mass)])

    def test_a_head_that_pooling_tells_reads_what_it_tells(self):
        blocks = Blocks()
        chosen = FlexPrefill(block_tokens=8, mass=0.6, divergence=1.0, least_tokens=0).choose(blocks)
        for n in range(3):
            for head in range(2):
                _, e = self.shares(blocks, n, head)
                assert set(chosen[n, head].nonzero().flatten().tolist()) == self.reached(e, 0.6)

    def test_any_other_reads_lines_and_slashes(self):
        blocks = Blocks()
        chosen = FlexPrefill(block_tokens=8, mass=0.3, divergence=0.0, least_tokens=0).choose(blocks)
        for n, end in enumerate((6, 8, 10)):
            for head in range(2):
                a, _ = self.shares(blocks, n, head)
                bands, probs = torch.zeros(end), blocks.probs(n)[head]
                for i in range(8):
                    for token in range((end - 2) * 4 + i + 1):
                        bands[((end - 2) * 4 + i - token) // 4] += probs[i, token] / 8
                crossed = {end - 1 - band - back for band in self.reached(bands, 0.3) for back in range(3)}
                pages = self.reached(a, 0.3) | {page for page in crossed if page >= 0}
                assert set(chosen[n, head].nonzero().flatten().tolist()) == pages

    def test_heads_differ(self):
        """The bound lies between the divergences of two heads of a block."""
        blocks = Blocks()
        apart = []
        for head in range(2):
            a, e = self.shares(blocks, 0, head)
            middle = (a + e) / 2
            apart.append(float(((a * (a / middle).log()).sum() + (e * (e / middle).log()).sum()) / 2) ** 0.5)
        sizes = {"block_tokens": 8, "mass": 0.4, "least_tokens": 0}
        mixed, aware, lines = (
            FlexPrefill(divergence=bound, **sizes).choose(blocks)[0] for bound in (sum(apart) / 2, 1.0, 0.0)
        )
        by_pooling = apart.index(min(apart))
        assert torch.equal(mixed[by_pooling], aware[by_pooling])
        assert torch.equal(mixed[1 - by_pooling], lines[1 - by_pooling])
        assert not torch.equal(aware, lines)

    def test_the_least_that_is_read(self):
        chosen = FlexPrefill(block_tokens=8, mass=0.01, divergence=1.0, least_tokens=17).choose(Blocks())
        assert chosen.sum(2).unique().tolist() == [5]


@pytest.mark.parametrize("name", ["flex_prefill", "top_pages", "vertical_slash", "xattention"])
def test_content_captures_more_than_chance(name, model, engine_for, drain):
    """The mass of the chosen pages, against as many that are drawn."""
    won = 0.0
    for seed in range(10):
        blocks = Blocks(seed)
        chosen = make(name, dense_layers=[]).prefill.choose(blocks)
        for n, end in enumerate((6, 8)):
            for head in range(2):
                by_page = blocks.probs(n)[head].sum(0).view(10, 4).sum(1) / 8
                free = chosen[n, head, : end - 2]
                won += (by_page[: end - 2][free].sum() - by_page[: end - 2].mean() * free.sum()).item()
    assert won > 0


def test_a_watch_sees_what_is_captured(model, engine_for, drain):
    engine = engine_for(model)
    watch = PatternWatch(engine)
    chosen = make("xattention", dense_layers=[])
    watched = run(engine, drain, chosen).samples[0]
    facts = watch.facts(chosen.prefill)
    assert (
        0 < facts["prefill_captured_mass_least"] < facts["prefill_captured_mass"] < 1
        and 0 < facts["prefill_output_error"] < 1
    )
    assert {layer for _, layer in watch.layers} == {0, 1, 2}
    assert all(found.rows == 56 * 4 for found in watch.layers.values())
    more = PatternWatch(wider := engine_for(model))
    run(wider, drain, make("xattention", mass=0.8, dense_layers=[]))
    wide = more.facts(make("xattention", mass=0.8, dense_layers=[]).prefill)
    assert (
        wide["prefill_captured_mass"] > facts["prefill_captured_mass"]
        and wide["prefill_output_error"] < facts["prefill_output_error"]
    )
    watch.close()
    assert watched.logprobs == run(engine_for(model), drain, chosen).samples[0].logprobs
    assert watch.facts(make("a_shape").prefill) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", PATTERNS)
def test_triton_agrees_with_the_reference(name, model, engine_for, drain):
    import copy

    on_card = copy.deepcopy(model).cuda()
    expected = run(engine_for(model, backend="reference"), drain, make(name)).samples[0]
    got = run(engine_for(on_card, backend="triton"), drain, make(name)).samples[0]
    assert got.token_ids == expected.token_ids and got.prefill_bytes_read == expected.prefill_bytes_read
    for a, b in zip(got.logprobs, expected.logprobs, strict=True):
        assert a == pytest.approx(b, abs=2e-3)


@pytest.mark.parametrize("name", ["xattention_quest", "oracle_token"])
def test_pages_in_the_host_tier_are_refused(name, model, engine_for):
    parts = {"xattention_quest": {"prefill": {"block_tokens": 8, "stride": 2}}}.get(name, {})
    made = method(name, budget_tokens=20, **SMALL, **parts)
    away = dataclasses.replace(made, placement=type("Away", (), {"resolve": Resident.resolve})())
    with pytest.raises(ValueError, match="reads pages of the device alone; take the placement Resident, not Away"):
        away.validate(engine_for(model).spec, 4)
