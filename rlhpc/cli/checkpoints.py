"""Which checkpoints RUN|STEPDIR means, and the bar that shows how far they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from rlhpc.checkpoint.manifest import MANIFEST_NAME, STEP_NAME, read_manifest, step_directories
from rlhpc.cli.runs import Run, is_run
from rlhpc.cli.status import one_run
from rlhpc.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoints:
    """Committed checkpoints by step, ascending, damaged ones among them; `run` is None where a directory of checkpoints
    lies outside of its run's."""

    run: Run | None
    steps: Mapping[int, Path]

    @property
    def newest(self) -> Path:
        return self.steps[max(self.steps)]


def find(argument: str, step: int | None = None) -> Checkpoints:
    """What RUN|STEPDIR means: a run (directory or job id), its directory of checkpoints, or one of these.

    With `step` only that one is among them. Raises ConfigError where there is no run, CheckpointError where it has no
    checkpoint, or none of the step.
    """
    path = Path(argument)
    if (named := STEP_NAME.fullmatch(path.absolute().name)) and not path.is_dir():
        known = ", ".join(map(str, step_directories(path.absolute().parent))) or "none"
        raise CheckpointError(f"{path} is no directory; steps beside it: {known}")
    if named or (path / MANIFEST_NAME).is_file():
        found = Checkpoints(_run_around(path.absolute().parent), {_step_of(path): path})
        root = path.parent
    elif path.is_dir() and not is_run(path) and (steps := step_directories(path)):
        found, root = Checkpoints(_run_around(path.absolute()), steps), path
    else:
        run = one_run(argument)
        root = run.checkpoint_root
        found = Checkpoints(run, step_directories(root))
    if not found.steps:
        raise CheckpointError(f"{root} holds no checkpoint (yet); see how the run is with: rlhpc status {argument}")
    if step is None:
        return found
    if step not in found.steps:
        known = ", ".join(map(str, found.steps))
        raise CheckpointError(f"no checkpoint of step {step} in {root}; committed steps: {known}")
    return Checkpoints(found.run, {step: found.steps[step]})


def byte_progress() -> Progress:
    """A bar over bytes, on a terminal only: standard output stays what a pipe can use."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", style="bold"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal or console.is_dumb_terminal,
        transient=True,
    )


def _step_of(directory: Path) -> int:
    """By its name; by its manifest where it was copied under another."""
    match = STEP_NAME.fullmatch(directory.absolute().name)
    return int(match[1]) if match else read_manifest(directory).step


def _run_around(root: Path) -> Run | None:
    return Run(root.parent) if is_run(root.parent) else None
