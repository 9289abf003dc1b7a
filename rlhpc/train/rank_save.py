"""A rank's side of a save: a thread writes its state while training goes on. What it hasn't written when the state is
about to change is copied first.

The thread's report goes through the store where the ranks met, since the rank itself is at its next call by then.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhpc.checkpoint.durable import DiskFullError
from rlhpc.checkpoint.manifest import FileEntry
from rlhpc.errors import CheckpointError, RlhpcError, TrainingError

if TYPE_CHECKING:  # a worker sets its environment before torch is first imported
    from rlhpc.checkpoint.snapshot import Lent
    from rlhpc.train.protocols import Trainer, TrainerState


class RankSaver:
    """Saves a trainer's state, at most one at a time: the driver begins the next when all have reported."""

    def __init__(
        self, rank: int, trainer: Trainer, tell: Callable[[str, str], object], *, num_threads: int, reserve: bool
    ) -> None:
        """`tell(key, report)` leaves a report where the driver looks for it; `num_threads` copy. `reserve` takes the
        memory for copies at once: raises CheckpointError where it isn't there."""
        from rlhpc.checkpoint.snapshot import Snapshot

        self._rank, self._trainer, self._tell = rank, trainer, tell
        self._snapshot = Snapshot(num_threads)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._reporting: Future[None] | None = None
        self._lent: Lent | None = None
        if reserve:
            with self._memory_for(state := trainer.state_pieces()):
                self._snapshot.reserve([tensor for _, tensor in state.pieces])

    def write(self, directory: Path, *, read_back: bool) -> list[FileEntry]:
        """Writes this rank's files into a pending checkpoint. Raises as `write_shard` does."""
        return self._written(directory, self._state(), read_back)

    def begin(self, directory: Path, save_id: str, *, read_back: bool) -> None:
        """Sets off the writing of the present state, whose report comes under `report_key`; `before_change` has to be
        called before the state changes. Raises CheckpointError where there is no memory for a copy."""
        from rlhpc.checkpoint.snapshot import Lent

        with self._memory_for(state := self._state()):
            lent = Lent(self._snapshot, [tensor for _, tensor in state.pieces])
        state = replace(state, rank_tensors={name: tensor.cpu().clone() for name, tensor in state.rank_tensors.items()})
        writing = self._thread.submit(self._written, directory, state, read_back, lent)
        self._reporting = self._thread.submit(self._report, save_id, writing, lent)
        self._lent = lent

    def before_change(self) -> None:
        """Returns when the state may change: what a save in flight has not written is copied."""
        if self._lent and self._reporting and not self._reporting.done():
            self._lent.settle()
        self._lent = None

    def check(self) -> None:
        """Raises what kept the thread from reporting: the driver, which waits for the report, has to hear of it."""
        if self._reporting and self._reporting.done():
            self._reporting.result()

    @contextmanager
    def _memory_for(self, state: TrainerState) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            size = sum(tensor.nbytes for _, tensor in state.pieces) / 2**30
            raise CheckpointError(
                f"rank {self._rank} has no {size:.2f} GiB of memory for a copy of its state: {error}; give the job "
                "more (cluster.memory_gib_per_node), or set checkpoint.async_save=false"
            ) from error

    def _state(self) -> TrainerState:
        self._trainer.sleep()  # what is offloaded is read from host memory
        return self._trainer.state_pieces()

    def _written(
        self, directory: Path, state: TrainerState, read_back: bool, lent: Lent | None = None
    ) -> list[FileEntry]:
        from rlhpc.checkpoint.shards import write_shard

        parts = (state.pieces, state.shapes, state.rank_tensors, state.scalars)
        if lent is None:
            return write_shard(directory, self._rank, *parts, read_back=read_back)
        return write_shard(directory, self._rank, *parts, read_back=read_back, reading=lent.reading)

    def _report(self, save_id: str, writing: Future[list[FileEntry]], lent: Lent) -> None:
        """Comes after the writing, in the same thread."""
        error = writing.exception()
        if error is None:
            report = json.dumps({"files": [entry.to_json() for entry in writing.result()], "copied_s": lent.copied_s})
        else:
            report = json.dumps({"error": type(error).__name__, "text": str(error)})
            with suppress(OSError):  # on a full disk the driver has to hear of the error, not of the log
                traceback.print_exception(error)
        self._tell(report_key(save_id, self._rank), report)


def report_key(save_id: str, rank: int) -> str:
    return f"rlhpc/save/{save_id}/{rank}"


def copied_s(reports: Sequence[str]) -> float:
    """Seconds for which the slowest rank was kept from changing its state."""
    return max(float(json.loads(report).get("copied_s", 0.0)) for report in reports)


def entries_of(reports: Sequence[str]) -> list[FileEntry]:
    """The files that the ranks wrote, of their reports in rank order. Raises what a rank's save failed of:
    DiskFullError only where nothing worse happened on another."""
    documents = [json.loads(report) for report in reports]
    errors = [_error(rank, document) for rank, document in enumerate(documents) if "error" in document]
    if errors:
        raise next((error for error in errors if not isinstance(error, DiskFullError)), errors[0])
    return [FileEntry.from_json(file) for document in documents for file in document["files"]]


def _error(rank: int, document: dict[str, str]) -> RlhpcError:
    name, text = document["error"], document["text"]
    if name == DiskFullError.__name__:
        return DiskFullError(text)
    if name == CheckpointError.__name__:
        return CheckpointError(text)
    return TrainingError(f"rank {rank} failed to save: {name}: {text}\nthe traceback is at the end of its log")
