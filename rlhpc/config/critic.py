"""PPO's critic: what its section means where it leaves a thing to the actor's, and what it may not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhpc.config.batch_fit import mini_batch_problems, too_long
from rlhpc.config.model_dir import read_model_config
from rlhpc.config.model_fit import recomputable
from rlhpc.config.parallel import trainer_layout
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError, ModelError

SIZES = tuple(
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)

_MEGATRON = "actor_rollout_ref.actor.megatron"

T = TypeVar("T")


@dataclass(frozen=True)
class Critic:
    """The critic section, with the actor's settings where it has none of its own."""

    path: Path
    enable_gradient_checkpointing: bool
    ppo_mini_batch_size: int
    ppo_micro_batch_size_per_gpu: int | None
    ppo_max_token_len_per_gpu: int
    forward_micro_batch_size_per_gpu: int | None
    forward_max_token_len_per_gpu: int
    ppo_epochs: int
    shuffle: bool
    cliprange_value: float
    loss_agg_mode: str
    loss_scale_factor: float | None
    param_offload: bool | str
    optimizer_offload: bool | str
    grad_offload: bool

    @staticmethod
    def of(cfg: RunConfig) -> Critic:
        critic, actor, model = cfg.critic, cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.model
        own, actors = critic.megatron, actor.megatron
        return Critic(
            path=Path(_or(critic.model.path, model.path)),
            enable_gradient_checkpointing=_or(
                critic.model.enable_gradient_checkpointing, model.enable_gradient_checkpointing
            ),
            ppo_mini_batch_size=_or(critic.ppo_mini_batch_size, actor.ppo_mini_batch_size),
            ppo_micro_batch_size_per_gpu=critic.ppo_micro_batch_size_per_gpu,
            ppo_max_token_len_per_gpu=critic.ppo_max_token_len_per_gpu,
            forward_micro_batch_size_per_gpu=_or(
                critic.forward_micro_batch_size_per_gpu, critic.ppo_micro_batch_size_per_gpu
            ),
            forward_max_token_len_per_gpu=_or(critic.forward_max_token_len_per_gpu, critic.ppo_max_token_len_per_gpu),
            ppo_epochs=_or(critic.ppo_epochs, actor.ppo_epochs),
            shuffle=_or(critic.shuffle, actor.shuffle),
            cliprange_value=critic.cliprange_value,
            loss_agg_mode=_or(critic.loss_agg_mode, actor.loss_agg_mode),
            loss_scale_factor=_or(critic.loss_scale_factor, actor.loss_scale_factor),
            param_offload=_or(own.param_offload, actors.param_offload),
            optimizer_offload=_or(own.optimizer_offload, actors.optimizer_offload),
            grad_offload=_or(own.grad_offload, actors.grad_offload),
        )


def _or(own: T | None, actors: T) -> T:
    return actors if own is None else own


def needs_critic(cfg: RunConfig) -> bool:
    return cfg.algorithm.adv_estimator == "gae"


def critic_model_config(cfg: RunConfig, model_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json that the critic is of; `model_config` is the policy's. Raises ModelError as read_model_config."""
    path = cfg.critic.model.path
    return model_config if path is None else read_model_config(path, key="critic.model.path")


def critic_problems(cfg: RunConfig, model_config: Mapping[str, Any], world_size: int) -> Iterator[str]:
    """A line for each thing that can't be."""
    yield from _switches(cfg)
    if not needs_critic(cfg):
        return
    actors = cfg.actor_rollout_ref.actor.megatron
    for name in SIZES:
        size, wanted = getattr(cfg.critic.megatron, name), getattr(actors, name)
        if size not in (None, wanted):
            yield (
                f"critic.megatron.{name}={size}: the critic has the actor's layout, where it is {wanted}; remove it, "
                f"or set {_MEGATRON}.{name} too"
            )
    critic = Critic.of(cfg)
    yield from mini_batch_problems(cfg, "critic", critic.ppo_mini_batch_size, world_size)
    for name in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"):
        yield from too_long(cfg, f"critic.{name}", getattr(critic, name))
    if cfg.critic.model.path is not None:
        yield from _model(cfg, model_config, world_size)


def _switches(cfg: RunConfig) -> Iterator[str]:
    algorithm, needed = cfg.algorithm, needs_critic(cfg)
    for key, on in (("algorithm.use_critic", algorithm.use_critic), ("critic.enable", cfg.critic.enable)):
        if on and not needed:
            yield (
                f"{key}=true, but algorithm.adv_estimator={algorithm.adv_estimator} looks at no values; set "
                "algorithm.adv_estimator=gae (algorithm=ppo), or remove it"
            )
        if needed and on is False:
            yield (
                f"{key}=false, but algorithm.adv_estimator=gae needs the critic's values; remove it, or use a group "
                "estimator such as algorithm.adv_estimator=grpo"
            )
    if cfg.trainer.critic_warmup and not needed:
        yield (
            f"trainer.critic_warmup={cfg.trainer.critic_warmup} needs a critic; set algorithm.adv_estimator=gae "
            "(algorithm=ppo), or 0"
        )


def _model(cfg: RunConfig, model_config: Mapping[str, Any], world_size: int) -> Iterator[str]:
    from rlhpc.reshard.families import model_facts

    told, policy = f"critic.model.path={cfg.critic.model.path}", model_facts(model_config)
    try:
        config = critic_model_config(cfg, model_config)
    except ModelError as error:
        yield str(error)
        return
    try:
        facts = model_facts(config)
        facts.check_trainer(trainer_layout(cfg, world_size))
    except (ConfigError, ModelError) as error:
        yield f"{told} under {_MEGATRON}'s layout: {error}"
        return
    if facts.vocab_size < policy.vocab_size:
        yield (
            f"{told} knows {facts.vocab_size} tokens, the policy has {policy.vocab_size}; give a model with the same "
            "tokenizer"
        )
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    if longest > facts.max_positions:
        yield f"{told} ends at max_position_embeddings={facts.max_positions}; prompt and response have {longest} tokens"
    modules = cfg.actor_rollout_ref.actor.megatron.recompute_modules
    other = sorted({"moe", "mlp"} & set(modules) - set(recomputable(facts)))
    if other and not Critic.of(cfg).enable_gradient_checkpointing:
        yield (
            f"{told}: its layers have no {other[0]}, which {_MEGATRON}.recompute_modules={modules} has; set "
            "critic.model.enable_gradient_checkpointing=true, or recompute core_attn alone"
        )
