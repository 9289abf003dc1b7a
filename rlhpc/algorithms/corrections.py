"""Importance weights and rejections that correct for sampling from another policy than the trainer's.

The engine and the trainer round differently (and the engine may be some steps behind), so tokens are drawn
from π_rollout while the gradient assumes π_trainer. Weighting a token's loss by a bounded π_trainer /
π_rollout removes most of the bias at a bounded variance; leaving out tokens or sequences that the two policies
disagree on trades what they would teach for trust in the rest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlhpc.algorithms.statistics import MAX_LOG_RATIO, effective_sample_size, masked, masked_mean
from rlhpc.errors import ConfigError

LEVELS = ("token", "sequence")
DIVERGENCES = ("k1", "k2", "k3")  # of d = log π_trainer / π_rollout: -d, d²/2, exp(d) - 1 - d
REJECTIONS = tuple(
    f"{over}_{kind}"
    for over in ("token", "seq_sum", "seq_mean", "seq_max")
    for kind in DIVERGENCES
    if (over, kind) != ("seq_max", "k1")
)


class Rejection(NamedTuple):
    """What is kept: tokens, or sequences, whose divergence lies within [low, high]."""

    over: str  # token | seq_sum | seq_mean | seq_max
    kind: str
    low: float
    high: float

    @property
    def name(self) -> str:
        return f"{self.over}_{self.kind}"


def parse_threshold(threshold: float | str) -> tuple[float | None, float]:
    """(low, high): low is None for a cap such as 2.0, and set for a window such as "0.5_5.0"."""
    low, _, high = str(threshold).rpartition("_")
    try:
        bounds = (float(low) if low else None, float(high))
    except ValueError:
        bounds = (None, 0.0)
    if (
        not 0 < (1 if bounds[0] is None else bounds[0]) <= bounds[1] < float("inf")
    ):  # YAML reads a window such as 0.5_2 as the number 0.52
        raise ConfigError(
            f"rollout_is_threshold={threshold!r} is neither a cap of at least 1 such as 2.0 nor a window 'low_high' "
            "with 0 < low <= high such as '0.5_5.0', its numbers with a decimal point"
        )
    return bounds


def parse_rejections(rules: str, thresholds: float | str | None) -> list[Rejection]:
    """`rules` are names of REJECTIONS by commas, `thresholds` one for each, or one for all.

    Thresholds of k1 are windows "low_high" of the ratio, one number u meaning 1/u to u; those of k2 and k3 are upper
    bounds of the divergence. Raises ConfigError.
    """
    names = list(dict.fromkeys(name.strip() for name in rules.split(",") if name.strip()))
    given = [part.strip() for part in str("" if thresholds is None else thresholds).split(",") if part.strip()]
    if not names or not set(names) <= set(REJECTIONS):
        raise ConfigError(f"rollout_rs={rules!r} is unknown; choose null, or by commas of {', '.join(REJECTIONS)}")
    if len(given) not in (1, len(names)):
        raise ConfigError(
            f"rollout_rs_threshold={thresholds} has {len(given)} thresholds for rollout_rs={rules}; give one for each, "
            'or one for all, such as "0.5_2.0"'
        )
    given *= len(names) // len(given)
    return [_rejection(name, threshold) for name, threshold in zip(names, given, strict=True)]


def _rejection(name: str, threshold: str) -> Rejection:
    over, _, kind = name.rpartition("_")
    low, _, high = threshold.rpartition("_")
    try:
        upper = float(high)
        lower = float(low) if low else 1 / upper
    except (ValueError, ZeroDivisionError):
        lower = upper = math.nan
    if kind == "k1" and 0 < lower <= upper < math.inf:
        return Rejection(over, kind, math.log(lower), math.log(upper))
    if kind != "k1" and not low and 0 < upper < math.inf:
        return Rejection(over, kind, -math.inf, upper)
    wanted = (
        "a window of ratios 'low_high' with 0 < low <= high such as '0.5_2.0' (YAML reads 0.5_2 as 0.52), or one "
        "number of at least 1"
    )
    raise ConfigError(
        f"rollout_rs_threshold={threshold} of {name} must be {wanted if kind == 'k1' else 'one number above 0'}"
    )


@torch.no_grad()
def kept_by(
    rules: list[Rejection], trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """(kept, metrics): `mask` float32 [B, T] without the tokens that a rule rejects, or whose sequence one does.

    Rules and metrics are verl 0.9's (trainer/ppo/rollout_corr_helper.py), under `rollout_corr/`: shares of tokens that
    are rejected, and of sequences of which any token is, by rule and in all; of each rule's divergences mean (over
    tokens), max and min, and the shares beyond its bounds. Log ratios are clamped to ±20.
    """
    d = masked(trainer_logprobs.float() - rollout_logprobs.float(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    divergences = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}
    on, answered = mask > 0, (mask > 0).any(-1)
    kept, metrics = on, dict[str, float]()
    if not bool(on.any()):
        return mask.float(), metrics
    for rule in rules:
        found = _over(rule.over, divergences[rule.kind], mask)
        passes = ((found >= rule.low) & (found <= rule.high)).expand_as(on)
        judged = found[on] if rule.over == "token" else found[answered].flatten()
        metrics |= {
            f"{rule.name}_mean": float(masked_mean(found.expand_as(mask), mask)),
            f"{rule.name}_max": float(judged.max()),
            f"{rule.name}_min": float(judged.min()),
            f"{rule.name}_fraction_high": float((judged > rule.high).float().mean()),
            f"{rule.name}_fraction_low": float((judged < rule.low).float().mean()),
            **_rejected(passes, on, f"{rule.name}_"),
        }
        kept = kept & passes
    metrics |= _rejected(kept, on, "")
    return kept.float(), {f"rollout_corr/rollout_rs_{name}": value for name, value in metrics.items()}


def _over(over: str, divergence: Tensor, mask: Tensor) -> Tensor:
    """[B, T] of tokens, [B, 1] of sequences."""
    if over == "token":
        return divergence
    if over == "seq_mean":
        return masked_mean(divergence, mask, -1).unsqueeze(-1)
    return divergence.sum(-1, keepdim=True) if over == "seq_sum" else divergence.amax(-1, keepdim=True)


def _rejected(passes: Tensor, on: Tensor, name: str) -> dict[str, float]:
    rejected = ~passes & on
    return {
        f"{name}masked_fraction": float(rejected[on].float().mean()),
        f"{name}seq_masked_fraction": float(rejected.any(-1)[on.any(-1)].float().mean()),
    }


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
