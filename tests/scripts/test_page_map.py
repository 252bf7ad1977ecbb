"""The page map: what the page holds is what the watch saw, and a browser shows it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.core import Engine
from octavo.core.inspection.page_census import CELL, STATES, PageCensus
from octavo.core.inspection.page_watch import PageWatch
from octavo.scripts import page_map, schema

from .conftest import Command

FREE, CACHED, HELD, SHARED, IMAGE, HOST, ABSENT = range(len(STATES))


def sections(page: str) -> list[str]:
    return re.findall(r'<section class="page-map".*?</section>', page, re.DOTALL)


def decoded(page: str) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The header, and the cells of every frame, of a page with one map, read as the script in the page reads them."""
    [data] = re.findall(r'class="data">([^<]*)</script>', page)
    raw = zlib.decompress(base64.b64decode(data))
    [size] = struct.unpack_from("<I", raw)
    header, at = json.loads(raw[4 : 4 + size]), 4 + size

    def column(kind: str, length: int) -> np.ndarray:
        nonlocal at
        found = np.frombuffer(raw, kind, length, at)
        assert at % found.itemsize == 0, "a typed array in the browser must be aligned"
        at += found.nbytes
        return found

    counts = column("<u4", len(header["step"]))
    columns = [column(kind, int(counts.sum())) for kind in ("<u4", "<i4", "<u2", "u1", "u1")]
    assert at == len(raw)
    cells, frames, i = np.zeros(header["units"] + 1, CELL), [], 0
    for count in counts.tolist():
        unit = 0
        for gap, offset, request, state, tokens in zip(*(c[i : i + count].tolist() for c in columns), strict=True):
            unit += gap
            cells[unit] = (unit + offset if state else 0, request, state, tokens)
        i += count
        frames.append(cells.copy())
    return header, frames


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> PageWatch:
    """Three steps of a pool of 6 units with 2 in host memory: every state, and a page of two units."""
    return scripted(
        monkeypatch,
        [
            {1: (1, 1, HELD, 4), 2: (1, 1, HELD, 2), 6: (0, 0, ABSENT, 0)},
            {2: (1, 1, SHARED, 4), 3: (3, 2, IMAGE, 4), 7: (7, 0, HOST, 4)},
            {1: (1, 1, CACHED, 4), 2: (1, 1, CACHED, 4), 3: (0, 0, FREE, 0), 5: (5, 2, HELD, 1)},
        ],
        device=6,
        host=2,
    )


def scripted(
    monkeypatch: pytest.MonkeyPatch, steps: list[dict[int, tuple[int, int, int, int]]], *, device: int, host: int
) -> PageWatch:
    cells, watch = np.zeros(1 + device + host, CELL), PageWatch()
    engine = SimpleNamespace(
        config=SimpleNamespace(unit_tokens=4),
        _pool=SimpleNamespace(most_units=device, evictions=3),
        _scheduler=SimpleNamespace(hit_tokens=1, query_tokens=8, preemptions=0, running=[1], waiting=[]),
        _steps=0,
    )
    monkeypatch.setattr(PageCensus, "take", lambda self, engine: cells.copy())
    watch._census.requests = ["first", "</script><b>second"]
    for changes in steps:
        engine._steps += 1
        for unit, cell in changes.items():
            cells[unit] = cell
        watch.observe(engine)  # type: ignore[arg-type]
    return watch


def same(page: str, watch: PageWatch) -> None:
    header, frames = decoded(page)
    assert len(frames) == len(watch.frames)
    for number, cells in enumerate(frames):
        assert (cells == watch.cells_at(number)).all(), number
    assert header["requests"] == watch.requests and header["states"] == list(STATES)
    assert (header["device_units"], header["unit_tokens"]) == (watch.device_units, watch.unit_tokens)
    for key in ("step", "running", "waiting", "evictions", "preemptions"):
        assert header[key] == watch.moments[key].tolist()
    for key, shares in watch.series().items():
        assert header[key] == [None if np.isnan(share) else pytest.approx(share, abs=1e-4) for share in shares]


def test_the_page_holds_what_the_watch_saw(watch: PageWatch) -> None:
    page = page_map.document(watch)
    same(page, watch)
    header, frames = decoded(page)
    assert frames[2][1:].tolist() == [
        (1, 1, CACHED, 4), (1, 1, CACHED, 4), (0, 0, FREE, 0), (0, 0, FREE, 0), (5, 2, HELD, 1), (0, 0, ABSENT, 0),
        (7, 0, HOST, 4), (0, 0, FREE, 0),
    ]  # fmt: skip
    assert header["utilisation"] == [0.75, 1.0, 0.25] and header["hit_rate"] == [0.125] * 3
    assert header["in_use"] == [0.4, 0.6, 0.2] and header["used_states"] == [0, 1, 2, 3, 4, 5, 6]


def test_it_needs_nothing_from_elsewhere(watch: PageWatch) -> None:
    page = page_map.document(watch)
    assert not re.findall(r"""(?:https?:|src=|href=|@import|url\(|fetch\()""", page)
    assert "</script><b>" not in page and len(page) < 40_000


def test_names_are_data_and_cut_when_they_are_long(watch: PageWatch) -> None:
    watch.requests[0] = "</script><script>alert(1)</script>" + "x" * 10_000
    page = page_map.document(watch)
    assert "alert" not in page
    header, _ = decoded(page)
    assert header["requests"][0] == watch.requests[0][:200] + "..."
    assert header["requests"][1:] == watch.requests[1:]


def test_the_heading_says_what_is_shown_and_is_text(watch: PageWatch) -> None:
    page = page_map.section(watch, 'one "request" <b> @DATA@')
    assert "<h2>Page map: one &quot;request&quot; &lt;b&gt; @DATA@</h2>" in page and "<b>" not in page
    assert 'aria-label="Page map: one &quot;request&quot; &lt;b&gt; @DATA@"' in page
    assert "<h2>Page map</h2>" in page_map.section(watch)
    same(page, watch)


def test_a_watch_that_saw_nothing_has_no_map() -> None:
    assert page_map.section(PageWatch()) == ""


def test_a_long_run_is_thinned_to_the_size_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    steps = [
        {
            int(unit): (int(unit), int(rng.integers(1, 3)), HELD, int(rng.integers(5)))
            for unit in rng.integers(1, 900, 90)
        }
        for _ in range(100)
    ]
    watch = scripted(monkeypatch, steps, device=900, host=0)
    whole, page = page_map.section(watch), page_map.section(watch, max_bytes=10_000)
    assert len(watch.frames) == len(decoded(whole)[1]) == 100, "the watch itself stays as it is"
    frames = decoded(page)[1]
    assert len(page) - len(page_map.TEMPLATE.read_text()) <= 10_000 and 2 <= len(frames) < 50
    assert (frames[-1] == watch.cells_at(-1)).all()


RUNS: dict[str, tuple[list[str], list[str]]] = {
    "code_completion": (["limit=1"], ["all items, one after another"]),
    "devices": (["limit=1", "devices=[cpu:reference,cpu:cpu]"], ["all items, one after another, on cpu:reference"]),
    "generate": (["limit=1"], ["all prompts, in one batch"]),
    "heads": (
        [
            "requests=4",
            "prompt_tokens=128",
            "new_tokens=8",
            "pool_requests=2",
            "engine.step_tokens=128",
            "sparse.budget_tokens=40",
            "sparse.methods=[dense,duo_attention]",
        ],
        ["dense", "duo_attention"],
    ),
    "image_benchmarks": (
        ["limit=1", "max_new_tokens=4", "benchmarks=[captions]"],
        ["prefix, all items, one after another"],
    ),
    "image_sharing": (
        ["limit=1", "images=1", "image_tokens=48", "new_tokens=2", "modes=[zero_copy]"],
        ["4 requests with the same 1 images, zero_copy"],
    ),
    "interleaved": (["limit=1", "exams=[colour]"], ["the conversations, all at once"]),
    "kept_tokens": (
        ["limit=1", "contexts=[200]", "budget_tokens=64", "only=[streaming]", "engine.step_tokens=32"],
        ["all prompts, one after another"],
    ),
    "knobs": (
        [
            "limit=4",
            "engine.page_tokens=8",
            "page_tokens=[]",
            "max_seqs=[]",
            "pool_percent=[80,46]",
            "max_model_percent=[]",
            "step_tokens=[]",
        ],
        ["pool_percent=46, 3 preemptions"],
    ),
    "latency": (
        ["limit=2", "rates=[offline]", "sparse.methods=[dense]"],
        ["dense, all requests at once, outputs of at most 48 tokens"],
    ),
    "layer_groups": (
        ["contexts=[60]", "new_tokens=4", "engine.step_tokens=32"],
        ["layer groups, 60 tokens", "one group, 60 tokens"],
    ),
    "lossless": (
        [
            "contexts=[300]",
            "documents=1",
            "drafts=[2]",
            "new_tokens=8",
            "sparse.methods=[quest]",
            "sparse.budget_tokens=128",
            "sparse.overrides.quest.dense_layers=[]",
        ],
        ["all documents, one after another"],
    ),
    "multi_turn": (
        ["conversations=1", "length=400", "turns=1", "max_new_tokens=4", "sparse.methods=[dense]"],
        ["all conversations, one after another"],
    ),
    "page_ratio": (
        ["images=[16]", "policies=[1,1.5]", "limit=1", "images_a_prompt=2"],
        ["images of 16 tokens, ratio 1.5"],
    ),
    "page_size": (
        ["limit=2", "page_sizes=[24,8,16]", "images=[]", "sequences=2"],
        ["the workload in pages of 8 tokens", "the workload in pages of 24 tokens"],
    ),
    "pareto": (["limit=1", "levels=[0.7]", "sparse.budget_tokens=1024"], ["all items, one after another"]),
    "perplexity": (
        ["documents=1", "context_tokens=300", "scored_tokens=6", "windows=2", "sparse.methods=[dense]"],
        ["all documents, one after another"],
    ),
    "protocols": (
        ["limit=1", "length=600", "sparse.budget_tokens=128", "dense_layers=[[]]", "sparse.methods=[dense]"],
        ["all puzzles and conversations"],
    ),
    "ruler": (
        [
            "lengths=[600]",
            "depths=[0.0]",
            "repeats=1",
            "max_new_tokens=6",
            "tasks=[needle_single]",
            "sparse.methods=[dense]",
        ],
        ["all puzzles, one after another"],
    ),
    "sessions": (["conversations=1", "turns=1", "forks=1", "new_tokens=2"], ["conversation 0"]),
    "sharing": (
        ["samples=[3,1]", "prompt_tokens=[40,20]", "new_tokens=[5]", "model_samples=[]", "surface_tokens=1024"],
        ["random weights, 3 samples of 40 + 5 tokens"],
    ),
    "structure": (
        ["limit=1", "sparse.methods=[quest]"],
        ["all items, one after another"],
    ),
    "visual_importance": (
        ["limit=1", "images=2", "max_new_tokens=3", "shares=[0.5]", "sparse.methods=[fastv]"],
        ["describe/0 under fastv 50 % host"],
    ),
    "throughput": (
        ["limit=1", "rivals=[]", "repeats=1"],
        ["octavo on workload ragged, outputs of at most 48 tokens"],
    ),
}
"""Experiment -> arguments that make it tiny, and what its page maps show."""

UNTIMED = {
    "code_completion", "devices", "generate", "heads", "interleaved", "kept_tokens", "lossless", "multi_turn", "pareto",
    "perplexity", "protocols", "ruler", "structure",
}  # fmt: skip
"""Experiments that are looked at while they run."""


@pytest.fixture
def arguments(request: pytest.FixtureRequest, name: str) -> list[str]:
    if name in ("code_completion", "devices", "pareto"):
        return [*request.getfixturevalue("tiny"), *RUNS[name][0]]
    if name == "structure":  # its methods are others than those of ``tiny``
        settings = request.getfixturevalue("tiny")[:3]
        return [*settings, "sparse.budget_tokens=128", "sparse.overrides.quest.dense_layers=[]", *RUNS[name][0]]
    if name == "kept_tokens":
        python = request.getfixturevalue("kvpress_python")
        return [f"model.path={request.getfixturevalue('tiny_model')}", f"kvpress_python={python}", *RUNS[name][0]]
    if name == "image_sharing":
        return ["model.shape=tiny", *RUNS[name][0]]
    seeing = name in ("image_benchmarks", "interleaved", "page_ratio", "sessions", "visual_importance")
    kind = "windowed_model" if name == "layer_groups" else "tiny_demo" if seeing else "tiny_model"
    return [f"model.path={request.getfixturevalue(kind)}", *RUNS[name][0]]


def test_every_experiment_that_runs_an_engine_is_in_the_table() -> None:
    assert set(RUNS) == {name for name, keys in schema.EXPERIMENTS.items() if issubclass(keys, schema.WithPageMap)}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *(pytest.param(name, True, id=f"{name}-on") for name in RUNS),
        pytest.param("code_completion", False, id="code_completion-off"),
        pytest.param("throughput", False, id="throughput-off"),
        *(
            pytest.param(name, False, id=f"{name}-off", marks=pytest.mark.slow)
            for name in RUNS
            if name not in ("code_completion", "throughput")
        ),
    ],
)
def test_it_is_part_of_the_report(
    name: str, wanted: bool, octavo: Command, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where time is measured, all steps that count come first and are not looked at."""
    shown: list[PageWatch] = []
    looked: list[bool] = []
    section, step = page_map.section, Engine.step
    monkeypatch.setattr(page_map, "section", lambda watch, shows: (shown.append(watch), section(watch, shows))[1])
    monkeypatch.setattr(Engine, "step", lambda self: (looked.append(self.watch is not None), step(self))[1])
    outcome = octavo(f"experiment={name}", f"page_map={str(wanted).lower()}", *arguments)
    assert outcome.code == 0, outcome.err
    report = (outcome.folder / "report.html").read_text()
    maps = sections(report)
    assert looked and any(looked) == wanted
    assert [re.findall("<h2>(.*?)</h2>", text) for text in maps] == [
        [f"Page map: {shows}"] for shows in RUNS[name][1] if wanted
    ]
    for text, watch in zip(maps, shown, strict=True):
        same(text, watch)
        assert len(text) < 1_600_000 and len(watch.frames) > 3
    if wanted and name not in UNTIMED:
        assert not looked[0] and looked == sorted(looked)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

DRIVE = """(async () => {
  const pause = () => new Promise((go) => setTimeout(go, 30)), said = {};
  const until = async (what) => { while (!what()) await pause(); };
  await until(() => document.querySelector(".page-map[data-frame]"));
  const map = document.querySelector(".page-map"), grid = map.querySelector(".grid");
  const note = (name) => { said[name] = [".legend", ".values", "output"].map((s) => map.querySelector(s).innerText); };
  const press = async (key, frame) => {
    grid.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await until(() => map.dataset.frame === frame);
    note(key);
  };
  note("start");
  await press("Home", "0");
  await press("ArrowRight", "1");
  map.querySelector("input[value=request]").click();
  await until(() => map.querySelector(".legend").innerText.startsWith("first"));
  note("request");
  const box = grid.getBoundingClientRect();
  grid.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 20, clientY: box.top + 4, bubbles: true }));
  said.tip = map.querySelector(".tip").innerText;
  const pixel = (x) => [...grid.getContext("2d").getImageData(x, 4, 1, 1).data].slice(0, 3);
  said.pixels = [4, 20, 36].map(pixel);
  map.querySelector("input[type=range]").value = 0;
  map.querySelector("input[type=range]").dispatchEvent(new Event("input"));
  await until(() => map.dataset.frame === "0");
  map.querySelector("button").click();
  await until(() => map.dataset.frame === "2");
  said.label = grid.getAttribute("aria-label");
  return said;
})()"""


def browse(file: Path, script: str, profile: Path) -> Any:
    """What a promise resolves to in a browser that shows a file, asked over the browser's debugging pipe (descriptors
    3 and 4, JSON messages that end with a zero byte)."""
    commands_out, commands = os.pipe()
    answers_in, answers_out = os.pipe()
    assert BROWSER is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=900,700"]
    browser = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{commands_out} 4>&{answers_out}', "bash", BROWSER, *options,
         "--remote-debugging-pipe", "about:blank"],
        pass_fds=(commands_out, answers_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(commands_out)
    os.close(answers_out)
    number = 0

    def ask(method: str, session: dict[str, str] | None = None, **params: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        message = {"id": number, "method": method, "params": params, **(session or {})}
        os.write(commands, json.dumps(message).encode() + b"\0")
        while True:  # events come in between
            answer = json.loads(b"".join(iter(lambda: answers.read(1) or b"\0", b"\0")))
            if answer.get("id") == number:
                return dict(answer["result"])

    try:
        with os.fdopen(answers_in, "rb") as answers:
            pages = [t for t in ask("Target.getTargets")["targetInfos"] if t["type"] == "page"]
            session = ask("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
            ask("Page.navigate", session, url=file.as_uri())
            result = ask("Runtime.evaluate", session, expression=script, awaitPromise=True, returnByValue=True)
            ask("Browser.close")
    finally:
        os.close(commands)
        browser.wait(20)
    assert "exceptionDetails" not in result, result
    return result["result"]["value"]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_it(watch: PageWatch, tmp_path: Path) -> None:
    """Keys, colours, hovering and playing, in a page opened from a file."""
    file = tmp_path / "map.html"
    file.write_text(page_map.document(watch))
    said = browse(file, DRIVE, tmp_path / "profile")
    states = ["free 2", "cached 0", "held 1", "shared 1", "image 1", "host 1", "absent 1"]  # the fullest moment
    assert said["start"][0].split("\n") == states
    assert "held 2" in said["Home"][0] and said["Home"][2].startswith("step 1,")
    assert "image 1" in said["ArrowRight"][0]
    assert said["ArrowRight"][1].split("\n") == ["utilisation 100.0 %", "in use 60.0 %", "hit rate 12.5 %"]
    assert said["request"][0].split("\n") == ["first 2", "</script><b>second 1", "free 2", "absent 1"]
    assert said["tip"] == "unit 2: shared\npage 1, 4 of 4 slots hold tokens\nrequest first"
    one, other, image = said["pixels"]
    assert one == other != image, "units of one request have one colour, another request's has another"
    assert said["label"].startswith("Pool at step 3, ")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_hundred_thousand_units_are_drawn_in_squares_of_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = {unit: (unit, 1 + unit % 2, HELD if unit % 3 else CACHED, 4) for unit in range(1, 100_001)}
    watch = scripted(monkeypatch, [first, {7: (7, 1, SHARED, 4)}], device=100_000, host=0)
    file = tmp_path / "map.html"
    file.write_text(page_map.document(watch))
    script = """(async () => {
      const pause = () => new Promise((go) => setTimeout(go, 30));
      while (!document.querySelector(".page-map[data-frame]")) await pause();
      const map = document.querySelector(".page-map"), grid = map.querySelector(".grid");
      return { note: map.querySelector(".note").innerText, legend: map.querySelector(".legend").innerText,
        width: grid.clientWidth, height: grid.clientHeight };
    })()"""
    said = browse(file, script, tmp_path / "profile")
    assert re.search(r"100,000 units of 4 slots; a square is \d units, in their mean colour", said["note"])
    assert said["legend"].split("\n") == ["cached 33,333", "held 66,666", "shared 1"]
    assert 300 < said["width"] <= 900 and 100 < said["height"] <= 400


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_maps_of_one_page_do_not_disturb_each_other(watch: PageWatch, tmp_path: Path) -> None:
    file = tmp_path / "maps.html"
    file.write_text(page_map.section(watch, "one") + page_map.section(watch, "other"))
    script = """(async () => {
      const pause = () => new Promise((go) => setTimeout(go, 30));
      const until = async (what) => { while (!what()) await pause(); };
      await until(() => document.querySelectorAll(".page-map[data-frame]").length === 2);
      const [one, other] = document.querySelectorAll(".page-map");
      other.querySelector("input[value=request]").click();
      other.querySelector(".grid").dispatchEvent(new KeyboardEvent("keydown", { key: "Home", bubbles: true }));
      await until(() => other.dataset.frame === "0");
      return [one, other].map((map) => [map.querySelector("h2").innerText, map.dataset.frame,
        map.querySelector("input:checked").value, map.querySelector(".legend li").innerText]);
    })()"""
    said = browse(file, script, tmp_path / "profile")
    assert said == [["Page map: one", "1", "state", "free 2"], ["Page map: other", "0", "request", "first 2"]]
