"""One try of a run under Slurm, and the files through which its processes and those who watch it talk.

    <run_dir>/config.yaml             the resolved configuration that every attempt reads
    <run_dir>/STOP                    written by `rlhpc cancel`: nobody requeues this run
    <run_dir>/attempts.jsonl          one line for each ended attempt
    <run_dir>/progress.json           what the driver does now
    <run_dir>/attempts/<job>-<n>/     mode 0700; <job> is Slurm's id (A_a for an array's task), <n> its try
        start.json                    when and on which nodes it began, and from which checkpoint
        ray_token                     mode 0600; lets a process into this attempt's Ray, and into no other
        head.json                     where Ray's head listens; appears whole, once it can be joined
        node-<id>.json                what node <id> is: host, address, ports, session
        stop.json                     why and until when: there before the driver hears of a stop; the deadline may move
                                      later, as the scheduler moves it
        link.json                     where node 0 listens for the other nodes' supervisors
        left-<id>.json                when node <id> had taken everything of the attempt away
        end.json                      how it ended, by the node that saw it first; every node leaves when it appears

Every file appears whole, by rename, and none is read by its existence alone. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.errors import ConfigError, print_error

STOP_NAME = "STOP"
ATTEMPT_VARIABLE = "RLHPC_ATTEMPT"  # the attempt's directory, in the environment of every process of it

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what flock says on a file system without locks

EXIT_FINISHED, EXIT_FAILED, EXIT_USAGE = 0, 1, 2  # 2: what the user can mend
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped with a checkpoint; another attempt goes on


@dataclass(frozen=True)
class StopNotice:
    """Why an attempt has to end. `cause` is one of preempted, time_limit, requeued, cancelled, signal; `signal` a name
    such as SIGTERM. Times are seconds since the epoch; at `deadline` the scheduler kills (None: not known)."""

    cause: str
    signal: str
    at: float
    deadline: float | None


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. `outcome`: finished, stopped, failed (another try would fail too) or lost (a process or a
    node died; another try may get further). `reason` is for people; `node` is where the first failure was seen."""

    outcome: str
    exit_code: int
    reason: str | None = None
    node: str | None = None
    at: float = 0.0  # seconds since the epoch

    @property
    def headline(self) -> str | None:
        """The reason's first line."""
        return self.reason.partition("\n")[0] if self.reason else None


@dataclass(frozen=True)
class Attempt:
    """`job_id` as scontrol takes it, A_a for an array's task; `restart` is the job's restart count, or more where the
    job was at this run before without being requeued."""

    run_dir: Path
    job_id: str
    restart: int

    @classmethod
    def current(cls, environ: Mapping[str, str]) -> Attempt | None:
        """The attempt that this process belongs to, None outside Slurm."""
        if not (directory := environ.get(ATTEMPT_VARIABLE)):
            return None
        path = Path(directory)
        job_id, _, restart = path.name.rpartition("-")
        return cls(path.parent.parent, job_id, int(restart))

    @property
    def name(self) -> str:
        return f"{self.job_id}-{self.restart}"

    @property
    def directory(self) -> Path:
        return self.run_dir / "attempts" / self.name

    @property
    def token_path(self) -> Path:
        return self.directory / "ray_token"

    def create(self, token: str) -> None:
        """The directory and Ray's token, readable by their owner alone. Safe to repeat."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        publish_text(self.token_path, token, mode=0o600)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Publishes `<name>.json` of the attempt, whole."""
        publish_text(self.directory / f"{name}.json", json.dumps(dict(content), indent=1) + "\n")

    def read(self, name: str) -> dict[str, Any] | None:
        """`<name>.json`, None while it isn't there."""
        # Reading the directory makes an NFS client forget that the file was missing a moment ago.
        if f"{name}.json" not in os.listdir(self.directory):
            return None
        return read_json(self.directory / f"{name}.json")

    def notify(self, notice: StopNotice) -> StopNotice:
        """Records why the attempt has to end; the first notice stands and is returned."""
        if (known := self.stop_notice()) is not None:
            return known
        self.write("stop", asdict(notice))
        return notice

    def stop_notice(self) -> StopNotice | None:
        found = self.read("stop")
        return None if found is None else StopNotice(**found)

    def end(self, ending: Ending) -> Ending:
        """Records how the attempt ended; the first ending stands, whichever node it comes from, and is returned."""
        content = json.dumps(asdict(replace(ending, at=time.time())), indent=1) + "\n"
        publish_text(self.directory / "end.json", content, replace=False)
        found = self.ending()
        assert found is not None
        return found

    def ending(self) -> Ending | None:
        found = self.read("end")
        return None if found is None else Ending(**found)


def publish_text(path: Path, text: str, mode: int = 0o644, *, replace: bool = True) -> None:
    """Writes a small file by renaming: readers on any node see the old content or the new, never a part. With
    `replace=False` a file that is there stays."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError:
        partial.unlink()
        raise
    if replace:
        os.replace(partial, path)
        return
    with suppress(FileExistsError):
        os.link(partial, path)  # atomic, also between NFS clients
    partial.unlink()


def refuse_full(run_dir: Path | None, error: OSError) -> int:
    """The exit code where nothing of an attempt can be written down, not even its end, after telling so. Raises any
    other error again."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    print_error(ConfigError(f"{run_dir}: {error.strerror}; make room there, then: rlhpc resume {run_dir}"))
    return EXIT_USAGE


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, None while the file isn't there. NFS may answer ESTALE for a file just replaced: tried again."""
    for _ in range(5):
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            return content
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(0.1)
    return None


def past_attempts(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines of attempts.jsonl, oldest first; a line that a crash tore is left out."""
    path = run_dir / "attempts.jsonl"
    if path.exists():
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                yield json.loads(line)
