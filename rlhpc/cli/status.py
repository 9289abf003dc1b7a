"""`rlhpc status`: how runs are, from Slurm's word and from what they left on disk."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhpc.cli import jobs as slurm_jobs
from rlhpc.cli.jobs import Jobs
from rlhpc.cli.runs import OUTPUTS, Run, chosen, find_runs, is_run
from rlhpc.cli.wording import attempt_details, attempt_end, clock, why_pending
from rlhpc.cluster.slurm import JobRecord
from rlhpc.errors import ConfigError
from rlhpc.metrics.console import ETA_WINDOW, duration

PIPED_WIDTH = 1000  # columns: in a file or a pipe a run stays on one line
MAX_NAMED = 9  # runs, in an error
WAITING = ("pending", "held")
COLOURS = {
    "running": "green", "finished": "bold green", "pending": "yellow", "held": "bold yellow", "failed": "bold red",
    "killed": "bold red", "cancelled": "magenta",
}  # fmt: skip
ENDED_STATES = {  # Slurm's names for how a job ended -> ours and, where the name doesn't tell, what it means
    "COMPLETED": ("finished", ""),
    "CANCELLED": ("cancelled", ""),
    "FAILED": ("failed", ""),
    "TIMEOUT": ("failed", "killed at the time limit"),
    "NODE_FAIL": ("failed", "a node failed, and Slurm was not to requeue it"),
    "PREEMPTED": ("failed", "preempted, and Slurm was not to requeue it"),
    "OUT_OF_MEMORY": ("failed", "killed for using more memory than it had asked for (cluster.memory_gib_per_node)"),
    "BOOT_FAIL": ("failed", "its nodes did not boot"),
    "DEADLINE": ("failed", "its deadline passed before it could end"),
    "REVOKED": ("cancelled", "another cluster took it"),
}


@dataclass(frozen=True)
class Status:
    """A run now. `state` is new, pending, held, running, ending, finished, stopped, failed, killed, cancelled or, while
    Slurm is silent, unknown; `why` says more. Times in seconds; None for what isn't known."""

    run_dir: str
    state: str
    why: str
    job_id: str | None
    slurm_state: str | None
    attempt: int  # 1 for the first
    nodes: list[str]
    phase: str | None
    phase_s: float | None
    phase_share: float | None  # how much of the phase is done, 0 to 1
    step: int  # the last that is finished
    total_steps: int | None
    reward: float | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    eta_s: float | None
    ended_attempts: list[dict[str, Any]]
    next: str  # a command


def status(argument: str | None, *, as_json: bool = False) -> None:
    """Prints the status of the runs that RUN|JOB means, or of all under outputs/ and in the queue.

    Raises ConfigError when it means no run.
    """
    runs, jobs = look(argument)
    statuses = [status_of(run, jobs) for run in runs]
    if as_json:
        if jobs.problem:
            print(jobs.problem, file=sys.stderr)
        print(json.dumps([asdict(status) for status in statuses], indent=1))
        return
    out = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPED_WIDTH, emoji=False)
    if jobs.problem and any(run.settled is None for run in runs):
        out.print(f"{jobs.problem}; this is what the run directories tell", style="yellow")
    if not statuses:
        out.print(f"no runs under {Path(OUTPUTS).absolute()} and none in the queue")
    elif argument is not None and len(statuses) == 1:
        for line in details(statuses[0]):
            out.print(line, soft_wrap=True)
    else:
        out.print(table(statuses))


def look(argument: str | None) -> tuple[list[Run], Jobs]:
    """The runs that are meant, and what Slurm says of their jobs."""
    if argument is None:
        runs = list(find_runs(Path(OUTPUTS)))
        queue = slurm_jobs.ask([run.job_id for run in runs if run.job_id and run.settled is None], own=True)
        listed = {run.directory.absolute() for run in runs}
        elsewhere = {path for path in queue.directories.values() if path.absolute() not in listed and is_run(path)}
        return runs + [Run(path) for path in sorted(elsewhere)], queue
    named = slurm_jobs.ask([argument] if argument.replace("_", "").isdecimal() else [])
    runs = chosen(argument, named.directories)
    return runs, slurm_jobs.ask([run.job_id for run in runs if run.job_id])


def one_run(argument: str) -> Run:
    """The run that RUN|JOB means. Raises ConfigError where several are meant, or none."""
    runs, _ = look(argument)
    if len(runs) > 1:
        names = [f"  {run.directory}" for run in runs[:MAX_NAMED]] + ["  ..."] * (len(runs) > MAX_NAMED)
        raise ConfigError("\n".join([f"{argument} means {len(runs)} runs; choose one of them:", *names]))
    return runs[0]


def status_of(run: Run, jobs: Jobs) -> Status:
    """One run's facts put together."""
    now, progress = time.time(), run.progress
    record = jobs.find(run.job_id)
    state, why = judge(run, jobs)
    active = state in ("running", "ending")
    now_doing = progress if active and progress.get("outcome") == "running" else {}
    rows = [row for row in run.rows if row["step"] > 0]
    step = run.rows[-1]["step"] if run.rows else 0
    total = progress.get("total_steps") or run.settings.get("trainer", {}).get("total_training_steps")
    times = [row["perf/time_per_step"] for row in rows[-ETA_WINDOW:] if row.get("perf/time_per_step")]
    checkpoint = max(run.checkpoints, default=None)
    last = run.attempts[-1] if run.attempts else {}
    return Status(
        run_dir=str(run.directory),
        state=state,
        why=why,
        job_id=run.job_id,
        slurm_state=record.state if record else None,
        attempt=max(1, len(run.attempts) + (active or state in WAITING)),
        nodes=list(record.nodes if record and active else last.get("nodes") or []),
        phase=now_doing.get("phase"),
        phase_s=now - now_doing["since"] if now_doing else None,
        phase_share=now_doing.get("fraction"),
        step=step,
        total_steps=total,
        reward=run.rows[-1].get("critic/score/mean") if run.rows else None,
        checkpoint_step=checkpoint,
        checkpoint_age_s=None if checkpoint is None else now - run.checkpoints[checkpoint].stat().st_mtime,
        eta_s=fmean(times) * (total - step) if times and total and (active or state in WAITING) else None,
        ended_attempts=[dict(line) for line in run.attempts],
        next=_next(run, state, record),
    )


def judge(run: Run, jobs: Jobs) -> tuple[str, str]:
    """State and explanation, by the driver here, else by Slurm's queue, the run's own last word, accounting."""
    progress, record = run.progress, jobs.find(run.job_id)
    if run.job_id is None:
        return _judge_local(run)
    if record is not None and record.live and (record.batch or not run.between_attempts):
        return _judge_live(run, record)
    if settled := run.settled:
        return settled, attempt_end(run.attempts[-1]).removeprefix(settled).lstrip(": ") if run.attempts else ""
    ended = record.state if record else slurm_jobs.accounted_state(run.job_id) if jobs.problem is None else None
    if ended in ENDED_STATES:
        state, why = ENDED_STATES[ended]
        if state == "finished":
            return "failed", "Slurm says COMPLETED, but the run has not written that it finished"
        return state, why or (str(progress.get("reason") or "") if state == "failed" else "")
    if jobs.problem:
        return "unknown", f"its driver last wrote {_ago(run)}" if progress else "Slurm could not be asked"
    return ("cancelled", "") if run.stopped else ("killed", f"Slurm no longer knows job {run.job_id}")


def _judge_live(run: Run, record: JobRecord) -> tuple[str, str]:
    if record.held and record.text("Comment") is None and run.attempts and run.attempts[-1].get("held"):
        again = f"scontrol release {run.job_id} lets it run"
        return (
            "held",
            f"its last attempts ended without a newer checkpoint (launch.max_attempts_without_progress); {again}",
        )
    if record.pending:
        return "held" if record.held else "pending", why_pending(record, str(run.job_id))
    if record.completing:
        return "ending", "cleaning up" if not run.stopped else "being cancelled"
    if run.progress.get("attempt") != (f"{run.job_id}-{record.restarts}" if record.batch else run.newest_attempt):
        return "running", "starting Ray on its nodes"
    if (stop := run.progress.get("stop")) is not None:
        return "ending", f"asked to stop at {clock(stop['at'])}"
    return "running", ""


def _judge_local(run: Run) -> tuple[str, str]:
    progress, outcome = run.progress, str(run.progress.get("outcome"))
    if not progress:
        total = run.settings.get("trainer", {}).get("total_training_steps")
        return ("finished" if run.rows and run.rows[-1]["step"] == total else "stopped" if run.rows else "new"), ""
    where = f"process {progress.get('pid')} on {progress.get('host')}"
    if outcome == "running":
        if run.driver_alive is None:
            return "running", f"{where}, as far as can be seen from here; it last wrote {_ago(run)}"
        return ("running", where) if run.driver_alive else ("killed", f"{where} is gone without a word")
    return ("killed" if outcome == "lost" else outcome), str(progress.get("reason") or "")


def _ago(run: Run) -> str:
    return f"{duration(time.time() - run.progress['since'])} ago"


def _next(run: Run, state: str, record: JobRecord | None) -> str:
    if state == "held" and record is not None:
        return f"scontrol release {run.job_id}"
    if state in ("pending", "running", "ending"):
        return f"rlhpc logs -f {quote(str(run.directory))}"
    if state == "unknown":
        return "scontrol ping"
    if state == "finished":
        return f"rlhpc report {quote(str(run.directory))}"
    return f"rlhpc resume {quote(str(run.directory))}"


def table(statuses: Sequence[Status]) -> Table:
    """One line a run."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    found.add_column("run", overflow="fold")
    found.add_column("job")
    found.add_column("state", overflow="fold")
    for header in ("step", "reward", "checkpoint", "eta"):
        found.add_column(header, justify="right")
    for run in statuses:
        again = f", attempt {run.attempt}" if run.attempt > 1 else ""
        doing = f", {run.phase}" if run.phase else f": {run.why.partition(';')[0]}" if run.why else ""
        found.add_row(
            _short(run.run_dir), run.job_id or "-", f"{run.state}{again}{doing}", _steps(run), _number(run.reward),
            _checkpoint(run), "-" if run.eta_s is None else duration(run.eta_s),
            style=COLOURS.get(run.state),
        )  # fmt: skip
    return found


def details(run: Status) -> Iterator[str]:
    """All that is known of one run, line by line."""
    yield run.run_dir
    yield f"  state       {run.state}{': ' + run.why if run.why else ''}"
    if run.job_id:
        nodes = f" on {', '.join(run.nodes)}" if run.nodes else ""
        said = f" ({run.slurm_state})" if run.slurm_state else ""
        yield f"  job         {run.job_id}{said}, attempt {run.attempt}{nodes}"
    share = f" ({run.phase_share:.0%})" if run.phase_share else ""
    doing = f"; in {run.phase}{share} for {duration(run.phase_s or 0)}" if run.phase else ""
    reward = "" if run.reward is None else f"; reward {run.reward:.3f}"
    yield f"  progress    {_steps(run)} steps{doing}{reward}"
    yield f"  checkpoint  {_checkpoint(run)}"
    if run.eta_s is not None:
        yield f"  remaining   about {duration(run.eta_s)} of training"
    for number, line in enumerate(run.ended_attempts, 1):
        times = (
            f"{clock(line['started'])} to {clock(line['ended'])}" if line.get("started") and line.get("ended") else ""
        )
        label = "attempts" if number == 1 else ""
        yield f"  {label:<10}  {number}  {times}  {'; '.join([attempt_end(line), *attempt_details(line)])}"
    yield f"  next        {run.next}"


def _steps(run: Status) -> str:
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)


def _checkpoint(run: Status) -> str:
    if run.checkpoint_step is None or run.checkpoint_age_s is None:
        return "none yet"
    return f"step {run.checkpoint_step}, {duration(run.checkpoint_age_s)} ago"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _short(path: str) -> str:
    """Relative to the working directory where it lies below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
