"""`rlhpc logs`: what a run printed, across its attempts and jobs, and with -f what it prints until it has ended.

<run_dir>/slurm/<job>.log           the job's output, every line behind its node's number; requeued jobs append
<run_dir>/logs/rank-<r>.log         a rank's
<run_dir>/attempts/<a>/ray/node-<i> what Ray's daemons wrote, kept of attempts that failed
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from rlhpc.cli import jobs as slurm_jobs
from rlhpc.cli.runs import Run
from rlhpc.cli.status import judge
from rlhpc.cli.wording import attempt_details, attempt_end
from rlhpc.cluster.attempt import read_json
from rlhpc.errors import ConfigError

POLL_S = 0.3
ASK_S = 5.0  # between questions to Slurm
FOLLOWED_LINES = 200  # of the past, when following
BLOCK_BYTES = 64 * 1024
UNDER_WAY = ("new", "pending", "held", "running", "ending", "unknown")  # states in which a run may still print
_RAY_SUFFIXES = {".log", ".out", ".err"}
_LABEL = re.compile(r"\s*(\d+): ")  # srun --label


@dataclass(frozen=True)
class Selection:
    """What to show: the job's output, or a rank's, or Ray's; of all nodes, or of one by its number or name."""

    rank: int | None = None
    node: str | None = None
    ray: bool = False
    lines: int | None = None  # the last ones; None: all


@dataclass
class Tail:
    """A file that grows, may be truncated or replaced, and may not be there yet."""

    path: Path
    node: int | None = None  # of labelled lines, only this node's
    offset: int = 0
    inode: int | None = None
    torn: bytes = b""

    def start_at(self, num_lines: int) -> None:
        """Skips all but the last lines."""
        try:
            with self.path.open("rb") as file:
                end, begin, block = file.seek(0, os.SEEK_END), 0, b""
                while end - len(block) > 0 and block.count(b"\n") <= num_lines:
                    begin = max(0, end - len(block) - BLOCK_BYTES)
                    file.seek(begin)
                    block = file.read(end - begin)
                self.inode = os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return
        kept = block.splitlines(keepends=True)[-num_lines:] if num_lines else []
        self.offset = end - sum(map(len, kept))

    def lines(self, *, rest: bool = False) -> list[str]:
        """Whole lines since the last call; with `rest` also one that has no end."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self.inode or stat.st_size < self.offset:
                    self.offset, self.torn = (0, b"") if self.inode is not None else (self.offset, b"")
                    self.inode = stat.st_ino
                file.seek(self.offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self.offset += len(new)
        whole, newline, self.torn = (self.torn + new).rpartition(b"\n")
        found = whole.decode(errors="replace").split("\n") if newline else []
        if rest and self.torn:
            found.append(self.torn.decode(errors="replace"))
            self.torn = b""
        return found if self.node is None else [line for line in found if _of_node(line, self.node)]


class Output:
    """Prints what is new in files, under a header wherever the file changes. `lines`: how many old ones of the files
    that are there at first, None for all; of `node` alone where files label their lines."""

    def __init__(self, directory: Path, node: int | None, lines: int | None) -> None:
        self._directory, self._node, self._lines = directory, node, lines
        self._tails: dict[Path, Tail] = {}
        self._last: Path | None = None

    def show(self, paths: Sequence[Path], *, rest: bool) -> None:
        """`rest`: nobody writes any more, so a line without an end is one too."""
        for path in paths:
            if path not in self._tails:
                self._tails[path] = Tail(path, self._node)
                if self._lines is not None:
                    self._tails[path].start_at(self._lines)
            if lines := self._tails[path].lines(rest=rest):
                if len(paths) > 1 and path != self._last:
                    shown = path.relative_to(self._directory) if path.is_relative_to(self._directory) else path
                    say(f"==> {shown} <==")
                self._last = path
                for line in lines:
                    say(line)
        self._lines = None  # what appears later is new from its first line
        sys.stdout.flush()


def logs(directory: Path, selection: Selection, *, follow: bool) -> None:
    """Prints the logs. Raises ConfigError where there are none of the kind."""
    run = Run(directory)
    paths = sources(run, selection)
    if not paths and not (follow and run.job_id):
        raise ConfigError(_none_of(run, selection))
    labelled = selection.rank is None and not selection.ray and selection.node is not None
    node = _node_number(run, str(selection.node)) if labelled else None
    lines = FOLLOWED_LINES if follow and selection.lines is None else selection.lines
    output = Output(run.directory, node, lines)
    for line in headline(run):
        say(line)
    if follow:
        _follow(run, selection, output)
    else:
        output.show(paths, rest=True)


def sources(run: Run, selection: Selection) -> list[Path]:
    """The files to read, oldest first."""
    if selection.ray:
        return _ray_logs(run, selection)
    if selection.rank is not None:
        path = run.directory / "logs" / f"rank-{selection.rank:05d}.log"
        return [path] if path.exists() else []
    return sorted((run.directory / "slurm").glob("*.log"), key=_by_number)


def headline(run: Run) -> Iterator[str]:
    """Where the last attempt failed first, before the many lines that follow from it."""
    last = run.attempts[-1] if run.attempts else {}
    if last.get("outcome") in ("failed", "lost"):
        first = last.get("first_failing") or {}
        node = f" on {first['node']}" if first.get("node") else ""
        yield f"== attempt {last.get('attempt', '')} failed first{node}: {first.get('what') or attempt_end(last)}"


def _follow(run: Run, selection: Selection, output: Output) -> None:
    """Until the run has ended and all is printed. Tells attempts' ends and reasons for waiting as they come."""
    told, said, ask_at = len(run.attempts), "", 0.0
    while True:
        over = False
        if time.monotonic() >= ask_at:
            ask_at = time.monotonic() + ASK_S
            state, why = judge(run, slurm_jobs.ask([run.job_id] if run.job_id else []))
            over = state not in UNDER_WAY
        output.show(sources(run, selection), rest=over)
        for line in run.attempts[told:]:
            told += 1
            say(f"== attempt {line.get('attempt')} ended: {'; '.join([attempt_end(line), *attempt_details(line)])}")
        now = state if state == "unknown" else f"{state}: {why.partition(';')[0]}"  # without what changes all the time
        if now != said and state not in ("running", "ending"):
            say(f"== {state}: {why}" if why else f"== {state}")
        said = now
        if over:
            return
        sys.stdout.flush()
        time.sleep(POLL_S)
        run = Run(run.directory)


def _none_of(run: Run, selection: Selection) -> str:
    if selection.ray:
        return (
            f"{run.directory} has no logs of Ray's daemons{_of(selection)}: failed attempts' are kept, and those of a "
            "live one lie on its nodes"
        )
    if selection.rank is not None:
        known = sorted(int(path.stem.removeprefix("rank-")) for path in (run.directory / "logs").glob("rank-*.log"))
        there = f"there are ranks {known[0]} to {known[-1]}" if known else "no rank has started yet"
        return f"{run.directory} has no log of rank {selection.rank}; {there}"
    if run.job_id and "log" in run.job and run.job["log"] is None:
        return f"job {run.job_id} prints to the terminal of its salloc shell; its ranks' logs are shown with --rank"
    if run.job_id:
        return f"job {run.job_id} has printed nothing yet; see why it waits with: rlhpc status {run.directory}"
    return (
        f"{run.directory} is a local run, which prints to its own terminal; its ranks' logs are shown with "
        f"--rank: rlhpc logs --rank 0 {quote(str(run.directory))}"
    )


def _of(selection: Selection) -> str:
    return f" of node {selection.node}" if selection.node is not None else ""


def _ray_logs(run: Run, selection: Selection) -> list[Path]:
    """Kept ones, then those of a live attempt where its session lies on this machine."""
    found: list[Path] = []
    for attempt in run.attempt_directories:
        for file in sorted(attempt.glob("node-*.json"), key=_by_number):
            number = file.stem.removeprefix("node-")
            node = read_json(file) or {}
            if selection.node is not None and selection.node not in (number, node.get("name"), node.get("host")):
                continue
            kept = attempt / "ray" / f"node-{number}"
            live = Path(str(node.get("session", "/nonexistent"))) / "session_latest" / "logs"
            here = node.get("host") in (socket.gethostname(), socket.getfqdn())
            folder = kept if kept.is_dir() else live if here else None
            if folder is not None and folder.is_dir():
                found += sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in _RAY_SUFFIXES)
    return found


def _node_number(run: Run, node: str) -> int:
    """A node's number in the job, by which srun labels its lines. Raises ConfigError for one that it doesn't have."""
    names: dict[str, int] = {}
    for attempt in run.attempt_directories:
        for file in attempt.glob("node-*.json"):
            told = read_json(file) or {}
            names |= {str(told[key]): int(file.stem.removeprefix("node-")) for key in ("name", "host") if key in told}
    for line in run.attempts:
        names |= {name: number for number, name in enumerate(line.get("nodes") or [])}
    if node.isdecimal() and (not names or int(node) in names.values()):
        return int(node)
    if node not in names:
        known = ", ".join(f"{name} ({number})" for name, number in names.items())
        raise ConfigError(f"node {node} has no part in {run.directory}; choose {known or 'its number, 0, 1, ...'}")
    return names[node]


def _of_node(line: str, node: int) -> bool:
    label = _LABEL.match(line)
    return label is not None and int(label[1]) == node


def _by_number(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.stem)]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
