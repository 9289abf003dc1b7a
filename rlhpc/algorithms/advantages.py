"""Advantage estimators. Pure functions of a whole step's trajectories, run on the driver.

Each takes rewards float [B, T], mask [B, T] (1 on response tokens) and group_ids int [B] (equal for the
samples of one prompt) and returns (advantages, returns), both float32 [B, T] and 0 where the mask is 0.
Outcome estimators score a trajectory by the sum of its row of rewards. Formulas and constants are verl 0.9's
(trainer/ppo/core_algos.py); group statistics are float64, so that a group of equal rewards gets advantages of
exactly zero.

A new estimator is one function of (rewards, mask, group_ids, options), registered by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.algorithms.registry import Registry
from rlhpc.algorithms.statistics import masked_whiten
from rlhpc.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """What estimators may need beyond the rewards."""

    values: Tensor | None  # [B, T], the critic's
    gamma: float
    lam: float
    norm_by_std: bool
    eps: float
    baselines: Tensor | None  # [B], e.g. the reward of a greedy sample


Estimate = Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Estimator:
    """An estimator with the public signature around its formula."""

    estimate: Estimate

    @torch.no_grad()
    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        group_ids: Tensor,
        *,
        values: Tensor | None = None,
        gamma: float = 1.0,
        lam: float = 1.0,
        norm_by_std: bool = True,
        eps: float = 1e-6,
        baselines: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(advantages, returns), float32 [B, T]. Raises ConfigError where a needed input is missing."""
        assert rewards.shape == mask.shape and rewards.shape[:1] == group_ids.shape
        mask = (mask > 0).float()
        options = Options(values, gamma, lam, norm_by_std, eps, baselines)
        advantages, returns = self.estimate(rewards.float(), mask, group_ids, options)
        return advantages.float() * mask, returns.float() * mask


ESTIMATORS: Registry[Estimator] = Registry("algorithm.adv_estimator")


def register(name: str) -> Callable[[Estimate], Estimate]:
    """Adds a formula to ESTIMATORS."""

    def decorate(estimate: Estimate) -> Estimate:
        ESTIMATORS.add(name, Estimator(estimate))
        return estimate

    return decorate


def group_sum(values: Tensor, group_ids: Tensor) -> Tensor:
    """The sum over its group, at each member: float64 [B] of [B]."""
    ids, index = torch.unique(group_ids, return_inverse=True)
    totals = torch.zeros(len(ids), dtype=torch.float64, device=values.device)
    return totals.index_add_(0, index, values.double())[index]


def _scores_and_mean(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, their group's mean and the group's size, each [B]. A group of one has mean 0: it has no baseline."""
    scores = rewards.double().sum(-1)
    size = group_sum(torch.ones_like(scores), group_ids)
    mean = torch.where(size > 1, group_sum(scores, group_ids) / size, 0.0)
    return scores, mean, size


def _outcome(advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    tokens = advantages.unsqueeze(-1).float() * mask
    return tokens, tokens


@register("grpo")
def grpo(rewards: Tensor, mask: Tensor, group_ids: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(R - mean) / (std + eps) within the group, unbiased std, 1 for a group of one (DeepSeekMath, arXiv
    2402.03300). Without std it is Dr. GRPO's (arXiv 2503.20783)."""
    scores, mean, size = _scores_and_mean(rewards, group_ids)
    if not options.norm_by_std:
        return _outcome(scores - mean, mask)
    squares = group_sum((scores - mean).square(), group_ids)
    std = torch.where(size > 1, (squares / (size - 1).clamp(min=1)).sqrt(), 1.0)
    return _outcome((scores - mean) / (std + options.eps), mask)


@register("rloo")
def rloo(rewards: Tensor, mask: Tensor, group_ids: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """R minus the mean of the group's others (arXiv 2402.14740), which is n/(n-1)·(R - mean)."""
    scores, mean, size = _scores_and_mean(rewards, group_ids)
    return _outcome(torch.where(size > 1, size / (size - 1).clamp(min=1), 1.0) * (scores - mean), mask)


@register("opo")
def opo(rewards: Tensor, mask: Tensor, group_ids: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """R minus the group's length-weighted mean reward, the variance-optimal baseline of arXiv 2505.23585."""
    scores, _, size = _scores_and_mean(rewards, group_ids)
    lengths = mask.double().sum(-1)
    baseline = group_sum(lengths * scores, group_ids) / group_sum(lengths, group_ids).clamp(min=1)
    return _outcome(scores - torch.where(size > 1, baseline, 0.0), mask)


@register("gpg")
def gpg(rewards: Tensor, mask: Tensor, group_ids: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """α(R - mean), α = B / number of non-zero scores (arXiv 2504.02546), with its F_norm of 1."""
    scores, mean, _ = _scores_and_mean(rewards, group_ids)
    return _outcome(len(scores) / scores.count_nonzero().clamp(min=1) * (scores - mean), mask)


@register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """R - mean, then whitened over the batch's tokens (arXiv 2501.03262)."""
    scores, mean, _ = _scores_and_mean(rewards, group_ids)
    advantages = masked_whiten((scores - mean).unsqueeze(-1) * mask, mask)
    return advantages, advantages


@register("reinforce_plus_plus")
def reinforce_plus_plus(rewards: Tensor, mask: Tensor, group_ids: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Discounted returns, whitened over the batch's tokens (arXiv 2501.03262). Masked tokens are stepped over."""
    returns, running = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t] > 0, rewards[:, t] + options.gamma * running, running)
        returns[:, t] = running
    return masked_whiten(returns, mask), returns


@register("remax")
def remax(rewards: Tensor, mask: Tensor, group_ids: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return to go minus the reward of the prompt's greedy sample, `baselines` [B] (arXiv 2310.10505)."""
    if options.baselines is None:
        raise ConfigError("adv_estimator=remax needs baselines [B], the rewards of greedy samples; got none")
    returns = (rewards * mask).flip(-1).cumsum(-1).flip(-1)
    return returns - options.baselines.float().unsqueeze(-1), returns


@register("gae")
def gae(rewards: Tensor, mask: Tensor, group_ids: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), whitened; returns are the unwhitened advantages +
    values. Masked tokens are stepped over."""
    if options.values is None:
        raise ConfigError("adv_estimator=gae needs a critic's values [B, T]; got none. Choose grpo or rloo without one")
    values = torch.where(mask > 0, options.values.float(), 0.0)
    advantages = torch.zeros_like(rewards)
    next_value, running = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + options.gamma * next_value - values[:, t]
        on = mask[:, t] > 0
        running = torch.where(on, delta + options.gamma * options.lam * running, running)
        next_value = torch.where(on, values[:, t], next_value)
        advantages[:, t] = running
    return masked_whiten(advantages, mask), advantages + values
