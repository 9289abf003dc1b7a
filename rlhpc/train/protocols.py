"""What the worker asks of a trainer and of a rollout engine. The loop and the worker know only these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rlhpc.checkpoint.pieces import Index, Piece
from rlhpc.data.types import Completion, PackedBatch
from rlhpc.layout.spec import ShardSpec


@dataclass(frozen=True)
class SamplingSpec:
    """How to sample. `max_response_length` in tokens; `temperature` 0 is greedy; `top_k` -1 is off."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_response_length: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    routing: bool = False  # completions with the experts of their tokens


@dataclass(frozen=True)
class LossSpec:
    """What one optimizer step minimises, and its global normalisers (over all data-parallel ranks and microbatches)."""

    loss_mode: str
    clip_low: float
    clip_high: float
    clip_c: float
    loss_agg_mode: str
    num_global_tokens: float
    num_global_seqs: float
    loss_scale_factor: float | None
    entropy_coeff: float
    kl_coef: float  # 0: no KL loss
    kl_type: str
    temperature: float


@dataclass(frozen=True)
class ValueLossSpec:
    """What one optimizer step of the critic minimises, and its global normalisers, as in LossSpec."""

    clip: float
    loss_agg_mode: str
    num_global_tokens: float
    num_global_seqs: float
    loss_scale_factor: float | None


@dataclass(frozen=True)
class TrainerState:
    """One rank's part of the training state. Tensors are live until the next step; what sleeps, in host memory.

    pieces: boxes of canonical tensors, each with a contiguous tensor of its extent; those of all ranks cover every
    tensor's masters and moments, or its weight where it is frozen.
    shapes: of the whole canonical tensors, by name.
    rank_tensors, scalars: this rank's alone (random generators), and JSON.
    """

    pieces: list[tuple[Piece, torch.Tensor]]
    shapes: Mapping[str, Index]
    rank_tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any]


class WeightSource(Protocol):
    """The side of a publish that owns the weights. Every rank computes the same specs."""

    def source_specs(self) -> Sequence[ShardSpec]: ...

    def source_buffers(self) -> Mapping[str, torch.Tensor]: ...


class WeightSink(Protocol):
    """The side of a publish that receives. Every rank computes the same specs."""

    def sink_specs(self) -> Sequence[ShardSpec]: ...

    def begin_publish(self) -> Mapping[str, torch.Tensor]:
        """Buffers to write into, by the names that the sink's shards use."""
        ...

    def end_publish(self, policy_version: int) -> None:
        """Makes the written weights the ones that generate, and drops every cache computed from the old ones."""
        ...


class Trainer(WeightSource, Protocol):
    """One rank of the trainer. Every method is collective: all ranks of the world call it together."""

    @property
    def data_parallel_rank(self) -> int: ...

    @property
    def data_parallel_size(self) -> int: ...

    @property
    def host_bytes(self) -> int:
        """Of host memory that the first sleep will take, and keep."""
        ...

    def logprobs(self, batches: Sequence[PackedBatch], *, temperature: float, model: str) -> list[torch.Tensor]:
        """Per-token logprobs float32 [T] per batch (0 where loss_mask is 0). `model` is "policy" or "reference"."""
        ...

    def routed_logprobs(
        self, batches: Sequence[PackedBatch], *, temperature: float
    ) -> tuple[list[torch.Tensor], list[np.ndarray]]:
        """The policy's logprobs, and for each batch the experts that it chose for them, as PackedBatch has them, on one
        of the ranks of each data-parallel rank; on the others no experts."""
        ...

    def values(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """The critic's values before each response token, float32 [T] per batch (0 where loss_mask is 0)."""
        ...

    def step(self, batches: Sequence[PackedBatch], loss: LossSpec | ValueLossSpec) -> dict[str, float]:
        """One optimizer step of the policy, or of the critic for a ValueLossSpec. Returns metrics summed over this
        rank's microbatches with global normalisers (to be summed over data-parallel ranks), except `*/grad_norm` and
        `*/lr`, the same everywhere."""
        ...

    def begin_sleep(self) -> None:
        """Sets off what `sleep` has to wait for. Until then the weights may be read and nothing may change."""
        ...

    def sleep(self) -> None:
        """Frees device memory for the engine. Nothing happens asleep, or on a CPU."""
        ...

    def wake(self) -> None:
        """Returns when what the caller does next finds the weights; the rest comes while it isn't needed yet."""
        ...

    def state_pieces(self) -> TrainerState:
        """This rank's part of the training state. Not collective."""
        ...

    def load_checkpoint(self, directory: Path) -> None:
        """Goes on from a checkpoint of any layout and number of ranks, with the weights in place for the next step.

        Under the layout that wrote it, random generators too go on where they were; else they begin with the run's
        seed. Raises CheckpointError on all ranks together: for damage (file and chunk), another model, missing tensors.
        What it then holds is undefined until another one is loaded.
        """
        ...

    def load_weights(self, source: Path) -> None:
        """Begins with the weights of an HF directory or of a committed checkpoint, the optimizer fresh. Masters are as
        exact as the source. Raises ModelError or CheckpointError on all ranks together."""
        ...

    def save_hf(self, directory: Path) -> None:
        """Writes an HF directory (safetensors, config.json) of the current weights. Collective."""
        ...


class RolloutEngine(WeightSink, Protocol):
    """One rank of the rollout engine. Ranks of one tensor-parallel replica are called with the same arguments."""

    @property
    def replica_rank(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    def expert_weights(self) -> Mapping[str, torch.Tensor]:
        """With reshard.in_place_experts: the experts that generate, by the names that the sink's shards use. They keep
        their memory and content while the engine sleeps, and then belong to whoever was given them."""
        ...

    def generate(
        self,
        prompts: Sequence[tuple[int, Sequence[int]]],
        sampling: SamplingSpec,
        *,
        seed: int,
        interrupted: Callable[[], bool],
    ) -> tuple[list[Completion], int]:
        """Samples n completions for each (prompt_id, token_ids). Returns them (prompt-major) and a digest of all
        tokens, which must agree between the ranks of a replica. `seed` identifies run and step. `interrupted` is asked
        now and then; once it says so on any rank of the replica, all return no completions and never generate again."""
        ...

    def sleep(self) -> None: ...

    def wake(self, what: str) -> None:
        """`what` is "weights" or "kv_cache"."""
        ...

    def close(self) -> None: ...
