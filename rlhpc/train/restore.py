"""From which checkpoint a run goes on, and how everything comes back from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhpc.checkpoint.manifest import CheckpointManifest
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.errors import CheckpointError
from rlhpc.train.persistence import TrainState

if TYPE_CHECKING:
    from rlhpc.train.context import Run


def restore(run: Run) -> TrainState:
    """Brings ranks, cursor and metrics to the newest committed step; the initial state when there is none. From here on
    no earlier attempt of the run can publish. Raises StopRequested when a stop is asked for meanwhile."""
    run.progress.enter(0, "restore")
    run.store.acquire()
    manifest = _chosen_manifest(run)
    if manifest is None:
        state = TrainState(0, run.cursor.state())
    else:
        run.ranks.load(manifest, run.stop.check)
        state = TrainState(**manifest.state["train"])
        run.reporter.say(f"resuming after step {state.step} from {manifest.directory}")
    run.reporter.cut_back(state.step)
    return state


def _chosen_manifest(run: Run) -> CheckpointManifest | None:
    trainer = run.cfg.trainer
    if trainer.resume_mode == "disable":
        if run.store.steps():
            raise CheckpointError(
                f"trainer.resume_mode=disable, but {run.store.root} holds steps {run.store.steps()}, which a new "
                "run would overwrite; choose another run_dir (or move that directory away), or resume_mode=auto"
            )
        return None
    latest = run.store.load_latest()
    if latest is None and trainer.resume_mode == "resume_path":
        latest = _load_from(Path(str(trainer.resume_from_path)))
    return latest


def _load_from(directory: Path) -> CheckpointManifest:
    name = directory.name
    if not name.removeprefix("step-").isdecimal():
        raise CheckpointError(
            f"trainer.resume_from_path={directory} is no checkpoint; give a committed step-NNNNNN directory"
        )
    return CheckpointStore(directory.parent).load(int(name.removeprefix("step-")))
