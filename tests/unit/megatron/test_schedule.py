"""Learning rates of the k-th update by hand, and what the settings refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhpc.backends.megatron.optimizer import _schedule
from rlhpc.config.critic import Critic
from rlhpc.config.schedule import optimizer_steps
from rlhpc.config.schema import OptimConfig, RunConfig
from rlhpc.errors import ConfigError


def rates(total_steps: int | None, steps: int, **settings: Any) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    schedule = _schedule(optimizer, OptimConfig(lr=8.0, **settings), total_steps)
    found = []
    for _ in range(steps):
        schedule.step(increment=1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_constant_after_warm_up() -> None:
    assert rates(None, 5, lr_warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0]


def test_linear_decay_ends_at_the_minimum() -> None:
    """Two steps of warm-up, then from 8 to 2 over four."""
    settings = {"lr_warmup_steps": 2, "lr_decay_style": "linear", "min_lr": 2.0}
    assert rates(6, 8, **settings) == [4.0, 8.0, 6.5, 5.0, 3.5, 2.0, 2.0, 2.0]


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    root = 0.5**0.5  # cos(pi / 4)
    expected = [4 * (1 + root), 4.0, 4 * (1 - root), 0.0]
    assert rates(4, 4, lr_decay_style="cosine") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("total", "settings", "message"),
    [
        (None, {"lr_decay_style": "cosine"}, "trainer.total_training_steps"),
        (9, {"lr_decay_style": "step"}, "choose constant, linear, cosine"),
        (3, {"lr_decay_style": "linear", "lr_warmup_steps": 3}, "lr_warmup_steps=3 must be below the 3"),
    ],
)
def test_refusals(total: int | None, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rates(total, 1, **settings)


def test_steps_of_the_run() -> None:
    """10 training steps of 100 prompts in minibatches of 32, twice over: 10 * 4 * 2 updates; the critic's of 50. Two
    steps of a warm-up are the critic's alone."""
    cfg = RunConfig()
    actor = cfg.actor_rollout_ref.actor
    assert optimizer_steps(cfg, actor) is None
    cfg.trainer.total_training_steps, cfg.data.train_batch_size = 10, 100
    actor.ppo_mini_batch_size, actor.ppo_epochs = 32, 2
    assert optimizer_steps(cfg, actor) == optimizer_steps(cfg, Critic.of(cfg)) == 80
    cfg.critic.ppo_mini_batch_size, cfg.critic.ppo_epochs = 50, 1
    assert optimizer_steps(cfg, Critic.of(cfg)) == 20
    cfg.trainer.critic_warmup = 3
    assert (optimizer_steps(cfg, actor), optimizer_steps(cfg, Critic.of(cfg))) == (64, 20)
