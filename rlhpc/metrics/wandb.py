"""Weights & Biases: one run across all restarts of a run directory, online or offline."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.errors import ConfigError


class WandbRun:
    """The run whose id is kept in `<directory>/wandb_id`, so that a restart goes on with it.

    Offline, each restart writes its own `wandb/offline-run-*-<id>` directory; `wandb sync` merges those of
    one id in order. Raises ConfigError where wandb is not installed, or refuses to start.
    """

    def __init__(
        self, directory: Path, *, project: str, name: str, mode: str | None, config: Mapping[str, Any]
    ) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ConfigError(
                "trainer.logger names wandb, which is not installed; pip install wandb, or set trainer.logger=[console]"
            ) from error
        self.id = _persisted_id(directory / "wandb_id")
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=self.id,
                resume="allow",
                dir=str(directory),
                mode=mode,  # type: ignore[arg-type]
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"wandb could not start: {error}; log in (WANDB_API_KEY), or set trainer.wandb_mode=offline"
            ) from error

    @property
    def place(self) -> str:
        """Where to look: a URL, or the command that uploads an offline run."""
        if self._run.settings.mode == "offline" or not self._run.url:
            return f"wandb sync {Path(self._run.dir).parent.parent}/offline-run-*-{self.id}*"
        return str(self._run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Steps that the run already has, from before a restart, are left as they are: a run's history only grows."""
        if step >= self._run.step:
            self._run.log({n: v for n, v in metrics.items() if math.isfinite(v)}, step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def _persisted_id(path: Path) -> str:
    if path.exists() and (known := path.read_text().strip()):
        return known
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(created := secrets.token_hex(4))
    return created
