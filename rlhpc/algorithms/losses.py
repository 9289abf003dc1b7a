"""Policy losses and their aggregation. Pure functions of tensors [B, T], float32 inside.

A policy loss is a formula per token (a `Surrogate`) and one shared rest: masking, rollout correction,
aggregation and metrics. A new loss is one function of (logprobs, log_ratio, advantages, mask, clip),
registered by name.

With the global counts of the optimizer step's batch (`num_global_tokens`, `num_global_seqs`) loss, gradient
and metrics of microbatches and data-parallel ranks simply add up to those of the whole batch, however it is
split. `scale` must be given too for seq-mean-token-sum-norm, whose default divisor is the width of the call's
own tensors.

Formulas and constants are verl 0.9's (trainer/ppo/core_algos.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlhpc.algorithms.registry import Registry
from rlhpc.algorithms.statistics import MAX_LOG_RATIO, masked
from rlhpc.errors import ConfigError

AGG_MODES = (
    "token-mean",  # Σ over tokens / tokens
    "token-sum",  # Σ over tokens
    "seq-mean-token-sum",  # mean over sequences of their sums
    "seq-mean-token-mean",  # mean over sequences of their means
    "seq-mean-token-sum-norm",  # mean over sequences of their sums / scale, a constant: Dr. GRPO
)
MAX_LOG_SEQ_RATIO = 10.0


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: str,
    *,
    num_global_tokens: float | None = None,
    num_global_seqs: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Reduces `values` [B, T] over the set entries of `mask` [B, T] to a scalar by one of AGG_MODES.

    The counts default to those of `mask`, where rows without a set entry are not sequences. What is summed
    over calls needs the counts of all calls together. Nothing set aggregates to 0. Raises ConfigError for
    another mode.
    """
    if mode not in AGG_MODES:
        raise ConfigError(f"loss_agg_mode={mode!r} is unknown; choose {', '.join(AGG_MODES)}")
    values, lengths = masked(values.float(), mask), (mask > 0).sum(-1)
    if mode == "token-sum":
        return values.sum()
    if mode == "token-mean":
        return values.sum() / _count(num_global_tokens, lengths)
    sums = values.sum(-1)
    if mode == "seq-mean-token-mean":
        sums = sums / lengths.clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        sums = sums / (mask.shape[-1] if scale is None else scale)
    return sums.sum() / _count(num_global_seqs, lengths > 0)


def _count(given: float | None, counted: Tensor) -> float | Tensor:
    return counted.sum().clamp(min=1) if given is None else max(given, 1)


class Clip(NamedTuple):
    """Ratios are clipped to [1 - low, 1 + high]; for negative advantages the loss is bounded at ratio `dual`."""

    low: float
    high: float
    dual: float


class TokenLoss(NamedTuple):
    """A surrogate's outcome, each [B, T]; `clipped` and `clipped_lower` mark the tokens that the clips changed."""

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor


# (logprobs, log_ratio, advantages, mask, clip); the tensors [B, T] are float32 and 0 where the mask is 0.
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], TokenLoss]


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss with the public signature around its surrogate."""

    surrogate: Surrogate

    def __call__(
        self,
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        clip_c: float = 3.0,
        loss_agg_mode: str = "token-mean",
        rollout_weights: Tensor | None = None,
        num_global_tokens: float | None = None,
        num_global_seqs: float | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, metrics) of [B, T] tensors; only `logprobs` is differentiated.

        `behavior_logprobs` are those that the ratio is taken against. The metrics, actor/{pg_clipfrac,
        pg_clipfrac_lower,ppo_kl}, are token means as scalar tensors without gradient, so that nothing waits
        for the device. Raises ConfigError for clip_c <= 1 or an unknown mode.
        """
        if clip_c <= 1:
            raise ConfigError(f"clip_ratio_c={clip_c} must be > 1, the ratio at which dual clip sets in; 3.0 is usual")
        logprobs, behavior = masked(logprobs.float(), mask), masked(behavior_logprobs.float(), mask).detach()
        advantages = masked(advantages.float(), mask).detach()
        log_ratio = logprobs - behavior
        token = self.surrogate(logprobs, log_ratio, advantages, mask, Clip(clip_low, clip_high, clip_c))
        losses = token.loss if rollout_weights is None else token.loss * rollout_weights.float().detach()
        loss = aggregate(
            losses,
            mask,
            loss_agg_mode,
            num_global_tokens=num_global_tokens,
            num_global_seqs=num_global_seqs,
            scale=scale,
        )
        per_token = {
            "actor/pg_clipfrac": token.clipped,
            "actor/pg_clipfrac_lower": token.clipped_lower,
            "actor/ppo_kl": -log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        }
        return loss, {
            name: aggregate(values, mask, "token-mean", num_global_tokens=num_global_tokens)
            for name, values in per_token.items()
        }


POLICY_LOSSES: Registry[PolicyLoss] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")


def register(name: str) -> Callable[[Surrogate], Surrogate]:
    """Adds a surrogate to POLICY_LOSSES."""

    def decorate(surrogate: Surrogate) -> Surrogate:
        POLICY_LOSSES.add(name, PolicyLoss(surrogate))
        return surrogate

    return decorate


def _pessimistic(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """PPO's max(-A·r, -A·clip(r)) and where the clipped side won."""
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    return torch.maximum(free, clipped), clipped > free


@register("vanilla")
def vanilla(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347 eq. 7) with separate bounds (arXiv 2503.14476 section 3.1)
    and dual clip (arXiv 1912.09729)."""
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss, clipped = _pessimistic(ratio, advantages, clip)
    bound = -advantages * clip.dual
    clipped_lower = (advantages < 0) & (loss > bound)
    return TokenLoss(torch.where(clipped_lower, bound, loss), clipped, clipped_lower)


@register("gspo")
def gspo(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> TokenLoss:
    """Clips the sequence's geometric mean ratio (arXiv 2507.18071 eq. 5-7), in the token form of its section
    4.3: the value is the sequence's ratio, the gradient reaches each token. Meant for seq-mean-token-mean."""
    log_seq_ratio = log_ratio.sum(-1, keepdim=True) / (mask > 0).sum(-1, keepdim=True).clamp(min=1)
    log_token_ratio = logprobs - logprobs.detach() + log_seq_ratio.detach()
    loss, clipped = _pessimistic(log_token_ratio.clamp(max=MAX_LOG_SEQ_RATIO).exp(), advantages, clip)
    return TokenLoss(loss, clipped, torch.zeros_like(clipped))


@register("cispo")
def cispo(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> TokenLoss:
    """-sg(clip(r))·A·logπ: clips the weight and keeps every token's gradient (arXiv 2506.13585 eq. 4-5)."""
    ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    clipped = weight != ratio
    return TokenLoss(-weight * advantages * logprobs, clipped, torch.zeros_like(clipped))


@register("gpg")
def gpg(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> TokenLoss:
    """-A·logπ, the plain policy gradient (arXiv 2504.02546); nothing is clipped."""
    never = torch.zeros_like(mask, dtype=torch.bool)
    return TokenLoss(-advantages * logprobs, never, never)
