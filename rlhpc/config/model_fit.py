"""Whether trainer and engine can share out a model as configured, and have what computes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhpc.config.schema import RunConfig
from rlhpc.layout.parallel import divisors

if TYPE_CHECKING:
    from rlhpc.reshard.families import ModelFacts

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vLLM 0.32, attention/backends/cpu_attn.py
CPU_LATENT = (512, 64)  # its mla/cpu_mla.py

_ROLLOUT, _MEGATRON = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
_ROLLOUT_TP = f"{_ROLLOUT}.tensor_model_parallel_size"


def choose(choices: list[int]) -> str:
    shown = choices if len(choices) <= 8 else [*choices[:7], "..."]
    return f"choose {', '.join(map(str, shown))}"


def must_divide(key: str, value: int, name: str, total: int) -> Iterator[str]:
    if total % value:
        yield f"{key}={value} must divide {name}={total}; {choose(divisors(total))}"


def trainer_problems(cfg: RunConfig) -> Iterator[str]:
    """What Megatron has and rlhpc's trainer doesn't."""
    megatron = cfg.actor_rollout_ref.actor.megatron
    if megatron.context_parallel_size != 1:
        yield f"{_MEGATRON}.context_parallel_size={megatron.context_parallel_size}: not available yet; set 1"
    if not megatron.use_distributed_optimizer:
        yield f"{_MEGATRON}.use_distributed_optimizer=false is not available; set true"


def engine_problems(cfg: RunConfig, facts: ModelFacts, num_ranks: int, device: str) -> Iterator[str]:
    """What the engine's replicas can't be on `num_ranks` ranks of this `device`."""
    rollout = cfg.actor_rollout_ref.rollout
    ep, tp = rollout.expert_parallel_size, rollout.tensor_model_parallel_size
    told = f"{_ROLLOUT}.expert_parallel_size={ep}"
    if num_ranks % tp:
        yield (
            f"{_ROLLOUT_TP}={tp} must divide the {num_ranks} ranks (trainer.nnodes * trainer.n_gpus_per_node); "
            f"{choose(divisors(num_ranks))}"
        )
    # vLLM has one switch: the ranks of a replica hold whole experts, or each holds a part of every expert.
    if ep not in (1, tp):
        yield f"{told} must be 1 or tensor_model_parallel_size={tp}: experts are spread over a replica or not"
    if ep > 1 and not facts.num_experts:
        yield f"{told} needs a mixture of experts, this model has none; set 1"
    if ep > 1 and device == "cpu":
        yield f"{told} needs GPUs: vLLM's CPU build ends in a segmentation fault with it; set 1"
    if cfg.reshard.in_place_experts and device == "cpu":
        yield (
            "reshard.in_place_experts=true needs GPUs: on a CPU vLLM packs weights into its kernels' layouts; set false"
        )


def model_problems(cfg: RunConfig, facts: ModelFacts, device: str) -> Iterator[str]:
    """What of the configuration this model can't do; `device` is cpu, cuda, or auto where it isn't known yet."""
    megatron = cfg.actor_rollout_ref.actor.megatron
    rollout_tp = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    trainer_tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    for key, tp in ((f"{_MEGATRON}.tensor_model_parallel_size", trainer_tp), (_ROLLOUT_TP, rollout_tp)):
        yield from must_divide(key, tp, "num_attention_heads", facts.num_heads)
        if facts.num_kv_heads % tp and tp % facts.num_kv_heads:
            yield (
                f"{key}={tp} must divide num_key_value_heads={facts.num_kv_heads} or be a multiple of it; "
                f"{choose(divisors(facts.num_kv_heads))} or a multiple of {facts.num_kv_heads}"
            )
    if pp not in facts.stage_counts:
        yield f"{_MEGATRON}.pipeline_model_parallel_size={pp}: {facts.no_stages(pp)}"
    padded_vocab = -(-facts.vocab_size // 64) * 64  # vLLM's padding
    yield from must_divide(_ROLLOUT_TP, rollout_tp, "the padded vocabulary", padded_vocab)
    yield from _head_dims(cfg, facts, device)
    yield from _attention(cfg, device)
    yield from _recompute(cfg, facts)
    yield from _replay(cfg)
    yield from _experts(cfg, facts) if facts.num_experts else _no_experts(cfg)
    for name, width in facts.dense_mlps.items():
        yield from must_divide(f"{_MEGATRON}.tensor_model_parallel_size", trainer_tp, name, width)
        yield from must_divide(_ROLLOUT_TP, rollout_tp, name, width)


def _head_dims(cfg: RunConfig, facts: ModelFacts, device: str) -> Iterator[str]:
    """What vLLM 0.24 (GPU) and 0.32 (CPU) have kernels for."""
    if facts.latent is None:
        if device == "cpu" and facts.head_dim not in CPU_HEAD_DIMS:
            supported = ", ".join(map(str, CPU_HEAD_DIMS))
            yield f"{_ROLLOUT}: vLLM's CPU build has no attention for head_dim={facts.head_dim}, only for {supported}"
        return
    kv_rank, rope_dim, dtype = facts.latent.kv_rank, facts.latent.rope_dim, cfg.actor_rollout_ref.model.dtype
    if device == "cpu" and (kv_rank, rope_dim) != CPU_LATENT:
        yield (
            f"{_ROLLOUT}: vLLM's CPU build has no latent attention for kv_lora_rank={kv_rank} and "
            f"qk_rope_head_dim={rope_dim}, only for {CPU_LATENT[0]} and {CPU_LATENT[1]}"
        )
    if device == "cuda" and dtype != "bfloat16":
        yield f"actor_rollout_ref.model.dtype={dtype}: on GPUs vLLM has latent attention for bfloat16 alone; set that"


def _replay(cfg: RunConfig) -> Iterator[str]:
    keeps = cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay
    mode, key = cfg.actor_rollout_ref.actor.megatron.router_replay.mode, f"{_ROLLOUT}.enable_rollout_routing_replay"
    if mode == "R3" and not keeps:
        yield f"{_MEGATRON}.router_replay.mode=R3 needs {key}=true; or set disabled"
    if mode == "R2" and keeps:
        yield (
            f"{_MEGATRON}.router_replay.mode=R2 replays the trainer's own routing, {key}=true keeps the engine's; set "
            "that false, or mode=R3"
        )


def _attention(cfg: RunConfig, device: str) -> Iterator[str]:
    """What a rank lacks for the backend it finds out itself: Transformer Engine need not be where this runs."""
    backend = cfg.actor_rollout_ref.actor.megatron.attention_backend
    if backend in ("fused", "flash") and device == "cpu":
        yield f"{_MEGATRON}.attention_backend={backend} needs CUDA devices; set auto"


def recomputable(facts: ModelFacts) -> list[str]:
    """Parts of its layers that megatron.recompute_modules may name."""
    dense = facts.num_dense_layers if facts.num_experts else facts.num_layers
    return ["core_attn", *(["moe"] if facts.num_experts else []), *(["mlp"] if dense else [])]


def _recompute(cfg: RunConfig, facts: ModelFacts) -> Iterator[str]:
    ref, parts = cfg.actor_rollout_ref, recomputable(facts)
    if unknown := set(ref.actor.megatron.recompute_modules) - set(parts):
        yield (
            f"{_MEGATRON}.recompute_modules has {', '.join(sorted(unknown))}; a layer of this model has "
            f"{' and '.join(parts)}"
        )
    if ref.actor.megatron.recompute_modules and ref.model.enable_gradient_checkpointing:
        yield (
            f"{_MEGATRON}.recompute_modules={ref.actor.megatron.recompute_modules} adds nothing to "
            "model.enable_gradient_checkpointing=true, which computes whole layers again; set one of them"
        )


def _experts(cfg: RunConfig, facts: ModelFacts) -> Iterator[str]:
    megatron = cfg.actor_rollout_ref.actor.megatron
    rollout, width = cfg.actor_rollout_ref.rollout, facts.moe_intermediate_size
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    yield from must_divide(f"{_MEGATRON}.expert_model_parallel_size", ep, "num_experts", facts.num_experts)
    yield from must_divide(f"{_MEGATRON}.expert_tensor_parallel_size", etp, "moe_intermediate_size", width)
    if facts.sigmoid_routing and megatron.moe_aux_loss_coeff:
        yield (
            f"{_MEGATRON}.moe_aux_loss_coeff={megatron.moe_aux_loss_coeff:g} balances softmax routing; this model's "
            "experts are chosen by sigmoids with correction biases; set 0, or balance with moe_router_bias_update_rate"
        )
    if not facts.sigmoid_routing and megatron.moe_router_bias_update_rate:
        yield (
            f"{_MEGATRON}.moe_router_bias_update_rate={megatron.moe_router_bias_update_rate:g} moves correction "
            "biases, which this model's routers haven't; set 0, or balance with moe_aux_loss_coeff"
        )
    if rollout.expert_parallel_size > 1:
        key = f"{_ROLLOUT}.expert_parallel_size"
        yield from must_divide(key, rollout.expert_parallel_size, "num_experts", facts.num_experts)
    else:
        tp = rollout.tensor_model_parallel_size
        yield from must_divide(_ROLLOUT_TP, tp, "moe_intermediate_size", width)


def _no_experts(cfg: RunConfig) -> Iterator[str]:
    megatron = cfg.actor_rollout_ref.actor.megatron
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if (size := getattr(megatron, name)) != 1:
            yield f"{_MEGATRON}.{name}={size} needs a mixture of experts, this model has none; set 1"
    keeps_routing = cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay
    for key, value, off in (
        (f"{_MEGATRON}.moe_aux_loss_coeff", megatron.moe_aux_loss_coeff, "0"),
        (f"{_MEGATRON}.moe_router_bias_update_rate", megatron.moe_router_bias_update_rate, "0"),
        (f"{_MEGATRON}.freeze_moe_router", megatron.freeze_moe_router, "false"),
        (f"{_ROLLOUT}.enable_rollout_routing_replay", keeps_routing, "false"),
    ):
        if value:
            yield f"{key}={str(value).lower()} needs a mixture of experts, this model has none; set {off}"
    if (mode := megatron.router_replay.mode) != "disabled":
        yield f"{_MEGATRON}.router_replay.mode={mode} needs a mixture of experts, this model has none; set disabled"
