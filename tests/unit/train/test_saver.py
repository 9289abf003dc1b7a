"""Saving while training goes on: the driver's real parts, and the real savers of two ranks in this process."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.checkpoint.durable import DiskFullError
from rlhpc.checkpoint.pieces import Piece
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.checkpoint.writer import Writer
from rlhpc.cluster.attempt import read_json
from rlhpc.cluster.stop import StopFlag
from rlhpc.config.load import load
from rlhpc.config.schema import RunConfig
from rlhpc.errors import CheckpointError, RankLostError, TrainingError
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.metrics.reporter import Reporter
from rlhpc.reshard.saved import load_saved
from rlhpc.train.persistence import TrainState
from rlhpc.train.progress import Progress
from rlhpc.train.protocols import TrainerState
from rlhpc.train.rank_save import RankSaver, entries_of, report_key
from rlhpc.train.ranks import Ranks
from rlhpc.train.saver import Saver

ROWS = 1000  # of the one tensor, a half on each rank


class HalfTrainer:
    """What a saver asks of a trainer, of a model that is one tensor [ROWS, 4]."""

    def __init__(self, rank: int) -> None:
        self.weight, self._rank = torch.zeros(ROWS // 2, 4), rank

    def sleep(self) -> None:
        pass

    def state_pieces(self) -> TrainerState:
        begin = self._rank * ROWS // 2
        pieces = [
            (Piece(kind, "w", (begin, 0), (begin + ROWS // 2, 4)), self.weight)
            for kind in ("master", "exp_avg", "exp_avg_sq")
        ]
        return TrainerState(pieces, {"w": (ROWS, 4)}, {"rng/torch": torch.get_rng_state()}, {"rank": self._rank})


class Rank:
    def __init__(self, rank: int, tell: Callable[[str, str], object]) -> None:
        self.trainer = HalfTrainer(rank)
        self._saver = RankSaver(rank, self.trainer, tell, num_threads=1, reserve=True)  # type: ignore[arg-type]
        self.place = {"dp_rank": rank, "dp_size": 2, "replica_rank": rank, "num_replicas": 2, "start_s": 0.0}

    def describe(self) -> dict[str, Any]:
        self._saver.check()
        return self.place

    def step(self, value: float) -> None:
        self._saver.before_change()
        self.trainer.weight.fill_(value)

    def save(self, directory: str, read_back: bool) -> Any:
        return self._saver.write(Path(directory), read_back=read_back)

    def begin_save(self, directory: str, save_id: str, read_back: bool) -> None:
        self._saver.begin(Path(directory), save_id, read_back=read_back)


class LocalRanks:
    """Two ranks of this process. While `held`, their reports don't arrive: the save stays in flight. `settling` is
    called when the driver waits for them."""

    world_size = 2

    def __init__(self) -> None:
        self.told: dict[str, str] = {}
        self.ranks = [Rank(rank, self.told.__setitem__) for rank in range(2)]
        self.held = threading.Event()
        self.settling: Callable[[], None] = lambda: None

    def call(
        self, method: str, per_rank: Any = None, *, phase: str = "", waiting: Any = None, **common: Any
    ) -> list[Any]:
        if method == "describe":
            self.settling()
        return [getattr(rank, method)(**common) for rank in self.ranks]

    def reports(self, save_id: str) -> list[str] | None:
        keys = [report_key(save_id, rank) for rank in range(2)]
        return (
            None if self.held.is_set() or not all(map(self.told.__contains__, keys)) else [self.told[k] for k in keys]
        )

    def interrupt(self) -> None:
        raise AssertionError("nobody generates here")

    def train(self, value: float) -> None:
        for rank in self.ranks:
            rank.step(value)


class Parts:
    """A driver's parts over local ranks, in a directory."""

    def __init__(self, directory: Path, caller: LocalRanks, **checkpoint: Any) -> None:
        self.caller, self.directory = caller, directory
        self.cfg: RunConfig = load(
            OmegaConf.create(
                {
                    "actor_rollout_ref": {"model": {"path": "/m"}},
                    "data": {"train_files": "/d"},
                    "trainer": {"n_gpus_per_node": 2},
                    "checkpoint": checkpoint,
                }
            )
        )
        self.progress = Progress(directory, None, StopFlag())
        self.reporter = Reporter(self.cfg, directory, 10)
        self.store = CheckpointStore(directory / "checkpoints")
        self.saver = Saver(self.cfg, Ranks(caller, lambda: False), self.store, self.progress, self.reporter)

    def saved_value(self, step: int) -> float:
        """The value of all elements, read as a rank of another layout would."""
        manifest = self.store.load(step)
        whole = torch.full((ROWS, 4), -1.0)
        spec = ShardSpec("w", (ROWS, 4), "float32", (Shard(0, (0, 0), (ROWS, 4), "w", (0, 0)),))
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            load_saved(manifest, kind, [spec], 0, {"w": whole})
        [value] = whole.unique().tolist()
        return value


@pytest.fixture
def caller() -> LocalRanks:
    return LocalRanks()


@pytest.fixture
def parts(tmp_path: Path, caller: LocalRanks) -> Iterator[Parts]:
    parts = Parts(tmp_path, caller)
    with parts.saver:
        yield parts
    caller.held.clear()


def state(step: int, **record: float) -> TrainState:
    return TrainState(step, {"position": step}, record)


def test_what_is_committed_is_the_state_from_when_it_began(parts: Parts, caller: LocalRanks, tmp_path: Path) -> None:
    caller.held.set()
    caller.train(1.0)
    parts.saver.start(state(1))
    caller.train(2.0)  # training goes on
    assert parts.store.steps() == []
    assert parts.saver.collect().keys() == {"checkpoint/blocked_s"}
    caller.held.clear()
    parts.saver.drain()
    assert parts.saved_value(1) == 1.0
    manifest = parts.store.load(1)
    assert manifest.state["train"] == asdict(state(1))
    assert manifest.layout == {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "world_size": 2}
    assert (read_json(tmp_path / "progress.json") or {})["checkpoint"]["step"] == 1
    metrics = parts.saver.collect()
    assert metrics["checkpoint/bytes"] == manifest.size_bytes and metrics["checkpoint/write_s"] > 0
    assert parts.saver.collect() == {}

    # The same bytes as those of a save that is waited for.
    caller.train(1.0)
    other = Parts(tmp_path / "other", caller)
    other.saver.now(state(1))
    for entry in manifest.files:
        assert (manifest.directory / entry.name).read_bytes() == (
            tmp_path / "other/checkpoints/step-000001" / entry.name
        ).read_bytes()
    assert other.store.load(1).files == manifest.files


def test_the_next_save_waits_for_the_one_before_and_says_so(tmp_path: Path, caller: LocalRanks, capsys) -> None:
    parts = Parts(tmp_path, caller)  # after capsys: it prints to what is standard output now
    caller.held.set()
    caller.train(1.0)
    parts.saver.start(state(1))
    caller.train(2.0)
    caller.settling = caller.held.clear  # now the driver waits
    parts.saver.start(state(2))
    caller.train(3.0)
    parts.saver.drain()
    assert [parts.saved_value(step) for step in parts.store.steps()] == [1.0, 2.0]
    out = " ".join(capsys.readouterr().out.split())
    assert "step 1 is still being written after 0 s, and the save of step 2 waits for it" in out
    parts.saver.start(state(2))  # committed already, as after a restart
    parts.saver.now(state(2))
    assert parts.store.steps() == [1, 2]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_alarm_and_the_next_one_makes_up_for_it(tmp_path: Path, caller: LocalRanks, capsys) -> None:
    parts = Parts(tmp_path, caller)
    caller.train(1.0)
    parts.saver.start(state(1))
    parts.saver.drain()
    parts.saver.collect()
    with largest_file(8192):
        parts.saver.start(state(2))
        parts.saver.drain()
    assert parts.saver.collect()["checkpoint/failed_saves"] == 1.0
    out = " ".join(capsys.readouterr().out.split())
    assert "WARNING: step 2 is not saved, training goes on: can't write " in out and "File too large" in out
    assert parts.store.steps() == [1] and not list(parts.store.root.glob("tmp-*"))
    with largest_file(8192), pytest.raises(DiskFullError):
        parts.saver.now(state(2))
    caller.train(3.0)
    parts.saver.start(state(3))
    parts.saver.drain()
    assert "checkpoint/failed_saves" not in parts.saver.collect()
    assert parts.store.steps() == [1, 3] and parts.saved_value(3) == 3.0


def test_storage_that_turns_read_only_is_an_alarm_too(tmp_path: Path, caller: LocalRanks, capsys) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root; run the tests as root to cover this")
    parts = Parts(tmp_path, caller)
    parts.store.root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "rlhpc-test", parts.store.root], check=True)
    try:
        parts.saver.start(state(1))
        parts.saver.drain()
        subprocess.run(["mount", "-o", "remount,ro", parts.store.root], check=True)
        parts.saver.collect()
        parts.saver.start(state(2))
        assert parts.saver.collect() == {"checkpoint/failed_saves": 1.0}
        out = " ".join(capsys.readouterr().out.split())
        assert "WARNING: step 2 is not saved, training goes on: can't write " in out and "Read-only file system" in out
        subprocess.run(["mount", "-o", "remount,rw", parts.store.root], check=True)
        parts.saver.start(state(3))
        parts.saver.drain()
        assert parts.store.steps() == [1, 3]
    finally:
        subprocess.run(["umount", "--lazy", parts.store.root], check=True)


def test_a_chunk_that_comes_back_otherwise_is_an_alarm_too(parts: Parts, caller: LocalRanks) -> None:
    caller.held.set()
    parts.saver.start(state(1))
    while len(caller.told) < 2:
        time.sleep(0.001)
    caller.told[report_key("1-0", 1)] = report("CheckpointError", "the device gives back chunk 0 with xxh3 ab")
    caller.held.clear()
    parts.saver.drain()
    assert parts.saver.collect()["checkpoint/failed_saves"] == 1.0
    assert parts.store.steps() == [] and not list(parts.store.root.glob("tmp-*"))


def test_a_lost_rank_ends_the_wait_at_once(tmp_path: Path, caller: LocalRanks) -> None:
    parts = Parts(tmp_path, caller)

    def lost() -> None:
        raise RankLostError("rank 1 died in describe")

    caller.held.set()  # its report never comes
    with pytest.raises(RankLostError, match="rank 1 died"), parts.saver:
        parts.saver.start(state(1))
        caller.settling = lost
        parts.saver.drain()
    assert parts.store.steps() == [] and not list(parts.store.root.glob("tmp-*"))


def test_a_report_that_does_not_arrive_is_not_waited_for(tmp_path: Path, caller: LocalRanks) -> None:
    def unreachable(key: str, report: str) -> None:
        raise RankLostError(f"no way to the store for {key}")

    caller.ranks[1] = Rank(1, unreachable)
    parts = Parts(tmp_path, caller)
    with pytest.raises(RankLostError, match="no way to the store for rlhpc/save/2-0/1"), parts.saver:
        parts.saver.start(state(2))
        parts.saver.drain()
    assert parts.store.steps() == []


def test_a_run_that_fails_still_commits_the_save_in_flight(tmp_path: Path, caller: LocalRanks) -> None:
    parts = Parts(tmp_path, caller)
    caller.held.set()
    caller.train(1.0)
    with pytest.raises(TrainingError, match="loss is nan"), parts.saver:
        parts.saver.start(state(1))
        threading.Timer(0.2, caller.held.clear).start()
        raise TrainingError("loss is nan")
    assert parts.saved_value(1) == 1.0


def test_who_lost_the_run_to_another_hears_of_it_in_the_next_step(parts: Parts, caller: LocalRanks) -> None:
    caller.held.set()
    parts.saver.start(state(1))
    newer = replace(Writer.current(), host="node7", pid=4711)
    (parts.store.root / "owner.json").write_text(json.dumps(asdict(newer)))
    caller.held.clear()
    with pytest.raises(CheckpointError, match="now belongs to another run \\(process 4711 on node7\\)"):
        while True:
            parts.saver.collect()  # as the end of every step does
    assert parts.store.steps() == []


def test_older_ones_go_when_the_newer_is_read_back(tmp_path: Path, caller: LocalRanks, capsys) -> None:
    parts = Parts(tmp_path, caller, keep=1, keep_best=1, best_metric="val-core/a")
    with parts.saver:
        for step, value in enumerate((0.2, 0.9, 0.4, 0.3), start=1):
            parts.saver.start(state(step, **{"val-core/a": value}))
        parts.saver.drain()
        assert parts.store.steps() == [2, 4]
        parts.saver.now(state(5), hurry=True)  # not read back
        assert parts.store.steps() == [2, 4, 5]
        parts.saver.retire()
        assert parts.store.steps() == [2, 5]
    assert "WARNING" not in capsys.readouterr().out
    misspelt = Parts(tmp_path / "other", caller, keep_best=1, best_metric="val-core/b")
    for step in (1, 2):
        misspelt.saver.now(state(step, **{"val-core/a": 0.5}))
    told = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert len(told) == 1 and told[0].endswith("keep_best keeps nothing; set one of val-core/a")


def report(error: str, text: str) -> str:
    return json.dumps({"error": error, "text": text})


def test_what_ranks_report() -> None:
    full, broken = report("DiskFullError", "no room"), report("CheckpointError", "chunk 3")
    with pytest.raises(DiskFullError, match="no room"):
        entries_of([json.dumps({"files": []}), full])
    with pytest.raises(CheckpointError, match="chunk 3"):  # it must not pass as a full disk
        entries_of([full, broken])
    with pytest.raises(TrainingError, match=r"rank 1 failed to save: KeyError: 'w'\nthe traceback is at the end of"):
        entries_of([full, report("KeyError", "'w'")])
