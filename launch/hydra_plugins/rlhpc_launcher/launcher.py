"""A sweep as an array of Slurm jobs: submits, prints a table, returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from omegaconf import OmegaConf, open_dict, read_write

if TYPE_CHECKING:
    from rlhpc.config.schema import RunConfig


class RunLauncher(SlurmLauncher):
    """Keeps hydra-submitit-launcher's way in, and submits what `launch=slurm` submits for a single run."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Every point composed and checked before the first is submitted. Exits with launch.wait's exit code."""
        from launch.sweep import Point, submit_sweep

        points = [
            Point(number, list(overrides), self._composed(overrides, number))
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        if status := submit_sweep(points):
            raise SystemExit(status)
        return [_completed(point.overrides) for point in points]

    def _composed(self, overrides: Sequence[str], number: int) -> RunConfig:
        from rlhpc.config.load import load

        assert self.hydra_context is not None and self.config is not None
        composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with read_write(composed), open_dict(composed):
            composed.hydra.job.num = number
            composed.hydra.job.id = str(number)
            HydraConfig.instance().set_config(composed)  # ${hydra:...} resolves by it
            del composed["hydra"]
        cfg = load(composed)
        cfg.run_dir = f"{cfg.run_dir}/{number}"
        return cfg


def _completed(overrides: Sequence[str]) -> JobReturn:
    """Hydra takes nothing but a completed or a failed job: submitting is what this one was to do, and it is done."""
    done = JobReturn(overrides=overrides, cfg=OmegaConf.create(), status=JobStatus.COMPLETED)
    done.return_value = None
    return done
