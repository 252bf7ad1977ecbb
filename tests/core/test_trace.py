"""Traces: what a recorder takes down, a file that says the same again, and every file that must be refused."""

from __future__ import annotations

import gc
import weakref
import zipfile
from contextlib import suppress
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core import SamplingParams
from octavo.core.inspection import trace as trace_module
from octavo.core.inspection.trace import ALL_EXACT, Event, Trace
from octavo.core.inspection.trace_recorder import TraceBuilder, TraceRecorder
from octavo.core.memory.page_layout import Segment


def small():
    """Two sequences, of which the second shares three tokens of the first."""
    builder = TraceBuilder()
    builder.at(1, 0.5)
    first = builder.open([1, 2, 3, 4, 5], namespace=7, priority=2)
    builder.hit(first, 0, 5)
    builder.grow(first, 5)
    builder.evict(3)
    second = builder.fork(first, 3, [9], exact_tokens=3, provenance=1)
    builder.at(2, 0.75)
    builder.grow(second, 4)
    builder.grow(first, 6, [6])
    builder.park(first)
    builder.close(second)
    return builder.build()


def rows(trace):
    columns = (trace.step, trace.event, trace.sequence, trace.a, trace.b)
    return [
        (step, Event(event).name, *rest)
        for step, event, *rest in zip(*(column.tolist() for column in columns), strict=True)
    ]


def same(one, other):
    return all(
        getattr(one, field.name).dtype == getattr(other, field.name).dtype
        and np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in fields(Trace)
    )


def test_events_and_tokens():
    trace = small()
    assert rows(trace) == [
        (1, "OPEN", 0, 7, 4), (1, "HIT", 0, 0, 5), (1, "GROW", 0, 5, 5), (1, "EVICT", -1, 3, 0),
        (1, "FORK", 1, 0, 3), (2, "GROW", 1, 4, 1), (2, "GROW", 0, 6, 1), (2, "PARK", 0, 0, 0), (2, "CLOSE", 1, 0, 0),
    ]  # fmt: skip
    assert trace.time_s.tolist() == [0.5] * 5 + [0.75] * 4
    assert [tokens.tolist() for tokens in trace.all_tokens()] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9]]
    assert trace.lengths().tolist() == [6, 4] and trace.tokens.tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert trace.segments(0) == [Segment("text", 5)] and trace.segments(1) == []
    assert (trace.priority.tolist(), trace.exact_tokens.tolist()) == ([2, 0], [ALL_EXACT, 3])
    assert (trace.total(Event.EVICT), trace.sequences, len(trace)) == (3, 2, 9)


def test_a_file_says_the_same_again(tmp_path):
    file = tmp_path / "a trace without an ending"
    small().save(file)
    assert same(Trace.load(file), small())
    TraceBuilder().build().save(file)
    assert len(Trace.load(file)) == 0


@given(st.data())
def test_any_trace_comes_back(tmp_path_factory, data):
    builder, known = TraceBuilder(), []
    for step in range(data.draw(st.integers(0, 12))):
        builder.at(step, step / 8)
        kind = data.draw(st.sampled_from(["open", "fork", "grow", "park", "close"]))
        if kind == "open":
            tokens = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=5))
            cut = data.draw(st.integers(1, len(tokens)))
            parts = [Segment("image", cut), *([Segment("text", len(tokens) - cut)] if cut < len(tokens) else [])]
            known.append(builder.open(tokens, segments=parts))
        elif known:
            chosen = data.draw(st.sampled_from(known))
            if kind == "fork":
                known.append(builder.fork(chosen, data.draw(st.integers(0, builder.tokens(chosen))), [step]))
            elif kind == "grow":
                builder.grow(chosen, builder.tokens(chosen) + 1, [step])
            elif kind == "park":
                builder.park(chosen)
            else:
                builder.close(chosen)
                known.remove(chosen)
    trace = builder.build()
    file = tmp_path_factory.mktemp("trace") / "t.npz"
    trace.save(file)
    again = Trace.load(file)
    assert same(again, trace)
    assert [tokens.tolist() for tokens in again.all_tokens()] == [tokens.tolist() for tokens in trace.all_tokens()]
    assert again.lengths().tolist() == [builder.tokens(number) for number in range(trace.sequences)]


def changed(name, at, value):
    def change(trace):
        column = getattr(trace, name).copy()
        column[at] = value
        return {name: column}

    return change


REFUSALS = {
    "dtype": (lambda t: {"a": t.a.astype(np.int64)}, r"a is int64 \[9\], where int32 \[n\] was expected"),
    "axes": (lambda t: {"tokens": t.tokens[None]}, r"tokens is int32 \[1, 7\], where int32 \[n\]"),
    "kinds": (lambda t: {"kinds": np.array([1])}, r"kinds is int64 \[1\], where text \[n\] was expected"),
    "lengths": (lambda t: {"b": t.b[1:]}, "b has 8 entries, and event 9"),
    "facts": (lambda t: {"provenance": t.provenance[:1]}, "provenance has 1 entries, and priority 2"),
    "starts": (lambda t: {"token_starts": t.token_starts[:-1]}, "token_starts has 2 entries, where 2 sequences need"),
    "rise": (changed("token_starts", 1, 8), "token_starts must rise from 0 to 7"),
    "end": (lambda t: {"tokens": t.tokens[:-1]}, "token_starts must rise from 0 to 6, got 0 to 7"),
    "token": (changed("tokens", 2, -1), "token ids must be at least 0, got -1"),
    "exact": (changed("exact_tokens", 0, -3), "exact_tokens must be at least 0, got -3"),
    "kind": (changed("segment_kind", 0, 4), "segment_kind 4 is unknown: there are 1 kinds"),
    "empty segment": (changed("segment_tokens", 0, 0), "a segment has at least 1 token, got 0"),
    "long segment": (changed("segment_tokens", 0, 7), "sequence 0 opens with segments of 7 tokens, and has fewer"),
    "event": (changed("event", 3, 99), "event 99 in row 3 is unknown"),
    "begins": (changed("sequence", 0, 1), "2 sequences must begin in the order of their numbers"),
    "unknown": (changed("sequence", 7, 5), "row 7 is about sequence 5, and there are 2"),
    "negative": (changed("sequence", 7, -1), "row 7 is about sequence -1, and there are 2"),
    "parent": (changed("a", 4, 2), "row 4 is about sequence 2, and there are 2"),
    "itself": (changed("a", 4, 1), "row 4 forks sequence 1 from itself"),
    "early": (changed("sequence", 2, 1), "row 2 is about sequence 1, which has not begun"),
    "late": (changed("event", 2, Event.CLOSE), "row 6 is about sequence 0, which has ended"),
    "late parent": (changed("event", 1, Event.CLOSE), "is about sequence 0, which has ended"),
    "growth": (changed("a", 5, 5), r"row 5 \(GROW\) says 5 tokens, of a sequence that has 4"),
    "reusable": (changed("b", 0, 7), r"row 0 \(OPEN\) says 7 tokens, of a sequence that has 6"),
    "shared": (changed("b", 4, -1), r"row 4 \(FORK\) says -1 tokens, of a sequence that has 6"),
    "step": (changed("step", 2, 0), "step must never fall"),
    "time": (changed("time_s", 2, np.nan), "time_s must never fall"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_contradicts_itself_is_refused(name):
    change, message = REFUSALS[name]
    trace = small()
    with pytest.raises(ValueError, match=message):
        replace(trace, **change(trace))


def columns(**changes):
    made = {field.name: getattr(small(), field.name) for field in fields(Trace)} | {"version": np.int64(1)} | changes
    return {name: value for name, value in made.items() if value is not None}


FILES = {
    "later": ({"version": np.int64(2)}, "version 2, and this octavo reads up to version 1"),
    "no version": ({"version": None}, "no field 'version'; its fields: step, time_s"),
    "odd version": ({"version": np.array([1])}, "where a whole number of at least 1 was expected"),
    "missing": ({"priority": None}, "no field 'priority'; its fields: step, time_s"),
    "dtype": ({"step": np.zeros(9)}, r"step is float64 \[9\], where int32 \[n\] was expected"),
    "pickle": ({"a": np.array([{}] * 9)}, "Object arrays cannot be loaded"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_traces_are_refused(name, tmp_path):
    changes, message = FILES[name]
    file = tmp_path / "wrong.npz"
    np.savez(file, **columns(**changes))
    with pytest.raises(ValueError, match=rf"wrong\.npz is no trace that can be read: .*{message}"):
        Trace.load(file)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"text"], ids=["empty", "torn", "text"])
def test_damaged_files_are_refused(content, tmp_path):
    file = tmp_path / "damaged.npz"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged\.npz is no trace that can be read"):
        Trace.load(file)


def test_no_damage_gets_past(tmp_path):
    """Whatever byte is wrong, it is a ValueError, or nothing that was read."""
    file = tmp_path / "damaged.npz"
    np.savez_compressed(file, **columns())
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        with suppress(ValueError):
            Trace.load(file)


CLAIMS = {
    "too much": ((10**10,), r"tokens\.npy claims 40000000000 bytes, shape \[10000000000\], and has 24"),
    "too little": ((5,), r"tokens\.npy claims 20 bytes, shape \[5\], and has 24"),
    "negative": ((-6,), r"claims -24 bytes"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_column_has_what_its_header_claims(name, tmp_path):
    """Refused before room is made for it."""
    shape, message = CLAIMS[name]
    file = tmp_path / "claims.npz"
    np.savez(file, **columns(tokens=None))
    with zipfile.ZipFile(file, "a") as archive, archive.open("tokens.npy", "w") as column:
        np.lib.format.write_array_header_1_0(column, {"descr": "<i4", "fortran_order": False, "shape": shape})
        column.write(bytes(24))
    with pytest.raises(ValueError, match=message):
        Trace.load(file)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "bomb.npz"
    np.savez_compressed(file, **columns(tokens=np.zeros(10_000, np.int32)))
    monkeypatch.setattr(trace_module, "MAX_BYTES", 20_000)
    with pytest.raises(ValueError, match=r"it unpacks to 4\d{4} bytes, and a trace has at most 20000"):
        Trace.load(file)


def test_a_single_array_is_refused(tmp_path):
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(ValueError, match="one array, where an"):
        Trace.load(tmp_path / "one.npz")


class TestRecorder:
    def test_two_requests_with_a_common_page(self, t_model, engine_for):
        """Pages of 4. The second request finds one page of the first; each new token is drawn a step later."""
        engine = engine_for(t_model, prefix_cache=True)
        engine.recorder = recorder = TraceRecorder()
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        new = engine.generate([[5, 6, 7, 8, 9]], params)[0].samples[0].token_ids
        engine.submit([5, 6, 7, 8, 10, 11], SamplingParams(max_tokens=1), salt="other")
        engine.generate([[5, 6, 7, 8, 10, 11]], SamplingParams(max_tokens=1))
        trace = recorder.trace()
        assert rows(trace) == [
            (1, "OPEN", 0, 0, 4), (1, "HIT", 0, 0, 5), (1, "GROW", 0, 5, 5),
            (2, "GROW", 0, 6, 1), (2, "CLOSE", 0, 0, 0),
            (3, "OPEN", 1, 1, 5), (3, "HIT", 1, 0, 6), (3, "GROW", 1, 6, 6),
            (3, "OPEN", 2, 0, 5), (3, "HIT", 2, 4, 6), (3, "GROW", 2, 6, 6),
            (3, "CLOSE", 1, 0, 0), (3, "CLOSE", 2, 0, 0),
        ]  # fmt: skip
        assert trace.all_tokens()[0].tolist() == [5, 6, 7, 8, 9, new[0]]

    def test_samples_and_sessions_fork(self, t_model, engine_for):
        engine = engine_for(t_model)
        engine.recorder = recorder = TraceRecorder()
        engine.generate([[5, 6, 7]], SamplingParams(n=2, max_tokens=2, ignore_eos=True, temperature=1.0))
        session = engine.session([5, 6])
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        session.generate(params)
        twin = session.fork()
        session.append([20])
        session.generate(params)
        session.close()
        twin.close()
        assert [row[1:] for row in rows(recorder.trace())] == [
            ("OPEN", 0, 0, 2), ("HIT", 0, 0, 3), ("GROW", 0, 3, 3), ("FORK", 1, 0, 3), ("GROW", 1, 4, 1),
            ("GROW", 0, 4, 1), ("CLOSE", 1, 0, 0), ("CLOSE", 0, 0, 0),
            ("OPEN", 2, 0, 1), ("HIT", 2, 0, 2), ("GROW", 2, 2, 2), ("GROW", 2, 3, 1), ("PARK", 2, 0, 0),
            ("FORK", 3, 2, 3), ("PARK", 3, 0, 0), ("FORK", 4, 2, 3), ("CLOSE", 2, 0, 0), ("GROW", 4, 5, 2),
            ("GROW", 4, 6, 1), ("PARK", 4, 0, 0), ("CLOSE", 4, 0, 0), ("CLOSE", 3, 0, 0),
        ]  # fmt: skip

    def test_preemptions_and_evictions_are_seen(self, t_model, engine_for):
        engine = engine_for(t_model, pool_tokens=24)
        engine.generate([[3] * 9], SamplingParams(max_tokens=1))
        engine.recorder = recorder = TraceRecorder()
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        engine.generate([[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25, 26, 27]], params)
        trace, stats = recorder.trace(), engine.stats()
        assert trace.total(Event.EVICT) == stats.evictions > 0
        assert np.count_nonzero(trace.event == Event.PREEMPT) == stats.preemptions > 0
        assert np.count_nonzero(trace.event == Event.HIT) == 2 + stats.preemptions
        assert trace.sequences == 2 and trace.lengths().tolist() == [14, 16]

    def test_a_recorder_keeps_nothing_alive(self, t_model, engine_for):
        engine = engine_for(t_model)
        engine.recorder = recorder = TraceRecorder()
        engine.submit([5, 6, 7], SamplingParams(max_tokens=5))
        engine.step()
        (sequence,) = engine._scheduler.running
        alive = [weakref.ref(engine), weakref.ref(sequence)]
        del engine, sequence
        gc.collect()
        assert [reference() for reference in alive] == [None, None] and len(recorder.trace()) == 3

    def test_a_recorder_comes_before_the_first_page(self, t_model, engine_for):
        engine = engine_for(t_model)
        engine.submit([5, 6, 7], SamplingParams(max_tokens=5))
        engine.step()
        with pytest.raises(ValueError, match="a recorder must see sequences begin, and 1 hold pages"):
            engine.recorder = TraceRecorder()
        assert engine.recorder is None
