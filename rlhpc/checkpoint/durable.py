"""Files that are either whole or absent after a crash, and disks that are full. Standard library only."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from rlhpc.errors import CheckpointError

T = TypeVar("T")

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # no space, quota, RLIMIT_FSIZE
LATE = frozenset({errno.ENOENT, errno.ESTALE})  # what one node of a network file system sees of another's rename
PATIENCE_S = 60.0  # an NFS client believes for up to a minute (acdirmax) what it last knew of a directory
LAGGING = ("9p", "cifs", "fuse", "nfs", "smb")  # Lustre, GPFS and the like show every node the same


class DiskFullError(CheckpointError):
    """The file system or a quota has no room. Earlier checkpoints are untouched; training itself can go
    on."""


def fsync(path: Path) -> None:
    """Flushes a file's data, or a directory's entries, to the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def patiently(path: Path, action: Callable[[], T], patience_s: float | None = None) -> T:
    """Does something to a file that another node may have put there a moment ago. What is missing or stale is tried
    again for `patience_s`, by default PATIENCE_S where the file system `lags`, else not at all.

    Raises OSError, the last one.
    """
    begin, pause = time.monotonic(), 0.05
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in LATE:
                raise
            if patience_s is None:
                patience_s = PATIENCE_S if lags(path.parent) else 0.0
            if time.monotonic() - begin + pause > patience_s:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 2.0)
        if path.parent.is_dir():
            os.listdir(path.parent)  # has the client ask the server for the directory's present content


def lags(directory: Path) -> bool:
    """Whether its file system may show late what another node did; False for a directory that doesn't exist."""
    try:
        device = os.stat(directory).st_dev
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1].startswith(LAGGING)
    return False


def publish_file(path: Path, write: Callable[[Path], None], num_bytes: int | None = None) -> None:
    """Has `write` fill a neighbouring `<name>.partial`, then gives it its name: readers see all of it or
    nothing. `num_bytes` is what it needs, for the message of an error.

    Raises DiskFullError or CheckpointError; the partial file is then gone.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        fsync(partial)
        os.rename(partial, path)
        fsync(path.parent)
    except OSError as error:
        if num_bytes is None:
            num_bytes = partial.stat().st_size if os.access(partial, os.F_OK) else 0
        _remove(partial)
        raise_write_error(error, path, num_bytes)
    except CheckpointError:
        _remove(partial)
        raise


def make_directory(path: Path) -> None:
    """Makes a directory and those above it; one that is there stays. Raises DiskFullError or CheckpointError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{error.filename} is a file, or a link to nothing, where checkpoints need a directory; remove it, or "
            "choose another trainer.default_local_dir"
        ) from error
    except OSError as error:
        raise_write_error(error, path, 0)


def _remove(partial: Path) -> None:
    """What an error left. Where that can't be (a file system that turned read-only), the error says enough."""
    with suppress(OSError):
        partial.unlink(missing_ok=True)


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write into the directory's file system."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def ensure_space(directory: Path, needed_bytes: int, num_files: int = 1) -> None:
    """Raises DiskFullError unless the directory's file system has room for so many bytes and files.

    A quota or another writer can still end a save that passed here.
    """
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if free < needed_bytes:
        raise DiskFullError(
            f"{directory} has {_size(free)} free, a checkpoint needs {_size(needed_bytes)}; free some space, "
            f"lower checkpoint.keep or choose another trainer.default_local_dir"
        )
    if stat.f_files and stat.f_favail < num_files:  # file systems without inode limits report 0 files
        raise DiskFullError(
            f"{directory} has {stat.f_favail} free inodes, a checkpoint needs {num_files}; delete some files"
        )


def raise_write_error(error: OSError, path: Path, needed_bytes: int) -> NoReturn:
    """Turns a failed write of `path` into the error that a user can act on."""
    if error.errno in FULL:
        raise DiskFullError(
            f"can't write {path}: {os.strerror(error.errno or 0)}; needed {_size(needed_bytes)}, "
            f"{_size(free_bytes(path.parent))} free; free some space or raise the quota"
        ) from error
    raise CheckpointError(f"can't write {path}: {error}") from error


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / 2**30:.2f} GiB)"
