"""A run directory before its job: what the job will read, whose job it is, and who may not start a second one.

    <run_dir>/config.yaml    the resolved configuration
    <run_dir>/cluster.json   what a node's supervisor needs of it (ray_node.RaySpec)
    <run_dir>/job.json       the job that the run was last given to
    <run_dir>/slurm/         the job's log (%j.log, for a task of an array a link to it) and the script as submitted

The job may run anywhere and at any later time: it reads nothing else of where it was submitted.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.cluster import slurm
from rlhpc.cluster.attempt import NO_LOCKS, STOP_NAME, publish_text, read_json
from rlhpc.cluster.ray_node import RaySpec
from rlhpc.config.load import to_yaml
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError

CONFIG_NAME, JOB_NAME, LOG_FOLDER = "config.yaml", "job", "slurm"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Submission:
    """job.json. `job_id` as scontrol takes it, A_a for a task; `cluster` only where sbatch names one; `submitted` in
    seconds since the epoch; `log` the job's standard output, None for a terminal; `command` as it was typed; `code` the
    commit it ran, with a + where files differed from it, None outside git."""

    job_id: str
    cluster: str | None
    mode: str  # slurm | allocation
    submitted: float
    log: str | None
    command: str
    code: str | None

    @classmethod
    def made_now(cls, job_id: str, mode: str, log: Path | None, cluster: str | None = None) -> Submission:
        return cls(job_id, cluster, mode, time.time(), str(log) if log else None, shlex.join(sys.argv), _commit())

    @classmethod
    def read(cls, run_dir: str | Path) -> Submission | None:
        """None while the run was never given to Slurm."""
        found = read_json(Path(run_dir) / f"{JOB_NAME}.json")
        if found is None:
            return None
        known: dict[str, Any] = {name: found.get(name) for name in cls.__dataclass_fields__}
        return cls(**known)

    def write(self, run_dir: str | Path) -> None:
        publish_text(Path(run_dir) / f"{JOB_NAME}.json", json.dumps(asdict(self), indent=1) + "\n")


def spec_of(cfg: RunConfig) -> RaySpec:
    """cluster.json of a configuration whose device is known."""
    return RaySpec(
        num_nodes=cfg.trainer.nnodes,
        ranks_per_node=cfg.trainer.n_gpus_per_node,
        cpus_per_rank=cfg.cluster.cpus_per_rank,
        gpus_per_node=cfg.trainer.n_gpus_per_node if cfg.trainer.device == "cuda" else 0,
        object_store_bytes=cfg.cluster.object_store_bytes,
        start_timeout_s=cfg.cluster.start_timeout_s,
        network_interface=cfg.cluster.network_interface,
        temp_root=cfg.cluster.ray_temp_root,
        stop_lead_s=float(cfg.launch.stop_lead_s),
        max_attempts_without_progress=cfg.launch.max_attempts_without_progress,
    )


def prepare(cfg: RunConfig) -> None:
    """Writes what the job reads and makes its log's directory, without which older Slurms fail it without a word."""
    run_dir = Path(cfg.run_dir)
    (run_dir / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
    publish_text(run_dir / CONFIG_NAME, to_yaml(cfg))
    spec_of(cfg).write(run_dir)
    if (run_dir / STOP_NAME).exists():
        (run_dir / STOP_NAME).unlink()
        print(f"removed {run_dir / STOP_NAME}, left by rlhpc cancel")


def holders(run_dirs: Iterable[str], own_job: str | None = None) -> dict[str, str]:
    """Who has a run directory, in words, for those that someone has: a job that waits or runs (other than `own_job`),
    or a driver on this machine. Raises SlurmError when the controller doesn't answer."""
    known = {run_dir: made.job_id for run_dir in run_dirs if (made := Submission.read(run_dir)) is not None}
    asked = set(known.values()) - {own_job}
    jobs = {job_id: record for job_id, record in slurm.queue(asked).items() if record.live} if asked else {}
    found = {}
    for run_dir in run_dirs:
        if (record := jobs.get(known.get(run_dir, ""))) is not None:
            found[run_dir] = f"job {known[run_dir]} ({record.state.lower()})"
        elif pid := _driver_here(Path(run_dir) / ".lock"):
            found[run_dir] = f"process {pid} on this machine"
    return found


def refuse_held(run_dir: str | Path, own_job: str | None = None) -> None:
    """Raises ConfigError while someone else has the run directory."""
    if holder := holders([str(run_dir)], own_job).get(str(run_dir)):
        shown = shown_path(run_dir)
        raise ConfigError(
            f"run_dir={shown} belongs to {holder}; follow it with: rlhpc logs -f {shown}, end it with: "
            f"rlhpc cancel {shown}, or choose another run_dir"
        )


@contextmanager
def submitting(folder: Path) -> Iterator[None]:
    """Two submissions into one folder come one after the other, so that the second sees the first's job."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".submitting").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def fit_allocation(cfg: RunConfig, env: slurm.SlurmEnv, environ: Mapping[str, str]) -> None:
    """Takes from the allocation what the configuration leaves open: the number of nodes, and the device.

    Raises ConfigError where the allocation is not what the configuration wants.
    """
    trainer, where = cfg.trainer, f"job {env.job_id}"
    if trainer.nnodes == 1 and cfg.cluster.nodes is None:
        trainer.nnodes = env.num_nodes
    if trainer.nnodes != env.num_nodes:
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes}, but {where} has {env.num_nodes} nodes; set cluster.nodes={env.num_nodes}"
            f", or allocate {trainer.nnodes}: sbatch --nodes={trainer.nnodes}"
        )
    gpus = _gpus_here(environ)
    if trainer.device == "auto":
        trainer.device = "cuda" if gpus else "cpu"
    if trainer.device == "cuda" and gpus < trainer.n_gpus_per_node:
        raise ConfigError(
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, but {where} has {gpus} GPUs on this node; "
            f"allocate them: sbatch --gpus-per-node={trainer.n_gpus_per_node}, or set trainer.device=cpu"
        )
    needed = trainer.n_gpus_per_node * cfg.cluster.cpus_per_rank
    cpus = int(environ.get("SLURM_CPUS_ON_NODE") or 0)
    if 0 < cpus < needed:
        raise ConfigError(
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} ranks * cluster.cpus_per_rank="
            f"{cfg.cluster.cpus_per_rank} = {needed} CPUs, but {where} has {cpus} on this node; "
            f"allocate them: sbatch --cpus-per-task={needed}"
        )


def claimed(run_dir: str, env: slurm.SlurmEnv) -> bool:
    """Whether this process is in a requeued job whose run it is already: that goes on with what it wrote at first,
    whatever became of the YAML files, of the model or of an override's meaning since."""
    known = Submission.read(run_dir)
    return bool(env.restart and known and known.job_id == env.job_id and (Path(run_dir) / CONFIG_NAME).exists())


def claim(cfg: RunConfig, env: slurm.SlurmEnv) -> None:
    """Makes the run that of the job which this process is in. Raises ConfigError while someone else has the run
    directory."""
    run_dir = Path(cfg.run_dir)
    with submitting(run_dir / LOG_FOLDER):
        refuse_held(run_dir, own_job=env.job_id)
        prepare(cfg)
        record = slurm.show_job(env.job_id)
        written = record.text("StdOut") if record else None
        log = run_dir / LOG_FOLDER / f"{env.job_id}.log" if written else None
        if log is not None and Path(str(written)) != log and not log.is_symlink():
            log.symlink_to(str(written))
        Submission.made_now(env.job_id, "allocation", log).write(run_dir)


def shown_path(path: str | Path) -> str:
    """Relative to the working directory where it lies below it."""
    path = Path(path)
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def _gpus_here(environ: Mapping[str, str]) -> int:
    """GPUs of the allocation on this node, by the variables that Slurm's GRES plugin sets."""
    if devices := environ.get("SLURM_JOB_GPUS") or environ.get("SLURM_STEP_GPUS"):
        return len(slurm.expand_nodelist(f"[{devices}]"))
    return int(environ.get("SLURM_GPUS_ON_NODE") or 0)


def _driver_here(lock_path: Path) -> str | None:
    """The pid of a live driver on this machine that holds the run's lock."""
    try:
        with lock_path.open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return next(iter(lock.read().split()), "unknown")
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
    except FileNotFoundError:
        pass
    return None


def _commit() -> str | None:
    """The commit of this checkout, with a + when files differ from it."""
    try:
        described = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None
