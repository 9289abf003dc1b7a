"""Which runs there are, and what each has left on disk. Nothing here asks Slurm.

A run directory holds config.yaml, written before a run starts, or run.json, written by its driver; what else a run
writes is told in rlhpc/cluster/attempt.py.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from yaml import YAMLError, safe_load

from rlhpc.checkpoint.manifest import committed_steps
from rlhpc.cluster.attempt import STOP_NAME, past_attempts, read_json
from rlhpc.errors import ConfigError

SETTINGS = ("config.yaml", "run.json")  # written by a submission, and by every driver
OUTPUTS = "outputs"  # below it lie run directories, unless run_dir says otherwise
MAX_DEPTH = 5  # of a run directory below the place that is searched
JOB_ID = re.compile(r"\d+(?:_\d+)?")
TAIL_BYTES = 256 * 1024  # of metrics.jsonl; a line has about 3 KiB


@dataclass(frozen=True)
class Run:
    """What a run directory tells, read when first asked for."""

    directory: Path

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The configuration of the last submission or start, {} where there is none to read."""
        files = (path for name in SETTINGS if (path := self.directory / name).is_file())
        for path in sorted(files, key=_modified, reverse=True):
            with suppress(OSError, ValueError, TypeError, LookupError, YAMLError):
                text = path.read_text()
                return dict(json.loads(text)["config"] if path.suffix == ".json" else safe_load(text) or {})
        return {}

    @cached_property
    def progress(self) -> Mapping[str, Any]:
        """What the driver does or did last, {} before the first start."""
        return read_json(self.directory / "progress.json") or {}

    @cached_property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """The ended attempts, oldest first."""
        return tuple(past_attempts(self.directory))

    @cached_property
    def job(self) -> Mapping[str, Any]:
        """{job_id, log, submitted} of the newest job, {} for a run that never was one or goes on without."""
        job = read_json(self.directory / "job.json") or {}
        if not job and (newest := max(self.attempt_directories, key=_modified, default=None)):
            job = {"job_id": newest.name.rpartition("-")[0], "submitted": _modified(newest)}
        local = bool(self.progress) and self.progress.get("attempt") is None
        return {} if local and self.progress.get("started", 0) > job.get("submitted", 0) else job

    @property
    def job_id(self) -> str | None:
        """As scontrol takes it."""
        return self.job.get("job_id")

    @cached_property
    def job_ids(self) -> set[str]:
        """Every job that worked on this run, and those ids of whole arrays."""
        ids = {path.name.rpartition("-")[0] for path in self.attempt_directories} | {self.job_id or ""}
        return {part for job_id in ids for part in (job_id, job_id.partition("_")[0])}

    @cached_property
    def attempt_directories(self) -> Sequence[Path]:
        """Of all attempts, in the order of their jobs and restarts."""
        return sorted((self.directory / "attempts").glob("*-*"), key=lambda path: _numbers(path.name))

    @property
    def newest_attempt(self) -> str | None:
        """The name of the attempt that the newest job began last."""
        names = (path.name for path in reversed(self.attempt_directories))
        return next((name for name in names if name.rpartition("-")[0] == self.job_id), None)

    @property
    def between_attempts(self) -> bool:
        """Whether the newest attempt has ended: inside salloc a job goes on without one."""
        return bool(self.attempts) and self.attempts[-1].get("attempt") == self.newest_attempt

    @property
    def stopped(self) -> bool:
        """Whether `rlhpc cancel` asked that nobody starts it again."""
        return (self.directory / STOP_NAME).exists()

    @cached_property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The last lines of metrics.jsonl."""
        return tail_rows(self.directory / "metrics.jsonl")

    @property
    def checkpoint_root(self) -> Path:
        """The directory of its checkpoints, which may not be there yet."""
        place = self.settings.get("trainer", {}).get("default_local_dir")
        return Path(place) if place else self.directory / "checkpoints"

    @cached_property
    def checkpoints(self) -> Mapping[int, Path]:
        """Committed steps, ascending."""
        return committed_steps(self.checkpoint_root)

    @property
    def settled(self) -> str | None:
        """How the run ended by its own word, None while it may go on: a job that is queued again has the last one."""
        by_job = str(self.progress.get("attempt")).rpartition("-")[0]
        if self.progress.get("outcome") == "finished" and by_job == (self.job_id or ""):
            return "finished"
        last = self.attempts[-1] if self.attempts else {}
        if last.get("job_id") != self.job_id or last.get("requeued") or not last:
            return None
        return {"lost": "killed"}.get(str(last.get("outcome")), str(last.get("outcome")))

    @property
    def driver_alive(self) -> bool | None:
        """Whether the driver of progress.json still runs; None where it belongs to another machine."""
        pid, host = self.progress.get("pid"), self.progress.get("host")
        if pid is None:
            return False
        if host not in (socket.gethostname(), socket.getfqdn()):
            return None
        return _alive_since(int(pid), float(self.progress.get("started") or time.time()))


def is_run(directory: Path) -> bool:
    """Whether a run began here, or is about to."""
    return any((directory / name).is_file() for name in (*SETTINGS, "progress.json"))


def find_runs(root: Path, depth: int = MAX_DEPTH) -> Iterator[Run]:
    """Every run at or below a directory, by name. Runs hold no runs, so none is searched."""
    if is_run(root):
        yield Run(root)
    elif depth and root.is_dir():
        for entry in sorted(os.scandir(root), key=lambda entry: _numbers(entry.name)):
            if entry.is_dir() and not entry.name.startswith("."):
                yield from find_runs(root / entry.name, depth - 1)


def chosen(argument: str, jobs_directories: Mapping[str, Path]) -> list[Run]:
    """The runs that RUN|JOB means: a run directory, one that holds several, or a job's id, an array's for all of its
    tasks. `jobs_directories` is what Slurm knows of jobs' run directories.

    Raises ConfigError when there is no such run.
    """
    path = Path(argument)
    if runs := list(find_runs(path)):
        return runs
    if JOB_ID.fullmatch(argument):
        known = {directory for job, directory in jobs_directories.items() if argument in (job, job.partition("_")[0])}
        runs = [Run(directory) for directory in sorted(known) if is_run(directory)]
        if runs := runs or [run for run in find_runs(Path(OUTPUTS)) if argument in run.job_ids]:
            return runs
        raise ConfigError(f"job {argument} belongs to no run under {Path(OUTPUTS).absolute()}; give its run directory")
    known_runs = [str(run.directory) for run in find_runs(Path(OUTPUTS))]
    there = "holds no run" if path.is_dir() else "does not exist"
    listed = f"; there are {', '.join(known_runs[:8])}" if known_runs else ""
    raise ConfigError(f"{argument} {there}; give a run directory or a job's id{listed}")


def tail_rows(path: Path, num_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The whole lines within the last `num_bytes` of a JSON-lines file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for line in lines[size > num_bytes : -1]:
        with suppress(ValueError):  # a power failure may have left anything
            rows.append(json.loads(line))
    return rows


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _numbers(name: str) -> list[tuple[int, int | str]]:
    """A key that sorts n9 before n10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]


def _alive_since(pid: int, started: float) -> bool:
    """Whether the process that had this pid at `started` still lives: pids are given anew."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (FileNotFoundError, ProcessLookupError):
        return False
    began = int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] not in "ZX" and began <= started + 5  # the clock may have been set a little meanwhile
