"""attempts.jsonl: what every attempt of a run came to, and whether another one is worth its nodes.

A line: {attempt, job_id, restart, nodes, started, ended, outcome, cause, signal, signal_at, deadline, exit_code,
reason, first_failing: {node, what} or null, phase_at_stop, resumed_from_step, last_step, checkpoint_step, save_s,
milestones, requeued, held}. Times are seconds since the epoch; `outcome` is finished, stopped, failed, lost or
cancelled. An attempt that was killed together with its batch script writes none: the next one adds it, from the files
that it left, and takes the time of the last of them for its end. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from rlhpc.cluster.attempt import Attempt, Ending, past_attempts, read_json


def summary(attempt: Attempt, ending: Ending | None, *, outcome: str, requeued: bool, held: bool) -> dict[str, Any]:
    """The attempt's line, from its files and the driver's progress."""
    start = attempt.read("start") or {}
    notice = attempt.stop_notice()
    progress = read_json(attempt.run_dir / "progress.json") or {}
    if progress.get("attempt") != attempt.name:  # its driver never got that far
        progress = {}
    checkpoint = progress.get("checkpoint") or {}
    resumed_from = start.get("checkpoint_step")
    # A driver that has not restored yet is at step 0.
    steps = [step for step in (progress.get("step"), resumed_from) if step is not None]
    reason = ending.headline if ending else None
    return {
        "attempt": attempt.name,
        "job_id": attempt.job_id,
        "restart": attempt.restart,
        "nodes": start.get("nodes", []),
        "started": start.get("at"),
        "ended": ending.at if ending else max(entry.stat().st_mtime for entry in os.scandir(attempt.directory)),
        "outcome": outcome,
        "cause": notice.cause if notice else None,
        "signal": notice.signal if notice else None,
        "signal_at": notice.at if notice else None,
        "deadline": notice.deadline if notice else None,
        "exit_code": ending.exit_code if ending else None,
        "reason": reason,
        "first_failing": {"node": ending.node, "what": reason} if ending and ending.node else None,
        "phase_at_stop": (progress.get("stop") or {}).get("phase"),
        "resumed_from_step": resumed_from,
        "last_step": max(steps, default=None),
        "checkpoint_step": checkpoint.get("step", resumed_from),
        "save_s": checkpoint.get("save_s") if checkpoint.get("at", 0) >= start.get("at", 0) else None,
        "milestones": progress.get("milestones", {}),
        "requeued": requeued,
        "held": held,
    }


def append(attempt: Attempt, line: dict[str, Any]) -> None:
    """Adds a line in one write, on the disk when this returns; a line that a crash tore before stays apart from it."""
    path = attempt.run_dir / "attempts.jsonl"
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (("\n" if torn else "") + json.dumps(line) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unrecorded(own: Attempt) -> list[Attempt]:
    """Earlier attempts of the run that left no line, oldest first."""
    known = {line["attempt"] for line in past_attempts(own.run_dir)} | {own.name}
    found = []
    for entry in sorted(os.scandir(own.directory.parent), key=lambda entry: entry.stat().st_mtime):
        job_id, _, restart = entry.name.rpartition("-")
        if entry.is_dir() and entry.name not in known and restart.isdigit():
            found.append(Attempt(own.run_dir, job_id, int(restart)))
    return found


def without_progress(lines: Iterable[dict[str, Any]], job_id: str) -> int:
    """How many of a job's last attempts in a row failed, or used up their time, without a newer checkpoint.

    Those that others ended count neither way. A line that says `held`, or is another job's, ends the count: somebody
    has looked since.
    """
    count = 0
    for line in reversed(list(lines)):
        progress = (line["checkpoint_step"] or 0) > (line["resumed_from_step"] or 0)
        if progress or line["held"] or line["job_id"] != job_id or line["outcome"] == "finished":
            break
        count += line["outcome"] == "failed" or line["cause"] == "time_limit" or not line["cause"]
    return count


def loop_reason(lines: Sequence[dict[str, Any]], job_id: str, limit: int) -> str | None:
    """Why no further attempt of a job should start, None while one should."""
    if (count := without_progress(lines, job_id)) < limit:
        return None
    last = lines[-1]
    end = f"{last['outcome']} at its {last['cause'].replace('_', ' ')}" if last["cause"] else last["outcome"]
    return (
        f"{count} attempts in a row ended without a newer checkpoint than step {last['checkpoint_step'] or 0}, "
        f"the last: {last['reason'] or end}"
    )
