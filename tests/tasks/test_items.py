import gzip
import json
import re
from dataclasses import replace

import pytest

from octavo.scripts.tasks.items import (
    CodeItem,
    dump_items,
    leaks,
    load_items,
    prompt_ids,
    prompt_text,
    read_item_file,
    sha256,
)
from octavo.scripts.tasks.metrics import identifiers
from octavo.scripts.tasks.packing import likeness
from octavo.scripts.tasks.sources import DATA, read_sources


def make(number=0, **changes):
    item = CodeItem(
        item_id=f"toy-1.0/a.py:{number}",
        source="toy",
        version="1.0",
        licence="MIT",
        path="a.py",
        setting="cross_file_first",
        context=(("far.py", "one\ntwo"), ("near.py", "three\nfour")),
        prefix=f"def f{number}():",
        gold="    return near.three()",
        uses="three",
        defined_in="near.py",
        tokens=10,
        prompt_sha256="",
    )
    item = replace(item, **changes)
    return replace(item, prompt_sha256=sha256(prompt_text(item)))


PROMPT = "# Repo Name: toy\n# Path: far.py\none\ntwo\n\n# Path: near.py\nthree\nfour\n\n# Path: a.py\ndef f0():\n   "


@pytest.fixture
def path(tmp_path):
    return tmp_path / "items.jsonl.gz"


def write(path, text):
    path.write_bytes(gzip.compress(text.encode()))
    return path


def test_prompt_and_target_join_to_the_code():
    item = make()
    assert prompt_text(item) == PROMPT
    assert item.target == " return near.three()"
    assert (prompt_text(item) + item.target).endswith("def f0():\n    return near.three()")


def test_an_answer_is_scored_on_its_first_code_line():
    item = make()
    assert item.score(" return near.three()\n\nmore") == {"exact_match": 100, "edit_similarity": 100}
    assert item.score(" # say why\n    return near.three()")["exact_match"] == 100
    assert item.score(" return near.four()")["exact_match"] == 0


@pytest.mark.parametrize(
    ("dropped", "context"),
    [
        (0, (("far.py", "one\ntwo"), ("near.py", "three\nfour"))),
        (1, (("far.py", "two"), ("near.py", "three\nfour"))),
        (2, (("near.py", "three\nfour"),)),
        (3, (("near.py", "four"),)),
        (4, ()),
    ],
)
def test_long_prompts_lose_lines_from_the_front(tokenizer, dropped, context):
    shortened = prompt_text(replace(make(), context=context))
    exactly = len(tokenizer.encode(shortened))
    assert tokenizer.decode(prompt_ids(make(), tokenizer, exactly)) == shortened
    if dropped < 4:
        assert len(prompt_ids(make(), tokenizer, exactly - 1)) < exactly


def test_in_file_code_is_never_cut(tokenizer):
    least = len(tokenizer.encode(prompt_text(replace(make(), context=()))))
    with pytest.raises(ValueError, match=rf"a\.py:0: {least} tokens without .* limit of {least - 1}"):
        prompt_ids(make(), tokenizer, least - 1)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("x = f(a)\n", True),
        ("y\n    x  =\tf(a)  # again", True),
        ("x = f(\n", False),
        ("X = f(a)", False),
    ],
)
def test_leaks_see_through_layout(prompt, found):
    assert leaks("    x = f(a)", prompt) is found


def test_items_survive_the_file(path):
    items = [make(n) for n in range(3)]
    write(path, dump_items(items, seed=4))
    header, loaded = read_item_file(path)
    assert loaded == items
    assert (header["seed"], header["count"]) == (4, 3)
    assert load_items(path, limit=2) == items[:2]
    assert load_items(str(path), limit=9) == items


def test_limit_must_be_positive(path):
    with pytest.raises(ValueError, match=r"limit=0: at least 1"):
        load_items(path, limit=0)


def edited(change):
    """A sound file of three items whose second (line 3) went through `change`; the hash over all is made anew."""
    lines = dump_items([make(n) for n in range(3)]).splitlines()
    raw = json.loads(lines[2])
    change(raw)
    lines[2] = json.dumps(raw)
    return rehashed(lines)


def rehashed(lines):
    header = json.loads(lines[0])
    body = "\n".join(lines[1:]) + "\n"
    return "\n".join([json.dumps({**header, "items_sha256": sha256(body)}), body])


def leak(raw):
    raw["prefix"] = "    return near.three()\n"
    item = CodeItem(**{**raw, "context": tuple(map(tuple, raw["context"]))})
    raw["prompt_sha256"] = sha256(prompt_text(item))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (edited(lambda raw: raw.pop("gold")), r"line 3: missing field 'gold'"),
        (edited(lambda raw: raw.update(extra=1)), r"line 3: unknown field 'extra'"),
        (edited(lambda raw: raw.update(tokens="many")), r"line 3: field 'tokens' has the wrong type: str"),
        (edited(lambda raw: raw.update(context=[["far.py"]])), r"line 3: field 'context' has the wrong type: list"),
        (edited(lambda raw: raw.update(prefix="other")), r"line 3: the prompt has sha256 \w{64}, recorded is \w{64}"),
        (edited(leak), r"line 3: the gold line 'return near\.three\(\)' appears in its own prompt"),
        (dump_items([make()]).replace('"uses"', '"uses', 1), r"line 2: not JSON"),
        (rehashed([*dump_items([make()]).splitlines(), "[1]"]), r"line 3: a JSON object was expected, not list"),
        ("", r"line 1: not JSON"),
        (dump_items([make()]).replace("items/1", "items/9", 1), r"line 1: schema 'octavo-code-items/9', this .*/1'"),
        (dump_items([make(), make(1)]).rsplit("\n", 2)[0] + "\n", r"1 complete items, the header announces 2"),
        (dump_items([make(), make(1)])[:-1], r"1 complete items, the header announces 2"),
        (dump_items([make()]).replace("near.three()", "near.other()"), r"items have sha256 \w{64}, the header says"),
    ],
)
def test_corrupt_text_is_refused_with_its_place(path, text, fault):
    with pytest.raises(ValueError, match=re.escape(str(path)) + ": " + fault):
        load_items(write(path, text), limit=1)  # also where the fault lies beyond the limit


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda data: b"plain text", "cannot be read: Not a gzipped file"),
        (lambda data: data[:-30], "corrupt or cut short"),
        (lambda data: data[:60] + bytes(20) + data[80:], "corrupt or cut short|cannot be read"),
        (lambda data: gzip.compress(b"\xff\xfe"), "corrupt or cut short"),
    ],
)
def test_corrupt_bytes_are_refused(path, damage, fault):
    path.write_bytes(damage(gzip.compress(dump_items([make(n) for n in range(3)]).encode())))
    with pytest.raises(ValueError, match=f"{path}: (?:{fault})"):
        load_items(path)


def test_a_missing_file_is_named(path):
    with pytest.raises(ValueError, match=f"{path}: cannot be read: .*No such file"):
        load_items(path)


@pytest.fixture(scope="module")
def committed():
    return read_item_file()


class TestCommittedFile:
    """What the main job relies on."""

    def test_header(self, committed):
        header, items = committed
        assert header["schema"] == "octavo-code-items/1"
        assert header["tokenizer"] == "SmolLM2-135M-Instruct"
        assert header["count"] == len(items) == 32
        assert len({item.item_id for item in items}) == 32

    def test_lengths(self, committed):
        _, items = committed
        tokens = [item.tokens for item in items]
        assert all(1000 <= n <= 8192 - 40 - 30 for n in tokens)
        assert sum(n > 7500 for n in tokens) == 5
        assert sum(n > 7500 for n in tokens[:24]) == 4
        assert 3200 <= sum(tokens[:24]) / 24 <= 3600
        assert all(n <= 1500 for n in tokens[:6])  # a small limit is quick

    def test_every_gold_line_needs_another_file(self, committed):
        for item in committed[1]:
            texts = dict(item.context)
            assert item.path not in texts
            assert item.context[-1][0] == item.defined_in
            assert re.search(rf"^(async def|def|class)? *{item.uses}\b", texts[item.defined_in], re.M), item.item_id
            assert 12 <= len(item.gold.strip()) <= 100
            assert set(identifiers(item.gold, "python")) <= set(re.findall(r"\w+", prompt_text(item)))

    def test_cross_file_code_holds_a_line_like_the_gold_line(self, committed):
        header, items = committed
        low, high = header["spec"]["likeness"]
        assert all(low <= likeness(item) <= high for item in items)

    def test_sources_are_pinned_and_attributed(self, committed):
        header, items = committed
        pinned = {(s.name, s.version): s for s in read_sources()}
        assert {(i.source, i.version) for i in items} == {(s["name"], s["version"]) for s in header["sources"]}
        notice = (DATA / "NOTICE").read_text()
        for item in items:
            source = pinned[item.source, item.version]
            assert item.licence == source.licence
            assert not {path for path, _ in item.context} & set(source.exclude)
            assert f"{source.name} {source.version}\n{source.licence}\n{source.copyright}" in notice

    def test_size(self):
        assert (DATA / "items.jsonl.gz").stat().st_size <= 400_000
