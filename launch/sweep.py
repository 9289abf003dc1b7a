"""The points of a sweep as tasks of Slurm arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonpath
from pathlib import Path
from typing import Any

from launch.modes import refuse_taken
from launch.submit import checked, plans, scripts, tell
from rlhpc.cli.resume import finished
from rlhpc.cluster import submission
from rlhpc.cluster.job import arrays_of
from rlhpc.cluster.submission import shown_path
from rlhpc.config.checks import check_run
from rlhpc.config.schema import RunConfig
from rlhpc.errors import RlhpcError, raise_problems
from rlhpc.train.model_files import check_model_files
from rlhpc.train.start import check_start


@dataclass(frozen=True)
class Point:
    """`number` names the point's directory below the sweep's."""

    number: int
    overrides: Sequence[str]
    cfg: RunConfig


def submit_sweep(points: Sequence[Point]) -> int:
    """Submits the points that aren't finished, queued or running already, and prints a table of all. Returns 0, or with
    launch.wait the highest exit code of the points.

    Raises ConfigError that lists what is wrong at every point, before anything is submitted.
    """
    runs, models = [point.cfg for point in points], composed_models(points)
    limit = checked(runs, models)
    for cfg, model_config in zip(runs, models, strict=True):
        refuse_taken(cfg, model_config)
    first = runs[0]
    sweep_dir = Path(commonpath([str(Path(cfg.run_dir).parent) for cfg in runs]))
    if first.launch.dry_run:
        print(plans(runs, models))
        print(*scripts(arrays_of(runs, sweep_dir, limit)), sep="\n", end="")
        return 0
    by_paths = {
        (c.actor_rollout_ref.model.path, c.critic.model.path): (c, m) for c, m in zip(runs, models, strict=True)
    }
    for cfg, model_config in by_paths.values():
        check_model_files(cfg, model_config)
    for cfg, model_config in zip(runs, models, strict=True):
        check_start(cfg, model_config)
    with submission.submitting(sweep_dir / submission.LOG_FOLDER):
        taken = submission.holders([cfg.run_dir for cfg in runs])
        taken |= {cfg.run_dir: "finished" for cfg in runs if finished(cfg)}
        free = [cfg for cfg in runs if cfg.run_dir not in taken]
        made: dict[str, submission.Submission] = {}
        for job in arrays_of(free, sweep_dir, limit) if free else []:
            made |= {cfg.run_dir: done for cfg, done in zip(job.runs, job.submit(), strict=True)}
    tell(*table(points, taken | {run_dir: done.job_id for run_dir, done in made.items()}))
    tell("", f"rlhpc status {shown_path(sweep_dir)}    rlhpc cancel {shown_path(sweep_dir)}")
    if not first.launch.wait:
        return 0
    from rlhpc.cli.wait import wait

    return wait({done.job_id: Path(run_dir) for run_dir, done in made.items()})


def composed_models(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The parsed config.json of every point that is right in itself; raises ConfigError for all that aren't."""
    problems, models = [], []
    for point in points:
        try:
            models.append(check_run(point.cfg))
        except RlhpcError as error:
            problems += [f"point {point.number}: {line}" for line in str(error).splitlines()]
    raise_problems(problems)
    return models


def table(points: Sequence[Point], jobs: dict[str, str]) -> list[str]:
    """A line a point: number, job, run directory, overrides."""
    shared = set.intersection(*(set(point.overrides) for point in points)) if len(points) > 1 else set()
    rows = [("point", "job", "run dir", "overrides")]
    for point in points:
        own = " ".join(override for override in point.overrides if override not in shared)
        rows.append((str(point.number), jobs[point.cfg.run_dir], shown_path(point.cfg.run_dir), own))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
