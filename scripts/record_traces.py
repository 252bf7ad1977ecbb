"""Record the traces that come with octavo: ``python -m octavo.scripts.record_traces [FOLDER]``.

They need the embedded model and take some minutes on a CPU. Without a folder they replace those of this checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

from octavo.core import Engine, EngineConfig, SamplingParams
from octavo.core.inspection.trace import Trace
from octavo.core.inspection.trace_recorder import TraceRecorder
from octavo.core.serving.session import Session
from octavo.scripts import benchmarks, build, naming, schema, settings, traces
from octavo.scripts.experiments.code_completion import complete
from octavo.scripts.schema import CodeCompletion

ITEMS = 20
ANSWER_TOKENS = 40
ROUNDS = 3
CHAT_POOL_TOKENS = 32768
CHAT_MODEL_TOKENS = 4096

SYSTEM = (
    "You are the reading-room assistant of a small museum of printing. Answer visitors in plain words and in no more "
    "than three sentences. If a question is not about books, paper, type or the museum itself, say so kindly and "
    "offer to talk about printing instead. Opening hours are ten to five, closed on Mondays; the press in the cellar "
    "is shown at eleven and at three. Photographs are welcome everywhere but in the map room."
)

NOTES = (
    "A sheet of paper that is folded once makes two leaves and four pages, and the book is called a folio. Folded "
    "twice it makes four leaves, and the book is a quarto; folded three times it makes eight leaves, an octavo. The "
    "direction of the chain lines and the place of the watermark show a cataloguer how a sheet was folded, even when "
    "the edges have been trimmed. Small prayer books were often printed in sixteens or smaller, since they were made "
    "to be carried in a pocket. A gathering is a group of leaves that are sewn together through one fold.",
    "Movable type is cast from an alloy of lead, tin and antimony. Antimony makes the metal hard and lets it swell a "
    "little as it sets, so that it fills the corners of the mould. A punch of steel is cut by hand, struck into a bar "
    "of copper to make the matrix, and the matrix is put into the mould. A skilled caster makes some four thousand "
    "letters a day. When a page has been printed, the type is cleaned and put back into its case, letter by letter; "
    "that work is called distribution, and apprentices did most of it.",
    "Rag paper is made from linen. The rags are sorted, left to rot a little, and beaten to a pulp with water. The "
    "maker dips a mould of wire into the vat, lifts it level and shakes it, so that the fibres lock while the water "
    "runs off. The wet sheet is pressed between felts, hung up to dry, and sized with gelatine so that ink will not "
    "spread. Wood pulp replaced rags in the nineteenth century, and the acid in it is why so many books of that time "
    "turn brown and break.",
    "A library catalogue of the old kind is a cabinet of drawers with one card for every author, title and subject. A "
    "rod through the foot of the cards keeps them in their drawer. The shelf mark in the corner says where the book "
    "stands: room, press, shelf and place. When a book is lent, a slip of wood takes its place on the shelf. Since "
    "cards are filed by hand, a card in the wrong drawer is a book that nobody will find for years.",
)

QUESTIONS = (
    "What is the main point of that note, in one sentence?",
    "Which step takes the most skill, and why?",
    "How could a visitor see this for themselves today?",
    "What would go wrong if that step were left out?",
    "Can you explain it to a child of eight?",
    "How does this compare with the way books are made now?",
)


def record_main_job(config: CodeCompletion, model: Any, tokenizer: Any) -> Trace:
    """The main job on its first items: all methods of an item in one batch, then its gold line under each."""
    engine = build.engine(config, model, tokenizer)
    methods = build.methods(config.sparse)
    engine.recorder = recorder = TraceRecorder()
    for item in benchmarks.load(config.task, config.limit):
        complete(item, methods, engine, config, tokenizer)
        print(f"main job: {item.id}", flush=True)
    return recorder.trace()


def record_chat(model: Any, tokenizer: Any) -> Trace:
    """Visitors share one system prompt; each reads a note, asks, and forks the conversation to go on in several ways.

    For every note: two visitors open sessions and ask. The first forks twice, one fork forks again, and all ask on.
    Then everybody leaves. A visitor of two notes ago comes back, sends the whole conversation once more and asks. All
    notes come round three times.
    """
    config = EngineConfig(pool_tokens=CHAT_POOL_TOKENS, max_model_tokens=CHAT_MODEL_TOKENS)
    engine = Engine(model, tokenizer, config)
    engine.recorder = recorder = TraceRecorder()
    histories: list[list[int]] = []
    for visit, note in enumerate(NOTES * ROUNDS):
        first, other = engine.session(), engine.session()
        for session in (first, other):
            session.append(SYSTEM, role="system")
        _ask(engine, [first, other], [f"{note}\n\n{QUESTIONS[0]}", f"{note}\n\n{QUESTIONS[visit % 5 + 1]}"])
        second, third = first.fork(), first.fork()
        _ask(engine, [first, second, third], [QUESTIONS[(visit + turn) % 5 + 1] for turn in range(3)])
        fourth = second.fork()
        third.close()
        _ask(engine, [fourth, second, other], [QUESTIONS[1], QUESTIONS[4], QUESTIONS[2]])
        histories.append(fourth.tokens)
        for session in (first, other, second, fourth):
            session.close()
        if visit >= 2:
            back = engine.session(histories[visit - 2])
            _ask(engine, [back], [QUESTIONS[3]])
            back.close()
        print(f"chat: visit {visit}", flush=True)
    return recorder.trace()


def _ask(engine: Engine, sessions: list[Session], questions: list[str]) -> None:
    """A turn of several sessions at once."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.8, top_p=0.9)
    for session, question in zip(sessions, questions, strict=True):
        session.append(question, role="user")
    engine.finish([session.submit(params) for session in sessions])


def record(folder: Path) -> None:
    schema.register()
    naming.register()
    with initialize_config_module("octavo.configs", version_base="1.3"):
        config = settings.typed(compose("config", overrides=[f"limit={ITEMS}"]))
    assert isinstance(config, CodeCompletion)
    model, tokenizer = build.load_model(config.model)
    recorded = {
        "chat": record_chat(model, tokenizer),
        "main_job": record_main_job(config, model, tokenizer),
    }
    for name, trace in recorded.items():
        file = folder / traces.file_name(name)
        trace.save(file)
        print(f"{file}: {len(trace)} events, {trace.sequences} sequences, {file.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tasks" / "data")
