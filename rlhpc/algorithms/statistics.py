"""Masked statistics, and how far the trainer's policy is from the one that sampled."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: beyond it a float32 ratio, and its square, is noise or overflow


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is set, else 0: padding may hold anything, NaN and infinity included."""
    return torch.where(mask > 0, values, torch.zeros_like(values))


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of [B, T] `values` over the set entries of `mask`, along `dim` or over all; 0 where none is set."""
    total, count = masked(values, mask), mask.to(values.dtype)
    if dim is None:
        return total.sum() / count.sum().clamp(min=1)
    return total.sum(dim) / count.sum(dim).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] `values` shifted and scaled to mean 0 and unbiased variance 1 over `mask`; 0 elsewhere.

    The statistics are taken in float64, so that equal values whiten to zeros and not to amplified rounding
    errors. Fewer than two set entries whiten to 0.
    """
    x, weight = masked(values, mask).double(), (mask > 0).double()
    count = weight.sum()
    centred = (x - x.sum() / count.clamp(min=1)) * weight
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + 1e-8)).to(values.dtype)


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(Σw)² / (n·Σw²) over `mask`: 1 for equal weights, 1/n where one weight carries all."""
    w, count = masked(weights, mask), (mask > 0).sum().clamp(min=1)
    return w.sum().square() / (count * w.square().sum()).clamp(min=torch.finfo(w.dtype).tiny)


@torch.no_grad()
def mismatch(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Differences between the two engines' logprobs [B, T] of the same sampled tokens, under verl 0.9's
    names.

    `rollout_corr/kl` and `k3_kl` estimate KL(rollout ‖ trainer) in nats per token; perplexities are per
    sequence and then averaged; `chi2_*` is E[ρ²] - 1 with ρ = π_trainer / π_rollout;
    `training/rollout_probs_diff_*` is about |Δprobability|, `training/rollout_logprobs_diff_*` about
    |Δlogprob|. `ess` is that of the uncapped token ratios. Empty where no token is set. (verl:
    trainer/ppo/rollout_corr_helper.py, utils/debug/metrics.py.)
    """
    rows = mask.sum(-1) > 0
    if not bool(rows.any()):
        return {}
    mask = mask[rows]
    trainer = masked(trainer_logprobs[rows].float(), mask)
    rollout = masked(rollout_logprobs[rows].float(), mask)
    log_ratio = trainer - rollout
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    seq_ratio = log_ratio.sum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    trainer_log_ppl, rollout_log_ppl = -masked_mean(trainer, mask, -1), -masked_mean(rollout, mask, -1)
    log_ppl_diff = trainer_log_ppl - rollout_log_ppl
    selected = mask > 0
    probs = torch.stack((trainer[selected].exp(), rollout[selected].exp()))
    probs_diff, logprobs_diff = (probs[0] - probs[1]).abs(), log_ratio[selected].abs()
    statistics = {
        "rollout_corr/kl": masked_mean(-log_ratio, mask),
        "rollout_corr/k3_kl": masked_mean(ratio - log_ratio - 1, mask),
        "rollout_corr/training_ppl": trainer_log_ppl.exp().mean(),
        "rollout_corr/training_log_ppl": trainer_log_ppl.mean(),
        "rollout_corr/rollout_ppl": rollout_log_ppl.exp().mean(),
        "rollout_corr/rollout_log_ppl": rollout_log_ppl.mean(),
        "rollout_corr/log_ppl_diff": log_ppl_diff.mean(),
        "rollout_corr/log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "rollout_corr/log_ppl_diff_max": log_ppl_diff.max(),
        "rollout_corr/log_ppl_diff_min": log_ppl_diff.min(),
        "rollout_corr/ppl_ratio": log_ppl_diff.exp().mean(),
        "rollout_corr/chi2_token": masked_mean(ratio.square(), mask) - 1,
        "rollout_corr/chi2_seq": seq_ratio.square().mean() - 1,
        "rollout_corr/ess": effective_sample_size(ratio, mask),
        "training/rollout_probs_diff_mean": probs_diff.mean(),
        "training/rollout_probs_diff_max": probs_diff.max(),
        "training/rollout_probs_diff_std": probs_diff.std(correction=min(1, probs_diff.numel() - 1)),
        "training/rollout_logprobs_diff_mean": logprobs_diff.mean(),
        "training/rollout_logprobs_diff_max": logprobs_diff.max(),
    }
    if bool((probs.std(1, correction=0) > 0).all()):  # a correlation with a constant is undefined
        statistics["training/rollout_actor_probs_pearson_corr"] = torch.corrcoef(probs)[0, 1]
    return {name: float(value) for name, value in statistics.items()}
