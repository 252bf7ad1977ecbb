"""Draws, their seeds and what is reported about them; stopping. BR numbers are those of public bug reports."""

import math
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.execution.sampler import Draw, sample, token_logprobs


def stand_in(params, seed=0, prompt=(0,), generated=()):
    """As much of a sequence as the sampler looks at."""
    return Draw(
        SimpleNamespace(
            request=SimpleNamespace(params=params), seed=seed, generated=len(generated), tokens=[*prompt, *generated],
            drafts=SimpleNamespace(tokens=[]),
        )
    )  # fmt: skip


def draws(logits, count=4000, eos=frozenset(), **params):
    """Frequencies of many seeded draws from one row of logits."""
    row = torch.tensor(logits, dtype=torch.float32)
    params = SamplingParams(**{"temperature": 1.0, **params})
    drawn = sample(row.expand(count, -1), [stand_in(params, seed) for seed in range(count)], eos)
    return np.bincount(drawn.tokens, minlength=len(logits))


LOGITS = [4.0, 3.0, 2.0, 1.0]


class TestDistribution:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_frequencies_follow_the_softmax(self, temperature):
        expected = torch.tensor(LOGITS).div(temperature).softmax(0).numpy() * 4000
        counts = draws(LOGITS, temperature=temperature)
        assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees of freedom, p = 0.001

    def test_one_stream_follows_the_softmax_too(self):
        params = SamplingParams(temperature=1.0, max_tokens=5000)
        row = torch.tensor(LOGITS).expand(4000, -1)
        drawn = sample(row, [stand_in(params, 7, generated=[0] * at) for at in range(4000)], frozenset())
        expected = row[0].softmax(0).numpy() * 4000
        counts = np.bincount(drawn.tokens, minlength=4)
        assert ((counts - expected) ** 2 / expected).sum() < 16.3

    @pytest.mark.parametrize(
        "params, kept",
        [
            ({"top_k": 1}, {0}),
            ({"top_k": 2}, {0, 1}),
            ({"top_k": 99}, {0, 1, 2, 3}),
            ({"top_p": 1e-9}, {0}),
            ({"top_p": 0.64}, {0}),  # softmax: 0.644 0.237 0.087 0.032
            ({"top_p": 0.65}, {0, 1}),
            ({"top_p": 0.89}, {0, 1, 2}),
            ({"top_p": 1.0}, {0, 1, 2, 3}),
            ({"min_p": 0.36}, {0, 1}),  # ratios to the largest: 1 0.368 0.135 0.050
            ({"min_p": 0.37}, {0}),
            ({"min_p": 1.0}, {0}),
            ({"top_k": 2, "top_p": 0.72}, {0}),  # after top-k: 0.731 0.269
            ({"top_k": 2, "top_p": 0.74}, {0, 1}),
            ({"temperature": 1e-6}, {0}),
            ({"temperature": 1e-300}, {0}),
            ({"temperature": 0.0}, {0}),
        ],
        ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
    )
    def test_only_the_kept_set_is_drawn_and_all_of_it(self, params, kept):
        assert set(np.flatnonzero(draws(LOGITS, 1500, **params))) == kept

    def test_order_of_the_vocabulary_does_not_matter(self):
        shuffled = [LOGITS[i] for i in (2, 0, 3, 1)]
        assert set(np.flatnonzero(draws(shuffled, 500, top_k=2))) == {1, 3}

    def test_minus_infinity_is_never_drawn(self):
        counts = draws([1.0, -math.inf, 1.0, -math.inf], top_k=4)
        assert counts[1] == counts[3] == 0 and counts.sum() == 4000

    def test_rows_have_their_own_parameters(self):
        row = torch.tensor(LOGITS).expand(3, -1)
        each = [SamplingParams(), SamplingParams(temperature=9.0, top_k=1), SamplingParams(temperature=1.0, seed=3)]
        together = sample(row, [stand_in(p, 5) for p in each], frozenset()).tokens
        assert together == [sample(row[:1], [stand_in(p, 5)], frozenset()).tokens[0] for p in each]


class TestTransforms:
    @pytest.mark.parametrize("penalty, expected", [(1.0, 0), (1.3, 0), (1.4, 1), (0.5, 0)])
    def test_repetition_penalty_divides_what_was_seen(self, penalty, expected):
        params = SamplingParams(repetition_penalty=penalty)
        assert sample(torch.tensor([LOGITS]), [stand_in(params, prompt=[0])], frozenset()).tokens == [expected]

    def test_repetition_penalty_multiplies_negative_logits(self):
        params = SamplingParams(repetition_penalty=3.0)
        row = torch.tensor([[-1.0, -2.0, -9.0]])
        assert sample(row, [stand_in(params, prompt=[2], generated=[0])], frozenset()).tokens == [1]
        assert row.tolist() == [[-1.0, -2.0, -9.0]]

    @pytest.mark.parametrize("generated, token", [(0, 1), (1, 1), (2, 0)])
    def test_minimum_length_masks_every_ending(self, generated, token):
        params = SamplingParams(min_tokens=2, stop_token_ids=[2])
        row = torch.tensor([[9.0, 1.0, 8.0, 0.5]])
        assert sample(row, [stand_in(params, generated=[3] * generated)], frozenset({0})).tokens == [token]


class TestReports:
    def test_br64_raw_values_of_k_entries_and_the_drawn_token(self):
        params = SamplingParams(temperature=0.5, top_p=0.6, top_k=2, logprobs=2)
        (entry,) = sample(torch.tensor([LOGITS]), [stand_in(params)], frozenset()).logprobs
        assert list(entry) == [0, 1]
        assert entry[0] == pytest.approx(-0.4402, abs=5e-5) and entry[1] == pytest.approx(-1.4402, abs=5e-5)

    @pytest.mark.parametrize(
        "k, token, ids",
        [(0, 0, [0]), (0, 3, [3]), (2, 1, [0, 1]), (2, 3, [0, 1, 3]), (4, 3, [0, 1, 2, 3]), (9, 2, [0, 1, 2, 3])],
    )
    def test_br64_number_of_entries(self, k, token, ids):
        (entry,) = token_logprobs(torch.tensor([LOGITS]), [token], [k])
        assert list(entry) == ids
        assert sum(map(math.exp, entry.values())) <= 1 + 1e-6
        assert list(entry.values()) == pytest.approx(torch.tensor(LOGITS).log_softmax(0)[ids].tolist())

    def test_br64_values_do_not_depend_on_the_transforms(self):
        plain = SamplingParams(logprobs=4)
        shaped = SamplingParams(logprobs=4, temperature=3.0, top_p=0.3, repetition_penalty=2.0, min_tokens=3)
        row = torch.tensor([LOGITS] * 2)
        first, second = sample(row, [stand_in(plain), stand_in(shaped)], frozenset({0})).logprobs
        assert {k: first[k] for k in range(4)} == {k: second[k] for k in range(4)}

    def test_engine_entries_are_aligned_with_its_tokens(self, make_scripted, engine_for):
        model = make_scripted(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) * 2)
        params = SamplingParams(n=2, temperature=1.5, seed=3, max_tokens=9, logprobs=3, ignore_eos=True)
        completion = engine_for(model).generate([[4, 5]], params)[0]
        table = model.lm_head.weight.detach().T * 4
        for one in completion.samples:
            assert len(one.logprobs) == len(one.token_ids) == 9
            for before, token, entry in zip([5, *one.token_ids], one.token_ids, one.logprobs, strict=False):
                expected = table[before].log_softmax(0)
                assert set(entry) == {*expected.topk(3).indices.tolist(), token}
                assert all(entry[i] == pytest.approx(expected[i].item(), abs=1e-5) for i in entry)

    @pytest.mark.parametrize("step_tokens", [64, 3])
    def test_prompt_entries(self, make_scripted, engine_for, step_tokens):
        model = make_scripted(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)) * 2)
        prompt = [3, 1, 4, 1, 5, 9, 2, 6]
        engine = engine_for(model, step_tokens=step_tokens)
        completion = engine.generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True))[0]
        table = model.lm_head.weight.detach().T * 4
        assert len(completion.prompt_logprobs) == 8 and completion.prompt_logprobs[0] is None
        for before, token, entry in zip(prompt, prompt[1:], completion.prompt_logprobs[1:], strict=False):
            expected = table[before].log_softmax(0)
            assert set(entry) == {int(expected.argmax()), token}
            assert entry[token] == pytest.approx(expected[token].item(), abs=1e-5)
        assert completion.samples[0].logprobs is None


@pytest.fixture(scope="module")
def noisy(make_scripted):
    """An S-model from which nothing is certain."""
    return make_scripted(torch.randn(32, 32, generator=torch.Generator().manual_seed(5)))


class TestSeeds:
    PARAMS = MappingProxyType({"temperature": 0.8, "max_tokens": 16, "ignore_eos": True})

    def seeded(self, engine, drain, before=(), after=(), **fields):
        for number, seed in enumerate(before):
            engine.submit([7, number], SamplingParams(seed=seed, **self.PARAMS))
        engine.submit([5] * 9, SamplingParams(seed=42, **self.PARAMS), request_id="it", **fields)
        for number, seed in enumerate(after):
            engine.submit([9, number], SamplingParams(seed=seed, **self.PARAMS))
        return drain(engine).tokens_of("it")

    def test_br59_a_seed_belongs_to_its_request(self, noisy, engine_for, drain):
        alone = self.seeded(engine_for(noisy), drain)
        assert len(set(alone)) > 4
        assert self.seeded(engine_for(noisy), drain, after=[None]) == alone
        assert self.seeded(engine_for(noisy), drain, after=[42, 1]) == alone
        assert self.seeded(engine_for(noisy), drain, before=[None, 3, 42]) == alone
        assert self.seeded(engine_for(noisy, step_tokens=2), drain, before=[1]) == alone
        assert self.seeded(engine_for(noisy, seed=9), drain) == alone

    def test_br59_a_preempted_request_goes_on_with_its_draws(self, noisy, engine_for, drain):
        alone = self.seeded(engine_for(noisy), drain)
        engine = engine_for(noisy, pool_tokens=32)
        engine.submit([5] * 9, SamplingParams(seed=42, **self.PARAMS), request_id="it")
        for _ in range(5):
            engine.step()
        engine.submit([8] * 25, SamplingParams(max_tokens=2), request_id="high", priority=1)
        drained = drain(engine)
        assert engine.stats().preemptions == 1 and drained.order == ["high", "it"]
        assert drained.tokens_of("it") == alone

    def test_samples_are_single_runs_with_consecutive_seeds(self, noisy, engine_for):
        group = engine_for(noisy).generate([[5] * 9], SamplingParams(n=3, seed=41, **self.PARAMS))[0]
        single = [
            engine_for(noisy).generate([[5] * 9], SamplingParams(seed=41 + i, **self.PARAMS))[0] for i in range(3)
        ]
        assert [s.token_ids for s in group.samples] == [c.samples[0].token_ids for c in single]
        assert len({tuple(s.token_ids) for s in group.samples}) == 3

    def test_unseeded_requests_repeat_with_the_engine(self, noisy, engine_for):
        runs = [
            [
                c.samples[0].token_ids
                for c in engine_for(noisy, seed=seed).generate([[5], [5]], SamplingParams(**self.PARAMS))
            ]
            for seed in (0, 0, 1)
        ]
        assert runs[0] == runs[1] != runs[2] and runs[0][0] != runs[0][1]

    @pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63, 2**64 + 5])
    def test_any_integer_is_a_seed(self, noisy, engine_for, seed):
        params = SamplingParams(seed=seed, n=2, **self.PARAMS)
        first, second = (engine_for(noisy).generate([[5]], params)[0] for _ in range(2))
        assert [s.token_ids for s in first.samples] == [s.token_ids for s in second.samples]


@pytest.fixture(scope="module")
def counting(make_chain):
    return make_chain(24, eos=[9, 4], config_eos=9)


class TestStopping:
    """The model counts: 1 2 3 4 ... after 0."""

    def run(self, model, engine_for, prompt=(0,), tokenizer=None, **params):
        engine = engine_for(model, tokenizer)
        one = engine.generate([list(prompt)], SamplingParams(**{"max_tokens": 12, **params}))[0].samples[0]
        engine.check()
        return one.token_ids, one.finish_reason

    @pytest.mark.parametrize(
        "prompt, params, expected, reason",
        [
            ([0], {}, [1, 2, 3, 4], "stop"),
            ([3], {}, [4], "stop"),
            ([4], {}, [5, 6, 7, 8, 9], "stop"),
            ([0], {"ignore_eos": True}, list(range(1, 13)), "length"),
            ([0], {"max_tokens": 4}, [1, 2, 3, 4], "stop"),
            ([0], {"max_tokens": 3}, [1, 2, 3], "length"),
            ([0], {"stop_token_ids": [2]}, [1, 2], "stop"),
            ([0], {"stop_token_ids": [6], "ignore_eos": True}, [1, 2, 3, 4, 5, 6], "stop"),
        ],
    )
    def test_br62_every_source_of_endings(self, counting, engine_for, prompt, params, expected, reason):
        assert self.run(counting, engine_for, prompt, **params) == (expected, reason)

    @pytest.mark.parametrize("eos, config_eos", [(9, None), (None, 9), (9, 5), ([9], [5, 7]), (5, 9)])
    def test_br62_union_of_the_configs(self, make_chain, engine_for, eos, config_eos):
        engine = engine_for(make_chain(24, eos=eos, config_eos=config_eos))
        ids = {i for source in (eos, config_eos) for i in (source if isinstance(source, list) else [source])} - {None}
        assert engine._eos == ids
        assert self.run(engine._model.model, engine_for) == (list(range(1, min(ids) + 1)), "stop")

    def test_br62_the_tokenizers_ending_counts_too(self, make_chain, engine_for, piece_tokenizer):
        tokenizer = piece_tokenizer([f"{i} " for i in range(24)], specials=[3], eos=3)
        assert self.run(make_chain(24), engine_for, tokenizer=tokenizer) == ([1, 2, 3], "stop")

    def test_br62_minimum_length_goes_on_past_an_ending(self, make_scripted, engine_for):
        table = torch.zeros(8, 8)
        table[:, 5], table[:, 6] = 9.0, 8.0  # always the ending, then 6
        model = make_scripted(table, eos=5)
        tokens, reason = self.run(model, engine_for, min_tokens=6)
        assert tokens == [6] * 6 + [5] and reason == "stop"  # six others, then the ending
        assert self.run(model, engine_for) == ([5], "stop")

    def test_br62_an_ending_at_once_gives_no_text(self, make_chain, engine_for, piece_tokenizer):
        tokenizer = piece_tokenizer([f"{i} " for i in range(24)], specials=[1], eos=1)
        engine = engine_for(make_chain(24), tokenizer)
        completion = engine.generate([[0]], SamplingParams(max_tokens=4))[0]
        assert completion.text == "" and completion.samples[0].token_ids == [1]

    def test_a_prompt_may_hold_the_ending(self, counting, engine_for):
        assert self.run(counting, engine_for, [4, 9, 10], max_tokens=3) == ([11, 12, 13], "length")
