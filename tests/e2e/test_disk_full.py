"""A disk that fills while the real command trains: a save in between is done without, the last one is an error."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.checkpoint.store import CheckpointStore
from tests.e2e.runs import DYNAMIC, command, comparable, finish, rows, run_to_end, start


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for one of the tiny model's checkpoints (14 MiB), not for two."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root; the unit tests cover a quota without")
    directory = tmp_path / "disk"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "rlhpc-test", directory], check=True)
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


def test_a_full_disk(task: Path, reference: Path, tmp_path: Path, small_disk: Path) -> None:
    run_dir, log, store = tmp_path / "run", tmp_path / "log", CheckpointStore(small_disk)
    arguments = command(task, run_dir, *DYNAMIC, f"trainer.default_local_dir={small_disk}", "trainer.save_freq=1")
    assert finish(start([*arguments, "trainer.total_training_steps=4"], log), log) == 2
    assert store.steps() == [1]
    assert (small_disk / "latest").read_text() == "step-000001\n"
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    # It is written in the background, and told with the step at whose end it is known.
    assert sum(row.get("checkpoint/failed_saves", 0.0) for row in metrics[2:]) >= 1.0
    assert all(row["checkpoint/blocked_s"] > 0 for row in metrics[1:])
    text = log.read_text()
    assert "WARNING: step 2 is not saved, training goes on: " in text
    told = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and f"{small_disk}/" in told[0] and "free some space" in told[0]

    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    run_to_end([*arguments, "trainer.total_training_steps=3"], log)
    assert store.steps() == [1, 2, 3]
    assert comparable(run_dir) == comparable(reference)[:4]
