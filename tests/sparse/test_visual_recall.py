"""Pages of images that were put away when the prompt was computed, and that decoded tokens ask back."""

import pytest
import torch

from octavo.core.compression import frames, recall_step
from octavo.core.compression.compaction import Compaction
from octavo.core.scheduler import StepPlan
from octavo.kernels.layout import entry_units, entry_valid
from octavo.scripts.refusal import ConfigError

from ..pictures import A, B, C, Picture, text
from .visual_cases import PROMPT, QUESTION, idle, params, seeing, visual

NAMES = ("cls_attention", "fastv", "vl_cache")
PAGES = ((5, 11), (11, 14), (17, 23), (23, 29), (29, 30))
"""Of the two images of ``PROMPT``: the last pages of both have empty slots, and the last one an empty unit."""


def recalling(name="vl_cache", placement="host", share=0.4, keep=0.4, **recall):
    given = {"_target_": "octavo.sparse.visual_recall.Recall", "share": share, **recall}
    return visual(name, keep, grain="page", placement=placement, recall=given)


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


@pytest.fixture
def hosting(model):
    def make(**fields):
        return seeing(model, host_tokens=200, **fields)

    return make


def run(engine, drain, requests, **options):
    """``requests``: id -> (prompt, method)."""
    for request_id, (prompt, chosen) in requests.items():
        engine.submit(prompt, params(), method=chosen, request_id=request_id, **options)
    return drain(engine).completions


def alone(engine, drain, chosen, prompt=PROMPT, **options):
    sample = run(engine, drain, {"a": (prompt, chosen)}, **options)["a"].samples[0]
    idle(engine)
    return sample


def values(sample):
    return [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]


def equal(one, other, within=1e-5):
    assert one.token_ids == other.token_ids
    assert values(one) == pytest.approx(values(other), abs=within)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_that_of_pages_that_are_only_hidden(name, backend, model, hosting, drain):
    hidden = alone(seeing(model, backend=backend), drain, recalling(name, "visible"))
    recalled = alone(hosting(backend=backend), drain, recalling(name))
    equal(recalled, hidden)
    assert recalled.digest_bytes_read == hidden.digest_bytes_read > 0
    assert hidden.host_bytes_read == 0 < recalled.host_bytes_read
    assert 0 < recalled.resident_misses <= recalled.resident_lookups
    run_bytes = 2 * 16 * 4  # a unit of 2 tokens, heads of 16, fp32
    assert recalled.host_bytes_read == recalled.resident_misses * 2 * 3 * run_bytes  # K and V of 3 units
    forgotten = alone(hosting(), drain, visual(name, 0.4, grain="page", placement="host"))
    assert values(forgotten) != values(recalled)
    assert forgotten.host_bytes_read == forgotten.digest_bytes_read == 0


def test_pages_come_back_that_the_token_would_keep_itself(model, drain, monkeypatch):
    """In every layer and head, at every token: the pages among the best as many as the head keeps, by boxes around the
    keys that the pool holds, and that it does not keep; two at most."""
    engine = seeing(model)
    seen = []
    joined = recall_step.RecallStep.joined

    def watched(self, layer, traits, q, table, slots):
        wider, more = joined(self, layer, traits, q, table, slots)
        (sequence,) = engine._scheduler.running
        units = engine._runner.tables.entries[0, engine._runner.tables.row(sequence)]
        kept = sequence.kept.recallable.is_kept[layer]
        for head in range(2):
            scores = []
            for start, end in PAGES:
                slot = torch.from_numpy(sequence.layout.slots(start, end))
                keys = engine._runner.kv[entry_units(units[slot // 2]), layer, 0, head, slot % 2]
                low, high = keys.amin(0), keys.amax(0)
                scores.append(max(float(torch.maximum(one * low, one * high).sum()) for one in q[0, 2 * head :][:2]))
            best = sorted(range(5), key=lambda page: -scores[page])[: int(kept[head].sum())]
            wanted = sorted([page for page in best if not kept[head, page]][:2])
            count = int(more[0, 0, head] - slots[0, 0, min(head, slots.shape[2] - 1)]) // 2
            entries = wider[0, 0, head, :count]
            tokens = [range(PAGES[page][0] + unit, min(PAGES[page][0] + unit + 2, PAGES[page][1]))
                      for page in wanted for unit in (0, 2, 4)]  # fmt: skip
            assert entry_valid(entries).tolist() == [len(own) for own in tokens]
            for entry, own in zip(entries, tokens, strict=True):
                if own:
                    slab = int(units[int(sequence.layout.slots(own[0], own[0] + 1)[0]) // 2] >> 9) * 3 + layer
                    assert int(entry_units(entry)) == slab
            assert torch.equal(wider[0, 0, head, count:][: table.shape[3]], table[0, 0, head])
            seen.append(wanted)
        return wider, more

    monkeypatch.setattr(recall_step.RecallStep, "joined", watched)
    alone(engine, drain, recalling("vl_cache", "visible"))
    assert len(seen) >= 7 * 2 * 2 and len({*map(tuple, seen)}) > 2


def test_units_are_given_back_and_frames_are_all_that_comes(hosting, drain):
    engine = hosting()
    engine.submit(PROMPT, params(), method=recalling(), request_id="a")
    engine.step()
    engine.check()
    (sequence,) = engine._scheduler.running
    assert sequence.kept.recallable.frames == 2 and sequence.frames is None and sequence.frames_due == 2 * 3
    held = engine.stats().units_held
    assert sum(engine._host.pins.values()) == len(PAGES)
    engine.step()
    engine.check()
    assert engine.stats().units_held == held + 2 * 3
    assert engine.stats().units_cached == 0  # what was put away is in the host tier alone
    drain(engine)
    assert not engine._host.pins
    idle(engine)


@pytest.mark.parametrize("name", NAMES)
class TestWhatDoesNotMatter:
    def test_how_the_prompt_is_cut(self, name, hosting, drain):
        whole = alone(hosting(), drain, recalling(name))
        for step_tokens in (1, 7):  # chunks round otherwise, and of two pages that score alike one is recalled
            equal(alone(hosting(step_tokens=step_tokens), drain, recalling(name)), whole, within=1e-3)

    def test_who_is_preempted(self, name, hosting, drain):
        whole = alone(hosting(), drain, recalling(name))
        for steps in (1, 2, 5):
            engine = hosting()
            engine.submit(PROMPT, params(), method=recalling(name), request_id="a")
            for _ in range(steps):
                engine.step()
            engine._scheduler._preempt(engine._scheduler.running[0], StepPlan())
            engine.check()
            assert not engine._host.pins
            equal(drain(engine).completions["a"].samples[0], whole)
            idle(engine)

    def test_who_is_beside_it(self, name, hosting, drain):
        chosen, forgetting = recalling(name), visual(name)
        requests = {"a": (PROMPT, chosen), "b": ([text(9, 4), C, B, text(8)], chosen), "c": (PROMPT, forgetting)}
        requests |= {"d": (PROMPT, None), "e": (PROMPT, recalling(name, "visible"))}
        singles = {key: alone(hosting(), drain, own, prompt) for key, (prompt, own) in requests.items()}
        engine = hosting()
        together = run(engine, drain, requests)
        for key, single in singles.items():
            equal(together[key].samples[0], single)
        idle(engine)

    def test_samples_have_frames_of_their_own(self, name, hosting, drain):
        def sampled(engine, seed, n=1):
            given = params(temperature=1.0, seed=seed, n=n)
            engine.submit(PROMPT, given, method=recalling(name), request_id="a")
            return drain(engine).completions["a"].samples

        engine = hosting()
        both = sampled(engine, 5, 2)
        idle(engine)
        for at in (0, 1):
            equal(both[at], sampled(hosting(), 5 + at)[0])


@pytest.mark.parametrize("host_tokens", [8, 24])
def test_where_the_host_has_no_room_all_of_it_stays(host_tokens, model, hosting, drain):
    engine = seeing(model, host_tokens=host_tokens)
    sample = alone(engine, drain, recalling())
    equal(sample, alone(hosting(), drain, recalling()))
    assert sample.host_bytes_read == 0


def test_where_frames_would_take_what_is_freed_all_of_it_stays(model, hosting, drain):
    sample = alone(hosting(), drain, recalling(share=1))
    equal(sample, alone(seeing(model), drain, recalling(placement="visible", share=1)))
    assert sample.host_bytes_read == 0 < sample.digest_bytes_read


@pytest.mark.parametrize("call", [0, 1, 4])
def test_a_step_that_ends_where_pages_have_frames_and_have_not_come(call, hosting, drain, monkeypatch):
    single = alone(hosting(), drain, recalling())
    engine = hosting()
    engine._host.kv.fill_(float("nan"))
    engine.submit(PROMPT, params(), method=recalling(), request_id="a")
    fetch, calls = recall_step.StepAway.fetch, []

    def leave(away, *args, **kwargs):
        calls.append(away)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return fetch(away, *args, **kwargs)

    monkeypatch.setattr(recall_step.StepAway, "fetch", leave)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    engine.check()
    equal(drain(engine).completions["a"].samples[0], single)
    idle(engine)


@pytest.mark.parametrize("unseen", [0, 3])
@pytest.mark.parametrize("where", ["_let_go", "_write", "_digests", "_kept"])
def test_a_compression_that_fails_is_made_again(where, unseen, hosting, drain, monkeypatch):
    """Runs that were taken, and pins, are given back."""
    single = alone(hosting(), drain, recalling(), unseen_tokens=unseen)
    engine = hosting()
    engine.submit(PROMPT, params(), method=recalling(), request_id="a", unseen_tokens=unseen)
    with monkeypatch.context() as patch:

        def fail(*_):
            raise MemoryError("no")

        patch.setattr(Compaction, where, fail)
        with pytest.raises(MemoryError):
            engine.step()
        engine.check()
        assert not engine._host.pins and not len(engine._compaction.split.units)
    equal(drain(engine).completions["a"].samples[0], single)
    idle(engine)


@pytest.mark.parametrize("where", ["upload", "CopiesAhead"])
def test_frames_that_the_device_has_no_room_for(where, hosting, drain, monkeypatch):
    """No page is lost when they cannot be made, at any stage, and they are made with the next step."""
    single = alone(hosting(), drain, recalling())
    engine = hosting()
    engine.submit(PROMPT, params(), method=recalling(), request_id="a")
    with monkeypatch.context() as patch:

        def fail(*_):
            raise MemoryError("no")

        patch.setattr(frames, where, fail)
        with pytest.raises(MemoryError):
            for _ in range(3):
                engine.step()
        engine.check()
    equal(drain(engine).completions["a"].samples[0], single)
    idle(engine)


def test_a_pool_that_is_too_small_for_all_at_once(hosting, drain):
    single = alone(hosting(), drain, recalling())
    engine = hosting(pool_tokens=72)
    for name in "abc":
        engine.submit(PROMPT, params(), method=recalling(), request_id=name, salt=name)
    for sample in (completion.samples[0] for completion in drain(engine).completions.values()):
        equal(sample, single)
    idle(engine)


def test_what_comes_behind_the_decision_asks_too(model, hosting, drain):
    """The last tokens of the prompt are unseen when the method decides, and are computed one by one."""
    answers = {}
    for placement in ("host", "visible"):
        answers[placement] = alone(hosting(), drain, recalling(placement=placement), unseen_tokens=4)
    equal(answers["host"], answers["visible"])
    equal(alone(hosting(step_tokens=3), drain, recalling(), unseen_tokens=4), answers["host"])
    forgotten = alone(hosting(), drain, visual("vl_cache", 0.4, grain="page", placement="host"), unseen_tokens=4)
    assert forgotten.logprobs[0] != answers["host"].logprobs[0]


def test_turns_of_a_session_begin_anew(model, hosting):
    answers = {}
    for placement in ("host", "visible"):
        engine = hosting()
        session = engine.session(PROMPT, method=recalling(placement=placement))
        session.generate(params())
        assert engine.stats().units_held == 0
        session.append([C, text(3, 5)])
        session.append(QUESTION)
        twin = session.fork()
        answers[placement] = session.generate(params()).samples[0]
        engine.check()
        equal(twin.generate(params()).samples[0], answers[placement])
        session.close()
        twin.close()
        idle(engine)
    equal(answers["host"], answers["visible"])


def test_a_prompt_without_images_and_one_that_keeps_all(model, hosting, drain):
    for prompt, keep in (([text(20, 3)], 0.4), (PROMPT, 1)):
        dense = alone(seeing(model), drain, None, prompt)
        assert alone(hosting(), drain, recalling(keep=keep), prompt).logprobs == dense.logprobs


def test_a_session_of_one_image_ends_with_it(hosting, drain):
    """The last page of the prompt is an image's, and full: it is recalled as any."""
    prompt = [text(4), A, B]
    equal(alone(hosting(), drain, recalling("cls_attention"), prompt),
          alone(hosting(), drain, recalling("cls_attention", "visible"), prompt))  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    [
        ({"placement": "drop"}, "placement=drop leaves nothing to recall"),
        ({"grain": "token"}, "recall brings whole pages back, and grain=token"),
        ({"recall": None, "placement": "visible", "grain": "token"}, "placement=visible moves nothing"),
        ({"recall": {"share": 0}}, "recall.share must be a number above 0"),
    ],
)
def test_what_does_not_go_together(change, message):
    recall = {"_target_": "octavo.sparse.visual_recall.Recall"}
    with pytest.raises(ConfigError, match=message):
        if isinstance(change.get("recall"), dict):
            change = {"recall": {**recall, **change["recall"]}}
        visual("fastv", **{"grain": "page", "placement": "host", "recall": recall, **change})


def test_scorers_that_read_what_is_not_there(model, hosting):
    scorer = {"_target_": "octavo.sparse.scorers.TrueMass"}
    with pytest.raises(ValueError, match=r"recall.scorer=TrueMass\(\) reads keys"):
        hosting().submit(PROMPT, method=recalling(scorer=scorer))
    digest = {"_target_": "octavo.sparse.mean_key.MeanKey"}
    with pytest.raises(ValueError, match=r"needs digest parts \['max', 'min'\]"):
        hosting().submit(PROMPT, method=recalling(digest=digest))


@pytest.mark.parametrize(
    "digest, scorer, why",
    [
        ("lserve.SubPageBoxes", "lserve.SubPageBound", "digest.sub_pages=4 must divide the page of 1 tokens"),
        ("infllm.Representatives", "infllm.SumOfDots", "digest.count=4 keys cannot stand for a page of 1 tokens"),
        ("rocketkv.ChunkBoxes", "scorers.Recency", "digest.chunk_tokens=4 must divide the page of 1 tokens"),
    ],
)
def test_digests_that_some_page_of_an_image_is_too_small_for(digest, scorer, why, hosting, drain):
    """They are refused by the prompt, before anything is computed, and served where all pages are as they want them."""
    parts = {key: {"_target_": f"octavo.sparse.{name}"} for key, name in (("digest", digest), ("scorer", scorer))}
    engine = hosting(page_policies={"image": 8})
    with pytest.raises(ValueError, match=rf"recall.digest=.*hold \[1, 5, 8\] tokens: .*{why}.*MinMax"):
        engine.submit([A, text(3), B], method=recalling(**parts))
    idle(engine)
    session = engine.session([A], method=recalling(**parts))
    with pytest.raises(ValueError, match=why):
        session.generate(params())
    session.close()
    whole = [text(5), Picture(7, 24), text(3, 1), Picture(8, 16), text(7, 2)]
    recalled = alone(engine, drain, recalling(**parts), whole)
    equal(recalled, alone(engine, drain, recalling(placement="visible", **parts), whole))
    assert recalled.host_bytes_read > 0


def test_layers_with_a_window_keep_it(g_model, drain):
    hidden = alone(seeing(g_model), drain, recalling("cls_attention", "visible"))
    recalled = alone(seeing(g_model, host_tokens=200), drain, recalling("cls_attention"))
    equal(recalled, hidden)
    assert recalled.host_bytes_read > 0
