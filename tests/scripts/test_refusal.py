"""What is wrong with a command line is said at once, with the key, the nearest right name and what is allowed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import Command

CASES = {
    "misspelt key": ("engine.page_tokns=16", "unknown key 'engine.page_tokns'; did you mean 'engine.page_tokens'?"),
    "misspelt group": ("modle=smollm2", "unknown key 'modle'; did you mean 'model'?"),
    "key of a group at the root": ("page_tokens=8", "did you mean 'engine.page_tokens'?"),
    "added key": ("+engine.page_tokns=16", "unknown key 'engine.page_tokns'; did you mean 'engine.page_tokens'?"),
    "deep added key": ("+task.max_new_token=3", "did you mean 'task.max_new_tokens'?"),
    "key of another experiment": ("prompts=[hi]", "it belongs to experiment=generate"),
    "key of two others": ("method=quest", "it belongs to experiment=calibrate or generate"),
    "a model without weights": ("model=random", "random weights say nothing; take model=smollm2, or model=local"),
    "misspelt option": (
        "tracking=oflfine",
        "tracking=oflfine: unknown; did you mean 'offline'? one of: off, offline, online",
    ),
    "misspelt experiment": ("experiment=code_completon", "did you mean 'code_completion'?"),
    "group that the experiment lacks": ("experiment=generate task=lcc", "no group 'task'"),
    "method as a group": ("sparse=quest", "sparse.methods=[dense,quest]"),
    "misspelt method": (
        "sparse.methods=[dense,qest]",
        "unknown sparse method 'qest'; did you mean 'quest'? known: a_shape, ada_kv",
    ),
    "missing method file": ("sparse.methods=[my/method.yaml]", "no such method file: {cwd}/my/method.yaml"),
    "method twice": ("sparse.methods=[dense,dense]", "lists 'dense' twice"),
    "unknown part of a method": ("sparse.overrides={streaming: {kep: 3}}", "no part 'kep'; did you mean 'keep'?"),
    "overrides of a method that does not run": ("sparse.overrides={qest: {}}", "did you mean 'quest'?"),
    "text for a number": (
        "engine.page_tokens=many",
        "engine.page_tokens: Value 'many' of type 'str' could not be converted",
    ),
    "its allowed values": ("engine.pool_tokens=many", "allowed: a whole number or null"),
    "text for a truth": ("engine.prefix_cache=perhaps", "allowed: true or false"),
    "text for a list": ("sparse.methods=quest", "allowed: a list of text"),
    "page size 0": ("engine.page_tokens=0", "engine.page_tokens must be an integer of at least 1, got 0"),
    "page size -4": ("engine.page_tokens=-4", "engine.page_tokens must be an integer of at least 1, got -4"),
    "unknown allocator": ("engine.allocator=stak", "engine.allocator='stak' is unknown; did you mean 'stack'?"),
    "unknown eviction": ("engine.eviction=lru_q", "engine.eviction.policy=lru_q: unknown; did you mean 'lru_k'?"),
    "unknown parameter of a policy": (
        "engine.eviction={policy: lru_k, kk: 3}",
        "unknown key 'engine.eviction.kk'; did you mean 'engine.eviction.k'?",
    ),
    "no eviction": ("engine.eviction=null", "engine.eviction must be a name or an EvictionPolicy, got None"),
    "unknown page policy": ("engine.page_policies={image: hole}", "did you mean 'whole'? one of: fixed, ratio"),
    "page of growing text": (
        "engine.page_policies.text=whole",
        "engine.page_policies['text']=WholePages(grain=8): text grows while it is decoded, but WholePages needs",
    ),
    "unknown element type": ("model.dtype=fp23", "model.dtype=fp23: unknown; did you mean 'fp32'? one of: auto, fp32"),
    "temperature": ("experiment=generate sampling.temperature=-1", "sampling.temperature must be"),
    "limit": ("limit=0", "limit=0: must be at least 1"),
    "overrides of dense": ("sparse.overrides.dense.x=3", "method dense: it has no parts, so none to change: x"),
    "overrides that are no mapping": (
        "sparse.overrides.quest=3",
        "sparse.overrides.quest=3: changes are given by part",
    ),
    "override that is no part": ("sparse.overrides.quest.budget_tokens=5", "method quest: no part 'budget_tokens'"),
    "number for a group": ("engine=3", "the value of a group is the name of one of its files"),
    "unknown device": ("model.device=foo model.path=.", "model.device=foo: "),
    "device of another kind": ("model.device=meta model.path=.", "model.device=meta: octavo runs on cpu and cuda"),
    "more samples than sequences": ("experiment=generate sampling.n=300", "sampling.n=300: more samples than run at"),
    "a number that is none": (
        "experiment=placements pool_requests=nan",
        "pool_requests=nan: must be at least 1, and finite",
    ),
    "a number without end": (
        "experiment=placements pool_requests=inf",
        "pool_requests=inf: must be at least 1, and finite",
    ),
    "a bound that is no number": ("experiment=latency ttft_limit_s=nan", "ttft_limit_s=nan: must be above 0"),
    "a gain that is no number": ("experiment=break_even gain=nan", "gain=nan: must be above 1"),
    "a weight without end": ("experiment=structure weight=inf", "weight=inf: must be above 0, and finite"),
    "seed": ("seed=-1", "seed=-1: must be at least 0"),
    "budget": ("sparse.budget_tokens=0", "sparse.budget_tokens=0: must be at least 1"),
    "no value": ("model=local", "model.path has no value; give one with model.path="),
    "benchmark without its file": ("task=lcc", "task.path has no value; lcc is read from a file"),
    "missing model folder": ("model.path=./nowhere", "no such folder: {cwd}/nowhere"),
    "broken override": ("engine.page_tokens=[", "cannot read the override 'engine.page_tokens=['"),
    "no list of lists": ("experiment=decode_step shapes=[1,64]", "shapes=[1,64]: Invalid value assigned: int is not"),
    "broken interpolation": ("model.path=${nowhere}", "nowhere"),
    "nothing to resume": ("resume=nowhere", "resume={cwd}/nowhere: no run is there"),
}


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=list(CASES))
def test_refused_with_one_message(
    arguments: str,
    message: str,
    octavo: Command,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_model(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("octavo.core.hf_model.load", no_model)
    one = [arguments] if "{" in arguments else arguments.split()
    model = [] if "model" in arguments else [f"model.path={tiny_model}"]
    outcome = octavo(*one, *model)
    assert outcome.code == 1
    assert message.format(cwd=tmp_path) in outcome.err
    assert outcome.err.startswith("octavo: ") and outcome.err.count("\n") == 1, "one message, no traceback"
    assert not list(tmp_path.rglob("*.yaml")), "a refused run leaves no folder behind"


@pytest.mark.parametrize("argument", ["engine.page_tokns=16", "tracking=oflfine", "limit=0"])
def test_refused_in_a_moment(argument: str, tmp_path: Path) -> None:
    start = time.perf_counter()
    command = [sys.executable, "-P", "-m", "octavo.scripts.main", argument]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1 and argument.split("=")[0] in result.stderr
    assert time.perf_counter() - start < 5
