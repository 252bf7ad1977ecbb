"""The contract of every method that drops tokens of images, on one table that is read from ``configs/sparse``."""

from dataclasses import replace

import pytest
import torch

from octavo.core.scheduler import StepPlan
from octavo.core.serving.prompts import TokenSegment
from octavo.scripts.build import method, reuse
from octavo.scripts.refusal import ConfigError

from ..pictures import A, B, C, FakeEncoder, text
from .method_cases import VISUAL
from .method_cases import make as selecting
from .visual_cases import PROMPT, QUESTION, SPANS, TOKENS, ScoringEncoder, every, idle, params, seeing, visual

ANY = {"per": "prompt"}, {"grain": "page"}


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


def run(engine, drain, requests, **options):
    """``requests``: id -> (prompt, method)."""
    for request_id, (prompt, chosen) in requests.items():
        engine.submit(prompt, params(), method=chosen, request_id=request_id, **options)
    return drain(engine).completions


def alone(engine, drain, chosen, prompt=PROMPT, **options):
    return run(engine, drain, {"a": (prompt, chosen)}, **options)["a"].samples[0]


def compressed(engine, chosen, prompt=PROMPT):
    """The kept positions int64 [L, Hkv, n] of a prompt that was just computed, and those since."""
    engine.submit(prompt, params(), method=chosen, request_id="a")
    engine.step()
    engine.check()
    (sequence,) = engine._scheduler.running
    return sequence.kept.positions, list(range(sequence.kept.end, TOKENS))


def retained(model, prompt, positions, tokens):
    """Greedy tokens and their log-probabilities of transformers itself, after a dense prefill of which each layer and
    head keeps some positions, a list for each."""
    from transformers import DynamicCache

    embed, encoder = model.get_input_embeddings(), FakeEncoder()
    rows = [embed(torch.tensor(p.token_ids)) if hasattr(p, "token_ids") else encoder.rows(p) for p in prompt]
    cache, drawn, logprobs = DynamicCache(), [], []
    length = sum(map(len, rows))
    with torch.inference_mode():
        logits = model(inputs_embeds=torch.cat(rows)[None], past_key_values=cache, use_cache=True).logits[0, -1]
        for layer, kept in zip(cache.layers, positions, strict=True):
            width = max(map(len, kept))
            full = [layer.keys, layer.values]
            for at, heads in enumerate(full):
                own = [heads[0, head, kept[head]] for head in range(len(kept))]
                assert all(len(one) == width for one in own), "transformers keeps as many in every head"
                full[at] = torch.stack(own)[None]
            layer.keys, layer.values = full
        for step in range(tokens):
            drawn.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1).max()))
            at = torch.tensor([[length + step]])
            out = model(torch.tensor([drawn[-1:]]), past_key_values=cache, position_ids=at, cache_position=at[0],
                        use_cache=True)  # fmt: skip
            logits = out.logits[0, -1]
    return drawn, logprobs


def values(sample):
    return [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]


@pytest.mark.parametrize("name", VISUAL)
def test_to_keep_all_is_dense_bit_for_bit(name, model, drain):
    dense = alone(seeing(model), drain, None)
    full = alone(seeing(model), drain, visual(name, 1))
    assert full.logprobs == dense.logprobs and full.kv_bytes_read == dense.kv_bytes_read


@pytest.mark.parametrize("parts", [{}, *ANY], ids=str)
@every
def test_text_is_kept_whole_and_a_share_of_images(name, parts, model):
    positions, since = compressed(seeing(model), visual(name, **parts))
    images = {at for start, end in SPANS for at in range(start, end)}
    kept_shares = []
    for layer in positions.tolist():
        for head in layer:
            kept = {at for at in head if at >= 0}
            assert kept - images == {*range(TOKENS)} - images - {*since}
            kept_shares.append(len(kept & images) / len(images))
    if parts:
        return
    dense = {"fastv": 1, "pyramid_drop": 1}.get(name, 0)  # of three layers
    assert kept_shares[: 2 * dense] == [1.0] * 2 * dense
    rest = kept_shares[2 * dense :]
    assert sum(rest) / len(rest) == pytest.approx(0.5, abs=2 / len(images))  # rounded up, for each image


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["visual_random", "visual_knorm", "look_m", "cls_attention"])
def test_what_is_kept_is_attended_to_at_its_own_positions(name, backend, model, drain):
    """Dense attention over the retained (token, position) pairs, computed by transformers, which wants as many in each
    head; the others differ from these in what they choose alone."""
    engine = seeing(model, backend=backend)
    positions, since = compressed(engine, visual(name))
    kept = [[[at for at in head if at >= 0] + since for head in layer] for layer in positions.tolist()]
    tokens, logprobs = retained(model, PROMPT, kept, 8)
    sample = drain(engine).completions["a"].samples[0]
    assert sample.token_ids == tokens
    assert values(sample) == pytest.approx(logprobs, abs=5e-4)


@pytest.mark.parametrize("parts", [{}, {"grain": "page"}, {"grain": "page", "placement": "visible"}], ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_slots_may_be_more_than_positions(backend, parts, model, drain):
    """Layer 0 keeps all 35 tokens in front of the open page, so a slot of its last unit is empty; pages that are only
    hidden leave more. The last tokens are seen all the same."""
    engine, prompt = seeing(model, backend=backend), [text(6), *PROMPT[1:]]
    positions, _ = compressed(engine, visual("fastv", **parts), prompt)
    since = list(range(35, TOKENS + 1))
    kept = [[[at for at in head if at >= 0] + since for head in layer] for layer in positions.tolist()]
    assert kept[0] == [[*range(TOKENS + 1)]] * 2
    tokens, logprobs = retained(model, prompt, kept, 8)
    sample = drain(engine).completions["a"].samples[0]
    assert sample.token_ids == tokens and values(sample) == pytest.approx(logprobs, abs=5e-4)


@pytest.mark.parametrize("name", ["snapkv", "knorm_drop", "tova"])
def test_methods_that_rate_all_tokens_serve_prompts_with_images(name, model, drain):
    engine = seeing(model)
    scorer = {"scorer": {"window": 4, "kernel": 3}} if name == "snapkv" else {}
    chosen = method(name, budget_tokens=20, keep={"sink_tokens": 2, "recent_tokens": 4}, every=0, **scorer)
    positions, since = compressed(engine, chosen)
    kept = [[[at for at in head if at >= 0] + since for head in layer] for layer in positions.tolist()]
    assert {len(head) for layer in kept for head in layer} == {20}
    tokens, logprobs = retained(model, PROMPT, kept, 8)
    sample = drain(engine).completions["a"].samples[0]
    assert sample.token_ids == tokens and values(sample) == pytest.approx(logprobs, abs=5e-4)


def test_pages_are_kept_whole(model):
    positions, _ = compressed(seeing(model), visual("visual_knorm", grain="page"))
    pages = [range(5, 11), range(11, 14), range(17, 23), range(23, 29), range(29, 30)]
    for layer in positions.tolist():
        for head in layer:
            kept = [page for page in pages if set(page) & set(head)]
            assert all(set(page) <= set(head) for page in kept)
            assert [sum(page in kept for page in own) for own in (pages[:2], pages[2:])] == [1, 2]


def test_a_share_of_the_prompt_goes_to_the_best_images(model):
    class Second(ScoringEncoder):
        def encode_scored(self, items):
            scored = super().encode_scored(items)
            return scored._replace(scores=scored.scores + 10.0 * (items[0] == B))

    positions, _ = compressed(seeing(model, Second()), visual("cls_attention", per="prompt"))
    (first, second) = ({*range(*span)} for span in SPANS)
    assert all(
        not first & set(head) and len(second & set(head)) == 11 for layer in positions.tolist() for head in layer
    )


@every
class TestWhatDoesNotMatter:
    def test_how_the_prompt_is_cut(self, name, model, drain):
        chosen = visual(name)
        whole = alone(seeing(model), drain, chosen)
        for step_tokens in (1, 7):
            cut = alone(seeing(model, step_tokens=step_tokens), drain, chosen)
            assert cut.token_ids == whole.token_ids and values(cut) == pytest.approx(values(whole), abs=1e-4)

    def test_who_is_preempted_and_what_was_cached(self, name, model, drain):
        chosen = visual(name)
        single = alone(seeing(model), drain, chosen).token_ids
        engine = seeing(model)
        dense = alone(engine, drain, None).token_ids
        engine.submit(PROMPT, params(), method=chosen, request_id="a")
        for _ in range(3):
            engine.step()
        for sequence in list(engine._scheduler.running):
            engine._scheduler._preempt(sequence, StepPlan())
            engine.check()
        completion = drain(engine).completions["a"]
        assert completion.samples[0].token_ids == single and completion.cached_tokens > 0
        assert alone(engine, drain, None).token_ids == dense  # nothing was written to shared pages

    def test_who_is_beside_it(self, name, model, drain):
        chosen = visual(name)
        requests = {"a": (PROMPT, chosen), "b": ([text(9, 4), C, text(8)], chosen), "c": (PROMPT, None)}
        requests |= {"d": ([text(20, 7)], chosen)}
        singles = {name: alone(seeing(model), drain, own, prompt) for name, (prompt, own) in requests.items()}
        engine = seeing(model)
        together = run(engine, drain, requests)
        for name, single in singles.items():
            sample = together[name].samples[0]
            assert (sample.token_ids, sample.kv_bytes_read) == (single.token_ids, single.kv_bytes_read)
        idle(engine)


@every
class TestPlacements:
    def test_the_answer_is_the_same_and_pages_lie_elsewhere(self, name, model, drain):
        dropped = alone(seeing(model), drain, visual(name))
        engine = seeing(model, host_tokens=200)
        engine.submit(PROMPT, params(), method=visual(name, placement="host"), request_id="a")
        engine.step()
        engine.check()
        stats = engine.stats()
        assert stats.units_cached == 0 and stats.host_units_held > 0
        hosted = drain(engine).completions["a"].samples[0]
        assert hosted.logprobs == dropped.logprobs and hosted.kv_bytes_read == dropped.kv_bytes_read
        assert hosted.kv_bytes_resident == dropped.kv_bytes_resident
        idle(engine)

    def test_recall_loses_nothing_and_dropping_does(self, name, model, drain):
        """The second turn of a session sees all of every image again, or what the first has left."""
        answers = {}
        for placement in ("drop", "host"):
            chosen = visual(name, 0.25, placement=placement)
            engine = seeing(model, host_tokens=200)
            session = engine.session(PROMPT, method=chosen)
            session.generate(params())
            assert (engine.stats().units_held == 0) == (placement == "host")
            session.append(QUESTION)
            history = session.tokens.copy()
            answers[placement] = session.generate(params())
            engine.check()
            session.close()
            idle(engine)
        again = [text(5), A, text(3, 1), B, TokenSegment("text", history[30:])]
        fresh = alone(seeing(model), drain, visual(name, 0.25), again)
        hosted = answers["host"].samples[0]
        assert hosted.token_ids == fresh.token_ids and values(hosted) == pytest.approx(values(fresh), abs=1e-4)
        assert answers["host"].cached_tokens >= 5  # found in the host tier
        assert answers["drop"].samples[0].logprobs != hosted.logprobs

    def test_a_full_host_tier_leaves_pages_on_the_device(self, name, model, drain):
        engine = seeing(model, host_tokens=8)
        sample = alone(engine, drain, visual(name, placement="host"))
        assert sample.logprobs == alone(seeing(model), drain, visual(name)).logprobs
        engine.check()
        assert engine.stats().units_cached > 0 == engine.stats().units_held


class TestEncoderScores:
    def test_the_best_of_each_image_stay(self, model):
        positions, _ = compressed(seeing(model), visual("cls_attention", 0.3))
        for head in positions.flatten(0, 1).tolist():
            first, second = ({at - start for at in head if start <= at < end} for start, end in SPANS)
            assert first == {1, 4, 7} and second == {1, 4, 7, 10}

    def test_the_encoder_is_asked_once_and_only_for_such_a_method(self, model, drain):
        encoder = ScoringEncoder()
        engine = seeing(model, encoder)
        alone(engine, drain, visual("fastv"))
        assert (len(encoder.calls), len(encoder.scored)) == (2, 0)
        chosen = visual("cls_attention")
        first = alone(engine, drain, chosen)  # the images are found, and yet nothing is known of their tokens
        assert (len(encoder.calls), len(encoder.scored)) == (2, 2)
        assert alone(engine, drain, chosen).token_ids == first.token_ids
        assert (len(encoder.calls), len(encoder.scored)) == (2, 2)

    def test_a_worker_gives_scores_with_embeddings(self, model, drain):
        from octavo.multimodal import EncodeWorker

        chosen = visual("cls_attention")
        encoder = ScoringEncoder()
        with EncodeWorker(encoder) as worker:
            sample = alone(seeing(model, worker), drain, chosen)
        assert sample.logprobs == alone(seeing(model), drain, chosen).logprobs
        assert not encoder.calls and sorted(map(len, encoder.scored)) == [1, 1]

    def test_an_encoder_that_fails_ends_its_own_requests(self, model, drain):
        class Failing(ScoringEncoder):
            def encode_scored(self, items):
                raise RuntimeError("no attention today")

        engine = seeing(model, Failing())
        alone(engine, drain, None)  # so that the images are found, and only their scores are missing
        done = run(engine, drain, {"a": (PROMPT, visual("cls_attention")), "b": (PROMPT, visual("fastv"))})
        assert "no attention today" in str(done["a"].error) and done["b"].error is None
        assert done["b"].samples[0].token_ids == alone(seeing(model), drain, visual("fastv")).token_ids
        idle(engine)

    def test_scores_of_another_shape_are_refused(self, model, drain):
        class Wrong(ScoringEncoder):
            def encode_scored(self, items):
                scored = super().encode_scored(items)
                return scored._replace(scores=scored.scores[:, 1:])

        engine = seeing(model, Wrong())
        done = run(engine, drain, {"a": (PROMPT, visual("cls_attention"))})["a"]
        assert "scores of (1, 12), and (1, 13) were due" in str(done.error)


class TestRefusals:
    def test_a_model_without_images(self, model, engine_for):
        with pytest.raises(ValueError, match="'fastv' rates the tokens of images, and this engine reads none"):
            engine_for(model).submit([3, 4, 5], method=visual("fastv"))

    def test_an_encoder_without_a_class_token(self, model):
        engine = seeing(model, FakeEncoder())
        with pytest.raises(ValueError, match=r"'cls_attention' goes by .* FakeEncoder says nothing"):
            engine.submit(PROMPT, method=visual("cls_attention"))
        engine.submit(PROMPT, method=visual("visual_knorm"))

    @pytest.mark.parametrize("share", [0, -0.5, 1.01, True, "half"])
    @pytest.mark.parametrize("name", VISUAL)
    def test_a_share_outside_0_to_1(self, name, share):
        with pytest.raises(ConfigError, match=r"budget.share=.* must be above 0 and at most 1"):
            visual(name, share)

    def test_demoting_without_a_host_tier(self, model):
        with pytest.raises(ValueError, match="demotes pages to the host tier, and host_tokens=0"):
            seeing(model).submit(PROMPT, method=visual("fastv", placement="host"))

    def test_a_layer_that_is_none(self, model, g_model):
        with pytest.raises(ValueError, match=r"scorer.layer=3 is none of the layers .*: \[0, 1, 2\]"):
            seeing(model).submit(PROMPT, method=visual("fastv", scorer={"layer": 3}))
        with pytest.raises(ValueError, match=r"dense_layers \[5\] are not among the 3 layers"):
            seeing(model).submit(PROMPT, method=visual("look_m", dense_layers=[5]))
        with pytest.raises(ValueError, match=r"scorer.layer=1 is none of .*: \[2\]"):
            visual("fastv", scorer={"layer": 1}).validate(seeing(g_model).spec, 4)

    def test_images_that_are_reused(self, model):
        with pytest.raises(ValueError, match="drops tokens, and 2 images of this prompt are reused from elsewhere"):
            seeing(model).submit(PROMPT, method=visual("fastv"), reuse=reuse("zero_copy"))

    def test_methods_that_choose_pages(self, model):
        for chosen in (selecting("quest"), method("snapkv", budget_tokens=40, grain="page")):
            with pytest.raises(ValueError, match="chooses among pages of one size"):
                seeing(model).submit(PROMPT, method=chosen)

    @pytest.mark.parametrize("key", ["grain", "per", "placement"])
    def test_words(self, key):
        with pytest.raises(ConfigError, match=f"{key} must be '.*' or '.*', got 'hidden'"):
            visual("fastv", **{key: "hidden"})


def test_layers_with_a_window_keep_it(g_model, drain):
    for name in set(VISUAL) - {"fastv"}:
        engine = seeing(g_model)
        sample = alone(engine, drain, visual(name))
        assert sample.logprobs != alone(seeing(g_model), drain, None).logprobs
        idle(engine)


def test_a_later_image_has_a_share_of_its_own(model):
    """In a session under "drop", the tokens that an earlier turn has left stay, and a new image is looked at."""
    engine = seeing(model)
    session = engine.session(PROMPT, method=visual("visual_random"))
    session.generate(params(max_tokens=4))
    before = session._parked.kept.positions
    session.append([text(2, 3), C, text(4, 5)])
    session.generate(params(max_tokens=4))
    engine.check()
    after = session._parked.kept.positions
    start = TOKENS + 4 + 2
    for old, new in zip(before.flatten(0, 1).tolist(), after.flatten(0, 1).tolist(), strict=True):
        assert {at for at in old if at >= 0} <= {*new}
        assert len([at for at in new if start <= at < start + C.tokens]) == 2


def test_no_two_methods_are_the_same_composition():
    assert len({replace(visual(name), name="").provenance for name in VISUAL}) == len(VISUAL)


def kept_by(rated):
    """Half of each image, rounded up, by scores [tokens], the earlier where they are equal."""
    found = set()
    for start, end in SPANS:
        best = sorted(range(start, end), key=lambda at: (-float(rated[at]), at))
        found |= {*best[: -(-(end - start) // 2)]}
    return found


def test_attention_is_that_of_transformers(model):
    """What FastV and VL-Cache keep, from the attention that transformers itself says of the whole prompt."""
    embed, encoder = model.get_input_embeddings(), FakeEncoder()
    rows = [embed(torch.tensor(p.token_ids)) if hasattr(p, "token_ids") else encoder.rows(p) for p in PROMPT]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = model(inputs_embeds=torch.cat(rows)[None], output_attentions=True, use_cache=False)
    model.set_attn_implementation(before)
    images = {at for start, end in SPANS for at in range(start, end)}
    positions, _ = compressed(seeing(model), visual("fastv"))
    wanted = kept_by(out.attentions[0][0, :, -1].mean(0))
    for layer in (1, 2):
        assert all({*head} & images == wanted for head in positions[layer].tolist())
    chosen = replace(visual("vl_cache"), budget=visual("visual_knorm").budget)  # the same share in all layers
    positions, _ = compressed(seeing(model), chosen)
    for layer in range(3):
        for head in range(2):
            mass = out.attentions[layer][0, 2 * head : 2 * head + 2, SPANS[-1][1] :].sum(1).mean(0)
            assert {*positions[layer, head].tolist()} & images == kept_by(mass)
