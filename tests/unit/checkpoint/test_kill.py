"""kill -9 at every system call of a save and at random moments: the newest committed step always loads, whole."""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from rlhpc.checkpoint.shards import read_rank_state
from rlhpc.checkpoint.store import CheckpointStore

NUM_RANKS = 2


def shards(step: int, num_values: int) -> list[tuple[dict[str, torch.Tensor], dict[str, object]]]:
    return [({"weight": torch.full((num_values,), float(step + rank))}, {"step": step}) for rank in range(NUM_RANKS)]


def loaded_step(root: Path) -> int:
    """The step that a restart would go on from, having compared every value of every rank with it."""
    manifest = CheckpointStore(root).load_latest()
    assert manifest is not None
    assert manifest.state == {"step": manifest.step}
    for rank in range(NUM_RANKS):
        tensors, scalars = read_rank_state(manifest, rank)
        assert scalars == {"step": manifest.step}
        assert tensors["weight"].unique().tolist() == [manifest.step + rank]
    return manifest.step


def in_child(body: Callable[[], None]) -> int:
    """Forks a process that runs `body`; returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    return pid


def kill_at(event: int) -> None:
    """Has this process kill itself at its n-th entry to a C function that touches the disk."""
    modules = ("posix", "_io", "safetensors._safetensors_rust")
    seen = 0

    def profile(frame: FrameType, what: str, function: object) -> None:
        nonlocal seen
        owner = type(getattr(function, "__self__", None)).__module__
        if what == "c_call" and (getattr(function, "__module__", None) in modules or owner in modules):
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.setprofile(profile)


def test_killed_at_every_system_call(tmp_path: Path) -> None:
    outcomes = []
    begun = tmp_path / "begun"
    CheckpointStore(begun).save(1, shards(1, 10), {"step": 1})
    CheckpointStore(begun).save(2, shards(2, 10), {"step": 2})
    (begun / "owner.json").unlink()  # this process's, which lives on
    for event in range(10_000):
        root = tmp_path / str(event)
        shutil.copytree(begun, root)

        def save_and_retire(root: Path = root, event: int = event) -> None:
            child = CheckpointStore(root)
            kill_at(event)
            child.save(3, shards(3, 10), {"step": 3})
            child.retain(1)

        _, status = os.waitpid(in_child(save_and_retire), 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        outcomes.append(loaded_step(root))
        store = CheckpointStore(root)
        store.save(4, shards(4, 10), {"step": 4})  # a restart isn't blocked by what is left,
        assert not list(root.glob("tmp-*"))  # and clears it away
        assert loaded_step(root) == 4
        steps = [int(path.name.removeprefix("step-")) for path in root.glob("step-*")]
        assert all(store.has(step) for step in steps)  # nothing half-deleted keeps a committed name

    assert len(outcomes) > 80, "the save has become so short that the hook must be missing its system calls"
    assert outcomes == sorted(outcomes) and set(outcomes) == {2, 3}  # one instant separates old from new


def test_killed_at_random_moments(tmp_path: Path) -> None:
    rng = random.Random(0)
    read_end, write_end = os.pipe()

    def save_for_ever() -> NoReturn:
        store = CheckpointStore(tmp_path)
        manifest = store.load_latest()
        step = manifest.step if manifest else 0
        while True:
            step += 1
            store.save(step, shards(step, 300_000), {"step": step})
            os.write(write_end, f"{step}\n".encode())
            store.retain(2)

    committed = 0
    for _ in range(40):
        child = in_child(save_for_ever)
        if not committed:
            committed = int(os.read(read_end, 1 << 16).split()[-1])
        time.sleep(rng.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.write(write_end, b"\n")
        told = [int(line) for line in os.read(read_end, 1 << 16).split()]
        committed = max([committed, *told])
        loaded = loaded_step(tmp_path)
        assert loaded in (committed, committed + 1)  # killed between the commit and the telling
        committed = loaded
    os.close(read_end), os.close(write_end)
    assert committed > 5
