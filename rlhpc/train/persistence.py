"""What survives a restart, and when it is committed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhpc.errors import CheckpointError

if TYPE_CHECKING:
    from rlhpc.train.context import Run


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds beside tensors: the last finished step, where the prompts go on, the step's metrics."""

    step: int
    cursor: dict[str, Any]
    record: dict[str, float] = field(default_factory=dict)


def save_periodically(run: Run, state: TrainState) -> None:
    """Saves while training goes on; after the last step, and once a stop is asked for, before anything else is done.

    A save for which the storage has no room, or fails, is made up for by the next one: the run goes on, and its metrics
    tell `checkpoint/failed_saves`. After the last step there is no next one.
    """
    last = state.step >= run.total_steps
    if run.cfg.checkpoint.async_save and not last and not run.stop.requested():
        run.saver.start(state)
        return
    try:
        run.saver.now(state, hurry=run.in_a_hurry())
    except CheckpointError as error:
        if last:
            raise
        run.store.require_ownership()
        run.saver.alarm(state.step, error)


def save_and_leave(run: Run, state: TrainState, *, trained: bool) -> None:
    """Answers a stop or an error that leaves the state whole: commits the save in flight, then the state where that was
    another one, and says how the run goes on. Where no step was `trained` since the start nothing is written, be it
    terabytes: the next start finds the state where this one did."""
    run.progress.stopping()
    run.reporter.say(f"{run.stop.reason or 'nothing to train on'}: stopping after step {state.step}")
    if trained:
        with run.timer(state.step).phase("save_checkpoint"):
            run.saver.now(state, hurry=run.in_a_hurry())
    else:
        run.reporter.say("no step was trained since the start, so there is nothing to save")
    run.reporter.close_run(state.step, finished=False)
