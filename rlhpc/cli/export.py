"""`rlhpc export`: a checkpoint's weights as a Hugging Face directory, one file in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from rlhpc.checkpoint.durable import free_bytes, fsync
from rlhpc.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, read_manifest
from rlhpc.checkpoint.origin import last_start
from rlhpc.checkpoint.pieces import ITEM_BYTES
from rlhpc.cli.checkpoints import Checkpoints, byte_progress, find
from rlhpc.cli.runs import Run
from rlhpc.config.model_dir import read_model_config
from rlhpc.errors import CheckpointError, ConfigError
from rlhpc.layout.spec import ShardSpec
from rlhpc.memory.state import readable
from rlhpc.reshard.families import family_for
from rlhpc.reshard.families.family import tensor_dtype
from rlhpc.reshard.hf import copy_side_files, index_text, split_into_files, write_tensors
from rlhpc.reshard.hf_files import INDEX_NAME, exported_config
from rlhpc.reshard.saved import WEIGHT_KINDS, load_saved

DTYPES = ("bfloat16", "float32")
FILE_BYTES = 5 * 10**9
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json: Transformers' name from 4.56 on, and before

Shapes = Mapping[str, tuple[int, ...]]


class Model(NamedTuple):
    """What goes beside the weights: config.json, and a directory with the tokenizer and generation config."""

    config: Mapping[str, Any]
    directory: Path


def export(
    argument: str,
    target: Path,
    *,
    step: int | None = None,
    model_dir: Path | None = None,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> str:
    """Makes the directory `target` of the checkpoint that RUN|STEPDIR means, whole or not at all; returns what it is
    in a sentence.

    The weights are the float32 masters, rounded to `dtype`; every chunk that is read is verified. Files hold at most
    `file_bytes` (but at least one tensor), and so does memory. Raises ConfigError and ModelError for what can't begin,
    CheckpointError for damage, naming file and chunk, and for a disk that is full.
    """
    checkpoints = find(argument, step)
    directory = checkpoints.newest
    manifest = _readable(checkpoints)
    model = _model(checkpoints.run, model_dir, directory)
    shapes = _shapes(manifest, model)
    dtype = dtype or _trained_dtype(checkpoints.run, model)
    sizes = {name: prod(shape) * ITEM_BYTES[tensor_dtype(name, dtype)] for name, shape in shapes.items()}
    files, total = split_into_files(sizes, file_bytes), sum(sizes.values())
    try:
        with _appearing_whole(target, total) as partial, byte_progress() as progress:
            copy_side_files(model.directory, partial)
            (partial / "config.json").write_text(json.dumps(_with_dtype(model.config, dtype), indent=2) + "\n")
            if len(files) > 1:
                (partial / INDEX_NAME).write_text(index_text(files, total))
            task = progress.add_task("exporting", total=total)
            for name, tensors in files.items():
                _write_file(partial / name, manifest, {tensor: shapes[tensor] for tensor in tensors}, dtype)
                progress.advance(task, sum(sizes[tensor] for tensor in tensors))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} can't be written: {error}") from error
    except CheckpointError as error:
        if directory.exists():
            raise
        raise CheckpointError(
            f"{directory} was deleted meanwhile, as checkpoint.keep asks; export a newer one"
        ) from error
    count = sum(map(prod, shapes.values()))
    plural = "s" if len(files) > 1 else ""
    return (
        f"made {target} of {directory}: {count:,} parameters in {dtype}, {readable(total)} in {len(files)} file{plural}"
    )


def _readable(checkpoints: Checkpoints) -> CheckpointManifest:
    try:
        manifest = read_manifest(checkpoints.newest)
        manifest.verify(checksums=False)
    except CheckpointError as error:
        *older, _ = checkpoints.steps
        if older:
            raise CheckpointError(f"{error}; for the checkpoint before it: --step {older[-1]}") from error
        raise
    return manifest


@contextmanager
def _appearing_whole(target: Path, needed_bytes: int) -> Iterator[Path]:
    """A directory to fill, which afterwards is `target`; after a failure it is gone."""
    place = target.resolve()
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise ConfigError(f"{target} exists and is no empty directory; choose another, or remove it")
    if inside := next((parent for parent in place.parents if (parent / MANIFEST_NAME).exists()), None):
        raise ConfigError(f"{target} would be in the checkpoint {inside}, and be deleted with it; choose another place")
    if place.is_mount():  # can't be renamed onto
        raise ConfigError(f"{target} is where a file system is mounted; choose a directory in it: {target / 'model'}")
    partial = place.with_name(f"{place.name}.partial")
    if partial.exists():
        raise ConfigError(f"{partial} exists: of an export that is under way, or was killed; then remove it")
    place.parent.mkdir(parents=True, exist_ok=True)
    if (free := free_bytes(place.parent)) < needed_bytes:
        raise CheckpointError(
            f"{target} needs {readable(needed_bytes)} and {place.parent} has {readable(free)} free; free some space or "
            "choose another directory"
        )
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            fsync(path)
        os.rename(partial, place)  # an empty directory gives way
        fsync(place.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_file(path: Path, manifest: CheckpointManifest, shapes: Shapes, dtype: str) -> None:
    specs = [ShardSpec.whole(name, shape, tensor_dtype(name, dtype), (0,)) for name, shape in shapes.items()]
    tensors = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
    load_saved(manifest, WEIGHT_KINDS, specs, 0, tensors, cast=True)
    write_tensors(tensors, path)


def _model(run: Run | None, model_dir: Path | None, checkpoint: Path) -> Model:
    """The config is what run.json says was trained: a model directory may have changed since."""
    trained = last_start(run.directory).get("model") if run else None
    if model_dir is not None:
        if not model_dir.is_dir():
            raise ConfigError(f"--model {model_dir} is not a directory; give an HF model directory")
        return Model(trained or read_model_config(model_dir), model_dir)
    if run is None:
        raise ConfigError(
            f"{checkpoint} lies in no run directory, which would name the model; give a directory with its config and "
            "tokenizer: --model DIR"
        )
    path = _settings(run).get("path")
    if not path or not Path(path).is_dir():
        raise ConfigError(
            f"the run's actor_rollout_ref.model.path={path} is not a directory here; give one with its tokenizer: "
            "--model DIR"
        )
    return Model(trained or read_model_config(path), Path(path))


def _shapes(manifest: CheckpointManifest, model: Model) -> Shapes:
    """The model's tensors in their order. Raises CheckpointError unless they are the checkpoint's."""
    shapes = family_for(model.config).canonical_tensors(model.config)
    if difference := manifest.other_than(shapes, critic=False):
        raise CheckpointError(
            f"{manifest.directory} is of another model than {model.directory}: {difference}; give the directory of its "
            "own with --model DIR"
        )
    return shapes


def _trained_dtype(run: Run | None, model: Model) -> str:
    trained = _settings(run).get("dtype") if run else None
    said = trained or next((model.config[key] for key in _DTYPE_KEYS if key in model.config), None)
    if said not in DTYPES:
        raise ConfigError(f"config.json says dtype={said}; choose with --dtype: {' or '.join(DTYPES)}")
    return str(said)


def _settings(run: Run) -> Mapping[str, Any]:
    model: Mapping[str, Any] = run.settings.get("actor_rollout_ref", {}).get("model", {})
    return model


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Under the names that the config has for it; both are read."""
    keys = [key for key in _DTYPE_KEYS if key in config] or _DTYPE_KEYS[:1]
    return exported_config(config) | dict.fromkeys(keys, dtype)
