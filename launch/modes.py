"""What `launch.mode` means: the run here, a job, or the nodes of the allocation that this process is in."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from rlhpc.config.checks import check_run
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError
from rlhpc.train.model_files import check_model_files
from rlhpc.train.start import check_start, describe_start


def local(cfg: RunConfig) -> int:
    """Trains in this process tree; the exit code."""
    model_config = check_run(cfg)
    if cfg.launch.dry_run:
        return _told(cfg, model_config)
    check_model_files(cfg, model_config)
    check_start(cfg, model_config)
    from rlhpc.train.run import run

    return run(cfg)


def slurm(cfg: RunConfig) -> int:
    """Submits one job and returns; with launch.wait the job's exit code."""
    from launch.submit import submit_run

    if HydraConfig.initialized() and "submitit_launcher" in HydraConfig.get().launcher._target_:
        raise ConfigError(
            "hydra/launcher=submitit_slurm and submitit_local start the points themselves, and launch=slurm would "
            "submit each once more; leave out one of the two"
        )
    return submit_run(cfg)


def allocation(cfg: RunConfig) -> int:
    """Trains over the nodes of the Slurm job that this process is in, whose batch process it becomes."""
    from rlhpc.cluster import submission
    from rlhpc.cluster.slurm_env import SlurmEnv

    env = SlurmEnv.from_environ(os.environ)
    if not submission.claimed(cfg.run_dir, env):
        submission.fit_allocation(cfg, env, os.environ)
        model_config = check_run(cfg)
        if cfg.launch.dry_run:
            return _told(cfg, model_config)
        check_model_files(cfg, model_config)
        refuse_taken(cfg, model_config)
        check_start(cfg, model_config)
        submission.claim(cfg, env)
    sys.stdout.flush()
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "rlhpc.cluster.batch", cfg.run_dir])


def refuse_taken(cfg: RunConfig, model_config: dict[str, Any]) -> None:
    """Raises CheckpointError where another run has trained in the run directory, before a job writes anything there."""
    from rlhpc.checkpoint.identity import has_trained, refuse_another

    run_dir = Path(cfg.run_dir)
    if has_trained(run_dir):
        refuse_another(run_dir, cfg.tree(), model_config)


def _told(cfg: RunConfig, model_config: dict[str, Any]) -> int:
    from rlhpc.cli.plan import describe

    refuse_taken(cfg, model_config)
    print(describe(cfg, model_config), "", *describe_start(cfg, model_config), sep="\n")
    return 0


MODES = {"local": local, "slurm": slurm, "allocation": allocation}
