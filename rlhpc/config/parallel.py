"""From configured parallel sizes to the trainer's grids."""

from __future__ import annotations

from rlhpc.config.schema import RunConfig
from rlhpc.layout.parallel import ParallelLayout


def trainer_layout(cfg: RunConfig, world_size: int | None = None) -> ParallelLayout:
    """The trainer's two grids over `world_size` ranks (default: those that the config asks for on all nodes).

    Raises ConfigError where the grids don't divide them.
    """
    megatron = cfg.actor_rollout_ref.actor.megatron
    return ParallelLayout(
        tp=megatron.tensor_model_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        cp=megatron.context_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        world_size=world_size or cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node,
    )
