"""What survives a restart, and when it is committed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from rlhpc.checkpoint.durable import DiskFullError
from rlhpc.data.packing import TokenSequence
from rlhpc.errors import RlhpcError

if TYPE_CHECKING:
    from rlhpc.train.context import Run


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds beside tensors: the last finished step, where the prompts go on, the step's metrics."""

    step: int
    cursor: dict[str, Any]
    record: dict[str, float] = field(default_factory=dict)


def save(run: Run, state: TrainState) -> None:
    """Commits the state and the ranks' tensors as one checkpoint, then retires old ones. A save that fails leaves
    the earlier checkpoints as they are."""
    if run.store.has(state.step, checksums=False):
        return
    begin = time.monotonic()
    pending = run.store.begin(state.step)
    try:
        entries = run.ranks.save(pending.directory)
    except RlhpcError as error:
        if isinstance(error, DiskFullError):
            run.ranks.settle()
        run.store.abandon(pending)
        run.store.require_ownership()  # where that was lost, it is why
        raise
    run.store.commit(pending, entries, {"train": asdict(state), "wandb": run.reporter.wandb_id})
    run.progress.committed(state.step, time.monotonic() - begin)
    run.store.retain(run.cfg.checkpoint.keep)


def save_periodically(run: Run, state: TrainState) -> TrainState:
    """A save that has no room is made up for by the next one: the run goes on, and its metrics tell
    `checkpoint/failed_saves`. After the last step there is no next one."""
    try:
        save(run, state)
    except DiskFullError as error:
        if state.step >= run.total_steps:
            raise
        run.reporter.say(f"WARNING: step {state.step} is not saved, training goes on: {error}")
        return replace(state, record=state.record | {"checkpoint/failed_saves": 1.0})
    return state


def save_and_leave(run: Run, state: TrainState) -> None:
    """Answers a stop: commits the state where it isn't, and says how the run goes on."""
    run.progress.stopping()
    run.reporter.say(f"{run.stop.reason}: stopping after step {state.step}")
    with run.timer(state.step).phase("save_checkpoint"):
        save(run, state)
    run.reporter.close_run(state.step, finished=False)


def save_sequences(path: Path, sequences: Sequence[TokenSequence]) -> None:
    """A batch that training refused, as safetensors: concatenated tokens and fields with per-sequence lengths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "token_ids": np.concatenate([s.token_ids for s in sequences]),
        "lengths": np.array([len(s.token_ids) for s in sequences]),
        "prompt_lens": np.array([s.prompt_len for s in sequences]),
    }
    for name in sequences[0].fields:
        arrays[f"fields.{name}"] = np.concatenate([s.fields[name] for s in sequences])
    save_file(arrays, path)
