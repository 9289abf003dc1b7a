"""What a critic learns from and how good it is. Pure functions of tensors [B, T], float32 inside.

Formulas and constants are verl 0.9's (trainer/ppo/core_algos.py, metric_utils.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.algorithms.losses import aggregate
from rlhpc.algorithms.statistics import masked


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float,
    loss_agg_mode: str = "token-mean",
    num_global_tokens: float | None = None,
    num_global_seqs: float | None = None,
    scale: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of [B, T] tensors; only `values` is differentiated.

    Half the larger of (v - R)² and (v' - R)², v' being v within `clip` of the value that the advantages were estimated
    with: PPO's clipped value loss (arXiv 2005.12729 section 4). Aggregated and split over calls as a policy loss is
    (losses.aggregate). The metrics, critic/{vf_clipfrac,vpred_mean}, are token means as scalar tensors without
    gradient. Raises ConfigError for an unknown mode.
    """
    values = masked(values.float(), mask)
    old_values, returns = (masked(x.float(), mask).detach() for x in (old_values, returns))
    free = (values - returns).square()
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    loss = aggregate(
        0.5 * torch.maximum(free, clipped),
        mask,
        loss_agg_mode,
        num_global_tokens=num_global_tokens,
        num_global_seqs=num_global_seqs,
        scale=scale,
    )
    per_token = {"critic/vf_clipfrac": clipped > free, "critic/vpred_mean": values.detach()}
    return loss, {
        name: aggregate(of_tokens, mask, "token-mean", num_global_tokens=num_global_tokens)
        for name, of_tokens in per_token.items()
    }


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the set entries of `mask`: 1 is a perfect critic, 0 one that knows
    no more than a constant. 0 where fewer than two are set."""
    on = mask > 0
    if int(on.sum()) < 2:
        return 0.0
    values, returns = values[on].double(), returns[on].double()
    return float(1 - (returns - values).var() / (returns.var() + 1e-5))
