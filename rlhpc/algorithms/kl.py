"""Per-token estimators of KL(policy ‖ reference) from logprobs of sampled tokens
(joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.algorithms.statistics import MAX_LOG_RATIO, masked_mean
from rlhpc.errors import ConfigError

_CANONICAL = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
KL_KINDS = tuple(_CANONICAL) + tuple(kind + "+" for kind in _CANONICAL)
MAX_K3 = 10.0


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """KL estimate in nats per token, float32 [B, T].

    With d = logprobs - ref_logprobs: k1 (kl) is d, abs is |d|, k2 (mse) is d²/2, k3 (low_var_kl) is exp(-d) +
    d - 1 with d clamped to ±20 and the result to at most 10. k1 and k3 estimate KL's value, but the gradient
    of neither is an estimate of KL's gradient, while k2's is: a "+" suffix keeps the kind's value and takes
    k2's gradient. Raises ConfigError for another kind. (verl 0.9, trainer/ppo/core_algos.py.)
    """
    base = _CANONICAL.get(kind.removesuffix("+"))
    if base is None:
        raise ConfigError(f"KL kind {kind!r} is unknown; choose {', '.join(_CANONICAL)}, each also with a '+' suffix")
    difference = logprobs.float() - ref_logprobs.float()
    k2 = 0.5 * difference.square()
    if base == "k1":
        value = difference
    elif base == "abs":
        value = difference.abs()
    elif base == "k2":
        value = k2
    else:
        log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = (log_ratio.exp() - log_ratio - 1).clamp(-MAX_K3, MAX_K3)
    return k2 - k2.detach() + value.detach() if kind.endswith("+") else value


def adapted_coef(coef: float, kl: float, *, target: float, horizon: int, num_samples: int) -> float:
    """The coefficient for the step after one of `num_samples` whose mean KL was `kl`: it follows the error relative to
    `target`, at most a fifth of it, by num_samples / horizon (arXiv 1909.08593 section 2.2)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)


@torch.no_grad()
def penalize_rewards(
    rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: str, coef: float
) -> tuple[Tensor, dict[str, float]]:
    """Rewards [B, T] minus coef·KL at each response token, and the penalty's metrics
    (`algorithm.use_kl_in_reward`)."""
    mask = (mask > 0).float()
    penalty = torch.where(mask > 0, kl_penalty(logprobs, ref_logprobs, kind), 0.0)
    rows = mask.sum(-1) > 0
    mean = masked_mean(penalty, mask, -1).sum() / rows.sum().clamp(min=1)
    metrics = {"actor/reward_kl_penalty": float(mean), "actor/reward_kl_penalty_coeff": coef}
    return rewards.float() - coef * penalty, metrics
