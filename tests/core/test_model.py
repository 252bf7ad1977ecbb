"""What the engine asks of a model, and that it leaves the model as it was."""

import pytest
import torch
from torch import nn

from octavo.core import Engine, SamplingParams, UnsupportedModelError
from octavo.core.execution.attention import octavo_attention

GREEDY = {"ignore_eos": True, "max_tokens": 5}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def plain(model):
    with torch.inference_mode():
        return model(IDS).logits


class TestLeavesTheModelAlone:
    def test_br29_two_batches_and_a_forward_pass(self, make_llama, engine_for, assert_idle):
        model = make_llama()
        before, implementation = plain(model), model.config._attn_implementation
        engine = engine_for(model)
        prompts = [[5, 6, 7], [8] * 9, [9, 10]]
        first, second = (engine.generate(prompts, SamplingParams(**GREEDY)) for _ in range(2))
        assert [c.samples[0].token_ids for c in first] == [c.samples[0].token_ids for c in second]
        assert [c.prompt_token_ids for c in second] == prompts
        assert torch.equal(plain(model), before) and model.config._attn_implementation == implementation != "octavo"
        assert_idle(engine)

    def test_br29_after_a_call_that_raised(self, make_llama, engine_for, assert_idle):
        model = make_llama()
        before, implementation = plain(model), model.config._attn_implementation
        engine = engine_for(model)
        expected = engine.generate([[5, 6, 7]], SamplingParams(**GREEDY))[0].samples[0].token_ids

        def broken(*_):
            raise MemoryError("no room")

        hook = model.model.layers[1].mlp.register_forward_pre_hook(broken)
        with pytest.raises(MemoryError):
            engine.generate([[5, 6, 7], [8] * 9], SamplingParams(**GREEDY))
        hook.remove()
        assert torch.equal(plain(model), before) and model.config._attn_implementation == implementation
        assert_idle(engine)
        assert engine.generate([[5, 6, 7]], SamplingParams(**GREEDY))[0].samples[0].token_ids == expected

    def test_two_engines_share_a_model(self, t_model, engine_for):
        first, second = engine_for(t_model), engine_for(t_model, page_tokens=16)
        for engine in (first, second):
            engine.submit([5, 6, 7], SamplingParams(**GREEDY))
        outputs = {0: [], 1: []}
        while first.has_work():
            for number, engine in enumerate((first, second)):
                outputs[number] += [token for out in engine.step() for token in out.new_token_ids]
        assert outputs[0] == outputs[1] and len(outputs[0]) == 5

    def test_no_gradients_are_kept(self, t_model, engine_for):
        engine = engine_for(t_model)
        engine.generate([[5, 6]], SamplingParams(**GREEDY))
        assert not engine._runner.kv.requires_grad and all(p.grad is None for p in t_model.parameters())


class TestProbe:
    def test_what_it_learns(self, w_model, engine_for):
        spec = engine_for(w_model).spec
        assert (spec.name, spec.layers, spec.q_heads, spec.kv_heads, spec.head_dim) == (
            "MistralForCausalLM",
            2,
            4,
            2,
            16,
        )
        assert (spec.windows, spec.vocab_size, spec.max_tokens, spec.kv_dtype) == ((8, 8), 128, 256, torch.float32)

    def test_layers_of_different_shapes(self, make_llama):
        model = make_llama()
        attention = model.model.layers[1].self_attn
        attention.k_proj, attention.v_proj = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        with pytest.raises(UnsupportedModelError, match=r"different shapes: \[\(4, 2, 16, 16\), \(4, 4, 16, 16\)\]"):
            Engine(model)

    def test_encoder_decoders(self):
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
            Engine(T5ForConditionalGeneration(config).eval())

    def test_attention_in_chunks(self, make_llama):
        model = make_llama()
        model.config.attention_chunk_size = 16
        with pytest.raises(UnsupportedModelError, match="attends in chunks of 16"):
            Engine(model)

    @pytest.mark.parametrize("heads, kv_heads", [(5, 1), (6, 2), (12, 2), (28, 4), (7, 7), (8, 8)])
    def test_br38_grouped_heads(self, make_llama, engine_for, heads, kv_heads):
        model = make_llama(
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=8,
            hidden_size=8 * heads,
            num_hidden_layers=1,
        )
        engine = engine_for(model)
        assert (engine.spec.q_heads, engine.spec.kv_heads) == (heads, kv_heads)
        ids = IDS[0].tolist()
        scores = engine.score(ids[:3], ids[3:])
        expected = plain(model)[0, 2:5].log_softmax(1).gather(1, IDS[0, 3:, None])[:, 0].tolist()
        assert scores == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128])
    def test_br39_head_sizes(self, make_llama, engine_for, dim):
        model = make_llama(head_dim=dim, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
        ids = IDS[0].tolist()
        expected = plain(model)[0, 2:5].log_softmax(1).gather(1, IDS[0, 3:, None])[:, 0].tolist()
        for backend in ("reference", "cpu"):
            assert engine_for(model, backend=backend).score(ids[:3], ids[3:]) == pytest.approx(expected, abs=1e-4)


class TestAttentionFunction:
    def call(self, mask, step=None):
        class Module(nn.Module):
            layer_idx = 0

        class Step:
            def attend(self, layer, q, k, v, traits):
                self.traits = traits
                return q

        step = step or Step()
        q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 3, 4)
        out, weights = octavo_attention(Module(), q, k, k, mask, scaling=0.5, sliding_window=7, octavo_step=step)
        assert out.shape == (1, 3, 2, 4) and weights is None
        return step.traits

    def test_traits(self):
        traits = self.call(None)
        assert (traits.scale, traits.window, traits.softcap, traits.sinks) == (0.5, 7, 0.0, None)

    def test_a_causal_mask_of_the_models_own_is_ignored(self):
        causal = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
        self.call(causal)
        self.call(torch.zeros(1, 1, 3, 3).masked_fill(~causal, torch.finfo(torch.float32).min))

    @pytest.mark.parametrize(
        "mask",
        [
            torch.ones(1, 1, 3, 3, dtype=torch.bool),
            torch.zeros(1, 1, 3, 3),
            torch.eye(3, dtype=torch.bool)[None, None],
            torch.full((1, 1, 3, 3), -1e9).triu(1) - torch.arange(3),
        ],
        ids=["both_ways", "additive_both_ways", "window", "slopes"],
    )
    def test_another_mask_is_refused(self, mask):
        with pytest.raises(RuntimeError, match="mask of its own"):
            self.call(mask)

    def test_outside_of_a_step(self, t_model):
        q = torch.zeros(1, 2, 3, 4)
        with pytest.raises(RuntimeError, match="Identity called octavo's attention outside of an engine step"):
            octavo_attention(nn.Identity(), q, q, q, None)
