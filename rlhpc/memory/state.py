"""What the state of a run takes: parameters, gradients and moments by rank, on the GPU and on its node. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from operator import sub
from typing import Any

from rlhpc.config.algorithm import needs_reference
from rlhpc.config.critic import Critic, critic_model_config, needs_critic
from rlhpc.config.parallel import trainer_layout
from rlhpc.config.schema import RunConfig
from rlhpc.layout.spec import Replicas, Shards, ShardSpec
from rlhpc.reshard.families import family_for

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4  # Megatron's buffer, kept in float32
MOMENT_BYTES = 8  # Adam's two, float32
MASTER_BYTES = 4  # float32 copy of bfloat16 parameters
SAVED_BYTES = MASTER_BYTES + MOMENT_BYTES  # of a parameter in a checkpoint: float32 weights are their own masters


@dataclass(frozen=True)
class RankMemory:
    """Persistent bytes on one rank, without activations, logits, communication buffers and the KV cache."""

    trainer_weights: int
    gradients: int
    optimizer: int
    reference_weights: int
    rollout_weights: int
    critic_weights: int = 0
    critic_gradients: int = 0
    critic_optimizer: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class NodeMemory:
    """Bytes of a node's memory that its ranks keep, without what processes and libraries take."""

    ranks: int  # on a CPU all of a rank's memory, with GPUs what waits there while the engine generates
    checkpoint_copies: int  # what is written while training goes on

    @property
    def total(self) -> int:
        return self.ranks + self.checkpoint_copies


def parameter_counts(model_config: Mapping[str, Any]) -> tuple[int, int]:
    """(all parameters, those that one token passes through)."""
    family = family_for(model_config)
    facts = family.model_facts(model_config)
    shapes = family.canonical_tensors(model_config)
    total = sum(map(prod, shapes.values()))
    experts = sum(prod(shape) for name, shape in shapes.items() if ".experts." in name)
    idle = experts * (facts.num_experts - facts.experts_per_token) // max(1, facts.num_experts)
    return total, total - idle


def rank_memory(cfg: RunConfig, model_config: Mapping[str, Any]) -> list[RankMemory]:
    """Persistent memory of every rank, from the very shard tables that place the weights."""
    family, layout = family_for(model_config), trainer_layout(cfg)
    ref, ranks = cfg.actor_rollout_ref, range(layout.world_size)
    dtype = ref.model.dtype
    size = DTYPE_BYTES[dtype]
    trainer = family.trainer_specs(model_config, layout, dtype)
    rollout = family.rollout_specs(
        model_config,
        ref.rollout.tensor_model_parallel_size,
        ranks,
        dtype,
        expert_parallel=ref.rollout.expert_parallel_size > 1,
    )
    dense, experts = (elements(group, layout.world_size) for group in _split(trainer))
    critic = [elements(group, layout.world_size) for group in _split(_critic_specs(cfg, model_config))]
    engine = elements(rollout, layout.world_size)
    per_element = MOMENT_BYTES + (MASTER_BYTES if dtype == "bfloat16" else 0)
    own = [0] * len(experts) if cfg.reshard.in_place_experts else experts  # in place they are the engine's alone
    return [
        RankMemory(
            trainer_weights=(dense[rank] + own[rank]) * size,
            gradients=(dense[rank] + experts[rank]) * GRADIENT_BYTES,
            optimizer=(dense[rank] // layout.dp + experts[rank] // layout.edp) * per_element,
            reference_weights=(dense[rank] + experts[rank]) * size if needs_reference(cfg) else 0,
            rollout_weights=engine[rank] * size,
            critic_weights=sum(part[rank] for part in critic) * size,
            critic_gradients=sum(part[rank] for part in critic) * GRADIENT_BYTES,
            critic_optimizer=(critic[0][rank] // layout.dp + critic[1][rank] // layout.edp) * per_element,
        )
        for rank in ranks
    ]


def fullest(memory: Sequence[RankMemory]) -> RankMemory:
    """What the rank takes that takes most."""
    return max(memory, key=lambda rank: rank.total)


def _critic_specs(cfg: RunConfig, model_config: Mapping[str, Any]) -> list[ShardSpec]:
    if not needs_critic(cfg):
        return []
    config = critic_model_config(cfg, model_config)
    return family_for(config).critic_specs(config, trainer_layout(cfg), cfg.actor_rollout_ref.model.dtype)


def kept_on_host(cfg: RunConfig, rank: RankMemory) -> tuple[tuple[bool | str, int], ...]:
    """What waits in host memory while the engine generates where its switch says so (auto: at most), and its bytes."""
    megatron, critic = cfg.actor_rollout_ref.actor.megatron, Critic.of(cfg)
    return (
        (megatron.param_offload, rank.trainer_weights + rank.reference_weights),
        (megatron.optimizer_offload, rank.optimizer),
        (critic.param_offload, rank.critic_weights),
        (critic.optimizer_offload, rank.critic_optimizer),
    )


def node_memory(
    cfg: RunConfig, model_config: Mapping[str, Any], device: str, memory: Sequence[RankMemory] | None = None
) -> NodeMemory:
    """Of the fullest node; `device` is "cpu" or "cuda", `memory` what rank_memory gives where that is at hand."""
    per_node, dtype = cfg.trainer.n_gpus_per_node, cfg.actor_rollout_ref.model.dtype
    optimizer_bytes = MOMENT_BYTES + (MASTER_BYTES if dtype == "bfloat16" else 0)
    nodes = []
    memory = memory or rank_memory(cfg, model_config)
    for first in range(0, len(memory), per_node):
        ranks = memory[first : first + per_node]
        copies = sum((rank.optimizer + rank.critic_optimizer) // optimizer_bytes * SAVED_BYTES for rank in ranks)
        asleep = sum(num_bytes for rank in ranks for leaves, num_bytes in kept_on_host(cfg, rank) if leaves)
        held = sum(rank.total for rank in ranks) if device == "cpu" else asleep
        copied = cfg.checkpoint.async_save and cfg.trainer.save_freq > 0  # the last step's is waited for
        nodes.append(NodeMemory(held, copies if copied else 0))
    return max(nodes, key=lambda node: node.total)


def too_little_memory(
    cfg: RunConfig, model_config: Mapping[str, Any], device: str, memory: Sequence[RankMemory] | None = None
) -> Iterator[str]:
    """What is wrong with the memory that a job asks for, if anything; `memory` as in node_memory."""
    if (asked := cfg.cluster.memory_gib_per_node) is None:
        return
    needed = node_memory(cfg, model_config, device, memory)
    if asked * 2**30 < needed.total:
        copies = f", {readable(needed.checkpoint_copies)} of that copies for checkpoint.async_save"
        stay = ", or {optimizer,param}_offload=false of actor_rollout_ref.actor.megatron: these stay on the GPU then"
        yield (
            f"cluster.memory_gib_per_node={asked:g} is less than the {readable(needed.total)} that the ranks of a node "
            f"keep in it{copies if needed.checkpoint_copies else ''}; set more, for processes and libraries too"
            f"{stay if device == 'cuda' else ''}"
        )


def checkpoint_bytes(cfg: RunConfig, model_config: Mapping[str, Any]) -> int:
    """Size of one checkpoint: masters and moments of every parameter once, a critic's too."""
    return (parameter_counts(model_config)[0] + critic_parameters(cfg, model_config)) * SAVED_BYTES


def critic_parameters(cfg: RunConfig, model_config: Mapping[str, Any]) -> int:
    if not needs_critic(cfg):
        return 0
    config = critic_model_config(cfg, model_config)
    return sum(map(prod, family_for(config).critic_tensors(config).values()))


def routing_bytes(cfg: RunConfig, model_config: Mapping[str, Any]) -> int:
    """Of the experts of a step's tokens, were all sequences as long as they may be."""
    num_tokens = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n
    num_tokens *= cfg.data.max_prompt_length + cfg.data.max_response_length
    return num_tokens * family_for(model_config).model_facts(model_config).routing_bytes


def readable(num_bytes: float) -> str:
    """A size with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def _split(specs: Sequence[ShardSpec]) -> tuple[list[ShardSpec], list[ShardSpec]]:
    """Dense and expert tensors: their replicas, over which optimizer state is sharded, are other ranks."""
    return [s for s in specs if ".experts." not in s.name], [s for s in specs if ".experts." in s.name]


def elements(specs: Sequence[ShardSpec], world_size: int) -> list[int]:
    """How many every rank has of the tensors."""
    kinds: dict[int, tuple[tuple[Replicas, ...], int]] = {}  # layers of a kind share theirs: counted once
    for spec in specs:
        replicas = Shards.of(spec.shards).replicas
        _, times = kinds.get(id(replicas), (replicas, 0))
        kinds[id(replicas)] = replicas, times + 1
    counts = [0] * world_size
    for replicas, times in kinds.values():
        for same in replicas:
            count = times * prod(map(sub, same.stop, same.start))
            for rank in same.ranks:
                counts[rank] += count
    return counts
