"""What a run leaves on a node while it lives, and how all of it goes away.

A session is a token that every process of the run carries in its environment, a private node-local directory, and the
names of the shared-memory segments that its engines create. Its owner, a driver or a node's supervisor, holds a lock in
the directory for as long as it lives. The reaper, a process of its own that holds the read end of a pipe, removes all
three when the owner goes away, however it goes. Should the reaper be killed as well, the next session on the node finds
the directory without its lock and finishes the job; so does

    python -m rlhpc.cluster.session sweep [--temp-root DIR]    # as root: of all users

Standard library only.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOKEN_VARIABLE = "RLHPC_SESSION"
MAX_RAY_DIR_BYTES = 43  # 107 bytes of an AF_UNIX path less 64 for Ray's session and socket names
DEFAULT_TEMP_ROOT = "/tmp"
_OWNER = "owner.json"  # locked by the owner: a pid would mean nothing in another container
_TOKEN = re.compile(r"[0-9a-f]{8}")
_YOUNG_S = 60.0  # a directory without its owner's file may be in the making


@dataclass(frozen=True)
class Session:
    """`token` marks the processes, `directory` holds what Ray writes, `ident` begins every shared-memory name."""

    token: str
    directory: Path

    @property
    def ident(self) -> str:
        return ident_of(self.token)


def ident_of(token: str) -> str:
    return f"rlhpc{token}"


def open_session(temp_root: str) -> Session:
    """Creates a session of this process and sweeps those whose owner is dead.

    Raises ValueError when the directory would be too long for Ray's sockets, or isn't this user's own.
    """
    root = _own_root(Path(temp_root))
    token = secrets.token_hex(4)
    session = Session(token, root / token)
    if (length := len(os.fsencode(session.directory))) > MAX_RAY_DIR_BYTES:
        raise ValueError(
            f"cluster.ray_temp_root={temp_root!r} gives {session.directory}, {length} bytes; "
            f"Ray's sockets allow {MAX_RAY_DIR_BYTES}. Use a shorter node-local directory such as /tmp"
        )
    for dead in _dead(root):
        clean(dead)
    session.directory.mkdir(mode=0o700)
    partial = session.directory / f".{_OWNER}"
    descriptor = os.open(
        partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600
    )  # open, and locked, until this process ends
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    node = os.environ.get("SLURMD_NODENAME")
    owner = {"pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID"), "node": node, "opened": time.time()}
    os.write(descriptor, json.dumps(owner).encode())
    partial.rename(session.directory / _OWNER)
    return session


def _own_root(temp_root: Path) -> Path:
    """The directory of this user's sessions. Ray opens its directories to everybody, so nobody else may pass here; and
    in a shared /tmp somebody else may have made it first."""
    root = temp_root / f"rlhpc-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        raise ValueError(f"cluster.ray_temp_root={str(temp_root)!r} can't be used: {error}; choose another") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ValueError(
            f"{root} belongs to user id {found.st_uid}, so this user's sessions wouldn't be private there; have it "
            "removed, or set cluster.ray_temp_root to another node-local directory"
        )
    root.chmod(0o700)
    return root


def sweep(temp_root: str) -> list[Session]:
    """Cleans the sessions whose owner is dead, this user's or, for root, everybody's. Returns them."""
    dead = left_over(temp_root)
    for session in dead:
        clean(session)
    return dead


def left_over(temp_root: str) -> list[Session]:
    """The sessions whose owner is dead, this user's or, for root, everybody's."""
    pattern = "rlhpc-*" if os.getuid() == 0 else f"rlhpc-{os.getuid()}"
    roots = [root for root in Path(temp_root).glob(pattern) if root.name == f"rlhpc-{root.lstat().st_uid}"]
    return [session for root in roots if not root.is_symlink() for session in _dead(root)]


def _dead(root: Path) -> list[Session]:
    return [Session(path.name, path) for path in root.iterdir() if _TOKEN.fullmatch(path.name) and not alive(path)]


def alive(directory: Path) -> bool:
    """Whether the session's owner lives, which is to say, holds its lock."""
    try:
        descriptor = os.open(directory / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        try:
            return time.time() - directory.stat().st_mtime < _YOUNG_S
        except FileNotFoundError:
            return True  # another sweep was quicker
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False  # a link in the place of the owner's file: no owner of ours made it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def clean(session: Session) -> None:
    """Kills what carries the token, then removes the shared-memory segments and the directory. Safe to repeat.

    Touches only what belongs to the directory's owner: root cleans for users who could have named it anything."""
    try:
        uid = session.directory.lstat().st_uid
    except FileNotFoundError:
        uid = os.getuid()
    deadline = time.monotonic() + 20
    while (pids := processes(session.token, uid)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    for segment in Path("/dev/shm").glob(f"*{session.ident}*"):
        try:
            if segment.lstat().st_uid == uid:
                segment.unlink()
        except FileNotFoundError:
            continue
    shutil.rmtree(session.directory, ignore_errors=True)


def processes(token: str, uid: int | None = None) -> list[int]:
    """Pids of a user's (by default this one's) live processes that carry the token, this process excepted."""
    return [pid for pid, found in _marked(os.getuid() if uid is None else uid) if found == token]


def _marked(uid: int) -> Iterator[tuple[int, str]]:
    prefix = f"{TOKEN_VARIABLE}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if entry.stat().st_uid != uid:
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")  # empty once the process is a zombie
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # another user's, or gone meanwhile
        yield from ((int(entry.name), os.fsdecode(v[len(prefix) :])) for v in variables if v.startswith(prefix))


class Reaper:
    """Cleans the session when this process ends. `close()` cleans now and waits for it."""

    def __init__(self, session: Session) -> None:
        read_end, self._write_end = os.pipe()
        env = {k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-EsP", __file__, "reap", session.token, str(session.directory)],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # a terminal's Ctrl-C or a killed process group must not reach it
        )
        os.close(read_end)

    def close(self) -> None:
        os.close(self._write_end)
        self._process.wait(timeout=60)


def _reap(session: Session) -> None:
    """Waits until the pipe on standard input closes, which the owner's death does."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):  # meant for the owner
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    clean(session)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rlhpc.cluster.session", description="Cleans up sessions on a node."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sweeping = commands.add_parser("sweep", help="clean sessions whose owner is dead; as root, of all users")
    sweeping.add_argument("--temp-root", default=DEFAULT_TEMP_ROOT, help="cluster.ray_temp_root (default: %(default)s)")
    reaping = commands.add_parser("reap", help="clean one session when standard input closes")
    reaping.add_argument("token")
    reaping.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "reap":
        _reap(Session(arguments.token, arguments.directory))
        return
    for session in sweep(arguments.temp_root):
        print(f"removed what session {session.token} had left in {session.directory}")


if __name__ == "__main__":
    main()
