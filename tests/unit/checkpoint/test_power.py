"""A power cut at every system call of a save: what was flushed is there, nothing else is, and the newest committed step
loads whole. The file system is a real one, which is told to forget what it has not yet written (ext4's shutdown)."""

import fcntl
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from rlhpc.checkpoint.store import CheckpointStore
from tests.unit.checkpoint.saves import at_disk_call, in_child, loaded_step, save

EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
NOLOGFLUSH = 2  # neither data nor the journal's open transaction reach the device


@pytest.fixture
def disk(in_memory: Path) -> Path:
    """The image of a small ext4 that holds step 2."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("cutting a file system's power needs root and mkfs.ext4; test_kill covers processes without")
    image = in_memory / "image"
    with image.open("wb") as file:
        file.truncate(8 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "1024", image], check=True)
    with mounted(image) as root:
        save(CheckpointStore(root), 2, max_file_bytes=10_000)
        (root / "owner.json").unlink()  # this process's, which lives on
    return image


@contextmanager
def mounted(image: Path) -> Iterator[Path]:
    directory = image.with_name("mounted")
    directory.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, directory], check=True)
    try:
        root = directory / "checkpoints"
        root.mkdir(exist_ok=True)
        yield root
    finally:
        subprocess.run(["umount", directory], check=True)


def cut_power(root: Path) -> Callable[[], None]:
    fd = os.open(root, os.O_RDONLY)

    def cut() -> None:
        fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NOLOGFLUSH))
        os.kill(os.getpid(), signal.SIGKILL)

    return cut


def test_a_power_cut_at_every_system_call(disk: Path) -> None:
    outcomes = []
    image = disk.with_name("copy")

    def save_and_retire(root: Path, call: int, told: int) -> None:
        at_disk_call(call, cut_power(root))
        store = CheckpointStore(root)
        save(store, 3, max_file_bytes=10_000)
        os.write(told, b"3")
        store.retain(1)

    for call in count():
        subprocess.run(["cp", "--sparse=always", disk, image], check=True)
        read_end, write_end = os.pipe()
        with mounted(image) as root:
            child = in_child(lambda root=root, call=call, told=write_end: save_and_retire(root, call, told))
            _, status = os.waitpid(child, 0)
        os.close(write_end)
        promised = os.read(read_end, 1)
        os.close(read_end)
        with mounted(image) as root:
            outcomes.append(loaded_step(root))
            assert outcomes[-1] == 3 or not promised
            save(CheckpointStore(root), 4, max_file_bytes=10_000)
            assert not list(root.glob("tmp-*"))
            assert loaded_step(root) == 4
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(outcomes) > 30, "the hook misses calls"
    assert outcomes == sorted(outcomes) and set(outcomes) == {2, 3}
