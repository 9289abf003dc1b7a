"""The stages of one sample: Prompt -> Completion -> Trajectory -> PackedBatch. Frozen; one type per stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

EXPERT_DTYPES = {1: torch.uint8, 2: torch.int16}  # of experts' numbers, by the bytes that one takes


@dataclass(frozen=True)
class Prompt:
    """One tokenised problem. `prompt_id` is the row's index in the dataset: stable across epochs and restarts."""

    prompt_id: int
    text: str  # what the tokens decode to, chat template included
    token_ids: np.ndarray  # int32 [P]
    ground_truth: str
    data_source: str  # names the reward
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One sampled answer, as the engine returns it."""

    prompt_id: int
    sample_idx: int  # 0..n-1 within the group
    token_ids: np.ndarray  # int32 [R], the stop token included when one was sampled
    logprobs: np.ndarray  # float32 [R], natural log, of the processed (tempered, truncated) distribution
    finish_reason: str  # stop | length | abort
    experts: np.ndarray | None = None  # [P + R - 1, layers, k] where asked for: see PackedBatch


@dataclass(frozen=True)
class Trajectory:
    """A scored completion. The reward is a scalar that stands at the last response token."""

    prompt: Prompt
    completion: Completion
    text: str  # decoded response
    score: float  # what the reward function gave
    reward_status: str  # ok | error | timeout
    overlong_penalty: float | None = None  # at most 0; None: there is no overlong buffer

    @property
    def reward(self) -> float:
        """The score less what the answer's length costs."""
        return self.score + (self.overlong_penalty or 0.0)


@dataclass(frozen=True)
class PackedBatch:
    """One microbatch of S sequences concatenated without padding into T tokens.

    `token_fields` are float32 [T] tensors aligned with *positions that predict*: entry t speaks of input_ids[t + 1].
    `loss_mask[t]` is 1 where input_ids[t + 1] is a response token of the same sequence, else 0.
    `experts` are those that each token is or was routed to, in every layer (0 in layers without experts), uint8 or, of
    more than 256, int16. No engine routed the last token of a sequence: what stands there means nothing.
    """

    input_ids: torch.Tensor  # int64 [T]
    position_ids: torch.Tensor  # int64 [T], restarts at 0 in each sequence
    cu_seqlens: torch.Tensor  # int32 [S + 1]
    prompt_lens: torch.Tensor  # int32 [S]
    loss_mask: torch.Tensor  # float32 [T]
    sequence_ids: torch.Tensor  # int64 [S], index of the trajectory in the step's batch; -1 for filler
    token_fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    experts: torch.Tensor | None = None  # [T, layers, k]

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.numel())

    @property
    def num_sequences(self) -> int:
        return int(self.prompt_lens.numel())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as arrays, whose memory is passed on as it is: torch copies a tensor's and writes a file around it,
        which for a step's microbatches takes ten times as long."""
        tensors = {name: value.numpy() for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return _packed_of, (tensors, {name: value.numpy() for name, value in self.token_fields.items()})


def _packed_of(arrays: Mapping[str, np.ndarray], token_fields: Mapping[str, np.ndarray]) -> PackedBatch:
    """Copies: what comes through shared memory can't be written to."""
    tensors, fields = (
        {name: torch.from_numpy(array.copy()) for name, array in part.items()} for part in (arrays, token_fields)
    )
    return PackedBatch(**tensors, token_fields=fields)
