"""What a run leaves on a node while it lives, and how all of it goes away.

A session is a token that every process of the run carries in its environment, a private node-local directory, and the
names of the shared-memory segments that its engines create. The reaper, a process of its own that holds the read end of
a pipe, removes all three when the driver goes away, however it goes. Should the reaper be killed as well, the next
session on the node finds the dead driver's directory and finishes the job. Standard library only.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TOKEN_VARIABLE = "RLHPC_SESSION"
MAX_RAY_DIR_BYTES = 43  # 107 bytes of an AF_UNIX path less 64 for Ray's session and socket names


@dataclass(frozen=True)
class Session:
    """`token` marks the processes, `directory` holds what Ray writes, `ident` begins every shared-memory name."""

    token: str
    directory: Path

    @property
    def ident(self) -> str:
        return f"rlhpc{self.token}"


def _root(temp_root: str) -> Path:
    return Path(temp_root, f"rlhpc-{os.getuid()}")


def _start_time(pid: int) -> str | None:
    """The kernel's start time of a process: with the pid it names one process for ever. None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] in "ZX" else fields[19]


def _processes(token: str) -> list[int]:
    """Pids of this user's live processes that carry the token, this process excepted."""
    needle = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0") and _start_time(int(entry.name)):
                found.append(int(entry.name))
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # another user's, or gone meanwhile
    return found


def open_session(temp_root: str) -> Session:
    """Creates a session of this process and sweeps those whose driver is dead.

    Raises ValueError when the directory would be too long for Ray's sockets.
    """
    root = _root(temp_root)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for directory in root.iterdir():
        if not _driver_alive(directory):
            clean(Session(directory.name, directory))
    token = secrets.token_hex(4)
    session = Session(token, root / token)
    if (length := len(os.fsencode(session.directory))) > MAX_RAY_DIR_BYTES:
        raise ValueError(
            f"cluster.ray_temp_root={temp_root!r} gives {session.directory}, {length} bytes; "
            f"Ray's sockets allow {MAX_RAY_DIR_BYTES}. Use a shorter node-local directory such as /tmp"
        )
    session.directory.mkdir(mode=0o700)
    (session.directory / "driver").write_text(f"{os.getpid()} {_start_time(os.getpid())}")
    return session


def _driver_alive(directory: Path) -> bool:
    try:
        pid, started = (directory / "driver").read_text().split()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # A session that another process is creating this very moment, or a torn one: judge by age.
        try:
            return time.time() - directory.stat().st_mtime < 60
        except FileNotFoundError:
            return True
    return _start_time(int(pid)) == started


def clean(session: Session) -> None:
    """Kills what carries the token, then removes the shared-memory segments and the directory. Safe to repeat."""
    deadline = time.monotonic() + 20
    while (pids := _processes(session.token)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    for segment in Path("/dev/shm").glob(f"*{session.ident}*"):
        segment.unlink(missing_ok=True)
    shutil.rmtree(session.directory, ignore_errors=True)


class Reaper:
    """Cleans the session when this process ends. `close()` cleans now and waits for it."""

    def __init__(self, session: Session) -> None:
        read_end, self._write_end = os.pipe()
        env = {k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-E", "-s", __file__, session.token, str(session.directory)],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # a terminal's Ctrl-C or a killed process group must not reach it
        )
        os.close(read_end)

    def close(self) -> None:
        os.close(self._write_end)
        self._process.wait(timeout=60)


def main() -> None:
    """The reaper: waits until the pipe on standard input closes, which the driver's death does."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):  # meant for the driver
        signal.signal(number, signal.SIG_IGN)
    session = Session(sys.argv[1], Path(sys.argv[2]))
    while os.read(0, 1):
        pass
    clean(session)


if __name__ == "__main__":
    main()
