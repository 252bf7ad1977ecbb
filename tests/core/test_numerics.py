"""Paged attention through the whole engine against the model's own, with NaN wherever nobody may look."""

import random

import pytest
import torch

from octavo.core import SamplingParams

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


def expected_rows(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(1)


def compare(model, completion, atol):
    """Every new token's whole log-softmax against one teacher-forced pass; gives the number of rows."""
    sample, prompt = completion.samples[0], completion.prompt_token_ids
    rows = expected_rows(model, prompt + sample.token_ids)[len(prompt) - 1 : -1]
    got = torch.tensor([[entry[i] for i in range(rows.shape[1])] for entry in sample.logprobs])
    assert got.isfinite().all() and (got - rows).abs().max() < atol
    return len(got)


def everything(new):
    return SamplingParams(max_tokens=new, logprobs=128, ignore_eos=True)


@BACKENDS
@pytest.mark.parametrize("step_tokens", [64, 7, 1], ids=["prefill", "chunks", "one_by_one"])
def test_br31_nan_behind_the_window(w_model, engine_for, poison_pool, step_tokens, backend):
    engine = engine_for(w_model, step_tokens=step_tokens, backend=backend)
    engine.submit(tokens(33), everything(7), request_id="a")
    kv, completion = engine._runner.kv, None
    while engine.has_work():
        for sequence in engine._scheduler.running:
            behind = max(0, sequence.computed - 7) // 4  # whole pages that no later query can see
            kv[sequence.table.pages(0, behind)] = float("nan")
            held = sequence.table.pages()
            last = sequence.computed % 4
            if last:
                kv[held[sequence.computed // 4], :, :, :, last:] = float("nan")
        for out in engine.step():
            completion = out.completion or completion
        engine.check()
    assert compare(w_model, completion, 3e-4) == 7


@BACKENDS
@pytest.mark.parametrize("page_tokens", [1, 5, 16, 48, 128, 256])
def test_br32_page_sizes_and_fills(t_model, engine_for, page_tokens, backend):
    lengths = sorted({1, 13, max(1, page_tokens - 1), page_tokens, page_tokens + 1} & set(range(1, 200)))
    engine = engine_for(t_model, page_tokens=page_tokens, pool_tokens=2000, backend=backend)
    completions = engine.generate([tokens(n, n) for n in lengths], everything(3))
    assert sum(compare(t_model, completion, 3e-4) for completion in completions) == 3 * len(lengths)


@BACKENDS
@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_br34_soft_caps_on_every_path(engine_for, cap, backend):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    def build(cap):
        torch.manual_seed(0)
        config = Gemma2Config(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=256, attn_logit_softcapping=cap,
            sliding_window=256, query_pre_attn_scalar=16, pad_token_id=None, bos_token_id=None, eos_token_id=2,
            initializer_range=0.5, attn_implementation="eager",
        )  # fmt: skip
        model = Gemma2ForCausalLM(config).eval()
        for layer in model.model.layers:  # raw scores of some hundreds
            layer.self_attn.q_proj.weight.data *= 8
        return model

    model, uncapped = build(cap), build(None)
    prompt = tokens(22)
    assert (expected_rows(model, prompt) - expected_rows(uncapped, prompt)).abs().max() > 1e-2
    for fields in ({}, {"step_tokens": 7}, {"step_tokens": 1}):
        engine = engine_for(model, backend=backend, **fields)
        for hits in (0, 20):
            completion = engine.generate([prompt], everything(4))[0]
            assert completion.cached_tokens == hits and compare(model, completion, 1e-3) == 4


def test_br36_rows_do_not_touch_each_other(t_model, engine_for):
    batch = engine_for(t_model).generate([tokens(n, n) for n in (1, 5, 9)], everything(4))
    assert sum(compare(t_model, completion, 3e-4) for completion in batch) == 12


def test_the_same_prompt_twice_in_one_row_stays_apart(t_model, engine_for):
    engine = engine_for(t_model, prefix_cache=False)
    both = engine.generate([tokens(9), tokens(9)], everything(3))
    assert sum(compare(t_model, completion, 3e-4) for completion in both) == 6


@pytest.mark.parametrize("new", [1, 7])
def test_batch_mates_steps_and_pages_change_nothing(t_model, engine_for, new):
    prompt, seen = tokens(13), []
    for fields in ({}, {"page_tokens": 16}, {"step_tokens": 3}, {"max_seqs": 1}, {"allocator": "stack"}):
        engine = engine_for(t_model, **fields)
        mates = [tokens(n, n) for n in (4, 20)]
        seen.append(engine.generate([mates[0], prompt, mates[1]], everything(new))[1])
    assert sum(compare(t_model, completion, 3e-4) for completion in seen) == 5 * new
    assert len({tuple(completion.samples[0].token_ids) for completion in seen}) == 1


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"min_tokens": 8}, {"min_new_tokens": 8}),
    ],
    ids=["penalty", "reward", "minimum"],
)
def test_transforms_equal_those_of_transformers(make_llama, engine_for, ours, theirs):
    model, compared = make_llama(seed=3), 0
    for seed in range(6):
        prompt = tokens(9, seed)
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=list(range(3, 40)), pad_token_id=0,
            output_scores=True, return_dict_in_generate=True, **theirs,
        )  # fmt: skip
        got = engine_for(model).generate(
            [prompt], SamplingParams(max_tokens=12, stop_token_ids=list(range(3, 40)), **ours)
        )
        gaps = torch.cat(out.scores).topk(2).values
        assert (gaps[:, 0] - gaps[:, 1]).min() > 1e-3
        assert got[0].samples[0].token_ids == out.sequences[0, len(prompt) :].tolist()
        compared += len(got[0].samples[0].token_ids)
    assert compared > 10
