"""Runs as jobs of Slurm, submitted through submitit: one task a node, a short script that becomes the attempt's batch
process. Nothing is pickled; a job reads its run directory's config.yaml.

A job's script is fixed by its configuration, byte for byte, so that what a dry run prints is what sbatch would get.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from rlhpc.cluster import slurm
from rlhpc.cluster.attempt import publish_text
from rlhpc.cluster.submission import LOG_FOLDER, ROOT, Submission, prepare
from rlhpc.config.schema import RunConfig
from rlhpc.errors import SlurmError

SPARE_CPUS = 2  # for the driver, Ray's daemons and the reward workers, beside those of the ranks


class RunExecutor(SlurmExecutor):
    """submitit's executor for scripts that run a command of ours."""

    cluster: str | None = None  # that sbatch answered from, where several are federated

    @classmethod
    def affinity(cls) -> int:
        return 2  # a dry run needs no srun; a submission without sbatch fails by name

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        inherited = sorted(os.environ.keys() - slurm.scrubbed(os.environ).keys())
        return ["env", *(f"--unset={name}" for name in inherited), "sbatch", "--parsable", str(submission_file_path)]

    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:  # type: ignore[override]
        job_id, _, cluster = (string.decode() if isinstance(string, bytes) else string).strip().partition(";")
        if not job_id.isdigit():
            raise FailedSubmissionError(f"sbatch --parsable answered {string!r}, which is no job id")
        self.cluster = cluster or None
        return job_id


@dataclass(frozen=True)
class Job:
    """One call of sbatch: a run, or several that ask for the same as the tasks of an array. `folder` gets the script as
    it was submitted and the logs; `parallelism` is how many tasks run at the same time."""

    runs: tuple[RunConfig, ...]
    folder: Path
    parallelism: int | None = None  # None: no array

    @property
    def script(self) -> str:
        """The bytes that sbatch reads."""
        return self._executor()._make_submission_file_text(self._command, "")

    def submit(self) -> list[Submission]:
        """Writes what the job reads, submits it, and records in every run directory whose it is now.

        Raises SlurmError with sbatch's own words.
        """
        for cfg in self.runs:
            prepare(cfg)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.parallelism is not None:
            publish_text(self._list_path, self._list_text)
        executor, said = self._executor(), io.StringIO()
        try:
            with contextlib.redirect_stderr(said):  # submitit prints sbatch's refusal besides raising it
                job_id = executor._submit_command(self._command).job_id
        except (FailedJobError, FailedSubmissionError, FileNotFoundError) as error:
            raise SlurmError(f"sbatch refused the job: {str(error).strip() or said.getvalue().strip()}") from error
        return [self._record(cfg, job_id, index, executor.cluster) for index, cfg in enumerate(self.runs)]

    def _record(self, cfg: RunConfig, job_id: str, index: int, cluster: str | None) -> Submission:
        name = job_id if self.parallelism is None else f"{job_id}_{index}"
        log = Path(cfg.run_dir) / LOG_FOLDER / f"{name}.log"
        if log.parent != self.folder and not log.is_symlink():
            log.symlink_to(os.path.relpath(self.folder / log.name, log.parent))
        submission = Submission.made_now(name, "slurm", log, cluster)
        submission.write(cfg.run_dir)
        return submission

    @property
    def _command(self) -> str:
        which = [self.runs[0].run_dir] if self.parallelism is None else ["--array-list", str(self._list_path)]
        return "exec " + shlex.join([sys.executable, "-m", "rlhpc.cluster.batch", *which])

    @property
    def _list_text(self) -> str:
        return "".join(f"{cfg.run_dir}\n" for cfg in self.runs)

    @property
    def _list_path(self) -> Path:
        """Named by its content: a later sweep can't change what a waiting task reads."""
        return self.folder / f"runs-{hashlib.sha256(self._list_text.encode()).hexdigest()[:12]}.txt"

    def _executor(self) -> RunExecutor:
        executor = RunExecutor(self.folder)
        log = "%j.log" if self.parallelism is None else "%A_%a.log"
        executor.update_parameters(**_options(self.runs[0], self.folder / log))
        if self.parallelism is not None:
            executor.parameters |= {"map_count": len(self.runs), "array_parallelism": self.parallelism}
        return executor


def job_of(cfg: RunConfig) -> Job:
    """The job of one run."""
    return Job((cfg,), Path(cfg.run_dir) / LOG_FOLDER)


def arrays_of(runs: Sequence[RunConfig], sweep_dir: Path, max_array_size: int) -> list[Job]:
    """The arrays of a sweep: one, or more where points ask Slurm for different things or are more than an array may
    have. launch.array_parallelism counts over all of them."""
    folder = sweep_dir / LOG_FOLDER
    alike: dict[str, list[RunConfig]] = {}
    for cfg in runs:
        alike.setdefault(str(_options(cfg, folder)), []).append(cfg)
    shards = [
        tuple(group[start : start + max_array_size])
        for group in alike.values()
        for start in range(0, len(group), max_array_size)
    ]
    each, more = divmod(runs[0].launch.array_parallelism, len(shards))
    return [Job(shard, folder, max(1, each + (index < more))) for index, shard in enumerate(shards)]


def cpus_per_node(cfg: RunConfig) -> int:
    """CPUs asked of Slurm on each node."""
    return cfg.cluster.cpus_per_node or cfg.trainer.n_gpus_per_node * cfg.cluster.cpus_per_rank + SPARE_CPUS


def _options(cfg: RunConfig, log: Path) -> dict[str, Any]:
    """submitit's parameters. What it has no name for goes to sbatch as it is; last, and so first in rank, what the user
    wrote in cluster.sbatch."""
    cluster, launch = cfg.cluster, cfg.launch
    further = {
        key.replace("_", "-"): value
        for key, value in cluster.sbatch.items()
        if value is not None and value is not False
    }
    own_gpus = cfg.trainer.device == "cuda" and not further.keys() & {"gres", "gpus-per-node"}
    memory = cluster.memory_gib_per_node
    if memory is None and cluster.exclusive:
        memory = 0  # all that a node has; without a word of it Slurm gives an exclusive job its default of memory
    return {
        "job_name": launch.job_name or cfg.trainer.experiment_name,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "nodelist": cluster.nodelist,
        "exclude": cluster.exclude,
        "exclusive": cluster.exclusive or None,
        "time": launch.time_min,
        "nodes": cfg.trainer.nnodes,
        "ntasks_per_node": 1,
        "cpus_per_task": cpus_per_node(cfg),
        "gpus_per_node": cfg.trainer.n_gpus_per_node if own_gpus else None,
        "signal_delay_s": launch.stop_lead_s,
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": [
            "set -e  # a line that fails fails the job",
            *cluster.setup,
            f"export PYTHONUNBUFFERED=1 PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
        ],
        "additional_parameters": {
            "output": str(log),
            "requeue": True,
            "signal": f"USR2@{launch.stop_lead_s}",
            **({} if memory is None else {"mem": f"{round(memory * 1024)}M"}),
            **({} if cluster.reservation is None else {"reservation": cluster.reservation}),
            **further,
        },
    }
