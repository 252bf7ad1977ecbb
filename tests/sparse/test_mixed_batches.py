"""Requests under several methods in one replayed step: each gets what it gets alone, and from eager steps."""

import random

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.execution.decode_program import MOST_SETS, RowSet
from octavo.sparse.lossless import Lossless

from .method_cases import PROMPT, make

METHODS = {
    "dense": None,
    "quest": make("quest", 12),
    "random": make("random", 12),
    "oracle": make("oracle", 12),
    "streaming": make("streaming", 12),
    "ada_kv": make("ada_kv"),
}


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


def watched(engine):
    """The methods of each step that an engine replays from now on."""
    program, launches = engine._runner._program, []
    launch = program.launch

    def noted(sets):
        launches.append({one.method.name if one.method else "dense": one for one in sets})
        return launch(sets)

    program.launch = noted
    return launches


def requests(names):
    """Prompts of several lengths, greedy and drawn, that end one after the other."""
    return [
        (
            PROMPT[: 45 - 2 * number],
            SamplingParams(max_tokens=10 + 3 * number, temperature=0.8 * (number % 2), seed=number, ignore_eos=True),
            METHODS[name],
        )
        for number, name in enumerate(names)
    ]


def serve(engine, drain, asked):
    """What each sample is and what it cost."""
    ids = [engine.submit(prompt, params, method=one) for prompt, params, one in asked]
    done = drain(engine).completions
    samples = [done[request_id].samples[0] for request_id in ids]
    return [(s.token_ids, s.decode_steps, s.kv_bytes_read, s.digest_bytes_read) for s in samples]


@pytest.mark.parametrize(
    "names",
    [
        ("dense", "quest"),
        ("quest", "random"),
        ("quest", "dense", "dense", "quest", "random"),
        ("dense", "quest", "oracle", "streaming"),
        ("ada_kv", "quest", "ada_kv", "dense"),
    ],
    ids=" ".join,
)
def test_a_replayed_mixed_batch_equals_eager_steps_and_each_alone(names, model, engine_for, drain, assert_idle):
    asked = requests(names)
    eager = serve(engine_for(model), drain, asked)
    engine = engine_for(model, execution="graph")
    launches = watched(engine)
    assert serve(engine, drain, asked) == eager
    assert max(map(len, launches)) == len(set(names))
    alone = [serve(engine_for(model), drain, [one])[0] for one in asked]
    assert [tokens for tokens, *_ in alone] == [tokens for tokens, *_ in eager]
    assert_idle(engine)


def test_more_methods_than_a_program_has_lists_for_run_eagerly(model, engine_for, drain):
    names = list(METHODS)
    assert len(names) > MOST_SETS + 1
    asked = requests(names)
    engine = engine_for(model, execution="graph")
    launches = watched(engine)
    assert serve(engine, drain, asked) == serve(engine_for(model), drain, asked)
    assert max(map(len, launches)) == MOST_SETS  # when the first have ended


def test_beside_windows(g_model, engine_for, drain):
    parts = {"dense_layers": []}
    asked = [
        (PROMPT, SamplingParams(max_tokens=15, ignore_eos=True), None),
        (PROMPT[:37], SamplingParams(max_tokens=20, ignore_eos=True), make("quest", 12, **parts)),
        (PROMPT[:30], SamplingParams(max_tokens=12, ignore_eos=True), make("random", 12, **parts)),
    ]
    engine = engine_for(g_model, execution="graph")
    launches = watched(engine)
    assert serve(engine, drain, asked) == serve(engine_for(g_model), drain, asked)
    assert max(map(len, launches)) == 3


def test_one_that_begins_to_choose_finds_its_digests(model, engine_for, drain):
    """Digests are NaN until they are made. Its method chooses for others from the start, and for it later on."""
    chosen = make("quest", 20)
    asked = [
        (PROMPT, SamplingParams(max_tokens=30, ignore_eos=True), chosen),
        (PROMPT[:9], SamplingParams(max_tokens=30, ignore_eos=True), chosen),
    ]
    engine = engine_for(model, execution="graph")
    engine._runner._digest_store(chosen)._store.fill_(torch.nan)
    launches = watched(engine)
    assert serve(engine, drain, asked) == serve(engine_for(model), drain, asked)
    assert [set(names) for names in launches[:1]] == [{"quest", "dense"}] and set(launches[-1]) == {"quest"}


def test_dense_rows_still_read_once_what_they_share(model, engine_for, drain):
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    asked = [(PROMPT, sampling, one) for one in (None, METHODS["quest"], None, None)]
    spared = []
    for execution in ("eager", "graph"):
        engine = engine_for(model, execution=execution, shared_decode_bytes=0)
        launches = watched(engine) if execution == "graph" else []
        spared.append((serve(engine, drain, asked), engine._runner.accounts.bytes_spared))
    assert spared[0] == spared[1] and spared[0][1] > 0
    assert any(sets["dense"].runs is not None for sets in launches if len(sets) == 2)


def test_drafts_beside_dense_and_sparse_requests(model, engine_for, drain):
    long = SamplingParams(max_tokens=24, ignore_eos=True)
    methods = [None, METHODS["quest"], Lossless(METHODS["quest"], 3), Lossless(METHODS["random"], 3)]
    asked = [(PROMPT[: 45 - 3 * number], long, one) for number, one in enumerate(methods)]
    eager = serve(engine_for(model), drain, asked)
    engine = engine_for(model, execution="graph")
    launches = watched(engine)
    assert serve(engine, drain, asked) == eager
    assert {"dense", "quest", "random"} in [set(sets) for sets in launches]
    dense = serve(engine_for(model), drain, [(prompt, params, None) for prompt, params, _ in asked])
    assert [tokens for tokens, *_ in eager[2:]] == [tokens for tokens, *_ in dense[2:]]


def test_lists_that_are_empty_change_nothing(model, engine_for):
    """The program of two methods when nobody is in either list."""
    engine = engine_for(model, execution="graph", max_seqs=4)
    engine.submit(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True), method=METHODS["random"])
    engine.step(), engine.step()
    program = engine._runner._program
    one = program._variant(2, RowSet([0], METHODS["random"], 12))
    program.state.rows.fill_(-1)
    program._lists.fill_(-1)
    kv = engine._runner.kv[1:].clone()
    before = {name: field.clone() for name, field in program.state.fields.items()}
    with torch.inference_mode():
        news = program._run(type(one)(4, sets=(type(one)(2), one)))
    assert news.shape == (3, 4)
    assert all(torch.equal(field, before[name]) for name, field in program.state.fields.items())
    assert torch.equal(engine._runner.kv[1:].nan_to_num(), kv.nan_to_num())


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_on_a_gpu(make_llama, engine_for, drain):
    """Captured graphs of combinations that come and go. Heads of 64, since Triton's products want at least 16."""
    model = make_llama(
        num_hidden_layers=3, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    ).to("cuda")
    fields = {"backend": "triton", "page_tokens": 16, "pool_tokens": 8000, "max_seqs": 12}
    small = {"keep": {"sink_tokens": 16, "recent_tokens": 16}}
    quest, noise = (make(name, 48, 16, **small) for name in ("quest", "random"))
    methods = [None, quest, Lossless(quest, 3), noise, Lossless(noise, 4), None, quest]
    draw = random.Random(0)
    asked = [
        (
            draw.choices(range(3, 128), k=100 + 11 * number),
            SamplingParams(max_tokens=20 + 7 * number, temperature=0.8 * (number % 2), seed=number, ignore_eos=True),
            one,
        )
        for number, one in enumerate(methods)
    ]
    eager = serve(engine_for(model, execution="eager", **fields), drain, asked)
    engine = engine_for(model, execution="graph", **fields)
    launches = watched(engine)
    got = serve(engine, drain, asked)
    assert [tokens for tokens, *_ in got] == [tokens for tokens, *_ in eager]
    assert max(map(len, launches)) == 3
