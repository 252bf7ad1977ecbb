import gzip
import importlib.util
import json

import pytest

from octavo.scripts.tasks.loaders import load, prompt_ids

REPOBENCH = {
    "repo_name": "me/tool",
    "file_path": "tool/main.py",
    "context": [
        {"identifier": "help", "path": "tool/far.py", "snippet": "one = 1\n\n\n\n\ntwo = 2"},
        {"identifier": "run", "path": "tool/near.py", "snippet": "def run():\n    pass"},
    ],
    "import_statement": "from .near import run",
    "token_num": 700,
    "cropped_code": "def main():",
    "all_code": "from .near import run\n\ndef main():\n    run()",
    "next_line": "    run()",
    "gold_snippet_index": 1,
    "created_at": "2023-12-05",
    "level": "2k",
}
REPOBENCH_PROMPT = (
    "# Repo Name: me/tool\n# Path: tool/far.py\none = 1\n\ntwo = 2\n\n# Path: tool/near.py\ndef run():\n    pass\n\n"
    "# Path: tool/main.py\nfrom .near import run\ndef main():\n"
)
LCC = {
    "input": "",
    "context": "def f():\n    x = 1\n",
    "answers": ["    return x"],
    "length": 1235,
    "dataset": "lcc",
    "language": "python",
    "all_classes": None,
    "_id": "abc123",
}
REPOBENCH_P = {**LCC, "context": "# Path: a.py\none\n", "input": "def f():\n", "length": 8000, "language": "java"}
CROSSCODEEVAL = {
    "prompt": "def f():\n    return helper.",
    "groundtruth": "run(1)",
    "right_context": "\n",
    "metadata": {
        "task_id": "project_cc_python/62",
        "repository": "me-tool-1234567",
        "file": "tool/main.py",
        "context_start_lineno": 0,
        "groundtruth_start_lineno": 1,
        "right_context_start_lineno": 2,
    },
    "crossfile_context": {
        "text": "# Here are some relevant code fragments\n# def run(n):\n",
        "list": [{"retrieved_chunk": "def run(n):", "filename": "helper.py", "score": 1.5}],
    },
}


@pytest.fixture
def write(tmp_path):
    def write(records, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        return path

    return write


def test_repobench(write):
    (item,) = load("repobench-v1.1", write([REPOBENCH], "cross_file_first.jsonl"))
    assert item.prompt == REPOBENCH_PROMPT
    assert item.golds == ("    run()",)
    assert item.item_id == "cross_file_first:0"
    assert item.metadata == {
        "level": "2k",
        "setting": "cross_file_first",
        "repository": "me/tool",
        "file": "tool/main.py",
        "created_at": "2023-12-05",
    }
    assert item.score("    run()\n") == {"exact_match": 100, "edit_similarity": 100}


def test_repobench_in_java_comments_with_slashes(write):
    (item,) = load("repobench-v1.1", write([{**REPOBENCH, "file_path": "Main.java"}]))
    assert item.prompt.startswith("// Repo Name: me/tool\n// Path: tool/far.py\n")
    assert (item.language, item.metadata["setting"]) == ("java", None)
    assert item.score("// c\n    run()")["exact_match"] == 100


def test_repobench_drops_cross_file_lines_from_the_end(write, tokenizer):
    (item,) = load("repobench-v1.1", write([REPOBENCH]))
    assert tokenizer.decode(prompt_ids(item, tokenizer, 999)) == REPOBENCH_PROMPT
    shorter = REPOBENCH_PROMPT.replace("def run():\n    pass\n\n", "def run():\n\n")
    assert tokenizer.decode(prompt_ids(item, tokenizer, len(tokenizer.encode(shorter)))) == shorter
    bare = REPOBENCH_PROMPT[REPOBENCH_PROMPT.index("# Path: tool/main.py") :]
    least = len(tokenizer.encode(bare))
    assert tokenizer.decode(prompt_ids(item, tokenizer, least)) == bare
    with pytest.raises(ValueError, match=rf"{least} tokens of in-file code alone, above the limit of {least - 1}"):
        prompt_ids(item, tokenizer, least - 1)


def test_lcc(write, tokenizer):
    (item,) = load("lcc", write([LCC]))
    assert item.prompt == (
        "Please complete the code given below. \ndef f():\n    x = 1\nNext line of code:\n"  # the space is published
    )
    assert (item.item_id, item.golds, item.metadata["level"]) == ("abc123", ("    return x",), "0-4k")
    assert item.score("```\n    return x\n```") == {"edit_similarity": 100}
    whole = tokenizer.encode(item.prompt)
    assert prompt_ids(item, tokenizer, 11) == whole[:6] + whole[-5:]  # cut in the middle
    assert prompt_ids(item, tokenizer, len(whole)) == whole


def test_repobench_p(write):
    (item,) = load("repobench-p", write([REPOBENCH_P]))
    assert item.prompt == "Please complete the code given below. \n# Path: a.py\none\ndef f():\nNext line of code:\n"
    assert item.metadata["level"] == "8k+"


def test_crosscodeeval(write, tokenizer):
    (item,) = load("crosscodeeval", write([CROSSCODEEVAL]))
    assert item.prompt == CROSSCODEEVAL["crossfile_context"]["text"] + "\n" + CROSSCODEEVAL["prompt"]
    assert (item.item_id, item.language) == ("project_cc_python/62", "python")
    assert item.score("run(1)\n    more")["exact_match"] == 100
    ids = prompt_ids(item, tokenizer, 12)  # half for the head, cut on the right; the tail cut on the left
    assert tokenizer.decode(ids) == "# Here are" + " " + "    return helper."[-len("  return helper.") :]


def test_crosscodeeval_without_cross_file_context(write, tokenizer):
    record = {key: value for key, value in CROSSCODEEVAL.items() if key != "crossfile_context"}
    (item,) = load("crosscodeeval", write([record]))
    assert item.prompt == record["prompt"]
    assert tokenizer.decode(prompt_ids(item, tokenizer, 3)) == "return helper."[-len(" helper.") :]


def test_other_containers(tmp_path, write):
    (tmp_path / "data.json").write_text(json.dumps([LCC, LCC]))
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress((json.dumps(LCC) + "\n\n").encode()))
    assert len(load("lcc", tmp_path / "data.json")) == 2
    assert len(load("lcc", tmp_path / "data.jsonl.gz")) == 1
    assert len(load("lcc", write([LCC] * 5), limit=3)) == 3


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow")
def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([REPOBENCH]), tmp_path / "data.parquet")
    (item,) = load("repobench-v1.1", tmp_path / "data.parquet")
    assert item.prompt == REPOBENCH_PROMPT


def test_parquet_without_pyarrow_says_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="reading parquet needs pyarrow"):
        load("repobench-v1.1", tmp_path / "data.parquet")


def test_an_unknown_data_set_lists_the_known():
    with pytest.raises(
        ValueError, match=r"unknown data set 'lca'; known: repobench-v1\.1, lcc, repobench-p, crosscodeeval"
    ):
        load("lca", "x.jsonl")


@pytest.mark.parametrize(
    ("name", "record", "fault"),
    [
        ("repobench-v1.1", {**REPOBENCH, "context": [{"path": "a"}]}, "missing field 'snippet' of repobench-v1.1"),
        ("lcc", {k: v for k, v in LCC.items() if k != "answers"}, "missing field 'answers' of lcc"),
        ("repobench-p", REPOBENCH, "missing field '_id' of repobench-p"),
        ("crosscodeeval", {**CROSSCODEEVAL, "metadata": {}}, "missing field 'file' of crosscodeeval"),
        ("crosscodeeval", {**CROSSCODEEVAL, "metadata": {"file": "a.go"}}, "file 'a.go' is in none of"),
        ("repobench-v1.1", {**REPOBENCH, "context": None}, "context must be a list of objects, got null"),
        ("repobench-v1.1", {**REPOBENCH, "context": ["a"]}, 'context must be a list of objects, got "a" in it'),
        ("repobench-v1.1", {**REPOBENCH, "next_line": None}, "next_line must be text, got null"),
        ("repobench-v1.1", {**REPOBENCH, "import_statement": None}, "import_statement must be text, got null"),
        ("repobench-v1.1", {**REPOBENCH, "cropped_code": None}, "cropped_code must be text, got null"),
        ("repobench-v1.1", {**REPOBENCH, "file_path": 3}, "file_path must be text, got 3"),
        ("lcc", {**LCC, "answers": "pass"}, 'answers must be a list of texts, got "pass"'),
        ("lcc", {**LCC, "answers": [1]}, "answers must be a list of texts, got 1 in it"),
        ("lcc", {**LCC, "answers": []}, "answers must not be empty"),
        ("lcc", {**LCC, "context": None}, "context must be text, got null"),
        ("lcc", {**LCC, "length": True}, "length must be a whole number, got true"),
        (
            "crosscodeeval",
            {**CROSSCODEEVAL, "crossfile_context": None},
            "crossfile_context must be an object, got null",
        ),
        ("crosscodeeval", {**CROSSCODEEVAL, "groundtruth": None}, "groundtruth must be text, got null"),
        ("lcc", [LCC], "a JSON object was expected, not list"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(write, name, record, fault):
    good = {"repobench-v1.1": REPOBENCH, "lcc": LCC, "repobench-p": REPOBENCH_P, "crosscodeeval": CROSSCODEEVAL}[name]
    path = write([good, record])
    with pytest.raises(ValueError, match=f"{path}: line 2: {fault}"):
        load(name, path)


def test_bad_files_are_named(tmp_path, write):
    (tmp_path / "broken.jsonl").write_text(json.dumps(LCC) + "\n{")
    with pytest.raises(ValueError, match=r"broken\.jsonl: line 2: not JSON"):
        load("lcc", tmp_path / "broken.jsonl")
    (tmp_path / "broken.json").write_text("[")
    with pytest.raises(ValueError, match=r"broken\.json: not JSON"):
        load("lcc", tmp_path / "broken.json")
    (tmp_path / "number.json").write_text("5")
    with pytest.raises(ValueError, match=r"number\.json: a JSON list was expected, not int"):
        load("lcc", tmp_path / "number.json")
    (tmp_path / "plain.jsonl.gz").write_text("text")
    with pytest.raises(ValueError, match=r"plain\.jsonl\.gz: cannot be read"):
        load("lcc", tmp_path / "plain.jsonl.gz")
    with pytest.raises(ValueError, match=r"none\.jsonl is not a file"):
        load("lcc", tmp_path / "none.jsonl")
    (tmp_path / "data.csv").write_text("")
    with pytest.raises(ValueError, match=r"data\.csv: neither"):
        load("lcc", tmp_path / "data.csv")
    with pytest.raises(ValueError, match="no records"):
        load("lcc", write([]))
    with pytest.raises(ValueError, match="limit=0"):
        load("lcc", write([LCC]), limit=0)
