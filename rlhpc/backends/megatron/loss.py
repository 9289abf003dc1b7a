"""The loss of one microbatch, normalised by the whole optimizer step's counts."""

from __future__ import annotations

import torch

from rlhpc.algorithms.critic import value_loss
from rlhpc.algorithms.kl import kl_penalty
from rlhpc.algorithms.losses import POLICY_LOSSES, aggregate
from rlhpc.data.packing import unpack
from rlhpc.data.types import PackedBatch
from rlhpc.train.protocols import LossSpec, ValueLossSpec


def microbatch_loss(
    logprobs: torch.Tensor, entropies: torch.Tensor, batch: PackedBatch, spec: LossSpec
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics) of `logprobs` and `entropies` [T]; summed over microbatches and data-parallel ranks they are
    those of the step's whole batch.

    Reads the token fields trainer_logprobs and advantages, ref_logprobs with a KL loss, and if there rollout_weights
    and kept, the tokens that it is over.
    """
    (policy, entropy), mask, rows = _in_rows(batch, logprobs, entropies)
    counts = {
        "num_global_tokens": spec.num_global_tokens,
        "num_global_seqs": spec.num_global_seqs,
        "scale": spec.loss_scale_factor,
    }
    pg_loss, metrics = POLICY_LOSSES[spec.loss_mode](
        policy,
        rows["trainer_logprobs"],
        rows["advantages"],
        mask,
        clip_low=spec.clip_low,
        clip_high=spec.clip_high,
        clip_c=spec.clip_c,
        loss_agg_mode=spec.loss_agg_mode,
        rollout_weights=rows.get("rollout_weights"),
        **counts,
    )
    entropy = aggregate(entropy, mask, spec.loss_agg_mode, **counts)
    loss = pg_loss - spec.entropy_coeff * entropy if spec.entropy_coeff else pg_loss
    metrics |= {"actor/pg_loss": pg_loss.detach(), "actor/entropy": entropy.detach()}
    if spec.kl_coef:
        kl = kl_penalty(policy, rows["ref_logprobs"], spec.kl_type)
        kl_loss = aggregate(kl, mask, spec.loss_agg_mode, **counts)
        loss = loss + spec.kl_coef * kl_loss
        metrics |= {"actor/kl_loss": kl_loss.detach()}
    return loss, metrics


def microbatch_value_loss(
    values: torch.Tensor, batch: PackedBatch, spec: ValueLossSpec
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As `microbatch_loss`, of the critic's `values` [T]. Reads the token fields values and returns, and kept."""
    (predicted,), mask, rows = _in_rows(batch, values)
    loss, metrics = value_loss(
        predicted,
        rows["values"],
        rows["returns"],
        mask,
        clip=spec.clip,
        loss_agg_mode=spec.loss_agg_mode,
        num_global_tokens=spec.num_global_tokens,
        num_global_seqs=spec.num_global_seqs,
        scale=spec.loss_scale_factor,
    )
    return loss, metrics | {"critic/vf_loss": loss.detach()}


def _in_rows(
    batch: PackedBatch, *predicted: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """`predicted` [T] each a sequence a row, the mask of the tokens that the loss is over, and the token fields by
    name."""
    mask, *rows = unpack(batch, *predicted, *batch.token_fields.values())
    fields = dict(zip(batch.token_fields, rows[len(predicted) :], strict=True))
    return rows[: len(predicted)], fields.get("kept", mask), fields
