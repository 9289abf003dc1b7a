"""kill -9 at every system call of a save and at random moments: the newest committed step always loads, whole."""

import json
import os
import random
import shutil
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import NoReturn

import pytest

from rlhpc.checkpoint.manifest import FileEntry
from rlhpc.checkpoint.store import CheckpointStore
from tests.unit.checkpoint.saves import NUM_RANKS, at_disk_call, in_child, loaded_step, newest_whole, save, write_rank


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_as_driver(root: Path, step: int, victim: str, call: int) -> None:
    """A save by a driver and two ranks, processes of their own that answer through pipes, and the deletion of what is
    older. The victim dies at its n-th disk call; a driver that misses an answer gives the save up."""
    if victim == "driver":
        at_disk_call(call, die)
    store = CheckpointStore(root)
    pending = store.begin(step)

    def run_rank(rank: int, answer: int) -> None:
        sys.setprofile(None)  # the driver's
        if victim == f"rank {rank}":
            at_disk_call(call, die)
        entries = write_rank(pending, rank, read_back=True)
        sys.setprofile(None)
        os.write(answer, json.dumps([entry.to_json() for entry in entries]).encode())

    answers = []
    for rank in range(NUM_RANKS):
        read_end, write_end = os.pipe()
        in_child(lambda rank=rank, write_end=write_end: run_rank(rank, write_end))
        os.close(write_end)
        answers.append(read_end)
    told = [os.read(answer, 1 << 20) for answer in answers]
    if not all(told):
        store.abandon(pending)
        raise SystemExit(3)
    store.commit(pending, [FileEntry.from_json(e) for text in told for e in json.loads(text)], {"step": step})
    store.retain(1)


@pytest.mark.parametrize("victim", ["driver", "rank 1"])
def test_killed_at_every_system_call(in_memory: Path, victim: str) -> None:
    outcomes = []
    begun = in_memory / "begun"
    save(CheckpointStore(begun), 2)
    (begun / "owner.json").unlink()  # this process's, which lives on
    for call in count():
        root = in_memory / str(call)
        shutil.copytree(begun, root)
        ended, living = os.pipe()  # whose other end the driver and its ranks hold while they live
        _, status = os.waitpid(in_child(lambda root=root, call=call: save_as_driver(root, 3, victim, call)), 0)
        os.close(living)
        assert os.read(ended, 1) == b""
        os.close(ended)
        outcomes.append(loaded_step(root))
        store = CheckpointStore(root)
        save(store, 4)  # a restart isn't blocked by what is left,
        assert not list(root.glob("tmp-*"))  # and clears it away
        assert loaded_step(root) == 4
        assert all(store.has(step) for step in store.steps())  # nothing half-deleted keeps a committed name
        shutil.rmtree(root)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            break
        assert os.WIFSIGNALED(status) if victim == "driver" else os.WEXITSTATUS(status) == 1  # by SystemExit

    assert len(outcomes) > {"driver": 30, "rank 1": 15}[victim], "the hook misses calls"
    assert outcomes == sorted(outcomes) and set(outcomes) == {2, 3}  # one instant separates old from new


def test_killed_at_random_moments(tmp_path: Path) -> None:
    rng = random.Random(0)
    read_end, write_end = os.pipe()

    def save_for_ever() -> NoReturn:
        store = CheckpointStore(tmp_path)
        manifest = newest_whole(tmp_path)
        step = manifest.step if manifest else 0
        while True:
            step += 1
            save(store, step)
            os.write(write_end, f"{step}\n".encode())
            store.retain(2)

    committed, longest_s = 0, 0.0
    for _ in range(25):
        begin = time.monotonic()
        child = in_child(save_for_ever)
        if not committed:
            committed = int(os.read(read_end, 1 << 16).split()[-1])
            longest_s = 2 * (time.monotonic() - begin)
        time.sleep(rng.uniform(0, longest_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.write(write_end, b"\n")
        told = [int(line) for line in os.read(read_end, 1 << 16).split()]
        committed = max([committed, *told])
        loaded = loaded_step(tmp_path)
        assert loaded in (committed, committed + 1)  # killed between the commit and the telling
        committed = loaded
    os.close(read_end), os.close(write_end)
    assert committed > 3
