"""Which folder may import which, where heavy dependencies live, and what importing the engine may do."""

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "kernels", "sparse", "multimodal", "scripts", "configs")
ARROWS = {
    "kernels": {"kernels"},
    "core": {"core", "kernels"},
    "sparse": {"sparse", "core", "kernels"},
    "multimodal": {"multimodal", "core"},
    "scripts": {"scripts", "multimodal", "sparse", "core", "kernels", "configs"},
    "configs": set(),
}
HOMES = {
    "hydra": ("scripts/",),
    "omegaconf": ("scripts/",),
    "wandb": ("scripts/",),
    "matplotlib": ("scripts/",),
    "rich": ("scripts/",),
    "rapidfuzz": ("scripts/",),
    "open_clip": ("multimodal/",),
    "PIL": ("multimodal/", "scripts/"),
    "triton": ("kernels/",),
    "cuda": ("kernels/hopper/", "core/memory/elastic.py"),
    "transformers": ("core/hf_model.py", "multimodal/", "scripts/"),
}
LAZY = {"wandb", "open_clip", "PIL"}
"""Imported inside functions only."""
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imports(path):
    """(module, whether it is imported when the file is) of every import statement, and literal ``import_module``.

    What stands under ``if TYPE_CHECKING`` is not imported."""
    tree = ast.parse(path.read_text())
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    } | {id(node) for block in ast.walk(tree) if _for_types_only(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        at_top = id(node) not in inner
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield node.module, at_top
            yield from ((f"{node.module}.{alias.name}", at_top) for alias in node.names if node.module == "octavo")
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", None)) == "import_module"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.args[0].value, at_top


def _for_types_only(node):
    return isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_arrows_and_homes(path):
    here = name(path)
    folder = here.split("/")[0]
    for module, at_top in imports(path):
        top, *rest = module.split(".")
        if top == "octavo" and rest:
            assert rest[0] in ARROWS[folder], f"{here} imports {module}"
        assert top not in (*FOLDERS, "tests"), f"{here} imports {module}; the package is octavo.{top}"
        if top in HOMES:
            assert here.startswith(HOMES[top]), f"{here} imports {module}, which lives in {HOMES[top]}"
            assert not (at_top and top in LAZY), f"{here} imports {module} when it is imported itself"


def test_the_arrows_are_looked_at():
    found = {module for path in SOURCES for module, _ in imports(path)}
    assert {"octavo.kernels", "transformers", "triton", "hydra", "torch"} <= found and len(SOURCES) > 40


def test_no_package_here_is_named_like_an_installed_one():
    installed = importlib.metadata.packages_distributions()
    regular = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    clashes = {here: installed[here] for here in regular if set(installed.get(here, [])) - {"octavo"}}
    assert not clashes
    assert not [folder for folder in ("kernels", "sparse", "tests") if list((ROOT / folder).rglob("__init__.py"))]


def test_every_folder_with_code_is_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"octavo." + ".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    assert set(settings["packages"]) == folders
    assert settings["package-dir"] == {"octavo": "."}
    data = settings["package-data"]
    assert "**/*.yaml" in data["octavo.configs"] and "py.typed" in data["octavo.core"]


IMPORT = """
import os, random, socket, sys, warnings
sys.modules["triton"] = None  # a machine without Triton

def refuse(*args, **kwargs):
    raise AssertionError(f"the network was asked for {args}")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
import logging, numpy, torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

def state():
    return dict(
        environment=dict(os.environ), path=list(sys.path), directory=os.getcwd(), filters=list(warnings.filters),
        random=random.getstate(), numpy=numpy.random.get_state()[1].tolist(), torch=torch.get_rng_state().tolist(),
        dtype=torch.get_default_dtype(), threads=torch.get_num_threads(), grad=torch.is_grad_enabled(),
        exact=torch.are_deterministic_algorithms_enabled(), precision=torch.get_float32_matmul_precision(),
        handlers=list(logging.root.handlers), level=logging.root.level, hook=sys.excepthook,
        tf32=(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    )

before = state()
import octavo.core
after = state()
changed = [key for key in before if before[key] != after[key]]
assert not changed, changed
assert not torch.cuda.is_initialized()
strangers = {"hydra", "omegaconf", "wandb", "open_clip", "octavo.sparse", "octavo.scripts", "octavo.multimodal"}
assert not strangers & set(sys.modules), strangers & set(sys.modules)

from octavo.core import Engine, EngineConfig, SamplingParams
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)).eval()
engine = Engine(model, None, EngineConfig(pool_tokens=64))
print(len(engine.generate([[3, 4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))[0].samples[0].token_ids))
try:
    Engine(model, None, EngineConfig(pool_tokens=64, backend="triton"))
except ValueError as error:
    print(error)
"""


def test_br74_importing_the_engine_touches_nothing(tmp_path):
    """Without Triton, a GPU or a network: import and generation work, and an explicit choice of Triton is refused."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    generated, refusal = done.stdout.strip().splitlines()
    assert generated == "4" and "backend='triton' needs the package triton" in refusal
