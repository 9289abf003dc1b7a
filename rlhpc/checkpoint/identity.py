"""Whose run directory this is: the configuration it began with, and what may change when it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.durable import publish_file
from rlhpc.errors import CheckpointError

RUN_NAME = "run.json"

# Keys (or sections) that change how a run goes on without changing what it is.
FREE = (
    "actor_rollout_ref.rollout.chunk_prompts",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "checkpoint",
    "cluster",
    "data.val_batch_size",
    "data.val_files",
    "data.val_max_samples",
    "launch",
    "reshard",
    "reward.num_workers",
    "reward.timeout_s",
    "run_dir",
    "trainer.default_local_dir",
    "trainer.log_val_generations",
    "trainer.logger",
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.resume_from_path",
    "trainer.resume_mode",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.val_before_train",
    "trainer.wandb_mode",
)


def has_trained(directory: Path) -> bool:
    """Whether the directory is a run's for good: a start that failed before it trained binds nobody."""
    return (directory / "metrics.jsonl").exists()


def refuse_another(directory: Path, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> None:
    """Raises CheckpointError where the directory is that of another run, listing the keys that differ and may not, old
    and new value."""
    path = directory / RUN_NAME
    if not path.exists():
        return
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore it, or choose another run_dir") from error
    differing = [
        f"  {key}: {json.dumps(old)} -> {json.dumps(new)}"
        for key, old, new in _differences(stored, {"config": dict(config), "model": dict(model_config)})
        if not free(key.removeprefix("config."))
    ]
    if differing:
        raise CheckpointError(
            f"run_dir={directory} belongs to a run with other settings:\n" + "\n".join(differing) + "\n"
            "choose another run_dir, or restore these settings to go on with that run "
            f"(free to change: {', '.join(FREE)})"
        )


def check_identity(
    directory: Path, config: Mapping[str, Any], model_config: Mapping[str, Any], *, trained: bool
) -> None:
    """Writes the run's identity into its directory, where something was trained there already after comparing it.

    Raises CheckpointError as `refuse_another` does.
    """
    path = directory / RUN_NAME
    if trained:
        refuse_another(directory, config, model_config)
    text = json.dumps({"config": dict(config), "model": dict(model_config)}, indent=2) + "\n"

    def write(partial: Path) -> None:
        partial.write_text(text)

    directory.mkdir(parents=True, exist_ok=True)
    publish_file(path, write)


def free(key: str) -> bool:
    """Whether a run that has trained may go on with another value of a key."""
    return any(key == free or key.startswith(free + ".") for free in FREE)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    before, after = dict(_leaves("", old)), dict(_leaves("", new))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), below)
    else:
        yield prefix, json.loads(json.dumps(value))
