"""Errors about memory say what was asked, who holds what, and which knob helps, with numbers that are right."""

import logging
import random
import re

import pytest
import torch

from octavo.core import CapacityError, EngineConfig, SamplingParams, sizing
from octavo.core.inspection import capacity_report
from octavo.core.memory.layer_groups import LayerPlan

GREEDY = {"ignore_eos": True}


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "octavo")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "octavo.core.engine"]


def knob(message, pattern):
    """The number that a message recommends."""
    [found] = re.findall(pattern, message)
    return int(found)


class TestARequestThatCanNeverFit:
    def test_what_it_says_helps(self, t_model, engine_for):
        engine = engine_for(t_model, pool_tokens=16)
        with pytest.raises(CapacityError) as refused:
            engine.submit(tokens(17), SamplingParams(max_tokens=5, **GREEDY))
        message = str(refused.value)
        assert "a prompt of 17 tokens and 5 new ones need 6 pages of 4 tokens, and the pool has 4" in message
        assert "(6 and 4 units); raise pool_tokens to at least 24 from 16 (or memory_fraction" in message
        enough = knob(message, r"at least (\d+)")
        engine_for(t_model, pool_tokens=enough).submit(tokens(17), SamplingParams(max_tokens=5, **GREEDY))
        with pytest.raises(CapacityError):
            engine_for(t_model, pool_tokens=enough - 4).submit(tokens(17), SamplingParams(max_tokens=5, **GREEDY))

    def test_too_long_for_the_model(self, t_model, engine_for):
        engine = engine_for(t_model, max_model_tokens=16)
        with pytest.raises(
            CapacityError, match="14 tokens and 3 new ones are 17 tokens, and a sequence may have 16"
        ) as e:
            engine.submit(tokens(14), SamplingParams(max_tokens=3, **GREEDY))
        shorter = 14 - knob(str(e.value), r"shorten the prompt by (\d+)")
        engine.submit(tokens(shorter), SamplingParams(max_tokens=3, **GREEDY))


class TestAPoolWithoutMemory:
    SPEC_BYTES = 2 * 2 * 2 * 16 * 4
    """Of a token of the T-model: layers, K and V, heads, head size, fp32."""

    @pytest.fixture(autouse=True)
    def small_machine(self, monkeypatch):
        """64,000 free bytes: room for 60 units of 4 tokens, and the scratch unit."""
        monkeypatch.setattr(capacity_report, "_free_bytes", lambda device: 61 * 4 * self.SPEC_BYTES + 100)

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nMore lines."),
            MemoryError("no memory"),
            ValueError("mapping failed"),
        ],
        ids=["cuda", "python", "system"],
    )
    def test_a_set_size(self, t_model, engine_for, monkeypatch, error):
        if isinstance(error, ValueError):
            error.__cause__ = OSError(12, "Cannot allocate memory")
        self.fail_with(error, monkeypatch)
        with pytest.raises(CapacityError) as refused:
            engine_for(t_model, pool_tokens=400)
        message, unit = str(refused.value), 4 * self.SPEC_BYTES
        assert message == (
            f"the pool's 400 tokens of KV in float32 need {101 * unit} bytes ({self.SPEC_BYTES} bytes a token), and "
            f"cpu has {61 * unit + 100} bytes free; lower pool_tokens from 400 to at most 240, or kv_dtype='bf16' for "
            f"50% of the bytes ({str(error).splitlines()[0]})"
        )
        assert refused.value.__cause__ is error

    def test_a_share_of_the_memory(self, t_model, engine_for, monkeypatch):
        self.fail_with(MemoryError("no memory"), monkeypatch)
        with pytest.raises(CapacityError) as refused:
            engine_for(t_model, pool_tokens=None, memory_fraction=0.8, max_seqs=4)
        message = str(refused.value)
        share = 0.8 * 0.9 * (61 * 4 + 100 / self.SPEC_BYTES) / (4 * 256 + 4)
        assert f"lower memory_fraction from 0.8, to {share:.2f} or so, or max_seqs=4 or max_model_tokens" in message
        assert "or set pool_tokens to at most 240" in message

    def test_other_failures_are_left_alone(self, t_model, engine_for, monkeypatch):
        self.fail_with(ValueError("chunk_tokens=9 is a growth step larger than the pool"), monkeypatch)
        with pytest.raises(ValueError, match=r"^chunk_tokens=9") as refused:
            engine_for(t_model)
        assert not isinstance(refused.value, CapacityError)

    def test_a_gpu_says_who_has_the_rest(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 10**9, 80 * 10**9))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * 10**9)
        config, plan = EngineConfig(pool_tokens=16 * 10**6), LayerPlan.of([0] * 4)
        message = capacity_report.pool_memory(
            10**6, 16 * 1024, torch.bfloat16, config, plan, torch.device("cuda:0"), "CUDA out of memory."
        )
        assert "need 16.38 GB (1024 bytes a token), and cuda:0 has" in message
        assert " free of 80.00 GB (30.00 GB are this process's, by torch); lower pool_tokens from 16000000" in message
        assert "kv_dtype" not in message

    @staticmethod
    def fail_with(error, monkeypatch):
        def fail(*args, **sizes):
            raise error

        monkeypatch.setattr(sizing, "pool_memory", fail)


class TestASequenceThatIsStranded:
    def test_it_says_how_much_would_do(self, t_model, engine_for, drain, warnings):
        engine = engine_for(t_model, pool_tokens=16)
        engine.submit(tokens(9), SamplingParams(max_tokens=20), request_id="a")
        engine._eos = set()
        [completion] = drain(engine).completions.values()
        assert completion.samples[0].finish_reason == "capacity"
        [message] = warnings()
        assert "request 'a', sample 0, ends with finish_reason='capacity' after 8 new tokens" in message
        assert "its next token needs 1 more units, and 0 of 4 can be had" in message
        assert "Of 4 units are held 4 ('a' 4 units (100%)), cached 0, free 0" in message
        assert "Raise pool_tokens from 16 to 28 for all of its max_tokens=20" in message
        enough = knob(message, r"from 16 to (\d+)")
        roomy = engine_for(t_model, pool_tokens=enough)
        roomy._eos = set()
        assert roomy.generate([tokens(9)], SamplingParams(max_tokens=20))[0].samples[0].finish_reason == "length"
        assert len(warnings()) == 1

    def test_pinned_pages_are_named(self, t_model, engine_for, drain, warnings):
        engine = engine_for(t_model, pool_tokens=40, eviction="priority")
        engine.generate([tokens(4, 2)], SamplingParams(max_tokens=1))
        engine.submit(tokens(33), SamplingParams(max_tokens=1), priority=100)
        drain(engine)
        engine.submit(tokens(9, 1), SamplingParams(max_tokens=5, **GREEDY), request_id="large")
        drain(engine)
        [message] = warnings()
        assert "request 'large', sample 0, ends with finish_reason='capacity' after 0 new tokens" in message
        assert "its next 9 tokens need 3 more units, and 2 of 10 can be had" in message
        assert "Of 10 units are held 0, cached 9 (8 of them pinned), free 1" in message
        assert "from 40 to 48 for all of its max_tokens=5" in message and "pin fewer requests' pages" in message


def test_holders_are_named_most_first(t_model, engine_for):
    engine = engine_for(t_model, pool_tokens=80)
    session = engine.session(tokens(5, 9))
    session.generate(SamplingParams(max_tokens=2, **GREEDY))
    engine.generate([tokens(4, 8)], SamplingParams(max_tokens=1, **GREEDY))
    for name, length in (("a", 3), ("b", 13), ("c", 9), ("d", 2)):
        engine.submit(tokens(length, length), SamplingParams(max_tokens=9, **GREEDY), request_id=name)
    engine.step()
    said = capacity_report.holders(engine)  # c shares its first page with the session, whose it was first
    assert said == (
        "Of 20 units are held 10 ('b' 4 units (20%), 'request-0' (an idle session) 2 units (10%), 'c' 2 units (10%), "
        "2 more requests 2), cached 1, free 9"
    )


@pytest.mark.parametrize(
    ("pool_tokens", "way_out"), [(80, "lower pool_tokens from 80"), (None, "lower memory_fraction from 0.9")]
)
def test_a_step_that_runs_out_of_memory_says_what_it_was(t_model, engine_for, drain, monkeypatch, pool_tokens, way_out):
    engine = engine_for(t_model, pool_tokens=pool_tokens, step_tokens=64, max_seqs=4)
    for seed in range(2):
        engine.submit(tokens(9, seed), SamplingParams(max_tokens=2, **GREEDY))
    run = engine._runner.run

    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine._runner, "run", fail)
    with pytest.raises(torch.OutOfMemoryError) as failed:
        engine.step()
    [note] = failed.value.__notes__
    assert note.startswith("the step was over 18 tokens of 2 sequences; cpu has ")
    assert "lower step_tokens from 64 to, say, 9, or max_seqs from 4" in note and note.endswith(way_out)
    monkeypatch.setattr(engine._runner, "run", run)
    assert len(drain(engine).completions) == 2
