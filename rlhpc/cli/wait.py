"""launch.wait: stays until jobs have ended, reports every change, and ends as they did."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rlhpc.cli.wording import attempt_end, why_pending
from rlhpc.cluster import slurm
from rlhpc.cluster.attempt import EXIT_FAILED, past_attempts
from rlhpc.cluster.slurm import JobRecord
from rlhpc.errors import SlurmError

FIRST_POLL_S, LONGEST_POLL_S = 1.0, 15.0
SILENCE_S = 600.0  # of Slurm, until waiting is given up
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def wait(jobs: Mapping[str, Path]) -> int:
    """Waits for jobs, given with their run directories; a job that is held counts as ended. Returns 0, or the highest
    exit code of those that did not complete.

    Raises SlurmError when the controller, or accounting, has said nothing for ten minutes.
    """
    told: dict[str, str] = {}
    codes: dict[str, int] = {}
    pause, heard = FIRST_POLL_S, time.monotonic()
    try:
        while waiting := jobs.keys() - codes.keys():
            try:
                records = slurm.queue(waiting)
                states = {job_id: _state(job_id, jobs[job_id], records.get(job_id)) for job_id in sorted(waiting)}
            except SlurmError:
                if time.monotonic() - heard > SILENCE_S:
                    raise
                time.sleep(pause)
                continue
            heard = time.monotonic()
            for job_id, (words, code) in states.items():
                if words != told.get(job_id):
                    told[job_id], pause = words, FIRST_POLL_S
                    print(f"{time.strftime('%H:%M:%S')}  job {job_id}: {words}", flush=True)
                if code is not None:
                    codes[job_id] = code
            if waiting - codes.keys():
                time.sleep(pause)
                pause = min(pause * 1.3, LONGEST_POLL_S)
    except KeyboardInterrupt:
        print("\nno longer waiting; the jobs go on without this command")
        return INTERRUPTED
    return max(codes.values(), default=0)


def _state(job_id: str, run_dir: Path, record: JobRecord | None) -> tuple[str, int | None]:
    """What to say of a job, and its exit code once it has ended."""
    if record is None:
        return _forgotten(job_id, run_dir)
    if not record.live:
        code, _, signal = (record.text("ExitCode") or "0:0").partition(":")
        words = f"{record.state.lower()}{f', exit code {code}' if code != '0' else ''}"
        return f"{words}{_end(run_dir, job_id)}", _exit_code(record.state, int(code))
    if record.held:
        return f"held: {why_pending(record, job_id)}", EXIT_FAILED
    if record.pending:
        return f"waits: {why_pending(record, job_id)}", None
    again = f", attempt {record.restarts + 1}" if record.restarts else ""
    return f"{record.state.lower()} on {', '.join(record.nodes)}{again}", None


def _forgotten(job_id: str, run_dir: Path) -> tuple[str, int]:
    """The end of a job that the controller no longer knows: from accounting, else from what the run wrote."""
    if tries := slurm.accounting(job_id):
        state = tries[-1]["State"].partition(" ")[0]
        return f"{state.lower()}{_end(run_dir, job_id)}", _exit_code(
            state, int(tries[-1]["ExitCode"].partition(":")[0])
        )
    lines = [line for line in past_attempts(run_dir) if line.get("job_id") == job_id]
    if lines:
        return f"ended{_end(run_dir, job_id)}", 0 if lines[-1]["outcome"] == "finished" else EXIT_FAILED
    return "gone from the queue, and neither accounting nor the run directory tells how it ended", EXIT_FAILED


def _end(run_dir: Path, job_id: str) -> str:
    lines = [line for line in past_attempts(run_dir) if line.get("job_id") == job_id]
    return f"; the run {attempt_end(lines[-1])}" if lines else ""


def _exit_code(state: str, code: int) -> int:
    return 0 if state == "COMPLETED" else code or EXIT_FAILED
