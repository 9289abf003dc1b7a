"""From which checkpoint a run goes on, and how everything comes back from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhpc.checkpoint.manifest import CheckpointManifest
from rlhpc.checkpoint.origin import Origin, none_usable
from rlhpc.checkpoint.store import Found
from rlhpc.config.model_dir import read_model_config
from rlhpc.errors import CheckpointError
from rlhpc.train.persistence import TrainState
from rlhpc.train.start import (
    describe_origin,
    differing,
    new_critic,
    origin_of,
    own_newest_first,
    settings_of,
    unused_origin,
)

if TYPE_CHECKING:
    from rlhpc.train.context import Run

Load = Callable[[CheckpointManifest], None]
Damaged = Callable[[int, CheckpointError], None]


def restore(run: Run) -> TrainState:
    """Brings ranks, cursor and metrics to the newest committed step that can be used; where the run has none, to what
    it begins from. From here on no earlier attempt of the run can publish.

    Sizes choose; the ranks verify the chunks that they read, and what one of them finds damaged all of them pass over.
    Raises CheckpointError where there are checkpoints and none can be used: a run never begins again by itself. Raises
    StopRequested when a stop is asked for meanwhile.
    """
    run.progress.enter(0, "restore")
    run.store.acquire()
    state = _own(run) or _origins(run, origin_of(run.cfg)) or TrainState(0, run.cursor.state())
    run.reporter.cut_back(state.step)
    return state


def _own(run: Run) -> TrainState | None:
    def damaged(step: int, error: CheckpointError) -> None:
        run.store.distrust(step, str(error))
        _pass_over(run, step, error)

    def load(manifest: CheckpointManifest) -> None:
        _load_all(run, manifest)

    manifest = newest_loadable(run.store.root, own_newest_first(run.cfg, run.store), load, damaged)
    if manifest is None:
        return None
    run.reporter.say(f"resuming after step {manifest.step} from {manifest.directory}")
    if unused := unused_origin(run.cfg):
        run.reporter.say(unused)
    return _state_of(manifest)


def _origins(run: Run, origin: Origin | None) -> TrainState | None:
    """The state with which a run begins that takes something over from another one."""
    if origin is None:
        return None
    run.reporter.say(f"starting {describe_origin(origin)}")
    for line in new_critic(run.cfg) if origin.what == "weights" else []:
        run.reporter.say(f"  {line}")
    for line in differing(settings_of(origin), run.cfg, read_model_config(run.cfg.actor_rollout_ref.model.path)):
        run.reporter.say(f"  differs  {line}")
    if origin.root is None:
        run.reporter.doing("reading weights")
        run.ranks.load_weights(origin.path, run.stop.check)
        return TrainState(0, run.cursor.state())

    def load(manifest: CheckpointManifest) -> None:
        (_load_all if origin.what == "all" else _load_weights)(run, manifest)

    manifest = newest_loadable(origin.path, origin.newest_first(), load, partial(_pass_over, run))
    assert manifest is not None  # an origin has checkpoints
    return _state_of(manifest) if origin.what == "all" else TrainState(0, run.cursor.state())


def _pass_over(run: Run, step: int, error: CheckpointError) -> None:
    run.reporter.say(f"WARNING: the checkpoint of step {step} can't be used, trying the one before: {error}")


def newest_loadable(
    place: Path, newest_first: Iterable[Found], load: Load, damaged: Damaged
) -> CheckpointManifest | None:
    """The newest checkpoint that `load` could load, None where there is none at all. `damaged` hears what is wrong with
    the newer ones, which are left where they are until a save of the same step replaces them.

    Raises CheckpointError where there are checkpoints of `place` and none can be used, with a reason for each.
    """
    refused = []
    for step, found in newest_first:
        try:
            if isinstance(found, CheckpointError):
                raise found
            load(found)
            return found
        except CheckpointError as error:
            damaged(step, error)
            refused.append(f"step {step}: {error}")
    if refused:
        raise CheckpointError(none_usable(place, refused))
    return None


def _load_all(run: Run, manifest: CheckpointManifest) -> None:
    run.cursor.load(_state_of(manifest).cursor)  # refuses other data before the ranks read anything
    _read(run, manifest, run.ranks.load)


def _load_weights(run: Run, manifest: CheckpointManifest) -> None:
    _read(run, manifest, run.ranks.load_weights)


def _read(run: Run, manifest: CheckpointManifest, load: Callable[[Path, Callable[[], None]], None]) -> None:
    run.reporter.doing(f"reading {manifest.size_bytes / 2**30:.1f} GiB")
    try:
        load(manifest.directory, run.stop.check)
    except CheckpointError:
        run.ranks.settle()  # others may still be reading
        raise


def _state_of(manifest: CheckpointManifest) -> TrainState:
    try:
        return TrainState(**manifest.state["train"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest.directory} holds no state of a training run ({error!r})") from error
