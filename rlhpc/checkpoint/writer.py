"""Which process writes a checkpoint, and whether it still lives. Standard library only."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from rlhpc.checkpoint.durable import LATE

FOREIGN_SILENCE_S = 6 * 3600.0


@dataclass(frozen=True)
class Writer:
    """A process for ever: the kernel's start time tells it from a later one with the same pid. `attempt` is the try of
    a scheduler's job that it belongs to, `<job>-<restart count>`; empty outside."""

    host: str
    pid: int
    started: int  # clock ticks after boot
    attempt: str = ""

    @classmethod
    def current(cls, attempt: str = "") -> Writer:
        pid = os.getpid()
        started = _start_time(pid)
        assert started is not None
        return cls(socket.gethostname(), pid, started, attempt)

    @classmethod
    def parse(cls, text: str) -> Writer:
        """Reads what `str` wrote: `<host>.<pid>.<started>` and, in a job, `@<attempt>`; the host may have dots itself.
        Raises ValueError."""
        process, _, attempt = text.partition("@")
        host, pid, started = process.rsplit(".", 2)
        return cls(host, int(pid), int(started), attempt)

    def __str__(self) -> str:
        return f"{self.host}.{self.pid}.{self.started}" + (f"@{self.attempt}" if self.attempt else "")

    def supersedes(self, other: Writer) -> bool:
        """Whether `other` is an earlier try of the same job. Its node may not have heard that the scheduler gave it up,
        and from here it can't be asked: it counts as dead."""
        job, _, restart = self.attempt.rpartition("-")
        other_job, _, other_restart = other.attempt.rpartition("-")
        return bool(job) and job == other_job and int(other_restart) < int(restart)

    def is_alive(self, trace: Path | None = None) -> bool:
        """Whether the process still runs. One of another host can't be asked: it counts as alive while its
        `trace`, a file or directory that it writes, was touched in the last six hours, and as dead without
        one."""
        if self.host == socket.gethostname():
            return _start_time(self.pid) == self.started
        if trace is None:
            return False
        try:
            newest = max(path.stat().st_mtime for path in (trace, *trace.rglob("*")))
        except OSError as error:
            if error.errno in LATE:  # it is being renamed or deleted at this moment, so somebody lives
                return True
            raise
        return time.time() - newest < FOREIGN_SILENCE_S


def _start_time(pid: int) -> int | None:
    """None when there is no such process, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rsplit(")", 1)[1].split()  # the command name may hold spaces and parentheses
    return None if fields[0] in "ZX" else int(fields[19])
