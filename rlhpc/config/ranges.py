"""What single leaves may hold: numbers within bounds, names out of a registry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from functools import reduce
from typing import Any

from rlhpc.config.schema import RunConfig

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

AT_LEAST_1 = (
    *(
        f"{_ACTOR}.megatron.{kind}_parallel_size"
        for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    ),
    f"{_ACTOR}.ppo_mini_batch_size",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_ACTOR}.ppo_epochs",
    f"{_ROLLOUT}.n",
    f"{_ROLLOUT}.tensor_model_parallel_size",
    f"{_ROLLOUT}.expert_parallel_size",
    f"{_ROLLOUT}.max_num_seqs",
    f"{_ROLLOUT}.max_num_batched_tokens",
    f"{_ROLLOUT}.max_model_len",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.val_kwargs.n",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu",
    "critic.ppo_epochs",
    "data.train_batch_size",
    "data.gen_batch_size",
    "algorithm.kl_ctrl.horizon",
    "data.val_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "reward.num_workers",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "checkpoint.keep",
    "reshard.bucket_bytes",
    "cluster.nodes",
    "cluster.cpus_per_node",
    "cluster.cpus_per_rank",
    "cluster.threads_per_rank",
    "cluster.object_store_bytes",
    "launch.time_min",
    "launch.array_parallelism",
    "launch.max_attempts_without_progress",
)
AT_LEAST_0 = (
    *(
        f"{model}.optim.{name}"
        for model in (_ACTOR, "critic")
        for name in ("lr", "min_lr", "lr_warmup_steps", "weight_decay", "clip_grad")
    ),
    f"{_ACTOR}.kl_loss_coef",
    f"{_ACTOR}.megatron.moe_aux_loss_coeff",
    f"{_ACTOR}.megatron.moe_router_bias_update_rate",
    f"{_ROLLOUT}.chunk_prompts",
    "algorithm.kl_ctrl.kl_coef",
    "reward.overlong_buffer.penalty_factor",
    "checkpoint.keep_every",
    "checkpoint.keep_best",
    "reshard.verify_every",
    "trainer.log_val_generations",
    "trainer.critic_warmup",
    "launch.stop_lead_s",
    "seed",
)
ABOVE_0 = (
    f"{_ACTOR}.optim.eps",
    "critic.optim.eps",
    "critic.cliprange_value",
    "critic.loss_scale_factor",
    f"{_ACTOR}.clip_ratio_high",
    f"{_ACTOR}.loss_scale_factor",
    "algorithm.kl_ctrl.target_kl",
    f"{_ROLLOUT}.cpu_kv_cache_gib",
    "reward.timeout_s",
    "cluster.collective_timeout_s",
    "cluster.gpu_memory_gib",
    "cluster.memory_gib_per_node",
    "cluster.start_timeout_s",
)
SHARES = (  # above 0, at most 1
    f"{_ROLLOUT}.top_p",
    f"{_ROLLOUT}.val_kwargs.top_p",
    f"{_ROLLOUT}.gpu_memory_utilization",
    f"{_ACTOR}.clip_ratio",
    f"{_ACTOR}.clip_ratio_low",
)
OFF_OR_AT_LEAST_1 = (  # -1 is off
    f"{_ROLLOUT}.top_k",
    f"{_ROLLOUT}.val_kwargs.top_k",
    "data.val_max_samples",
    "trainer.save_freq",
    "trainer.test_freq",
)
ATTENTION_BACKENDS = ("auto", "fused", "flash", "local")
UNIT = ("algorithm.gamma", "algorithm.lam")  # from 0 to 1


# vLLM (0.24 to 0.32, sampling_params.py) refuses temperatures above 2, and without a word raises those below 0.01
# to 0.01, with which the trainer's logits would no longer agree.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0


def out_of_range(cfg: RunConfig) -> Iterator[str]:
    """A line for every number outside its bounds."""
    bounds: tuple[tuple[Sequence[str], Callable[[Any], bool], str], ...] = (
        (AT_LEAST_1, lambda v: v >= 1, "set at least 1"),
        (AT_LEAST_0, lambda v: v >= 0, "set at least 0"),
        (ABOVE_0, lambda v: v > 0, "set it above 0"),
        (SHARES, lambda v: 0 < v <= 1, "set it above 0 and at most 1"),
        (OFF_OR_AT_LEAST_1, lambda v: v == -1 or v >= 1, "set -1 (off) or at least 1"),
        (UNIT, lambda v: 0 <= v <= 1, "set it from 0 to 1"),
        (
            (f"{_ROLLOUT}.temperature",),
            lambda v: LOWEST_TEMPERATURE <= v <= HIGHEST_TEMPERATURE,
            f"vLLM samples at {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE:g}: set one of these",
        ),
        (
            (f"{_ROLLOUT}.val_kwargs.temperature",),
            lambda v: v == 0 or LOWEST_TEMPERATURE <= v <= HIGHEST_TEMPERATURE,
            f"vLLM samples at {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE:g}: set one of these, or 0 (greedy)",
        ),
        ((f"{_ACTOR}.clip_ratio_c",), lambda v: v > 1, "dual clip needs more than 1, such as 3"),
    )
    for keys, holds, fix in bounds:
        for key in keys:
            if (value := value_of(cfg, key)) is not None and not holds(value):
                yield f"{key}={value} is out of range; {fix}"
    if "" in cfg.actor_rollout_ref.rollout.stop:
        yield f"{_ROLLOUT}.stop={cfg.actor_rollout_ref.rollout.stop} has an empty string; remove it"
    for key in (f"{_ACTOR}.megatron", "critic.megatron"):
        for name in ("param_offload", "optimizer_offload"):
            if (value := value_of(cfg, f"{key}.{name}")) not in (True, False, "auto", None):
                yield f"{key}.{name}={value!r} is unknown; choose true, false or auto"
    for key in (f"{_ACTOR}.optim.betas", "critic.optim.betas"):
        if len(betas := value_of(cfg, key)) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield f"{key}={betas} must be two numbers from 0 to below 1, such as [0.9, 0.999]"


def unknown_names(cfg: RunConfig) -> Iterator[str]:
    """A line for every name that its registry doesn't know."""
    for key, known in _registries().items():
        value = value_of(cfg, key)
        for name in value if isinstance(value, list) else [value]:
            if name is not None and name not in known:
                near = get_close_matches(name, known, n=1, cutoff=0.7)
                hint = f"did you mean {near[0]}? " if near else ""
                yield f"{key}={name!r} is unknown; {hint}choose {', '.join(sorted(known))}"


def value_of(cfg: RunConfig, key: str) -> Any:
    """The value at a dotted key."""
    return reduce(getattr, key.split("."), cfg)


def _registries() -> dict[str, Collection[str]]:
    from rlhpc.algorithms.advantages import ESTIMATORS
    from rlhpc.algorithms.corrections import LEVELS
    from rlhpc.algorithms.groups import METRICS
    from rlhpc.algorithms.kl import KL_KINDS
    from rlhpc.algorithms.losses import AGG_MODES, POLICY_LOSSES
    from rlhpc.metrics.reporter import LOGGERS

    return {
        "actor_rollout_ref.model.dtype": ("float32", "bfloat16"),
        f"{_ACTOR}.loss_agg_mode": AGG_MODES,
        f"{_ACTOR}.kl_loss_type": KL_KINDS,
        f"{_ACTOR}.policy_loss.loss_mode": POLICY_LOSSES,
        f"{_ACTOR}.megatron.attention_backend": ATTENTION_BACKENDS,
        f"{_ACTOR}.megatron.router_replay.mode": ("disabled", "R2", "R3"),
        f"{_ACTOR}.optim.lr_decay_style": ("constant", "linear", "cosine"),
        "critic.optim.lr_decay_style": ("constant", "linear", "cosine"),
        "critic.loss_agg_mode": AGG_MODES,
        f"{_ROLLOUT}.name": ("vllm",),
        "reshard.sink": ("direct", "reference"),
        "algorithm.adv_estimator": ESTIMATORS,
        "algorithm.kl_penalty": KL_KINDS,
        "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
        "algorithm.filter_groups.metric": METRICS,
        "algorithm.rollout_correction.rollout_is": LEVELS,
        "checkpoint.best_mode": ("max", "min"),
        "resume.what": ("weights", "all"),
        "trainer.logger": LOGGERS,
        "trainer.device": ("auto", "cpu", "cuda"),
        "trainer.resume_mode": ("auto", "disable", "resume_path"),
        "trainer.wandb_mode": ("online", "offline", "disabled"),
        "launch.mode": ("local", "slurm", "allocation"),
    }
