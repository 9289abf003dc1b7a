"""What the file systems of a run can do, found out in temporary directories that are gone afterwards. Standard library
only."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhpc.checkpoint.durable import fsync, lags
from rlhpc.cluster.attempt import NO_LOCKS
from rlhpc.cluster.storage import existing, filesystem
from rlhpc.doctor.finding import Finding, judged

GIB, MIB = 2**30, 2**20
CHUNK_BYTES, PROBE_BYTES = 4 * MIB, 64 * MIB
PROBE_S = 1.0  # no more is written after that
PREFIX = ".rlhpc-doctor-"
MAX_SKEW_S = 2.0  # a run compares times of files with its own
LITTLE_TEMP_BYTES = 2 * GIB  # Ray's logs, and what engines compile


def run_directory(run_dir: Path) -> Iterator[Finding]:
    """Of the directory where a run would write, or of the nearest above that is there."""
    place = existing(run_dir)
    disk = os.statvfs(place)
    shown = f"{place} ({filesystem(place)}), {disk.f_bavail * disk.f_frsize / GIB:.1f} GiB free"
    other = "choose another: run_dir=DIR"
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        yield Finding("run directory", "failed", f"{shown}; no directory that you may write to", other)
        return
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place) as probe:
            rate = _write_rate(Path(probe))
            yield Finding("run directory", "ok", f"{shown}; writes {rate:.0f} MB/s, fsync included")
            yield from _abilities(Path(probe))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = f"free some, raise the quota, or {other}" if full else other
        yield Finding("run directory", "failed", f"{shown}; a checkpoint can't be written: {error.strerror}", fix)


def temp_root(root: Path) -> Iterator[Finding]:
    """Of cluster.ray_temp_root: Ray's sockets and logs, and what engines compile."""
    place = existing(root)
    fix = "set another node-local directory: cluster.ray_temp_root=DIR"
    try:
        with tempfile.TemporaryDirectory(prefix="rlhpc-", dir=place) as probe, socket.socket(socket.AF_UNIX) as sock:
            sock.bind(f"{probe}/s")
    except OSError as error:
        yield Finding(
            "node's directory", "failed", f"{place} takes no sockets of Ray's: {error.strerror or error}", fix
        )
        return
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    found = f"{place} ({filesystem(place)}), {free / GIB:.1f} GiB free for Ray's logs and compiled kernels"
    noexec = bool(disk.f_flag & os.ST_NOEXEC)
    if noexec:
        found += "; mounted noexec, so that compiled kernels can't be loaded"
    elif lags(place):
        found += "; on the network, which is slow for it"
    yield judged("node's directory", found, fix, failed=noexec, warning=free < LITTLE_TEMP_BYTES or lags(place))


def _write_rate(probe: Path) -> float:
    """MB/s of one file, each chunk until it is on the device: what a slow one has taken in can't be taken back."""
    block, written, begin = os.urandom(CHUNK_BYTES), 0, time.monotonic()
    with (probe / "data").open("wb", buffering=0) as file:
        while written < PROBE_BYTES and time.monotonic() - begin < PROBE_S:
            written += file.write(block)
            os.fsync(file.fileno())
    return written / 1e6 / (time.monotonic() - begin)


def _abilities(probe: Path) -> Iterator[Finding]:
    tried: dict[str, tuple[Callable[[Path], None], str]] = {
        "fsync of directories": (fsync, "a checkpoint's name may be lost with the power"),
        "rename": (_rename, "checkpoints are committed by it"),
        "hard links": (_hard_link, "the nodes of a job agree by them; a run of one machine does without"),
        "locks": (_lock, "two drivers in one directory are told apart by the checkpoints' owner alone"),
    }
    lacking = {}
    for name, (ability, meaning) in tried.items():
        try:
            ability(probe)
        except OSError as error:
            lacking[name] = f"no {name} ({error.strerror}): {meaning}"
    found = "; ".join(lacking.values()) or ", ".join(tried)
    fix = "keep runs on another file system: run_dir=DIR"
    yield judged("file system", found, fix, failed="rename" in lacking, warning=bool(lacking))
    (probe / "now").touch()
    skew = (probe / "now").stat().st_mtime - time.time()
    fix = "have server and clients follow one time server; chronyc tracking shows the difference"
    yield judged("times of files", f"{abs(skew):.1f} s from this machine's", fix, warning=abs(skew) > MAX_SKEW_S)


def _rename(probe: Path) -> None:
    """Of a file over another, and of a directory, as checkpoints are committed."""
    (probe / "old").write_text("old")
    (probe / "new").write_text("new")
    os.rename(probe / "new", probe / "old")
    if (probe / "old").read_text() != "new":
        raise OSError(errno.EIO, "a file that was renamed over another has the other's content")
    (probe / "step.partial").mkdir()
    os.rename(probe / "step.partial", probe / "step")


def _hard_link(probe: Path) -> None:
    (probe / "one").write_text("one")
    os.link(probe / "one", probe / "two")


def _lock(probe: Path) -> None:
    with (probe / "lock").open("w") as first, (probe / "lock").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise OSError(NO_LOCKS[-1], "two had the same lock")
