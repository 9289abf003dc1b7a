"""Whether a GPU has room for each phase of a step: the trainer's state, activations, the engine and its KV cache. Pure,
but for `gpu_bytes`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhpc.config.critic import Critic, critic_model_config, needs_critic
from rlhpc.config.parallel import trainer_layout
from rlhpc.config.schema import ActorConfig, RunConfig
from rlhpc.memory.activations import Activations, Microbatch, Model, repeats_keys
from rlhpc.memory.state import DTYPE_BYTES, RankMemory, fullest, kept_on_host, rank_memory, readable
from rlhpc.reshard.families import model_facts
from rlhpc.reshard.families.facts import ModelFacts

# Contexts, CUDA graphs, NCCL's buffers, what allocators keep: 4.3 to 7.9 GiB on an H200, with 5.6 B parameters.
BESIDES_BYTES = 4 * 2**30

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_FIXES = {
    "generate": f"lower {_ROLLOUT}.gpu_memory_utilization, or let more leave ({_ACTOR}.megatron.*_offload=true)",
    "publish": f"raise the ranks, a parallel size of {_ACTOR}.megatron, or {_ROLLOUT}.tensor_model_parallel_size",
    "logprobs": f"lower {_ROLLOUT}.log_prob_max_token_len_per_gpu, or raise a parallel size of {_ACTOR}.megatron",
    "update": "set actor_rollout_ref.model.enable_gradient_checkpointing=true, "
    f"lower {_ACTOR}.ppo_max_token_len_per_gpu, or raise a parallel size of {_ACTOR}.megatron",
}


@dataclass(frozen=True)
class KvCache:
    """Of one replica: bytes of a token on each of its ranks, room for them there (None: not known), the longest
    sequence in tokens and how many sequences are decoded at once."""

    token_bytes: int
    room: int | None
    longest: int
    at_once: int

    @property
    def sequences(self) -> float | None:
        """Of the longest kind that fit."""
        return None if self.room is None else self.room / (self.token_bytes * self.longest)


def gpu_bytes(cfg: RunConfig) -> int | None:
    """Memory of a GPU of the run: as cluster.gpu_memory_gib says, else of one here; None where neither is known."""
    if cfg.cluster.gpu_memory_gib is not None:
        return int(cfg.cluster.gpu_memory_gib * 2**30)
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def kv_cache(cfg: RunConfig, facts: ModelFacts, rank: RankMemory, device: str, gpu: int | None) -> KvCache:
    """A token keeps keys and values of the rank's heads in every layer; with latent attention, on every rank, the
    latent vector and the rotated part of its key (arXiv 2405.04434 section 2.1.4). Of its share of the GPU the engine
    takes weights and what a step of max_num_batched_tokens computes with first, about."""
    rollout, size = cfg.actor_rollout_ref.rollout, DTYPE_BYTES[cfg.actor_rollout_ref.model.dtype]
    if facts.latent:
        of_layer = facts.latent.kv_rank + facts.latent.rope_dim
    else:
        of_layer = 2 * max(1, facts.num_kv_heads // rollout.tensor_model_parallel_size) * facts.head_dim
    room: int | None = int(rollout.cpu_kv_cache_gib * 2**30)
    if device == "cuda":
        room = None
        if gpu is not None:
            room = int(rollout.gpu_memory_utilization * gpu) - rank.rollout_weights - _engine_step(cfg, facts, size)
    longest = rollout.max_model_len or cfg.data.max_prompt_length + cfg.data.max_response_length
    return KvCache(facts.num_layers * of_layer * size, room, longest, rollout.max_num_seqs)


def _engine_step(cfg: RunConfig, facts: ModelFacts, size: int) -> int:
    """Hidden states and the widest MLP of a step's tokens, and float32 logits and logprobs of its sequences."""
    rollout = cfg.actor_rollout_ref.rollout
    tp = rollout.tensor_model_parallel_size
    experts = facts.experts_per_token * (3 * facts.moe_intermediate_size // tp + facts.hidden_size)
    of_token = 3 * facts.hidden_size + max(experts, *(3 * width // tp for width in facts.dense_mlps.values()), 0)
    logits = rollout.max_num_seqs * facts.vocab_size * (size + 8)
    return max(rollout.max_num_batched_tokens, rollout.max_num_seqs) * of_token * size + logits


def activations(cfg: RunConfig, model_config: Mapping[str, Any], device: str) -> dict[str, tuple[Activations, int]]:
    """Of the models that are trained, by name: in training, and the most without gradients."""
    ref = cfg.actor_rollout_ref
    megatron, size = ref.actor.megatron, DTYPE_BYTES[ref.model.dtype]
    limit = ref.rollout.log_prob_max_token_len_per_gpu or ref.actor.ppo_max_token_len_per_gpu
    layout, repeats = trainer_layout(cfg), repeats_keys(megatron.attention_backend)
    again = "full" if ref.model.enable_gradient_checkpointing else megatron.recompute_modules
    policy = Model(model_facts(model_config), layout, size, device, recompute=again, repeats_keys=repeats)
    batch = microbatch(cfg, ref.actor)
    alone = replace(batch, tokens=min(limit, batch.tokens), predicted=min(limit, batch.predicted))
    found = {"policy": (policy.of_training(batch), policy.of_inference(alone))}
    if needs_critic(cfg):
        critic = Critic.of(cfg)
        again = "full" if critic.enable_gradient_checkpointing else megatron.recompute_modules
        facts = model_facts(critic_model_config(cfg, model_config))
        model = Model(facts, layout, size, device, recompute=again, repeats_keys=repeats)
        batch = microbatch(cfg, critic)
        found["critic"] = (model.of_training(batch, head=False), model.of_inference(batch))
    return found


def microbatch(cfg: RunConfig, model: ActorConfig | Critic) -> Microbatch:
    """The largest of an optimizer step: by the token budget, the number of sequences, and how many there are at all."""
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    sequences = -(-model.ppo_mini_batch_size * cfg.actor_rollout_ref.rollout.n // trainer_layout(cfg).dp)
    if model.ppo_micro_batch_size_per_gpu is not None:
        sequences = min(sequences, model.ppo_micro_batch_size_per_gpu)
    tokens = min(model.ppo_max_token_len_per_gpu, sequences * longest)
    return Microbatch(tokens, tokens, longest)


def phases(cfg: RunConfig, model_config: Mapping[str, Any], rank: RankMemory, gpu: int | None) -> dict[str, int]:
    """Bytes that each phase of a step takes of a rank's GPU at most, `BESIDES_BYTES` included. A save is written while
    the engine generates or the trainer sleeps, and takes nothing. What leaves by "auto" stays where there is room."""
    rollout, megatron, critic = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.actor.megatron, Critic.of(cfg)
    gradients = ((megatron.grad_offload, rank.gradients), (critic.grad_offload, rank.critic_gradients))
    staying = sum(size for leaves, size in (*kept_on_host(cfg, rank), *gradients) if not leaves)
    engine = max(rank.rollout_weights, int(rollout.gpu_memory_utilization * gpu) if gpu else 0)
    weights = rank.trainer_weights + rank.reference_weights + rank.critic_weights
    # Otherwise the engine has no memory while the trainer works, but for experts that are the trainer's too.
    awake = 0 if rollout.free_cache_engine else engine
    if rollout.free_cache_engine and cfg.reshard.in_place_experts:
        awake = rank.rollout_weights
    made = activations(cfg, model_config, "cuda").values()
    state = rank.total - rank.rollout_weights
    gone = sum(size for leaves, size in gradients if leaves)
    found = {
        "generate": staying + engine,
        "publish": state - gone + rank.rollout_weights + 2 * cfg.reshard.bucket_bytes,
        "logprobs": max(weights, staying) + awake + max(alone for _, alone in made),
        "update": state + awake + max(trained.peak for trained, _ in made),
    }
    return {name: size + BESIDES_BYTES for name, size in found.items()}


def too_full(cfg: RunConfig, model_config: Mapping[str, Any], rank: RankMemory, gpu: int | None) -> Iterator[str]:
    """Phases for which a GPU is too small, and the knobs to turn; nothing where its memory isn't known."""
    if gpu is None:
        return
    for name, size in phases(cfg, model_config, rank, gpu).items():
        if size > gpu:
            yield f"{name} takes about {readable(size)} of a GPU's {readable(gpu)}; {_FIXES[name]}"


def impossible(
    cfg: RunConfig, model_config: Mapping[str, Any], device: str, rank: RankMemory | None = None
) -> Iterator[str]:
    """What is certain not to fit: on GPUs state alone, without activations or anything else; on a CPU, whose KV cache
    has the size that is asked for, one sequence. `rank`: the fullest, where that is at hand."""
    rank = rank or fullest(rank_memory(cfg, model_config))
    if device == "cpu":
        cache = kv_cache(cfg, model_facts(model_config), rank, device, None)
        yield from cramped(cache, device) if (cache.sequences or 0) < 1 else ()
        return
    gpu, state = gpu_bytes(cfg), rank.total - rank.rollout_weights
    if gpu is not None and state > gpu:
        yield (
            f"weights, gradients and optimizer of a rank take {readable(state)} while it trains, more than a GPU's "
            f"{readable(gpu)} (cluster.gpu_memory_gib); raise trainer.nnodes or a parallel size of {_ACTOR}.megatron"
        )


def doubtful(
    cfg: RunConfig, model_config: Mapping[str, Any], device: str, rank: RankMemory | None = None
) -> Iterator[str]:
    """What may not fit: phases of a step, and the KV cache. `rank` as in `impossible`."""
    rank = rank or fullest(rank_memory(cfg, model_config))
    gpu = gpu_bytes(cfg) if device == "cuda" else None
    if device == "cuda":
        yield from too_full(cfg, model_config, rank, gpu)
    yield from cramped(kv_cache(cfg, model_facts(model_config), rank, device, gpu), device)


def cramped(cache: KvCache, device: str) -> Iterator[str]:
    """What the KV cache has no room for: a longest sequence, which the engine refuses, or as many as may be decoded."""
    key = f"{_ROLLOUT}.cpu_kv_cache_gib" if device == "cpu" else f"{_ROLLOUT}.gpu_memory_utilization"
    if cache.sequences is None or cache.sequences >= cache.at_once:
        return
    if cache.sequences < 1:
        needed = cache.token_bytes * cache.longest
        yield (
            f"the KV cache has room for {readable(max(0, cache.room or 0))}, a sequence of {cache.longest} tokens "
            f"takes {readable(needed)}: the engine will refuse to start; raise {key} or "
            f"{_ROLLOUT}.tensor_model_parallel_size, or lower data.max_response_length"
        )
    else:
        yield (
            f"the KV cache holds {cache.sequences:.0f} sequences of {cache.longest} tokens, fewer than "
            f"{_ROLLOUT}.max_num_seqs={cache.at_once}: if all grow that long, some are computed anew; raise {key} "
            "or lower max_num_seqs"
        )
