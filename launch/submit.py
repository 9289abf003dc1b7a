"""What a submission says and does: refuse what can be known, submit, tell how to follow, perhaps wait."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.modes import refuse_taken
from rlhpc.cli.output import reader_may_leave
from rlhpc.cli.plan import describe
from rlhpc.cli.resume import finished
from rlhpc.cluster import preflight, storage, submission
from rlhpc.cluster.job import Job, cpus_per_node, job_of
from rlhpc.cluster.preflight import Cluster
from rlhpc.cluster.submission import shown_path
from rlhpc.config.checks import check_run, device_of
from rlhpc.config.schema import RunConfig
from rlhpc.errors import SlurmError, raise_problems
from rlhpc.memory.device import doubtful, impossible
from rlhpc.memory.state import checkpoint_bytes, fullest, rank_memory, too_little_memory
from rlhpc.train.model_files import check_model_files
from rlhpc.train.start import describe_start


def submit_run(cfg: RunConfig) -> int:
    """One run as one job. Returns the exit code: 0, or with launch.wait that of the job."""
    model_config = check_run(cfg)
    checked([cfg], [model_config])
    if not cfg.launch.dry_run:
        check_model_files(cfg, model_config)
    refuse_taken(cfg, model_config)
    start, job = describe_start(cfg, model_config), job_of(cfg)
    if cfg.launch.dry_run:
        print(describe(cfg, model_config), "", *start, *scripts([job]), sep="\n", end="")
        return 0
    with submission.submitting(job.folder):
        if finished(cfg):
            print(f"{shown_path(cfg.run_dir)} has finished; see: rlhpc report {shown_path(cfg.run_dir)}")
            return 0
        submission.refuse_held(cfg.run_dir)
        (made,) = job.submit()
    shown, log = shown_path(cfg.run_dir), shown_path(str(made.log))
    tell(
        f"submitted job {made.job_id}: {asked(cfg)}",
        f"  run dir  {shown}",
        f"  log      {log}",
        f"  {start[0].replace('    ', '   ', 1)}",
        f"  rlhpc status {shown}      what it does now, or why it waits",
        f"  rlhpc logs -f {shown}     follow it",
        f"  rlhpc cancel {shown}      end it for good",
    )
    if not cfg.launch.wait:
        return 0
    from rlhpc.cli.wait import wait

    return wait({made.job_id: Path(cfg.run_dir)})


def tell(*lines: str) -> None:
    """Prints what was submitted, which stays so whoever reads it."""
    with reader_may_leave():
        print(*lines, sep="\n")


def checked(runs: Sequence[RunConfig], models: Sequence[Mapping[str, Any]]) -> int:
    """Compares the runs with the cluster and the file systems; prints what may go wrong, returns how many tasks an
    array may have. A dry run goes on where there is no Slurm.

    Raises ConfigError for all that would be refused or wait for ever, SlurmError when Slurm doesn't answer.
    """
    problems: list[str] = []
    warnings: list[str] = []
    try:
        cluster = Cluster.ask()
    except SlurmError as error:
        if not runs[0].launch.dry_run:
            raise
        print(f"warning: not compared with the cluster's limits: {error}", file=sys.stderr)
        cluster = Cluster({}, {}, {})
    for cfg, model_config in zip(runs, models, strict=True):
        if cluster.partitions:
            problems += preflight.limits(cfg, cluster, cpus_per_node(cfg))
            warnings += preflight.cautions(cfg, cluster)
        device, memory = device_of(cfg), rank_memory(cfg, model_config)
        problems += too_little_memory(cfg, model_config, device, memory)
        problems += impossible(cfg, model_config, device, fullest(memory))
        warnings += doubtful(cfg, model_config, device, fullest(memory))
        size = checkpoint_bytes(cfg, model_config)
        problems += storage.refusals(cfg, elsewhere=cluster.elsewhere, checkpoint_bytes=size)
        warnings += storage.cautions(cfg, elsewhere=cluster.elsewhere)
    for warning in dict.fromkeys(warnings):
        print(f"warning: {warning}", file=sys.stderr)
    raise_problems(problems)
    return cluster.max_array_size


def plans(runs: Sequence[RunConfig], models: Sequence[Mapping[str, Any]]) -> str:
    """Layout and memory of every point, those that are alike told once."""
    told: dict[str, list[str]] = {}
    for cfg, model_config in zip(runs, models, strict=True):
        lines = describe(cfg, model_config).splitlines()
        own = [f"writes    {cfg.run_dir}", *describe_start(cfg, model_config)]
        told.setdefault("\n".join(line for line in lines if not line.startswith("writes ")), []).extend(own)
    return "\n\n".join("\n".join([*own, plan]) for plan, own in told.items())


def scripts(jobs: Sequence[Job]) -> list[str]:
    """For a dry run: every script under a line that tells what it is."""
    return [part for job in jobs for part in ("", f"what sbatch would read, for {job.folder.parent}:", job.script)]


def asked(cfg: RunConfig) -> str:
    """What a run asks of Slurm, in words."""
    nodes, cluster = cfg.trainer.nnodes, cfg.cluster
    gpus = f" with {cfg.trainer.n_gpus_per_node} GPUs" if cfg.trainer.device == "cuda" else ""
    where = f" of partition {cluster.partition}" if cluster.partition else ""
    limit = f", {cfg.launch.time_min} min" if cfg.launch.time_min else ""
    return f"{nodes} node{'s' if nodes > 1 else ''}{gpus}{where}{limit}"
