"""The only place where backends are chosen. A backend is imported inside the branch that chose it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError
from rlhpc.train.protocols import RolloutEngine, Trainer


def build_engine(
    cfg: RunConfig, hf_config: dict[str, Any], device: str, rank: int, world_size: int, ident: str
) -> RolloutEngine:
    """This rank's rollout engine; `ident` makes the names of its shared-memory segments unique on the node."""
    name = cfg.actor_rollout_ref.rollout.name
    if name == "vllm":
        from rlhpc.backends.vllm.environment import keep_compiled

        keep_compiled(Path(cfg.cluster.ray_temp_root, f"rlhpc-{os.getuid()}-compiled"))
        try:
            from rlhpc.backends.vllm.engine import VllmEngine
        except ModuleNotFoundError as error:
            raise _missing(error, device) from error
        model_dir = Path(cfg.actor_rollout_ref.model.path)
        return VllmEngine(cfg, hf_config, model_dir, device, rank, world_size, ident)
    raise ConfigError(f"actor_rollout_ref.rollout.name={name!r} is not available; choose vllm")


def build_trainer(
    cfg: RunConfig, hf_config: dict[str, Any], device: str, shared: Mapping[str, torch.Tensor] | None = None
) -> Trainer:
    """This rank's trainer. Its experts are the `shared` tensors where there are any, by the trainer's buffer names."""
    try:
        from rlhpc.backends.megatron.trainer import MegatronTrainer
    except ModuleNotFoundError as error:
        raise _missing(error, device) from error
    return MegatronTrainer(cfg, hf_config, Path(cfg.actor_rollout_ref.model.path), device, shared)


def _missing(error: ModuleNotFoundError, device: str) -> ConfigError:
    extra = "gpu" if device == "cuda" else "cpu"
    return ConfigError(f"package {error.name!r} is missing; install it with: pip install 'rlhpc[{extra}]'")
