"""The driver's side of saving: one checkpoint at a time, written by the ranks while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING

from rlhpc.checkpoint.manifest import CheckpointManifest, FileEntry
from rlhpc.checkpoint.store import CheckpointStore, PendingCheckpoint
from rlhpc.config.load import config_digest
from rlhpc.config.parallel import trainer_layout
from rlhpc.config.schema import RunConfig
from rlhpc.errors import CheckpointError, ClusterError, RlhpcError
from rlhpc.metrics.reporter import Reporter
from rlhpc.train.progress import Progress
from rlhpc.train.rank_save import copied_s, entries_of
from rlhpc.train.ranks import Ranks

if TYPE_CHECKING:
    from rlhpc.train.persistence import TrainState

POLL_S = 0.05  # between two looks for the ranks' reports
ALIVE_S = 1.0  # between two looks whether the ranks live, while a save is waited for
PATIENCE_S = 60.0  # for a save in flight, beyond twice what the last one took, where the run ends with an error

Metrics = dict[str, float]


@dataclass(frozen=True)
class _Flight:
    step: int
    begun: float  # time.monotonic()
    committed: Future[Metrics]


class Saver:
    """Saves training states, one after the other. Use as a context manager: leaving it waits for a save in flight,
    unless a rank is lost.

    The ranks' threads write their state while it stays as it is, and a copy of what is left when it changes; a
    thread here waits for them, commits, and deletes what need not stay. Whatever is killed meanwhile, only this save is
    lost.
    """

    def __init__(
        self, cfg: RunConfig, ranks: Ranks, store: CheckpointStore, progress: Progress, reporter: Reporter
    ) -> None:
        self._cfg, self._ranks, self._store = cfg.checkpoint, ranks, store
        self._progress, self._reporter = progress, reporter
        self._layout = asdict(trainer_layout(cfg))
        self._digest = config_digest(cfg)
        self._ids = count()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._given_up = threading.Event()
        self._flight: _Flight | None = None
        self._retiring: threading.Thread | None = None
        self._metric_checked = not cfg.checkpoint.keep_best
        self._metrics: Metrics = {}

    @property
    def remaining_s(self) -> float:
        """What the save in flight still takes, judged by the last one; 0 without one."""
        if self._flight is None or self._flight.committed.done():
            return 0.0
        return max(0.0, self._flight.begun + self._progress.save_s - time.monotonic())

    def start(self, state: TrainState) -> None:
        """Returns when the ranks have begun to write their state; `collect` and `drain` tell what became of the save.

        The save before has to be over first: where it isn't, this waits and says so. Storage that fails or is full is
        an alarm and no error. Raises CheckpointError where ranks lack the memory for the copy, and where a newer
        attempt has taken the run over.
        """
        begin = time.monotonic()
        if self._flight and not self._flight.committed.done():
            self._reporter.say(
                f"step {self._flight.step} is still being written after {begin - self._flight.begun:.0f} s, and the "
                f"save of step {state.step} waits for it; a larger trainer.save_freq leaves more time in between"
            )
        self.drain()
        if self._store.has(state.step, checksums=False):
            return
        try:
            pending = self._store.begin(state.step)
        except CheckpointError as error:
            self._store.require_ownership()
            self.alarm(state.step, error)
            return
        save_id = f"{state.step}-{next(self._ids)}"
        try:
            self._ranks.begin_save(pending.directory, save_id, read_back=self._cfg.read_back)
        except RlhpcError:
            self._store.abandon(pending)
            raise
        self._add({"checkpoint/blocked_s": time.monotonic() - begin})

        def commit() -> Metrics:
            reports: list[str] = []

            def written() -> list[FileEntry]:
                reports.extend(self._reports(save_id))
                return entries_of(reports)

            try:
                metrics = self._commit(state, pending, written, begin)
            except CheckpointError as error:
                if self._given_up.is_set():
                    raise
                self._store.require_ownership()
                return self._missed(state.step, error)
            self._retiring = threading.Thread(target=self._retire_behind, name="retire", daemon=True)
            self._retiring.start()
            return metrics | {"checkpoint/blocked_s": copied_s(reports)}

        self._flight = _Flight(state.step, begin, self._thread.submit(commit))

    def now(self, state: TrainState, *, hurry: bool = False) -> None:
        """Returns when the state is committed. In a `hurry` nothing is read back, and so nothing older deleted. Raises
        DiskFullError and other CheckpointErrors."""
        begin = time.monotonic()
        self.drain(hurry=hurry)
        if self._store.has(state.step, checksums=False):
            return
        pending = self._store.begin(state.step)

        def write() -> list[FileEntry]:
            try:
                return self._ranks.save(pending.directory, read_back=self._cfg.read_back and not hurry)
            except CheckpointError:
                self._ranks.settle()  # others may still be writing
                raise

        self._add(self._commit(state, pending, write, time.monotonic()))
        if not hurry:
            self.retire()
        self._add({"checkpoint/blocked_s": time.monotonic() - begin})

    def _commit(
        self, state: TrainState, pending: PendingCheckpoint, written: Callable[[], list[FileEntry]], begin: float
    ) -> Metrics:
        """Commits what the ranks have `written`. A save that fails leaves the earlier checkpoints as they are."""
        self._check_metric(state)
        driver = {"train": asdict(state), "wandb": self._reporter.wandb_id}
        try:
            manifest = self._store.commit(pending, written(), driver, layout=self._layout, config_digest=self._digest)
        except RlhpcError:
            self._store.abandon(pending)
            self._store.require_ownership()  # where that was lost, it is why
            raise
        seconds = time.monotonic() - begin
        self._progress.committed(state.step, seconds)
        return {"checkpoint/write_s": seconds, "checkpoint/bytes": float(manifest.size_bytes)}

    def _check_metric(self, state: TrainState) -> None:
        """Says once where validation doesn't give what checkpoints are to be ranked by."""
        known = sorted(name for name in state.record if name.startswith("val-core/"))
        if known and not self._metric_checked:
            self._metric_checked = True
            if self._cfg.best_metric not in known:
                self._reporter.say(
                    f"WARNING: validation doesn't give checkpoint.best_metric={self._cfg.best_metric}, so that "
                    f"checkpoint.keep_best keeps nothing; set one of {', '.join(known)}"
                )

    def _reports(self, save_id: str) -> list[str]:
        while (reports := self._ranks.save_reports(save_id)) is None:
            if self._given_up.wait(POLL_S):
                raise CheckpointError("the save was given up")
        return reports

    def retire(self) -> None:
        """Deletes the checkpoints that need not stay. The newest one has to be known as good: read back, or loaded."""
        cfg = self._cfg

        def score(manifest: CheckpointManifest) -> float | None:
            record = manifest.state.get("train", {}).get("record", {})  # a run's; there may be others beside it
            value: float | None = record.get(cfg.best_metric)
            return value

        self._store.retain(cfg.keep, every=cfg.keep_every, best=cfg.keep_best, mode=cfg.best_mode, score=score)

    def _retire_behind(self) -> None:
        """In a thread that nobody waits for in a hurry: deleting terabytes takes minutes, and what is left of that when
        the process ends, the next one's first save clears away."""
        try:
            self.retire()
        except (CheckpointError, OSError) as error:
            self._reporter.say(f"WARNING: older checkpoints are not deleted: {error}")

    # --- what became of it

    def alarm(self, step: int, error: CheckpointError) -> None:
        """A save could not be written, and is made up for by the next one."""
        self._add(self._missed(step, error))

    def _missed(self, step: int, error: CheckpointError) -> Metrics:
        self._reporter.say(f"WARNING: step {step} is not saved, training goes on: {error}")
        return {"checkpoint/failed_saves": 1.0}

    def collect(self) -> Metrics:
        """Metrics of what was saved since the last call: seconds that training was `blocked_s` and that it took from
        the beginning to the commit (`write_s`), `bytes`, `failed_saves`. Raises what a save failed of."""
        if self._flight and self._flight.committed.done():
            self._land()
        metrics, self._metrics = self._metrics, {}
        return metrics

    def drain(self, *, hurry: bool = False) -> None:
        """Returns when no save is in flight. Raises what it failed of, unless that was the storage, and RankLostError
        as soon as a rank is lost. No rank may be at anything else. In a `hurry` older ones may still be on their way
        out."""
        while self._flight and not wait([self._flight.committed], timeout=ALIVE_S).done:
            self._ranks.settle()
        self._land()
        if self._retiring and not hurry:
            self._retiring.join()

    def wind_up(self) -> None:
        """Waits for the save in flight where the run ends before its time. Its state is whole, whatever happened since;
        but ranks may be stuck in a call, so that only their threads are waited for, and not for ever. What it failed of
        is said."""
        if self._flight is None:
            return
        wait([self._flight.committed], timeout=2 * self._progress.save_s + PATIENCE_S)
        self._given_up.set()
        try:
            self._land()
        except RlhpcError as error:
            self._reporter.say(f"WARNING: the save in the background failed: {error}")

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight:
            self._add(flight.committed.result())

    def _add(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, ClusterError):
            self.wind_up()
        self._given_up.set()
        self._thread.shutdown()
