"""Policies by name and parameters. Methods from YAML: by name, by path, from one's own folder, changed, and refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from octavo.core.policies import EVICTIONS, PAGE_POLICIES, FixedPages
from octavo.core.policies.lru_k import LruK
from octavo.core.policies.page_divisors import DivisorPages, WholePages
from octavo.core.policies.page_size import RatioPages
from octavo.core.policies.page_sqrt import SqrtPages
from octavo.scripts.build import engine_config, load_model, method, methods, policy
from octavo.scripts.refusal import ConfigError
from octavo.scripts.schema import EngineSettings, ModelSettings, SparseSettings
from octavo.sparse.host_placement import Host

from .conftest import Command, samples


def test_dense_is_no_method() -> None:
    assert method("dense") is None
    assert method("dense", budget_tokens=64) is None


def test_a_name_and_its_budget() -> None:
    made = method("quest", budget_tokens=2048)
    assert made is not None and made.name == "quest"
    assert made.budget.tokens == 2048  # type: ignore[attr-defined]
    assert made.dense_layers == (0, 1)  # type: ignore[attr-defined]


def test_parts_can_be_changed() -> None:
    made = method("streaming", keep={"sink_tokens": 4}, dense_layers=[])
    assert made.keep.sink_tokens == 4 and made.keep.recent_tokens == 64  # type: ignore[union-attr]
    assert made.dense_layers == ()  # type: ignore[union-attr]


def test_what_a_file_leaves_to_its_class_can_be_set(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text(
        "_target_: octavo.sparse.method.Method\nname: bare\nscorer: {_target_: octavo.sparse.scorers.Recency}\n"
        "budget: {_target_: octavo.sparse.budgets.Uniform, tokens: 64}\nkeep: {_target_: octavo.sparse.keep.Keep}\n"
    )
    bare = str(tmp_path / "bare.yaml")
    assert method(bare, keep={"sink_tokens": 32}).keep.sink_tokens == 32  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"keep has no 'sinks'; .*it has: sink_tokens, recent_tokens"):
        method(bare, keep={"sinks": 32})


def test_a_file_of_ones_own_may_build_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - /sparse@_global_: streaming\n  - _self_\nname: mine\nkeep: {sink_tokens: 8}\n"
    )
    made = method(str(tmp_path / "mine.yaml"), budget_tokens=512)
    assert made is not None and made.name == "mine"
    assert made.keep.sink_tokens == 8 and made.budget.tokens == 512  # type: ignore[attr-defined]
    monkeypatch.chdir(tmp_path)
    assert method("./mine.yaml", budget_tokens=512) == made
    assert not GlobalHydra.instance().is_initialized(), "nothing global stays behind"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    known = r"unknown sparse method 'qest'; did you mean 'quest'\? known: a_shape, .*quest, quest_structure"
    with pytest.raises(ConfigError, match=known):
        method("qest")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keeep": {}}, "no part 'keeep'; did you mean 'keep'"),
        ({"keep": {"sink_tokns": 4}}, "keep has no 'sink_tokns'; did you mean 'sink_tokens'[^\n]*$"),
        ({"scorer": {"_target_": "octavo.sparse.scorers.Nothing"}}, "Nothing"),
        ({"scorer": {"_target_": "nowhere.Idea"}}, "No module named 'nowhere'; PYTHONPATH=. lets Python find"),
        ({"placement": {"_target_": "octavo.sparse.host_placement.Host", "slack": 4}}, "slack"),
        (
            {"placement": {"_target_": "octavo.sparse.host_placement.Host", "prefetch": "next"}},
            "is none of: none, prev",
        ),
        ({"placement": "host"}, "placement=host is no placement; what can be set: nothing; for another placement name"),
        ({"keep": 4}, "keep=4 is no keep; what can be set: keep.sink_tokens, keep.recent_tokens; for another keep"),
        ({"scorer": None}, "scorer=None is no scorer"),
        ({"name": "dense"}, "name='dense'; give it one of its own"),
        ({"name": None}, "name=None; give it one of its own"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"method streaming: .*{message}"):
        method("streaming", **changes)


def test_a_part_of_another_class_has_its_own_settings() -> None:
    host = {"_target_": "octavo.sparse.host_placement.Host", "prefetch": "next_query", "slack_tokens": 0}
    assert method("quest", placement=host).placement == Host(0, prefetch="next_query")


def test_a_file_without_a_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("name: bare\n")
    with pytest.raises(ConfigError, match=r"bare.yaml: no _target_"):
        method(str(tmp_path / "bare.yaml"))


@pytest.mark.parametrize(
    ("target", "message"),
    [("builtins.dict", "builds a dict, which is no sparse method"), ("builtins.print", "builds a NoneType")],
)
def test_a_target_that_builds_no_method_is_refused(target: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(f"_target_: {target}\n")
    with pytest.raises(ConfigError, match=rf"other.yaml: its _target_ {message}"):
        method(str(tmp_path / "other.yaml"))


def test_a_damaged_model_is_named(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"model.path={broken}: its weights are damaged"):
        load_model(ModelSettings(str(broken)))


def test_dense_has_nothing_to_change() -> None:
    with pytest.raises(ConfigError, match="method dense: it has no parts, so none to change: foo"):
        method("dense", foo=3)


def test_the_methods_of_a_run_share_their_budget() -> None:
    made = methods(SparseSettings(methods=["dense", "quest", "random"], budget_tokens=256))
    assert list(made) == ["dense", "quest", "random"] and made["dense"] is None
    assert {m.budget.tokens for m in made.values() if m} == {256}  # type: ignore[attr-defined]


def test_two_methods_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("defaults:\n  - /sparse@_global_: random\n  - _self_\n")
    with pytest.raises(ConfigError, match="is named 'random', like another"):
        methods(SparseSettings(methods=["random", str(tmp_path / "other.yaml")]))


class TestPolicies:
    def test_one_of_the_user_s_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own_policy.py").write_text(
            "from dataclasses import dataclass\n"
            "@dataclass(frozen=True)\nclass Mine:\n    weight: float = 1.0\n    history = 1\n"
            "    def rank(self, pages, facts):\n        return self.weight * facts.uses[pages]\n"
            "class NoDataclass: ...\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        made = engine_config(EngineSettings(eviction={"policy": "own_policy.Mine", "weight": 0.5})).eviction_policy
        assert type(made).__name__ == "Mine" and made.weight == 0.5
        for given, message in (
            ("own_policy.Mien", "no such class can be imported"),
            ("own_policy.NoDataclass", "a policy is a dataclass"),
            ({"policy": "own_policy.Mine", "wieght": 1}, "weight"),
        ):
            with pytest.raises(ConfigError, match=message):
                engine_config(EngineSettings(eviction=given))

    @pytest.mark.parametrize("name", EVICTIONS)
    def test_every_eviction_policy_goes_by_name(self, name: str) -> None:
        made = engine_config(EngineSettings(eviction=name)).eviction_policy
        assert type(made) is EVICTIONS[name] and made == EVICTIONS[name]()

    def test_parameters(self) -> None:
        config = engine_config(
            EngineSettings(
                eviction={"policy": "lru_k", "k": 3},
                page_policies={"text": {"policy": "sqrt", "overhead_tokens": 2, "mean_tokens": 400}, "image": "whole"},
            )
        )
        assert config.eviction == LruK(3)
        assert config.policies == {"text": SqrtPages(2.0, 400.0), "image": WholePages()}

    @pytest.mark.parametrize(
        ("given", "made"),
        [
            (24, 24),
            ("divisor", DivisorPages()),
            ({"policy": "ratio", "ratio": 2}, RatioPages(2.0)),
            ({"policy": "fixed", "tokens": 24}, FixedPages(24)),
        ],
    )
    def test_a_page_policy(self, given: object, made: object) -> None:
        assert policy("key", given, PAGE_POLICIES) == made

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("ratoi", "key.policy=ratoi: unknown; did you mean 'ratio'? one of: fixed, ratio"),
            ({"policy": "ratoi"}, "did you mean 'ratio'?"),
            ({"ratio": 1.5}, "key={'ratio': 1.5}: no `policy` says which one; one of: fixed, ratio"),
            (
                {"policy": "ratio", "ration": 2},
                "unknown key 'key.ration'; did you mean 'key.ratio'? keys of key: ratio, of",
            ),
            ("fixed", "key.tokens has no value; the policy 'fixed' needs one"),
            ({"policy": "fixed", "tokens": "many"}, "key.tokens: Value 'many' of type 'str' could not be converted"),
            ({"policy": "fixed", "tokens": 2.5}, "allowed: a whole number"),
            ({"policy": "divisor", "cap": 4}, "key: DivisorPages: cap=4 is below grain=8"),
        ],
    )
    def test_refused(self, given: object, message: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(message)):
            policy("key", given, PAGE_POLICIES)

    def test_from_the_command_line(self, octavo: Command, tiny_model: Path) -> None:
        arguments = [
            "experiment=generate", f"model.path={tiny_model}", "sampling.max_tokens=2", "prompts=[hi]",
            "engine.eviction={policy: lru_k, k: 3}", "engine.page_policies={image: {policy: ratio, ratio: 1.5}}",
        ]  # fmt: skip
        outcome = octavo(*arguments)
        assert outcome.code == 0, outcome.err
        again = octavo("--config-path", str(outcome.folder), "--config-name", "config", "tracking.mode=off")
        assert again.code == 0, again.err
        for folder in (outcome.folder, again.folder):
            saved = OmegaConf.load(folder / "config.yaml").engine
            assert saved.eviction == {"policy": "lru_k", "k": 3}
            assert saved.page_policies == {"image": {"policy": "ratio", "ratio": 1.5}}


@pytest.mark.parametrize("way", ["--config-dir", "hydra.searchpath"])
def test_a_run_finds_methods_on_its_search_path(way: str, octavo: Command, tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "own"
    (folder / "sparse").mkdir(parents=True)
    (folder / "sparse" / "mine.yaml").write_text("defaults: [streaming, _self_]\nname: mine\ndense_layers: []\n")
    where = ["--config-dir", str(folder)] if way == "--config-dir" else [f"hydra.searchpath=[file://{folder}]"]
    arguments = [a for a in tiny if "overrides" not in a and "methods" not in a]
    outcome = octavo(*where, *arguments, "sparse.methods=[dense,mine]", "limit=1")
    assert outcome.code == 0, outcome.err
    assert [sample["method"] for sample in samples(outcome.folder)] == ["dense", "mine"]
