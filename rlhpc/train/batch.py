"""From scored completions to what the optimizer sees: padded [B, T] response tensors, T the longest response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhpc.algorithms.advantages import ESTIMATORS
from rlhpc.algorithms.corrections import kept_by, parse_rejections, rollout_weights
from rlhpc.algorithms.kl import penalize_rewards
from rlhpc.config.schema import AlgorithmConfig
from rlhpc.data.packing import TokenSequence
from rlhpc.data.types import Trajectory


@dataclass(frozen=True)
class RolloutBatch:
    """The step's trajectories, prompt-major, with the rollout's tensors."""

    trajectories: tuple[Trajectory, ...]
    group_ids: torch.Tensor  # int64 [B]: position of the prompt in the batch
    mask: torch.Tensor  # float32 [B, T]: 1 on response tokens
    rollout_logprobs: torch.Tensor  # float32 [B, T]
    scores: torch.Tensor  # float32 [B, T]: the reward, at each last response token
    experts: tuple[np.ndarray | None, ...]  # the engine's of each trajectory, or those to replay instead: TokenSequence

    @staticmethod
    def collate(trajectories: Sequence[Trajectory], n: int) -> RolloutBatch:
        """`n` consecutive trajectories make a group."""
        mask = pad([np.ones(len(t.completion.token_ids), np.float32) for t in trajectories])
        scores = torch.zeros_like(mask)
        for row, trajectory in enumerate(trajectories):
            scores[row, len(trajectory.completion.token_ids) - 1] = trajectory.reward
        return RolloutBatch(
            trajectories=tuple(trajectories),
            group_ids=torch.arange(len(trajectories)) // n,
            mask=mask,
            rollout_logprobs=pad([t.completion.logprobs for t in trajectories]),
            scores=scores,
            experts=tuple(t.completion.experts for t in trajectories),
        )

    def sequences(self, *, routed: bool = False, **fields: torch.Tensor) -> list[TokenSequence]:
        """Token sequences to pack, `sequence_id` the row; `fields` are [B, T] tensors that travel with them. `routed`:
        so do the experts, where there are any. They are the policy's alone."""
        return [
            TokenSequence.of(
                row,
                t,
                {name: f[row, : len(t.completion.token_ids)].numpy() for name, f in fields.items()},
                experts if routed else None,
            )
            for row, (t, experts) in enumerate(zip(self.trajectories, self.experts, strict=True))
        ]


@dataclass(frozen=True)
class TrainBatch:
    """A rollout batch with everything the loss needs, all float32 [B, T]."""

    rollout: RolloutBatch
    trainer_logprobs: torch.Tensor
    rewards: torch.Tensor  # scores less the in-reward KL, where asked for
    advantages: torch.Tensor
    returns: torch.Tensor
    fields: dict[str, torch.Tensor]  # what travels to the trainer, by the names of PackedBatch.token_fields
    metrics: dict[str, float]
    values: torch.Tensor | None = None  # the critic's, that advantages and returns were estimated with

    @property
    def critic_fields(self) -> dict[str, torch.Tensor]:
        """What travels to the trainer for the critic's update."""
        assert self.values is not None
        shared = {name: self.fields[name] for name in ("kept",) if name in self.fields}
        return {"values": self.values, "returns": self.returns} | shared


def pad(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """float32 [B, T] from rows of different lengths, zeros behind."""
    padded = np.zeros((len(rows), max(len(row) for row in rows)), np.float32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def prepare(
    rollout: RolloutBatch,
    trainer_logprobs: Sequence[np.ndarray],
    ref_logprobs: Sequence[np.ndarray] | None,
    algorithm: AlgorithmConfig,
    *,
    kl_coef: float,
    kl_in_loss: bool,
    values: Sequence[np.ndarray] | None = None,
) -> TrainBatch:
    """Advantages and corrections of one batch; pure. `kl_coef` is that of the KL in the reward."""
    mask = rollout.mask
    metrics: dict[str, float] = {}
    behavior = pad(trainer_logprobs)
    rewards, fields = rollout.scores, {"trainer_logprobs": behavior}
    if ref_logprobs is not None:
        reference = pad(ref_logprobs)
        if kl_in_loss:
            fields["ref_logprobs"] = reference
        if algorithm.use_kl_in_reward:
            rewards, more = penalize_rewards(
                rewards, behavior, reference, mask, kind=algorithm.kl_penalty, coef=kl_coef
            )
            metrics |= more
    of_critic = None if values is None else pad(values)
    advantages, returns = ESTIMATORS[algorithm.adv_estimator](
        rewards,
        mask,
        rollout.group_ids,
        values=of_critic,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
    )
    fields["advantages"] = advantages
    correction = algorithm.rollout_correction
    if correction.rollout_is is not None:
        weights, more = rollout_weights(
            behavior,
            rollout.rollout_logprobs,
            mask,
            level=correction.rollout_is,
            threshold=correction.rollout_is_threshold,
        )
        fields["rollout_weights"] = weights
        metrics |= more
    if correction.rollout_rs is not None:
        rules = parse_rejections(correction.rollout_rs, correction.rollout_rs_threshold)
        fields["kept"], more = kept_by(rules, behavior, rollout.rollout_logprobs, mask)
        metrics |= more
    if algorithm.mask_truncated_completions:
        whole = torch.tensor([t.completion.finish_reason != "length" for t in rollout.trajectories])
        fields["kept"] = fields.get("kept", mask) * whole.unsqueeze(-1)
    if "kept" in fields:
        metrics["training/kept_token_ratio"] = float(fields["kept"].sum() / mask.sum().clamp(min=1))
    return TrainBatch(rollout, behavior, rewards, advantages, returns, fields, metrics, of_critic)
