"""The shipped traces can be made again: the same recordings on a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.core.inspection.trace import Event
from octavo.scripts import build, record_traces
from octavo.scripts.paged_trace import PagedTrace
from octavo.scripts.replay import replay
from octavo.scripts.schema import CodeCompletion, ModelSettings, SparseSettings, TaskSettings

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ':' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def test_the_main_job(tiny_model: Path, items_file: Path) -> None:
    config = CodeCompletion(
        "code_completion",
        limit=2,
        model=ModelSettings(str(tiny_model)),
        task=TaskSettings(path=str(items_file), max_new_tokens=3),
        sparse=SparseSettings(["dense", "streaming"], budget_tokens=128, overrides={"streaming": {"dense_layers": []}}),
    )
    trace = record_traces.record_main_job(config, *build.load_model(config.model))
    assert trace.sequences == 2 * 2 * 2  # written and scored, for every item and method
    assert np.count_nonzero(trace.provenance) == 4 and np.count_nonzero(trace.event == Event.CLOSE) == 8
    found = replay(PagedTrace(trace, {"text": 16}), pool_tokens=1 << 14, check=True)
    assert found.hit_tokens == trace.total(Event.HIT) > 0


def test_the_chat(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NOTES", ("A sheet.",)), ("SYSTEM", "Be kind."), ("ANSWER_TOKENS", 2)):
        monkeypatch.setattr(record_traces, name, value)
    monkeypatch.setattr(record_traces, "CHAT_MODEL_TOKENS", 1024)
    model, tokenizer = build.load_model(ModelSettings(str(tiny_model)))
    tokenizer.chat_template = TEMPLATE
    trace = record_traces.record_chat(model, tokenizer)
    opened = 3 * 2 + 1  # two visitors a visit, and one who comes back at the third
    assert np.count_nonzero(trace.event == Event.OPEN) == opened
    assert np.count_nonzero(trace.event == Event.CLOSE) == trace.sequences
    found = replay(PagedTrace(trace, {"text": 16}), pool_tokens=1 << 14, check=True)
    assert found.hit_tokens == trace.total(Event.HIT) > 0 and len(found.lookups.found) == opened
