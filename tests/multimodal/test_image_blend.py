"""Images of which the tokens that deviate most are computed anew, against the same arithmetic done by hand."""

import pytest
import torch

from octavo.core import BatchError
from octavo.core.hf_model import HFModel
from octavo.core.serving.prompts import TokenSegment
from octavo.multimodal.reuse import BlendReuse

from ..pictures import BROKEN, A, FakeEncoder, Picture, preempt, text
from .reuse_cases import PROMPTS, answers, params


class Blended:
    """Plain causal attention that keeps K and V of every layer, or takes those of tokens ``copied`` from another pass
    in layers behind ``layer``."""

    def __init__(self, layer=99, copied=(), other=None):
        self.layer, self.copied, self.other, self.kv = layer, list(copied), other, []

    def attend(self, layer, q, k, v, traits):
        self.kv.append((k.clone(), v.clone()))
        if layer > self.layer:
            k, v = k.clone(), v.clone()
            k[self.copied], v[self.copied] = (x[self.copied] for x in self.other[layer])
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=traits.scale)
        return out.transpose(0, 1)


def blended(model, prompt, reuse, n):
    """The n tokens of the model when it computes everything, and all but the tokens that deviate most are taken, behind
    the layer that is compared, from passes over their image alone."""
    parts, new = list(prompt), []
    hf, encoder = HFModel(model), FakeEncoder()
    for _ in range(n):
        ids_, at, rows, images = [], [], [], []
        for part in [*parts, TokenSegment("text", new)]:
            if isinstance(part, Picture):
                images.append(range(len(ids_), len(ids_) + part.tokens))
                at, rows = [*at, *images[-1]], [*rows, encoder.rows(part)]
            ids_ += [0] * part.tokens if isinstance(part, Picture) else part.token_ids
        ids_, positions = torch.tensor(ids_), torch.arange(len(ids_))
        embedded = torch.tensor(at), torch.cat(rows)
        exact = Blended()
        hf.forward(ids_, positions, None, exact, embedded)
        alone = [(k.clone(), v.clone()) for k, v in exact.kv]
        copied = []
        for image, own in zip(images, rows, strict=True):
            source, where = Blended(), torch.tensor(list(image))
            hf.forward(ids_[where], where, None, source, (torch.arange(len(where)), own))
            for (k, v), (own_k, own_v) in zip(alone, source.kv, strict=True):
                k[where], v[where] = own_k, own_v
            (k, v), (own_k, own_v) = exact.kv[reuse.layer], source.kv[reuse.layer]
            distance = ((k[where] - own_k) ** 2 + (v[where] - own_v) ** 2).sum((1, 2))
            kept = sorted(range(len(where)), key=lambda i: distance[i])[
                : len(where) - -(-int(reuse.share * 100) * len(where) // 100)
            ]
            copied += [image[i] for i in kept]
        logits = hf.forward(ids_, positions, None, Blended(reuse.layer, copied, alone), embedded)
        new.append(int(logits[-1].argmax()))
    return new


BLEND = BlendReuse(share=0.3, layer=1)


@pytest.fixture(scope="module")
def deeper(make_llama):
    """4 layers, of which two are left behind the one that is compared."""
    return make_llama(num_hidden_layers=4)


@pytest.fixture(scope="module")
def wanted(deeper):
    return [blended(deeper, prompt, BLEND, 4) for prompt in PROMPTS[:4]]


class TestBlend:
    @pytest.mark.parametrize("step_tokens", [1, 5, 12, 8192])
    def test_what_deviates_most_is_computed(self, step_tokens, deeper, wanted, served, drain, assert_nothing_held):
        """Of images found and new, on chunks of any size; one after another and in one batch."""
        engine = served(deeper, BLEND, step_tokens=step_tokens)
        for _ in range(2):
            assert [answers(engine, drain, [prompt], tokens=4)[0] for prompt in PROMPTS[:4]] == wanted
        assert answers(served(deeper, BLEND, step_tokens=step_tokens), drain, PROMPTS[:4], tokens=4) == wanted
        assert_nothing_held(engine)

    def test_preempted_at_every_step(self, deeper, wanted, served, drain, assert_nothing_held):
        step = steps = 0
        while step <= steps:
            engine = served(deeper, BLEND, step_tokens=7)
            request = engine.submit(PROMPTS[3], params(4))

            def interfere(drained, engine=engine, step=step):
                for sequence in list(engine._scheduler.running) if drained.steps == step else []:
                    preempt(engine, sequence)
                    engine._pool.release(engine._pool.allocate(engine._pool.available))

            drained = drain(engine, interfere)
            assert drained.tokens_of(request) == wanted[3], step
            assert_nothing_held(engine)
            steps = drained.steps if step == 0 else steps
            step += 1

    def test_samples_and_sessions(self, deeper, wanted, served, drain, assert_nothing_held):
        engine = served(deeper, BLEND)
        request = engine.submit(PROMPTS[0], params(4, n=3, temperature=0.0))
        assert drain(engine).tokens_of(request) == [wanted[0]] * 3
        session = engine.session(PROMPTS[0][:3])
        session.append(PROMPTS[0][3:])
        assert session.generate(params(4)).samples[0].token_ids == wanted[0]
        session.append([A, text(2)])
        session.generate(params(2))
        engine.check()
        session.close()
        assert_nothing_held(engine)

    def test_what_is_found_is_counted_without_it(self, deeper, served, assert_nothing_held):
        engine = served(deeper, BLEND)
        for words in (1, 2):
            done = engine.generate([[text(5, words), A, text(3)]], params(1))[0]
            assert done.cached_tokens == 9 - 3  # 30 % of 9, rounded up
        assert engine.stats().hit_tokens == 2 * 6
        assert_nothing_held(engine)

    def test_an_image_that_cannot_be_encoded(self, deeper, served, assert_nothing_held):
        """At first, or when its tokens are compared."""
        encoder = FakeEncoder()
        engine = served(deeper, BLEND, encoder)
        with pytest.raises(BatchError, match="no such picture"):
            engine.generate([[text(3), BROKEN, text(2)]], params(1))
        engine.generate([[text(3), A, text(2)]], params(1))
        encode = encoder.encode
        encoder.encode = lambda items: encode([BROKEN])
        with pytest.raises(BatchError, match="no such picture"):
            engine.generate([[text(4, 2), A, text(2)]], params(1))
        engine.check()
        engine.generate([[text(3)]], params(1))  # copies that nobody needs any more are made all the same
        assert_nothing_held(engine)

    def test_refusals(self, deeper, t_model, served):
        with pytest.raises(ValueError, match="compares KV in layer 1; of the 2 layers of LlamaForCausalLM"):
            served(t_model, BLEND)
        with pytest.raises(ValueError, match="layer 0"):
            served(deeper, BlendReuse(layer=0))
        with pytest.raises(ValueError, match="see one another"):
            served(deeper, BLEND, FakeEncoder(True)).submit([A, text(2)])
        for share in (0, 1.1, True):
            with pytest.raises(ValueError, match="share must be in"):
                BlendReuse(share=share)
        assert BlendReuse(share=1).head(9, 6) == 9
