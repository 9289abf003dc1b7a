"""`rlhpc cancel`: ends runs so that nothing starts them again, and says what they became."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from shlex import quote

from rlhpc.cli import jobs as slurm_jobs
from rlhpc.cli.logs import UNDER_WAY
from rlhpc.cli.runs import Run
from rlhpc.cli.status import judge, look
from rlhpc.cluster import slurm
from rlhpc.cluster.attempt import STOP_NAME, publish_text
from rlhpc.errors import SlurmError

PATIENCE_S = 15.0  # a run that commits a checkpoint takes its time
POLL_S = 1.0


def cancel(argument: str, *, now: bool = False) -> None:
    """Cancels the runs that RUN|JOB means. Each commits a checkpoint first, unless `now`.

    Raises ConfigError when it means no run, SlurmError when Slurm does not answer.
    """
    runs, jobs = look(argument)
    under_way = []
    for run in runs:
        state, why = judge(run, jobs)
        if state in UNDER_WAY and (run.job_id or run.driver_alive):
            under_way.append(run)
        elif state == "running":
            print(f"{run.directory}: {why}; cancel it on that machine")
        elif state == "new":
            print(f"{run.directory}: was never started; nothing to cancel")
        else:
            print(f"{run.directory}: {state} already{', ' + why if why else ''}; nothing to cancel")
    for run in under_way:
        if run.job_id:
            publish_text(run.directory / STOP_NAME, f"rlhpc cancel, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    if now:
        for run in (run for run in under_way if run.job_id):
            with suppress(SlurmError):  # it may not have a step yet
                slurm.cancel(f"{run.job_id}.0", signal="KILL")  # to a job, Slurm would send SIGTERM first
    for job_id in _jobs(argument, under_way):
        slurm.cancel(job_id)
    for run in under_way:
        if not run.job_id and run.driver_alive:
            os.kill(int(run.progress["pid"]), signal.SIGKILL if now else signal.SIGTERM)
    _await_end(under_way)


def _jobs(argument: str, runs: Sequence[Run]) -> list[str]:
    """What to tell scancel: an array as a whole where that is named."""
    jobs = [run.job_id for run in runs if run.job_id]
    return [argument] if any(job.startswith(f"{argument}_") for job in jobs) else jobs


def _await_end(runs: Sequence[Run]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    waiting = list(runs)
    while waiting:
        jobs = slurm_jobs.ask([run.job_id for run in waiting if run.job_id])
        late = time.monotonic() >= deadline
        for run in list(waiting):
            state, why = judge(fresh := Run(run.directory), jobs)
            if state in UNDER_WAY and not late:
                continue
            waiting.remove(run)
            newest = f"; checkpoint of step {max(fresh.checkpoints)}" if fresh.checkpoints else "; no checkpoint yet"
            named = quote(str(run.directory))
            if state in UNDER_WAY:
                print(f"{run.directory}: still {state}{', ' + why if why else ''}; see: rlhpc status {named}")
            else:
                print(f"{run.directory}: {state}{newest}; rlhpc resume {named} goes on with it")
        if waiting:
            time.sleep(POLL_S)
