"""Importance weights that correct for sampling from another policy than the trainer's.

The engine and the trainer round differently (and the engine may be some steps behind), so tokens are drawn
from π_rollout while the gradient assumes π_trainer. Weighting a token's loss by a bounded π_trainer /
π_rollout removes most of the bias at a bounded variance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.algorithms.statistics import MAX_LOG_RATIO, effective_sample_size, masked, masked_mean
from rlhpc.errors import ConfigError

LEVELS = ("token", "sequence")


def parse_threshold(threshold: float | str) -> tuple[float | None, float]:
    """(low, high): low is None for a cap such as 2.0, and set for a window such as "0.5_5.0"."""
    low, _, high = str(threshold).rpartition("_")
    try:
        bounds = (float(low) if low else None, float(high))
    except ValueError:
        bounds = (None, 0.0)
    if not 0 < bounds[1] < float("inf") or not (bounds[0] is None or 0 < bounds[0] <= bounds[1]):
        raise ConfigError(
            f"rollout_is_threshold={threshold!r} is neither a cap > 0 such as 2.0 "
            "nor a window 'low_high' with 0 < low <= high such as '0.5_5.0'"
        )
    return bounds


@torch.no_grad()
def rollout_weights(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, level: str, threshold: float | str
) -> tuple[Tensor, dict[str, float]]:
    """Weights π_trainer / π_rollout, float32 [B, T], 0 where the mask is 0, never differentiated.

    `level` "token" weighs each token by its own ratio, "sequence" all tokens of a row by the product of
    theirs. A number as `threshold` caps the weights (truncated importance sampling, as verl's
    `rollout_is_threshold`); a string "low_high" zeroes those outside the window instead (IcePop). Log ratios
    are clamped to ±20 before exponentiation.

    Metrics are verl's names under `rollout_corr/`. Mean, std and effective sample size are over the applied
    weights of tokens; max, min and the fractions above and below the bounds are of the ratios before the
    bound was applied, of tokens or of sequences by `level`. Raises ConfigError for another level or a
    malformed threshold.
    """
    if level not in LEVELS:
        raise ConfigError(f"rollout_is={level!r} is unknown; choose null, {', '.join(LEVELS)}")
    low, high = parse_threshold(threshold)
    log_ratio = masked(trainer_logprobs.float() - rollout_logprobs.float(), mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    kept = (ratio >= low) & (ratio <= high) if low is not None else torch.ones_like(ratio, dtype=torch.bool)
    bounded = torch.where(kept, ratio.clamp(max=high), 0.0)
    weights = masked(bounded.expand_as(mask), mask)

    judged = ratio[mask.sum(-1) > 0].flatten() if level == "sequence" else ratio[mask > 0]
    if judged.numel() == 0:
        return weights, {}
    mean = masked_mean(weights, mask)
    statistics = {
        "rollout_is_mean": mean,
        "rollout_is_std": masked_mean((weights - mean).square(), mask).sqrt(),
        "rollout_is_max": judged.max(),
        "rollout_is_min": judged.min(),
        "rollout_is_ratio_fraction_high": (judged > high).float().mean(),
        "rollout_is_ratio_fraction_low": (judged < (1 / high if low is None else low)).float().mean(),
        "rollout_is_eff_sample_size": effective_sample_size(weights, mask),
    }
    if low is not None:
        statistics["rollout_is_oob_ratio"] = 1 - masked_mean(kept.expand_as(mask).float(), mask)
    return weights, {f"rollout_corr/{name}": float(value) for name, value in statistics.items()}
