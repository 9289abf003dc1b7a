"""Where a run's metrics go: metrics.jsonl always, the console and wandb as trainer.logger says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError
from rlhpc.metrics.console import Console, duration
from rlhpc.metrics.jsonl import MetricsFile
from rlhpc.metrics.records import timing_metrics
from rlhpc.metrics.throughput import peak_flops, train_metrics
from rlhpc.metrics.timer import phase_seconds
from rlhpc.metrics.wandb import WandbRun

LOGGERS = ("console", "wandb")


class Reporter:
    """The run's one voice, on the driver. Use as a context manager: leaving it ends the progress bar and
    wandb's run."""

    def __init__(self, cfg: RunConfig, directory: Path, total_steps: int) -> None:
        """Raises ConfigError for an unknown logger and where wandb can't start."""
        trainer = cfg.trainer
        if unknown := set(trainer.logger) - set(LOGGERS):
            raise ConfigError(f"trainer.logger={sorted(unknown)} is unknown; choose among {', '.join(LOGGERS)}")
        self._cfg, self._directory, self._total_steps = cfg, directory, total_steps
        self._num_ranks = trainer.nnodes * trainer.n_gpus_per_node
        self._file = MetricsFile(directory / "metrics.jsonl")
        self._model_config, self._peak = _model_config(cfg), _peak_flops(cfg)
        self._logged: tuple[int, float] | None = None  # the last step and when it was logged
        self._wandb = None
        if "wandb" in trainer.logger:
            self._wandb = WandbRun(
                directory,
                project=trainer.project_name,
                name=trainer.experiment_name,
                mode=trainer.wandb_mode,
                config=cfg.tree(),
            )
        self._console = Console(total_steps)

    @property
    def wandb_id(self) -> str | None:
        return self._wandb.id if self._wandb else None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._console.close()
        if self._wandb:
            self._wandb.finish(failed=kind is not None)

    def say(self, text: str) -> None:
        self._console.say(text)

    def progress(self, step: int, phase: str, fraction: float) -> None:
        """Moves the progress bar: `fraction` of the phase, 0 to 1."""
        self._console.progress(step, phase, fraction)

    def doing(self, text: str) -> None:
        """Says beside the progress bar what takes its time."""
        self._console.doing(text)

    def cut_back(self, step: int) -> None:
        """Forgets the lines of `step` and later: the loop logs the step it resumes from once more."""
        self._file.truncate_after(step - 1)

    def log(self, step: int, record: Mapping[str, float]) -> None:
        """A finished step's metrics, completed by its times and rates.

        The step's own time is the time since the last one was logged; after a restart, the sum of its phases.
        """
        now = time.perf_counter()
        if self._logged is not None and self._logged[0] == step - 1:
            step_s = now - self._logged[1]
        else:
            step_s = sum(phase_seconds(record).values())
        self._logged = (step, now)
        record = dict(record) | timing_metrics(record, step_s, self._num_ranks)
        record |= train_metrics(
            self._model_config,
            record,
            epochs=self._cfg.actor_rollout_ref.actor.ppo_epochs,
            num_ranks=self._num_ranks,
            peak=self._peak,
        )
        self._file.append(step, record)
        if "console" in self._cfg.trainer.logger:
            self._console.row(step, record)
        if self._wandb:
            self._wandb.log(step, record)

    def generations(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Shows `trainer.log_val_generations` of the samples {prompt, response, ground_truth, reward}."""
        for sample in samples[: self._cfg.trainer.log_val_generations]:
            prompt, response = _one_line(sample["prompt"]), _one_line(sample["response"])
            self.say(
                f"val step {step}: {prompt!r} -> {response!r} "
                f"(expected {_one_line(sample['ground_truth'])!r}, reward {sample['reward']:g})"
            )

    def close_run(self, step: int, finished: bool) -> None:
        """The last word: what was learnt, where the outputs are and what to do next. Raises DiskFullError where
        there is no room for the last metrics."""
        self._file.flush()
        for line in self._summary(step, finished):
            self.say(line)

    def _summary(self, step: int, finished: bool) -> Iterator[str]:
        rows = self._file.read()
        seconds = sum(row.get("timing_s/step") or 0.0 for row in rows)
        num_tokens = sum(row.get("perf/total_num_tokens") or 0 for row in rows)
        done = "finished" if finished else "stopped"
        yield f"{done} after step {step} of {self._total_steps}: {duration(seconds)}, {num_tokens:,} tokens"
        for name in sorted({name for row in rows for name in row if name.startswith("val-core/")}):
            scores = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            (first_step, first), (last_step, last) = scores[0], scores[-1]
            later = f" -> {last:.3f} at step {last_step}" if len(scores) > 1 else ""
            yield f"  {name}  {first:.3f} at step {first_step}{later}"
        yield f"  outputs      {self._directory}: metrics.jsonl, val_generations/, logs/"
        yield f"  checkpoints  {self._cfg.checkpoint_root()}"
        if self._wandb:
            yield f"  wandb        {self._wandb.place}"
        if not finished:
            yield "  next         the same command goes on from here"
            return
        yield f"  next         rlhpc report {quote(str(self._directory))}  for a summary and plots"
        yield "               more training: the same command with a larger trainer.total_training_steps"


def _one_line(text: object, width: int = 100) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= width else "..." + line[3 - width :]


def _model_config(cfg: RunConfig) -> dict[str, Any]:
    """The model's config.json; empty where there is none, which is the model loader's to refuse."""
    path = Path(cfg.actor_rollout_ref.model.path, "config.json")
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return config


def _peak_flops(cfg: RunConfig) -> float | None:
    import torch

    if cfg.trainer.device == "cpu" or not torch.cuda.is_available():
        return None
    return peak_flops(torch.cuda.get_device_name())
