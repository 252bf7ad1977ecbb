"""A checkpoint on disk with a real (byte-level) tokenizer: loading, text, stop strings and chat."""

import pytest
import torch

from octavo.core import Engine, EngineConfig, SamplingParams

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_llama):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet, "he", "ll", "Ġt"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l"), ("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=specials, chat_template=CHATML
    )
    path = tmp_path_factory.mktemp("checkpoint")
    model = make_llama(len(vocabulary), max_position_embeddings=512)
    model.config.eos_token_id = model.generation_config.eos_token_id = vocabulary["<|im_end|>"]
    model.save_pretrained(path)
    fast.save_pretrained(path)
    return path


@pytest.fixture
def engine(folder):
    config = EngineConfig(page_tokens=4, pool_tokens=800, max_seqs=8, backend="reference")
    return Engine.from_pretrained(folder, config, device="cpu", dtype="float32")


def test_loads_and_generates(engine, folder):
    from transformers import AutoModelForCausalLM

    completion = engine.generate("hello there €", SamplingParams(max_tokens=12, ignore_eos=True))[0]
    ids = completion.prompt_token_ids
    assert engine.tokenizer.decode(ids) == "hello there €" and len(ids) < len("hello there €".encode())
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert completion.samples[0].token_ids == out[0, len(ids) :].tolist()
    assert completion.text == engine.tokenizer.decode(completion.samples[0].token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_element_type(folder, dtype):
    engine = Engine.from_pretrained(folder, EngineConfig(pool_tokens=64), dtype=dtype, device="cpu")
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert engine.spec.kv_dtype == engine._runner.kv.dtype == wanted
    assert len(engine.generate(["hi"], SamplingParams(max_tokens=3, ignore_eos=True))[0].samples[0].token_ids) == 3


@pytest.mark.parametrize("seed", range(6))
def test_streams_of_random_bytes_add_up(engine, drain, seed):
    """A random model emits half characters and invalid bytes all the time."""
    free = engine.generate(["hi"], SamplingParams(max_tokens=40, temperature=1.5, seed=seed, ignore_eos=True))[0]
    params = SamplingParams(max_tokens=40, temperature=1.5, seed=seed, ignore_eos=True, stop=[free.text[8:10]])
    request_id = engine.submit("hi", params)
    drained = drain(engine)
    sample = drained.completions[request_id].samples[0]
    assert drained.text[request_id, 0] == sample.text
    assert sample.text == free.text.split(free.text[8:10])[0] and sample.finish_reason == "stop"
    assert free.text == engine.tokenizer.decode(free.samples[0].token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("ending", [True, False], ids=["ended_by_eos", "ended_by_length"])
def test_chat_turns_are_what_the_template_gives(engine, ending):
    tokenizer = engine.tokenizer
    session = engine.session()
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    for message in messages:
        session.append(message["content"], role=message["role"])
    for _ in range(2):
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert session.tokens == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        # Letters only, and an ending exactly when it is wanted.
        params = SamplingParams(max_tokens=3 if ending else 2, min_tokens=2)
        request_id = session.submit(params)
        forced = iter([*tokenizer("he" + "ll")["input_ids"], tokenizer.eos_token_id])
        force(engine, request_id, forced)
        assert session.tokens[-1] == tokenizer.eos_token_id or not ending
        messages.append({"role": "assistant", "content": "hell"})
        messages.append({"role": "user", "content": "more"})
        session.append("more", role="user")


def force(engine, request_id, forced):
    """Run a request whose draws are replaced."""
    forward = engine._model.forward

    def replaced(input_ids, *args):
        logits = forward(input_ids, *args)
        if len(logits):
            logits = torch.full_like(logits, -9.0)
            logits[:, next(forced)] = 9.0
        return logits

    engine._model.forward = replaced
    engine.finish([request_id])
    engine._model.forward = forward
