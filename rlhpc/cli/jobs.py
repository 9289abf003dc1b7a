"""What Slurm knows of the jobs of runs. It may be absent or silent, which is an answer too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.cluster import slurm
from rlhpc.cluster.slurm import JobRecord
from rlhpc.errors import SlurmError


@dataclass(frozen=True)
class Jobs:
    """`known` by scontrol's ids; `problem` is why Slurm could not be asked, None when it answered."""

    known: Mapping[str, JobRecord] = field(default_factory=dict)
    problem: str | None = None

    def find(self, job_id: str | None) -> JobRecord | None:
        """A job's record, None where Slurm has none (any more) or could not be asked."""
        return self.known.get(job_id) if job_id else None

    @property
    def directories(self) -> dict[str, Path]:
        """Job -> run directory, from where its log goes: <run_dir>/slurm/<job>.log."""
        logs = ((job_id, Path(record.text("StdOut") or "/")) for job_id, record in self.known.items())
        return {job_id: log.parent.parent for job_id, log in logs if log.parent.name == "slurm"}


def ask(job_ids: Iterable[str] = (), *, own: bool = False) -> Jobs:
    """The jobs named, an array's id for its tasks, and with `own` all of this user's that wait or run."""
    wanted = list(job_ids)
    if not (wanted or own):
        return Jobs()
    if shutil.which("scontrol") is None:
        return Jobs(problem="Slurm's commands are not on the PATH here" if wanted else None)
    try:
        known = slurm.queue(wanted) if wanted else {}
        if own:
            known |= slurm.queue(user=str(os.getuid()))
        return Jobs(known)
    except SlurmError as error:
        return Jobs(problem=f"Slurm does not answer ({str(error).splitlines()[0]})")


def accounted_state(job_id: str) -> str | None:
    """The state in which accounting has the newest try of a job, such as TIMEOUT; None where it has nothing."""
    try:
        tries = slurm.accounting(job_id)
    except SlurmError:
        return None
    return tries[-1]["State"].partition(" ")[0] if tries else None  # "CANCELLED by 1000"
