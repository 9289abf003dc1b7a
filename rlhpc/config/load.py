"""From composed configuration to the typed schema, and what is derived from it: digest and YAML."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from rlhpc.config.schema import RunConfig, written
from rlhpc.config.tree import MISSING, leaves
from rlhpc.config.verl import verl_key
from rlhpc.errors import ConfigError, raise_problems

if TYPE_CHECKING:
    from omegaconf import DictConfig

_PATHS = (
    "run_dir",
    "actor_rollout_ref.model.path",
    "critic.model.path",
    "data.train_files",
    "data.val_files",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
    "resume.from",
)


def load(cfg: DictConfig | Mapping[str, Any]) -> RunConfig:
    """The typed configuration of `cfg` over the schema's defaults; interpolations resolved, paths absolute.

    Raises ConfigError that lists every unknown key (with the nearest valid ones), wrong type, missing value.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(OmegaConf.create(defaults()), cfg)
        tree = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration can't be composed: {error}") from error
    problems: list[str] = []
    config = _build(RunConfig, tree, "", problems)
    problems += _with_nodes(config)
    problems += [_missing(key) for key, value in leaves("", tree) if value == MISSING]
    problems += [
        f"{key} is empty; give a path, or leave it out"
        for key, value in leaves("", tree)
        if value == "" and key in _PATHS
    ]
    raise_problems(problems)
    assert isinstance(config, RunConfig)
    return _with_absolute_paths(config)


def load_file(path: Path) -> RunConfig:
    """The configuration that `to_yaml` wrote to a file, such as <run_dir>/config.yaml. Raises ConfigError."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        return load(OmegaConf.load(path))  # type: ignore[arg-type]
    except (OSError, YAMLError) as error:
        raise ConfigError(f"{path} can't be read: {error}; it is written when a run is launched") from error


def violations(tree: Mapping[str, Any]) -> list[str]:
    """What is wrong with a part of the configuration tree, such as the overrides alone: keys and types."""
    problems: list[str] = []
    _build(RunConfig, tree, "", problems)
    return problems


def defaults() -> dict[str, Any]:
    """The schema's defaults as a plain tree, interpolations and missing values (`???`) included."""
    return RunConfig().tree()


def to_yaml(cfg: RunConfig) -> str:
    """The configuration as YAML that `load` reads back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(cfg.tree()))


def config_digest(cfg: RunConfig) -> str:
    """16 hex digits that differ whenever a value differs."""
    canonical = json.dumps(cfg.tree(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def suggest(key: str) -> str:
    """The end of a message: the keys whose last part is near, nearest first, else near as a whole; "" if none is."""
    by_name: dict[str, list[str]] = {}
    for known, _ in _leaf_types():
        by_name.setdefault(known.rpartition(".")[2], []).append(known)
    names = get_close_matches(key.rpartition(".")[2], by_name, n=2, cutoff=0.75)
    near = [known for name in names for known in by_name[name]]
    if not near:  # beginnings that are alike must not hide endings that have nothing in common
        named = [
            known for name in get_close_matches(key.rpartition(".")[2], by_name, 9, 0.6) for known in by_name[name]
        ]
        near = get_close_matches(key, named, n=1, cutoff=0.8)
    near = get_close_matches(key, near, n=3, cutoff=0.0)
    return f"; did you mean {' or '.join(near)}?" if near else ""


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key of the schema, sections included."""
    return tuple(key for key, _ in _typed_keys(RunConfig, ""))


def open_section(key: str) -> bool:
    """Whether a dotted key lies under one that takes any name (`reward.kwargs`)."""
    return any(key.startswith(known + ".") and kind == dict[str, Any] for known, kind in _leaf_types())


@cache
def _leaf_types() -> tuple[tuple[str, Any], ...]:
    return tuple((key, kind) for key, kind in _typed_keys(RunConfig, "") if not is_dataclass(kind))


def _typed_keys(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, kind in get_type_hints(cls).items():
        key = prefix + written(name)
        yield key, kind
        if is_dataclass(kind):
            yield from _typed_keys(kind, f"{key}.")


def _build(cls: type, tree: Any, prefix: str, problems: list[str]) -> Any:
    """An instance of dataclass `cls`, defaults where `tree` says nothing. `problems` gets what is wrong."""
    if not isinstance(tree, Mapping):
        names = ", ".join(written(f.name) for f in fields(cls))
        problems.append(f"{prefix[:-1]}={tree!r} must be a section with the keys {names}")
        return cls()
    kinds, named, values = get_type_hints(cls), {written(f.name): f.name for f in fields(cls)}, {}
    for last, value in tree.items():
        key, name = f"{prefix}{last}", named.get(last)
        if name is None:
            problems += _unknown(key, value)
        elif is_dataclass(kinds[name]):
            values[name] = _build(kinds[name], value, key + ".", problems)
        elif value == MISSING or _fits(value, kinds[name]):
            values[name] = _coerced(value, kinds[name])
        else:
            found = type(value).__name__
            problems.append(f"{key}={_shown(value)} has type {found}; expected {_described(kinds[name])}")
    return cls(**values)


def _unknown(key: str, value: Any) -> list[str]:
    """Refusals of the leaves below an unknown key; those of verl that change nothing here pass."""
    problems = []
    for leaf, leaf_value in leaves(key, value):
        entry = verl_key(leaf)
        if entry is None:
            problems.append(f"unknown key {leaf}{suggest(leaf)}")
        elif not entry.accepts(leaf_value):
            problems.append(f"{leaf}={_shown(leaf_value)} is verl's: {entry.instead}")
    return problems


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    options = _options(kind)
    if len(options) > 1:
        return any(_fits(value, option) for option in options)
    if kind is Any:
        return True
    if get_origin(kind) is list:
        item_kind = get_args(kind)[0]
        if isinstance(value, str):  # trainer.logger=wandb is a list of one, as in verl
            return item_kind is str
        return isinstance(value, list) and all(_fits(item, item_kind) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, Mapping)
    if isinstance(value, bool):
        return kind is bool
    if kind is str:
        return isinstance(value, (str, int, float))  # experiment_name=7 is a name
    return isinstance(value, (int, float) if kind is float else kind)


def _coerced(value: Any, kind: Any) -> Any:
    if value == MISSING:
        return value
    kind = next(option for option in _options(kind) if _fits(value, option))
    if get_origin(kind) is list:
        return [_coerced(item, get_args(kind)[0]) for item in ([value] if isinstance(value, str) else value)]
    return kind(value) if kind in (float, str) else value


def _described(kind: Any) -> str:
    if len(options := _options(kind)) > 1:
        return " or ".join(map(_described, options))
    if get_origin(kind) is list:
        return f"a list of {get_args(kind)[0].__name__}"
    if get_origin(kind) is dict:
        return "a section of names and values"
    return "null" if kind is type(None) else str(kind.__name__)


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def _missing(key: str) -> str:
    hints = {
        "actor_rollout_ref.model.path": "a directory with config.json, safetensors and tokenizer: {}=DIR",
        "data.train_files": "a .jsonl or .parquet file, or a list of them: {}=PATH/train.jsonl",
    }
    return f"{key} is not set; give {hints.get(key, 'a value: {}=...').format(key)}"


def _with_nodes(cfg: RunConfig) -> list[str]:
    """Sets trainer.nnodes to cluster.nodes, which says the same; what is wrong where both are set and differ."""
    asked, nodes = cfg.cluster.nodes, cfg.trainer.nnodes
    if asked is None or not isinstance(asked, int):
        return []
    if nodes not in (1, asked):
        return [f"cluster.nodes={asked} contradicts trainer.nnodes={nodes}; set one of them"]
    cfg.trainer.nnodes = asked
    return []


def _with_absolute_paths(cfg: RunConfig) -> RunConfig:
    """Workers and later jobs may have another working directory."""
    for key in _PATHS:
        *sections, last = key.split(".")
        section: Any = reduce(getattr, sections, cfg)
        name = next(f.name for f in fields(section) if written(f.name) == last)
        setattr(section, name, _absolute(getattr(section, name)))
    file, colon, function = (cfg.reward.name or "").rpartition(":")
    if file.endswith(".py"):
        cfg.reward.name = f"{_absolute(file)}{colon}{function}"
    return cfg


def _absolute(path: Any) -> Any:
    if isinstance(path, list):
        return [_absolute(p) for p in path]
    return str(Path(path).expanduser().absolute()) if isinstance(path, str) else path
