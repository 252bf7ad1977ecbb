"""The method that docs/sparse.md builds runs as it stands there."""

import re
from pathlib import Path

from octavo.core import SamplingParams
from octavo.core.costs import predict_decode
from octavo.scripts.build import method

from .method_cases import BUDGET, CONFIGS, PROMPT, SMALL

GUIDE = (Path(__file__).parents[2] / "docs" / "sparse.md").read_text()


def block(language):
    return re.search(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)[1]


def test_the_method_of_the_guide(tmp_path, monkeypatch, make_llama, engine_for):
    code, recipe = block("python"), block("yaml")
    assert len(code.splitlines()) <= 30 and len(recipe.splitlines()) <= 15
    (tmp_path / "landmarks.py").write_text(code)
    (tmp_path / "landmarks.yaml").write_text(recipe)
    monkeypatch.syspath_prepend(tmp_path)
    made = method(str(tmp_path / "landmarks.yaml"), budget_tokens=BUDGET, **SMALL)
    engine = engine_for(make_llama(num_hidden_layers=3))
    engine.submit(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True), request_id="a", method=made)
    sample = engine.finish(["a"])["a"].samples[0]
    shape = {"prompt_tokens": len(PROMPT), "new_tokens": 12, "page_tokens": 4, "unit_tokens": 4, "itemsize": 4}
    sparse, dense = (predict_decode(engine.spec, which, **shape) for which in (made, None))
    assert (sample.kv_bytes_read, sample.digest_bytes_read) == (sparse.kv_bytes, sparse.digest_bytes)
    assert sparse.kv_bytes < 0.7 * dense.kv_bytes


def test_the_guide_lists_every_method():
    named = set(re.findall(r"`(\w+)`", GUIDE[GUIDE.index("## The methods") :]))
    assert {path.stem for path in CONFIGS.glob("*.yaml")} <= named
