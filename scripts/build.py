"""Objects from settings: the only place that instantiates what YAML describes."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import pydoc
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from octavo.scripts.paths import absolute
from octavo.scripts.refusal import ConfigError, explain, nearest, one_of, unknown_key
from octavo.scripts.schema import Config, EngineSettings, ModelSettings, SamplingSettings, SparseSettings

if TYPE_CHECKING:
    from octavo.core import Engine, EngineConfig, SamplingParams
    from octavo.core.costs import DecodeCost
    from octavo.core.interfaces import ModelSpec, SegmentEncoder, SegmentReuse, SparseMethod

log = logging.getLogger(__name__)

DENSE = "dense"
DRAFT = "draft"
"""The part of a method that is a method itself (``octavo.sparse.lossless``)."""
OPTIONAL_PARTS = ("prefill", "prior")
"""Parts of a method that a change may add, since its YAML does well without them."""
NEEDED_PARTS = ("scorer", "budget", "selector", "placement", "keep")
"""Parts that a change may not take away; others, a digest say, a method may do without."""
DTYPES = {"auto": "auto", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def check(config: Config) -> dict[str, SparseMethod | None]:
    """Build everything that needs no model, so that what cannot be built is refused before one is loaded. Gives the
    methods of the run by name.

    Raises:
        ConfigError: naming the key.
    """
    made: dict[str, SparseMethod | None] = {}
    for part in dataclasses.fields(config):
        value = getattr(config, part.name)
        if isinstance(value, ModelSettings):
            check_device("model.device=", value.device)
        elif isinstance(value, EngineSettings):
            engine_config(value)
        elif isinstance(value, SamplingSettings):
            sampling_params(value)
        elif isinstance(value, SparseSettings):
            made |= methods(value)
    for name, changes in getattr(config, "features", {}).items():  # of image_benchmarks: settings of an engine each
        try:
            engine_config(dataclasses.replace(config.engine, **changes))
        except ConfigError as error:
            raise ConfigError(f"features.{name}: {error}") from error
    sampling = getattr(config, "sampling", None)
    if sampling is not None and sampling.n > config.engine.max_seqs:
        raise ConfigError(
            f"sampling.n={sampling.n}: more samples than run at once, engine.max_seqs={config.engine.max_seqs}"
        )
    return made


def check_device(key: str, device: str) -> None:
    """Raises ConfigError, its message beginning with ``key``, unless ``device`` is "auto", or one that is there."""
    if device == "auto":
        return
    import torch

    try:
        kind = torch.empty(0, device=device).device.type
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without CUDA
        raise ConfigError(f"{key}{device}: {str(error).splitlines()[0]}") from error
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"{key}{device}: octavo runs on cpu and cuda")


def load_model(settings: ModelSettings) -> tuple[Any, Any]:
    """A transformers model in eval mode on its device, and its tokenizer.

    Raises:
        ConfigError: nothing can be loaded from ``settings.path``.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    from octavo.core.hf_model import load

    logging.disable_progress_bar()  # progress is ours
    try:
        return load(settings.path, DTYPES[settings.dtype], settings.device)
    except SafetensorError as error:
        raise ConfigError(f"model.path={settings.path}: its weights are damaged: {error}") from error
    except ValueError as error:
        raise ConfigError(f"model.path={settings.path}: {error}") from error


def engine(
    config: Config,
    model: Any,
    tokenizer: Any,
    *,
    encoders: Mapping[str, SegmentEncoder] | None = None,
    reuse: SegmentReuse | None = None,
) -> Engine:
    """The engine of a run.

    Raises:
        ConfigError: settings that the engine, the model or the machine cannot have.
    """
    from octavo.core import Engine

    _spare_model()
    try:
        return Engine(model, tokenizer, engine_config(config.engine), encoders=encoders, reuse=reuse)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"engine: {error}") from error


@cache
def _spare_model() -> None:
    spare_collections()


def spare_collections() -> None:
    """Let garbage collections pass over all that is there now, which stays until the end: torch, transformers and a
    model when the first engine is built; the code that is compiled for it, as many objects again, once it is warm. A
    full collection that looks through them takes up to a second, in the middle of whatever is being timed."""
    gc.freeze()


def engine_config(settings: EngineSettings) -> EngineConfig:
    from octavo.core.config import EngineConfig
    from octavo.core.policies import EVICTIONS, PAGE_POLICIES

    pages = {
        kind: policy(f"engine.page_policies.{kind}", given, PAGE_POLICIES)
        for kind, given in settings.page_policies.items()
    }
    eviction = policy("engine.eviction", settings.eviction, EVICTIONS)
    built = dataclasses.replace(settings, page_policies=pages, eviction=eviction)
    return typing.cast("EngineConfig", _checked("engine", EngineConfig, built))


def policy(key: str, given: Any, known: Mapping[str, type]) -> Any:
    """The policy that setting ``key`` describes: its name, or ``{policy: NAME, PARAMETER: VALUE, ...}``. A name with a
    dot is that of a class of the user's own, ``module.Class``. Anything else (a number of tokens, say) is given back
    as it is.

    Args:
        known: name -> dataclass, whose fields are the parameters.

    Raises:
        ConfigError: an unknown name or parameter, with the nearest; a parameter that is missing, of the wrong type, or
            that the policy refuses.
    """
    if isinstance(given, str):
        given = {"policy": given}
    if not isinstance(given, Mapping):
        return given
    parameters = {str(name): value for name, value in given.items()}
    if "policy" not in parameters:
        raise ConfigError(f"{key}={given}: no `policy` says which one; one of: {', '.join(known)}")
    name = str(parameters.pop("policy"))
    if "." in name:
        known = {**known, name: _own_policy(key, name)}
    one_of(f"{key}.policy", name, tuple(known))
    fields = dataclasses.fields(known[name])
    strange = [parameter for parameter in parameters if parameter not in [field.name for field in fields]]
    if strange:
        raise unknown_key(f"{key}.{strange[0]}", known[name], known[name], {})
    for field in fields:
        if field.name not in parameters and field.default is dataclasses.MISSING:
            raise ConfigError(f"{key}.{field.name} has no value; the policy {name!r} needs one")
    typed = OmegaConf.structured(known[name])
    OmegaConf.set_readonly(typed, False)  # policies are frozen
    try:
        return OmegaConf.to_object(OmegaConf.merge(typed, parameters))
    except ValidationError as error:
        raise ConfigError(f"{key}.{explain(error, known[name], {})}") from error
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def _own_policy(key: str, name: str) -> type:
    """The dataclass ``name``, from a module on the path."""
    try:
        found = get_class(name)
    except Exception as error:  # whatever importing a user's module raises
        raise ConfigError(f"{key}.policy={name}: no such class can be imported: {error}") from error
    if not dataclasses.is_dataclass(found):
        raise ConfigError(f"{key}.policy={name}: a policy is a dataclass, whose fields are its parameters")
    return found


def sampling_params(settings: SamplingSettings) -> SamplingParams:
    from octavo.core.config import SamplingParams

    return typing.cast("SamplingParams", _checked("sampling", SamplingParams, settings))


def methods(settings: SparseSettings) -> dict[str, SparseMethod | None]:
    """The methods of a run by name, in order, all with the shared budget; None is dense."""
    built: dict[str, SparseMethod | None] = {}
    for entry in settings.methods:
        overrides = settings.overrides.get(entry, {})
        if not isinstance(overrides, Mapping):
            raise ConfigError(
                f"sparse.overrides.{entry}={overrides}: changes are given by part, as in "
                f"sparse.overrides.{entry}.keep.sink_tokens=4"
            )
        made = _method(entry, settings.budget_tokens, overrides)
        name = DENSE if made is None else made.name
        if name in built:
            raise ConfigError(f"sparse.methods: {entry} is named {name!r}, like another; give it a `name` of its own")
        built[name] = made
    return built


def has_prior(method: SparseMethod | None) -> bool:
    """Whether a method asks what a request says of its own tokens."""
    return getattr(method, "prior", None) is not None


def within_share(
    share: float,
    made: Mapping[str, SparseMethod | None],
    tokens: int,
    engine: Engine,
    rebuild: Callable[[int], Mapping[str, SparseMethod | None]],
) -> Mapping[str, SparseMethod | None]:
    """The same methods, for a prompt of so many tokens: ``rebuild``, given a budget in tokens, with this ``share`` of
    them, rounded up to whole pages.

    Raises:
        ConfigError: the budget is too small for what a method always reads.
    """
    page = engine.config.text_page_tokens
    budget = math.ceil(share * tokens / page) * page
    found = rebuild(budget)
    fit(found, engine)
    return {name: found[name] for name in made}


def method(name_or_path: str, *, budget_tokens: int | None = None, **overrides: Any) -> SparseMethod | None:
    """A sparse method, from the YAML that composes it; None for "dense".

    Args:
        name_or_path: a file of ``configs/sparse/`` or of ``sparse/`` in a folder on ``hydra.searchpath``, without its
            ending; or the path of a YAML file. Either may build on others by a defaults list.
        budget_tokens: ``tokens`` of the method's budget, if it has one.
        overrides: what else to change, by part: ``keep={"sink_tokens": 4}``. A part that is a method itself may be
            named: ``method("lossless", draft="tidal")``; the budget is its budget.

    Raises:
        ConfigError: an unknown method, with the nearest name, or parts that do not fit together.
    """
    return _method(name_or_path, budget_tokens, overrides)


def _method(name_or_path: str, budget_tokens: int | None, overrides: Mapping[str, Any]) -> SparseMethod | None:
    if name_or_path == DENSE and overrides:
        raise ConfigError(f"method {DENSE}: it has no parts, so none to change: {', '.join(map(str, overrides))}")
    if name_or_path == DENSE:
        return None
    recipe = _compose(name_or_path)
    overrides = dict(overrides)
    if isinstance(overrides.get(DRAFT), str) and DRAFT in recipe:
        if overrides[DRAFT] == DENSE:
            raise ConfigError(f"method {name_or_path}: {DRAFT}={DENSE} would spare nothing; give a sparse method")
        recipe[DRAFT] = _compose(overrides.pop(DRAFT))
    for made in (recipe, recipe.get(DRAFT)):
        if budget_tokens is not None and made is not None and OmegaConf.select(made, "budget.tokens") is not None:
            made.budget.tokens = budget_tokens
    if "_target_" not in recipe:
        raise ConfigError(
            f"method {name_or_path}: no _target_ says what to build; octavo.sparse.method.Method, usually"
        )
    _make_room(name_or_path, recipe, overrides)
    try:
        built = instantiate(OmegaConf.merge(recipe, overrides), _convert_="all")
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise ConfigError(f"method {name_or_path}: {_no_such_part(error, recipe)}") from error
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"method {name_or_path}: {_root_cause(error)}") from error
    lacking = [part for part in ("name", "validate", "select", "resolve") if not hasattr(built, part)]
    if lacking:
        raise ConfigError(
            f"method {name_or_path}: its _target_ builds a {type(built).__name__}, which is no sparse method: "
            f"it has no {', '.join(lacking)}"
        )
    if not isinstance(built.name, str) or built.name in ("", DENSE):
        raise ConfigError(f"method {name_or_path}: name={built.name!r}; give it one of its own: no method is {DENSE!r}")
    return typing.cast("SparseMethod", built)


def _make_room(name_or_path: str, recipe: DictConfig, overrides: Mapping[str, Any]) -> None:
    """Let a recipe have the keys that ``overrides`` change.

    Raises:
        ConfigError: it has no such part, or what is given is none.
    """
    for key in map(str, overrides):
        if key not in recipe and key in OPTIONAL_PARTS:
            with open_dict(recipe):
                recipe[key] = overrides[key]
        elif key not in recipe:
            known = [str(part) for part in recipe]
            raise ConfigError(f"method {name_or_path}: no part {key!r}; {nearest(key, known)}parts: {', '.join(known)}")
        elif OmegaConf.is_dict(recipe[key]) and _is_no_part(key, overrides[key]):
            settings = ", ".join(f"{key}.{setting}" for setting in map(str, recipe[key]) if setting != "_target_")
            raise ConfigError(
                f"method {name_or_path}: {key}={overrides[key]} is no {key}; what can be set: {settings or 'nothing'}; "
                f"for another {key} name its class, as in {key}={{_target_: octavo.sparse...}}"
            )
    _open_defaults(recipe, overrides)


def _is_no_part(key: str, value: Any) -> bool:
    """Whether a plain value stands where a method has an object, and cannot do without."""
    return isinstance(value, bool | int | float | str | list | tuple) or (value is None and key in NEEDED_PARTS)


def reuse(name_or_path: str) -> SegmentReuse:
    """How images are reused, from a file of ``configs/reuse/`` or of ``reuse/`` in a folder on ``hydra.searchpath``,
    without its ending, or from the path of a YAML file.

    Raises:
        ConfigError: an unknown name, with the nearest, or parameters that the policy refuses.
    """
    recipe = _compose(name_or_path, "reuse")
    try:
        return typing.cast("SegmentReuse", instantiate(recipe, _convert_="all"))
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"reuse {name_or_path}: {_root_cause(error)}") from error


def drafting(method: SparseMethod, drafts: int, forced_acceptance: float | None = None) -> SparseMethod:
    """``method`` as one that only drafts (``octavo.sparse.lossless``).

    Raises:
        ConfigError: it cannot.
    """
    from octavo.sparse.lossless import Lossless

    try:
        return typing.cast("SparseMethod", Lossless(method, drafts, forced_acceptance))
    except ValueError as error:
        raise ConfigError(f"sparse.methods: {error}") from error


def fit(methods: Mapping[str, SparseMethod | None], engine: Engine) -> None:
    """Make sure that the methods can serve the engine's model and page size. One that serves it and chooses nothing is
    said, since its figures are those of dense.

    Raises:
        ConfigError: naming the method and what does not fit.
    """
    from octavo.core.serving.requests import validate_method

    for name, method in methods.items():
        try:
            if method is not None:
                validate_method(method, engine)
        except ValueError as error:
            reason = str(error).removeprefix(f"{name}: ")  # a method says its name, where others do not
            raise ConfigError(f"method {name}: {reason}") from error
        layers = getattr(method, "sparse_layers", None)
        if layers is not None and not layers(engine.spec):
            _say_idle(name, tuple(method.dense_layers), engine.spec)  # type: ignore[union-attr]


@cache
def _say_idle(name: str, dense_layers: tuple[int, ...], spec: ModelSpec) -> None:
    """Once for a method and model, however often methods are fitted."""
    log.warning(
        "method %s chooses nothing: none of the %d layers of %s is left by dense_layers=%s and sliding windows; give "
        "sparse.overrides.%s.dense_layers=[]", name, spec.layers, spec.name, list(dense_layers), name,
    )  # fmt: skip


def predicted_cost(
    engine: Engine, method: SparseMethod | None, prompt_tokens: int, new_tokens: int, unseen_tokens: int = 0
) -> DecodeCost:
    """What decoding ``new_tokens`` after a prompt reads, in closed form."""
    from octavo.core import sizing
    from octavo.core.costs import predict_decode

    return predict_decode(
        engine.spec,
        method,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        unseen_tokens=unseen_tokens,
        page_tokens=engine.config.text_page_tokens,
        unit_tokens=engine.config.unit_tokens,
        itemsize=sizing.kv_dtype(engine.config, engine.spec).itemsize,
    )


def digest_bytes(engine: Engine, method: SparseMethod | None, tokens: int) -> int:
    """Bytes of the digests that a method has of the full pages of a sequence of so many tokens, or of those that it
    keeps of them."""
    from octavo.core import sizing

    if method is None or method.digest is None:
        return 0
    page, unit, spec = engine.config.text_page_tokens, engine.config.unit_tokens, engine.spec
    elements = sum(map(math.prod, method.digest.spec(page, spec).values()))
    layers = [layer for layer, window in enumerate(spec.windows) if not window]  # others choose nothing
    pages = tokens // page * len(layers)
    if (compressor := getattr(method, "compressor", None)) is not None:
        units = sum(compressor.kept_units(tokens, layer, spec, page, unit) for layer in layers)
        pages = units // spec.kv_heads * unit // page
    return pages * elements * sizing.kv_dtype(engine.config, engine.spec).itemsize


def budget_of(method: SparseMethod | None) -> dict[str, int]:
    """What a sample says of a method's budget, if it has one in tokens."""
    tokens = getattr(getattr(method, "budget", None), "tokens", None)
    return {} if tokens is None else {"budget_tokens": tokens}


def _checked(group: str, target: type[Any], settings: Any) -> Any:
    """``target`` with the fields of ``settings``; what it refuses is refused under the name of the key."""
    try:
        return target(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)})
    except ValueError as error:
        raise ConfigError(f"{group}.{error}") from error


def _compose(name_or_path: str, group: str = "sparse") -> DictConfig:
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    try:
        if not is_path:
            with _apart(), initialize_config_module("octavo.configs", version_base="1.3"):
                return compose(overrides=[_search_path(), f"+{group}@_global_={name_or_path}"])
        file = absolute(name_or_path)
        if not file.is_file():
            raise ConfigError(f"no such method file: {file}")
        with _apart(), initialize_config_dir(str(file.parent), version_base="1.3"):
            return compose(file.stem, overrides=[_search_path()])
    except MissingConfigException as error:
        known = sorted({*([DENSE] if group == "sparse" else []), *(error.options or ())})
        missing = (error.missing_cfg_file or "").rpartition("/")[2]
        kind = "sparse method" if group == "sparse" else "way of reusing images"
        raise ConfigError(
            f"unknown {kind} {missing!r}; {nearest(missing, known)}known: {', '.join(known)}, "
            "or the path of a YAML file"
        ) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"method {name_or_path}: {_root_cause(error)}") from error


def _search_path() -> str:
    """The folders that the running job was composed from, so that a user's methods are found like the built-in ones."""
    found = ["pkg://octavo.configs"]
    if HydraConfig.initialized():
        sources = [f"{source.schema}://{source.path}" for source in HydraConfig.get().runtime.config_sources]
        found += [source for source in sources if source.startswith(("file://", "pkg://")) and source not in found]
    return f"hydra.searchpath=[{','.join(map(_quoted, found))}]"


def _quoted(text: str) -> str:
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"


@contextmanager
def _apart() -> Iterator[None]:
    """Compose beside a running Hydra job: Hydra is one object a process, and refuses to start a second time."""
    state = GlobalHydra.instance()
    running = state.hydra
    state.clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running


def _open_defaults(recipe: DictConfig, overrides: Mapping[str, Any]) -> None:
    """Make room in a recipe for what ``overrides`` say and it leaves to the defaults of its classes."""
    for key, value in overrides.items():
        if key not in recipe and key in _fields(str(recipe.get("_target_"))):
            with open_dict(recipe):
                recipe[key] = None
        elif isinstance(value, Mapping) and isinstance(recipe.get(key), DictConfig):
            if "_target_" in value:
                OmegaConf.set_struct(recipe[key], False)  # another class may have other settings
            _open_defaults(recipe[key], value)


def _fields(target: str) -> list[str]:
    """The parameters of the dataclass that a ``_target_`` names; none if it names no such thing."""
    try:
        kind = pydoc.locate(target)
    except pydoc.ErrorDuringImport:  # who builds it says so
        return []
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return []
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _no_such_part(error: OmegaConfBaseException, recipe: DictConfig) -> str:
    """What OmegaConf says of a key deep in overrides that the recipe has not, in a line that has the way out."""
    parent, _, key = str(error.full_key or "").rpartition(".")
    part = OmegaConf.select(recipe, parent) if parent else None
    if not isinstance(part, DictConfig):
        return _root_cause(error).splitlines()[0]
    known = list(
        dict.fromkeys([*(str(name) for name in part if name != "_target_"), *_fields(str(part.get("_target_")))])
    )
    return f"{parent} has no {key!r}; {nearest(key, known)}it has: {', '.join(known) or 'nothing to set'}"


def _root_cause(error: BaseException) -> str:
    """Hydra wraps what a constructor raised, with its own advice around it; the first words are in the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; PYTHONPATH=. lets Python find the modules of this folder"
    return str(error) or type(error).__name__
