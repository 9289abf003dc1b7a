"""How many optimizer steps a run has, and what learning-rate schedules need to know of that."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhpc.config.critic import Critic, needs_critic
from rlhpc.config.schema import ActorConfig, OptimConfig, RunConfig


def optimizer_steps(cfg: RunConfig, model: ActorConfig | Critic) -> int | None:
    """Of the whole run, if the config says how long it is."""
    steps = cfg.trainer.total_training_steps
    if steps is None:
        return None
    if not isinstance(model, Critic):
        steps -= max(0, cfg.trainer.critic_warmup - 1)  # they train the critic alone
    return steps * updates_per_step(cfg, model)


def updates_per_step(cfg: RunConfig, model: ActorConfig | Critic) -> int:
    return math.ceil(cfg.data.train_batch_size / model.ppo_mini_batch_size) * model.ppo_epochs


def schedule_problems(cfg: RunConfig) -> Iterator[str]:
    """A line for each schedule that doesn't fit the run."""
    actor, warmup, total = cfg.actor_rollout_ref.actor, cfg.trainer.critic_warmup, cfg.trainer.total_training_steps
    if needs_critic(cfg):
        yield from _problems("critic.optim", cfg.critic.optim, optimizer_steps(cfg, Critic.of(cfg)))
        if total is not None and warmup > total:
            yield (
                f"trainer.critic_warmup={warmup} is beyond trainer.total_training_steps={total}: no step would train "
                "the policy; set at most that"
            )
            return
    yield from _problems("actor_rollout_ref.actor.optim", actor.optim, optimizer_steps(cfg, actor))


def _problems(key: str, optim: OptimConfig, steps: int | None) -> Iterator[str]:
    if optim.lr_decay_style != "constant" and steps is None:
        yield (
            f"{key}.lr_decay_style={optim.lr_decay_style} must know where it ends; set trainer.total_training_steps, "
            "or lr_decay_style=constant"
        )
    if steps is not None and optim.lr_warmup_steps >= steps:
        yield (
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} must be below the {steps} optimizer steps of the run; "
            "lower it, or raise trainer.total_training_steps"
        )
