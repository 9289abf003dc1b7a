"""Whether trainer and engine can share the memory of their experts, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhpc.config.parallel import trainer_layout
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.reshard.families import ModelFacts

_TOLD = "reshard.in_place_experts=true"


def in_place_problems(cfg: RunConfig, model_config: Mapping[str, Any], world_size: int) -> Iterator[str]:
    """A line for everything that keeps the experts from being shared, where the configuration asks for it."""
    from rlhpc.reshard.families import model_facts

    if not cfg.reshard.in_place_experts:
        return
    facts, dtype = model_facts(model_config), cfg.actor_rollout_ref.model.dtype
    if not facts.num_experts:
        yield f"{_TOLD} needs a mixture of experts, this model has none; set false"
        return
    if cfg.reshard.sink != "direct":
        yield f"{_TOLD} leaves reshard.sink={cfg.reshard.sink} nothing to load whole; set sink=direct, or false"
    if dtype != "bfloat16":
        yield (
            f"{_TOLD} needs actor_rollout_ref.model.dtype=bfloat16, got {dtype}: such weights are their own masters, "
            "which leave the device while the engine generates; set bfloat16, or false"
        )
    try:
        shared_experts(cfg, model_config, world_size)
    except ConfigError as error:
        yield f"{_TOLD}: {error}; {_alternatives(cfg, facts, world_size)}"


def shared_experts(cfg: RunConfig, model_config: Mapping[str, Any], world_size: int) -> dict[str, str]:
    """The trainer's buffers of experts, by name, and the engine's that lie alike; none unless the configuration asks
    for them to be shared.

    Raises ConfigError where they don't, naming tensor and rank.
    """
    from rlhpc.reshard.families import family_for
    from rlhpc.reshard.in_place import in_place

    if not cfg.reshard.in_place_experts:
        return {}
    layout, family, ref = trainer_layout(cfg, world_size), family_for(model_config), cfg.actor_rollout_ref
    if layout.edp > 1:
        raise ConfigError(
            f"expert_model_parallel_size={layout.ep} * expert_tensor_parallel_size={layout.etp} * "
            f"pipeline_model_parallel_size={layout.pp} on {world_size} ranks gives the same experts to {layout.edp} of "
            "them, each of which updates a part; only one may have them"
        )
    tp, expert_parallel = ref.rollout.tensor_model_parallel_size, ref.rollout.expert_parallel_size > 1
    dtype, ranks = ref.model.dtype, range(world_size)
    return in_place(
        family.trainer_specs(model_config, layout, dtype),
        family.rollout_specs(model_config, tp, ranks, dtype, expert_parallel=expert_parallel),
    )


def _alternatives(cfg: RunConfig, facts: ModelFacts, num_ranks: int) -> str:
    """One replica over all ranks, with experts spread or cut alike on both sides."""
    trainer, rollout = "actor.megatron.expert", "rollout.tensor_model_parallel_size"
    stages = cfg.actor_rollout_ref.actor.megatron.pipeline_model_parallel_size
    fixes = []
    if cfg.trainer.nnodes == 1 and facts.num_heads % num_ranks == 0:
        if facts.num_experts % num_ranks == 0:
            fixes.append(
                f"{trainer}_model_parallel_size={num_ranks} and expert_tensor_parallel_size=1 with "
                f"{rollout}={num_ranks} and expert_parallel_size={num_ranks}"
            )
        if facts.moe_intermediate_size % num_ranks == 0:
            fixes.append(
                f"{trainer}_tensor_parallel_size={num_ranks} and expert_model_parallel_size=1 with "
                f"{rollout}={num_ranks} and expert_parallel_size=1"
            )
    one_stage = "pipeline_model_parallel_size=1, " if stages > 1 and fixes else ""
    return f"set {one_stage}{', or '.join([*fixes, 'reshard.in_place_experts=false'])}"
