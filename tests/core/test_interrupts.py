"""Ctrl-C at any line of the engine's own code: it goes on as if nothing had happened."""

import random
import signal
import sys
import threading
from contextlib import contextmanager, suppress

import pytest

from octavo.core import Engine, SamplingParams, interrupts


@contextmanager
def ctrl_c_at(line):
    """Ctrl-C when so many lines of the core have run."""
    left = [line]

    def trace(frame, event, arg):
        code = frame.f_code
        if "core/" not in code.co_filename or code.co_filename == __file__ or code is Engine.step.__code__:
            return None  # between taking the news and returning them Python does not look for signals
        left[0] -= event == "line"
        if left[0] == 0:
            left[0] = -1
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


@pytest.fixture(autouse=True)
def pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("as_if_beside")
@pytest.mark.parametrize(("execution", "n"), [("eager", 2), ("graph", 1)])
def test_any_line_of_a_step(execution, n, t_model, engine_for, host_tier_for, assert_nothing_held):
    """Small pool, host tier and growth, so that steps evict, copy, restore and preempt; single samples are planned
    ahead."""
    rng = random.Random(0)
    params = SamplingParams(n=n, max_tokens=9, temperature=0.9, seed=3, ignore_eos=True)
    prompts = [rng.choices(range(3, 128), k=9)[: rng.randint(4, 9)] + rng.choices(range(3, 9), k=3) for _ in range(12)]
    expected = [[s.token_ids for s in c.samples] for c in engine_for(t_model).generate(prompts, params)]
    engine = host_tier_for(
        t_model, pool_tokens=56, host_tokens=60, base_share=0.5, growth_tokens=8, max_seqs=4, step_tokens=20,
        execution=execution,
    )  # fmt: skip
    ids = [engine.submit(prompt, params) for prompt in prompts]
    done, streams, interrupted = {}, {}, 0
    while engine.has_work():
        try:
            with ctrl_c_at(int(rng.expovariate(1 / 2000)) + 1):
                outputs = engine.step()
        except KeyboardInterrupt:
            interrupted += 1
            outputs = []
        engine.check()
        for out in outputs:
            streams.setdefault((out.request_id, out.sample), []).extend(out.new_token_ids)
            if out.completion is not None:
                done[out.request_id] = [sample.token_ids for sample in out.completion.samples]
    assert interrupted > 20
    assert [done[request_id] for request_id in ids] == expected
    assert [[streams[request_id, sample] for sample in range(n)] for request_id in ids] == expected
    assert_nothing_held(engine)


def test_a_session_and_an_abort(t_model, engine_for, assert_idle):
    engine = engine_for(t_model)
    twins = []
    session = engine.session([5, 6, 7, 8, 9])
    session.generate(SamplingParams(max_tokens=3))
    for line in range(1, 120, 3):
        for call in (
            lambda: twins.append(session.fork()),
            lambda: engine.abort(engine.submit([9, 8, 7])),
            lambda: twins.pop().close() if twins else None,
        ):
            with suppress(KeyboardInterrupt), ctrl_c_at(line):
                call()
            engine.check()
    for request_id in list(engine._requests):
        engine.abort(request_id)
    while engine.has_work():
        engine.step()
    for sequence in list(engine._scheduler.parked):  # also those of forks that nobody got to see
        engine._scheduler.remove(sequence)
    assert_idle(engine)


def test_a_forward_pass_ends_at_once(t_model, engine_for, monkeypatch, drain):
    engine = engine_for(t_model)
    engine.submit([5, 6, 7], SamplingParams(max_tokens=2))

    def forward(*_, **__):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")

    attention = t_model.config._attn_implementation
    with monkeypatch.context() as patch:
        patch.setattr(t_model, "forward", forward)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check()
    assert t_model.config._attn_implementation == attention
    assert len(drain(engine).completions) == 1


def test_a_stretch_that_nobody_ended_ends_without_a_trace():
    """Ctrl-C just where ``with`` ends leaves the end to whoever collects the garbage."""
    with interrupts.held():
        stretch = interrupts.let_through()
        stretch.__enter__()
    del stretch
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_waits_and_who_gets_it():
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with interrupts.held():
        signal.raise_signal(signal.SIGINT)
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
        assert seen == []
        with interrupts.let_through():
            assert seen == [signal.SIGINT]
            signal.raise_signal(signal.SIGINT)
            assert len(seen) == 2
        signal.raise_signal(signal.SIGINT)
        assert len(seen) == 2
    assert len(seen) == 3
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_signal_that_python_does_not_handle_is_left_alone(handler):
    signal.signal(signal.SIGINT, handler)
    with interrupts.held(), interrupts.let_through():
        assert signal.getsignal(signal.SIGINT) == handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_change_nothing():
    handlers = []

    def work():
        with interrupts.held(), interrupts.let_through():
            handlers.append(signal.getsignal(signal.SIGINT))

    with interrupts.held():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert handlers == [signal.getsignal(signal.SIGINT)] != [signal.default_int_handler]
