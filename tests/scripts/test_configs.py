"""Every YAML composes, is typed, and says what it is; settings mirror the dataclasses that they configure."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from octavo.core import EngineConfig, SamplingParams
from octavo.scripts import main, schema, settings
from octavo.scripts.build import method

from .conftest import CONFIGS

EXPERIMENTS = sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))
NEEDED = {"compare": ["runs=[one,two]"]}
"""What has no default."""
OPTIONS = [f"{group}={f.stem}" for group in ("engine", "tracking") for f in sorted((CONFIGS / group).glob("*.yaml"))]


def composed(*overrides: str) -> schema.Config:
    assert main.schema is schema  # importing main registers the types
    with initialize_config_module("octavo.configs", version_base="1.3"):
        return settings.typed(compose("config", overrides=[*overrides, "model.path=owner/name"]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_to_its_type(name: str) -> None:
    config = composed(f"experiment={name}", *NEEDED.get(name, ()))
    assert config.experiment == name
    assert type(config) is schema.EXPERIMENTS[name]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_starts_with_its_command_line(name: str) -> None:
    lines = (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith(f"# octavo experiment={name}")
    assert lines[2].startswith("# ")


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option: str) -> None:
    composed(option)


def test_the_main_job_is_the_default() -> None:
    assert composed().experiment == "code_completion"


@pytest.mark.parametrize("given", ["lfu", {"policy": "lru_k", "k": 3}], ids=["name", "parameters"])
def test_a_policy_may_have_parameters(given: object) -> None:
    config = composed(f"engine.eviction={str(given).replace(chr(39), '')}", "engine.page_policies.image=whole")
    assert config.engine.eviction == given
    assert config.engine.page_policies == {"image": "whole"}


@pytest.mark.parametrize("file", sorted((CONFIGS / "task").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_task_composes(file: Path) -> None:
    config = composed(f"task={file.stem}", "task.path=some.jsonl")
    assert isinstance(config, schema.CodeCompletion)
    assert Path(config.task.path or "").is_absolute()


@pytest.mark.parametrize("file", sorted((CONFIGS / "sparse").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_method_builds(file: Path) -> None:
    made = method(file.stem, budget_tokens=2048)
    assert made is None or made.name == file.stem


def defaults(cls: type) -> dict[str, object]:
    made = cls()
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(cls)}


def test_engine_settings_are_those_of_the_engine() -> None:
    # An empty mapping rather than null: OmegaConf cannot add a key to null.
    assert defaults(schema.EngineSettings) == {**defaults(EngineConfig), "page_policies": {}}


def test_sampling_settings_are_those_of_the_sampler() -> None:
    ours = {name: tuple(v) if isinstance(v, list) else v for name, v in defaults(schema.SamplingSettings).items()}
    assert ours == defaults(SamplingParams)
