"""Where a run may begin besides its own checkpoints: the weights of an HF directory, or a checkpoint of another run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.identity import RUN_NAME
from rlhpc.checkpoint.manifest import MANIFEST_NAME, STEP_NAME, CheckpointManifest, committed_steps, read_manifest
from rlhpc.checkpoint.store import CheckpointStore, Found
from rlhpc.errors import CheckpointError, ConfigError

ACCEPTED = "give an HF model directory, a run directory or one of its checkpoints/step-NNNNNN"


@dataclass(frozen=True)
class Origin:
    """`what` is "weights" (of step 0 of this run, then) or "all" of a run's state. Nothing is read before it is asked
    for, and nothing is written."""

    path: Path  # as it was given
    what: str
    root: Path | None = None  # where its checkpoints lie; None: an HF directory

    def newest_first(self) -> Iterator[Found]:
        """The checkpoints that may be used, looking at manifests and sizes: all of a run, or the one that was named."""
        assert self.root is not None
        if not (self.path / MANIFEST_NAME).is_file():
            yield from CheckpointStore(self.root).newest_first()
            return
        manifest = read_manifest(self.path)
        try:
            manifest.verify(checksums=False)
            yield manifest.step, manifest
        except CheckpointError as error:
            yield manifest.step, error

    @cached_property
    def manifest(self) -> CheckpointManifest:
        """The one that would be used. Raises CheckpointError that lists what is wrong with each."""
        refused = []
        for step, found in self.newest_first():
            if isinstance(found, CheckpointManifest):
                return found
            refused.append(f"step {step}: {found}")
        raise CheckpointError(none_usable(self.path, refused))

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """{config, model} with which the other run was started last; {} where that isn't beside its checkpoints."""
        places = [self.path] if self.root is None else [self.path, self.root, self.root.absolute().parent]
        return next(filter(None, map(last_start, places)), {})


def find_origin(path: Path, what: str, *, key: str = "resume.from") -> Origin:
    """What a path is. Raises ConfigError, speaking of `key`, where it can't be begun from."""
    if not path.is_dir():
        raise ConfigError(f"{key}={path} is not a directory; {ACCEPTED}")
    if (path / MANIFEST_NAME).is_file():
        return Origin(path, what, path.absolute().parent)
    if STEP_NAME.fullmatch(path.name):
        raise ConfigError(f"{key}={path} has no {MANIFEST_NAME}: it was never committed; {ACCEPTED}")
    for root in _roots(path):
        if committed_steps(root):
            return Origin(path, what, root)
    if (path / RUN_NAME).is_file():
        raise ConfigError(f"{key}={path} is a run without a committed checkpoint; wait for its first, or {ACCEPTED}")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{key}={path} holds neither checkpoints nor a config.json; {ACCEPTED}")
    if what == "all":
        raise ConfigError(
            f"{key}={path} is an HF model directory, which has weights alone; set resume.what=weights, or give a run"
        )
    return Origin(path, what)


def none_usable(place: Path, refused: list[str]) -> str:
    """What to say where checkpoints exist, and each was refused for a reason."""
    return "\n".join(
        [
            f"none of the {len(refused)} checkpoints of {place} can be used:",
            *(f"  {line}" for line in refused),
            "bring the files back from a copy; to begin anew, move the directory away or choose another run_dir",
        ]
    )


def last_start(run_dir: Path) -> Mapping[str, Any]:
    """{config, model} of the last start in a run directory; {} where there was none, or it can't be read."""
    try:
        found = json.loads((run_dir / RUN_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def age_s(manifest: CheckpointManifest) -> float:
    """Seconds since it was committed."""
    return max(0.0, time.time() - (manifest.directory / MANIFEST_NAME).stat().st_mtime)


def _roots(path: Path) -> Iterator[Path]:
    """Where the checkpoints of a run may lie, or `path` itself if it holds them."""
    yield path
    trainer = last_start(path).get("config", {}).get("trainer", {})
    if trainer.get("default_local_dir"):
        yield Path(trainer["default_local_dir"])
    yield path / "checkpoints"
