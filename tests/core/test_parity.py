"""Greedy generation against transformers' own, in fp32, on tiny random models of many architectures.

Every row of logits is compared, not only the tokens: an engine reports the whole log-softmax with ``logprobs`` = the
vocabulary. A token is compared where the two best logits of the reference are more than 1e-3 apart; after a closer
pair that fell the other way nothing is comparable, and a test fails if that happens to more than a few rows.

Runs with any transformers from 5.0 on; see ``tests/oldest-requirements.txt``.
"""

import copy
import random

import pytest
import torch
import transformers

from octavo.core import Engine, SamplingParams, UnsupportedModelError

from .architectures import MODELS, VOCAB, build, refusal

pytestmark = pytest.mark.parity

NEW = 10
LENGTHS = (1, 6, 13, 22)
GAP, TOLERANCE = 1e-3, 2e-4


class Reference:
    """A model, and for each prompt the tokens and logits of its own ``generate``."""

    def __init__(self, name):
        self.name = name
        self.model = build(name)
        self.prompts = [random.Random(length).choices(range(3, VOCAB), k=length) for length in LENGTHS]
        self.tokens, self.logits = [], []
        for prompt in self.prompts:
            out = self.model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
                max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            self.tokens.append(out.sequences[0, len(prompt) :].tolist())
            self.logits.append(torch.cat(out.logits).float())

    def compare(self, prompt, sample, start=0):
        """Compare a sample with the reference from its token ``start`` on; gives the number of rows compared."""
        compared = 0
        rows = self.logits[prompt][start:]
        for row, token, entry in zip(rows, sample.token_ids, sample.logprobs, strict=False):
            got = torch.tensor([entry[i] for i in range(VOCAB)])
            worst = (got - row.log_softmax(0)).abs().max().item()
            assert worst < TOLERANCE, f"{self.name}, prompt {prompt}, row {start + compared}: off by {worst}"
            compared += 1
            best = row.topk(2)
            if best.values[0] - best.values[1] > GAP:
                assert token == best.indices[0]
            elif token != best.indices[0]:
                break
        return compared


@pytest.fixture(scope="module")
def references():
    made = {}

    def get(name):
        if name not in made:
            made[name] = Reference(name)
        return made[name]

    return get


@pytest.fixture(params=MODELS)
def reference(request, references):
    found = references(request.param)
    if refusal(request.param):
        with pytest.raises(UnsupportedModelError):
            Engine(found.model)
        pytest.skip(refusal(request.param))
    return found


PARAMS = SamplingParams(max_tokens=NEW, logprobs=VOCAB, ignore_eos=True)
ROWS = NEW * len(LENGTHS)


def check_batch(reference, engine):
    completions = engine.generate(reference.prompts, PARAMS)
    engine.check()
    compared = sum(reference.compare(i, c.samples[0]) for i, c in enumerate(completions))
    assert compared >= 0.9 * ROWS
    assert all(len(c.samples[0].token_ids) == NEW for c in completions)


slow = pytest.mark.slow
"""What no architecture has a part in: which page sizes, chunks and backends there are beside the first ones."""

BACKENDS = [pytest.param("reference", marks=slow), "cpu"]


@pytest.mark.parametrize(
    "page_tokens, backend",
    [
        (5, "reference"),
        (16, "cpu"),
        *(pytest.param(size, "reference", marks=slow) for size in (1, 4, 16, 24)),
        *(pytest.param(size, "cpu", marks=slow) for size in (1, 4, 5, 24)),
    ],
)
def test_page_sizes(reference, engine_for, page_tokens, backend):
    check_batch(reference, engine_for(reference.model, page_tokens=page_tokens, backend=backend))


@pytest.mark.parametrize(
    "step_tokens, page_tokens, backend",
    [(7, 4, "cpu"), pytest.param(7, 16, "reference", marks=slow), pytest.param(1, 5, "cpu", marks=slow)],
)
def test_chunks(reference, engine_for, step_tokens, page_tokens, backend):
    engine = engine_for(reference.model, page_tokens=page_tokens, step_tokens=step_tokens, backend=backend)
    check_batch(reference, engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_preemption(reference, engine_for, backend):
    engine = engine_for(reference.model, pool_tokens=32, backend=backend)
    check_batch(reference, engine)
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefix_hits(reference, engine_for, backend):
    engine = engine_for(reference.model, backend=backend)
    prompt, compared = reference.prompts[3], 0
    for extension, hits in [(0, 0), (0, 20), (3, 24), (9, 28)]:
        completion = engine.generate([prompt + reference.tokens[3][:extension]], PARAMS)[0]
        engine.check()
        assert completion.cached_tokens == hits
        compared += reference.compare(3, completion.samples[0], extension)
    assert compared >= 0.9 * (10 + 10 + 7 + 1)


def test_a_future_token_changes_no_earlier_logits(reference, engine_for):
    prompt = reference.prompts[3]
    params = SamplingParams(max_tokens=1, prompt_logprobs=VOCAB)
    other = [*prompt[:-4], *(token ^ 1 for token in prompt[-4:])]
    first, second = (engine_for(reference.model).generate([ids], params)[0].prompt_logprobs for ids in (prompt, other))
    changed = [
        at for at in range(1, len(prompt)) if any(abs(first[at][i] - second[at][i]) > 1e-4 for i in range(VOCAB))
    ]
    assert changed == [len(prompt) - 3, len(prompt) - 2, len(prompt) - 1]


def test_the_window_and_the_cap_matter(references):
    """Else the comparisons above would say nothing about them."""
    ids = torch.tensor([references("mistral").prompts[3]])
    for name, field, value in [
        ("mistral", "sliding_window", None), ("gemma3", "sliding_window", 64), ("gpt_oss", "sliding_window", 64),
        ("phi3", "sliding_window", None), ("starcoder2", "sliding_window", None), ("cohere2", "sliding_window", 64),
        ("gemma2", "sliding_window", 64), ("gemma2", "attn_logit_softcapping", None),
    ]:  # fmt: skip
        model = references(name).model
        config = copy.deepcopy(model.config)
        setattr(config, field, value)
        changed = type(model)(config).eval()
        changed.load_state_dict(model.state_dict())
        with torch.inference_mode():
            difference = (changed(ids).logits[0, -1] - model(ids).logits[0, -1]).abs().max()
        assert difference > 10 * TOLERANCE, name


def test_architectures():
    required = (
        "llama qwen2 qwen3 qwen3_moe mistral gemma2 gemma3 phi3 gpt_oss olmo2 starcoder2 cohere2 gpt_neox granite"
    )
    assert set(required.split()) | {"glm4", "opt"} <= set(MODELS)


@pytest.mark.parametrize(
    "family, fields",
    [
        ("Falcon", {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}),
        ("Bloom", {"hidden_size": 32, "n_head": 2, "n_layer": 2}),
    ],
)
def test_a_model_that_ignores_the_interface_is_refused(family, fields):
    config = getattr(transformers, f"{family}Config")(vocab_size=64, **fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.inference_mode():
        before = model(torch.tensor([[3, 4, 5]])).logits
    with pytest.raises(
        UnsupportedModelError, match=rf"{family}ForCausalLM .*does not follow transformers' AttentionInterface"
    ):
        Engine(model)
    with torch.inference_mode():
        assert torch.equal(model(torch.tensor([[3, 4, 5]])).logits, before)
