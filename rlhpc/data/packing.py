"""Sequences to microbatches without padding, as many on every data-parallel rank, and values back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rlhpc.data.balance import partition
from rlhpc.data.types import PackedBatch, Trajectory
from rlhpc.errors import ConfigError

FILLER_ID = -1


@dataclass(frozen=True)
class TokenSequence:
    """Prompt and response of one trajectory, with float32 `fields` [R] aligned with the R response tokens, and where
    a routing goes with them the experts of all tokens but the last."""

    sequence_id: int  # index of the trajectory in the step's batch
    token_ids: np.ndarray  # int32 [P + R]
    prompt_len: int  # P
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    experts: np.ndarray | None = None  # [P + R - 1, layers, k]

    def __post_init__(self) -> None:
        assert 1 <= self.prompt_len <= len(self.token_ids), f"sequence {self.sequence_id}: prompt_len={self.prompt_len}"
        assert self.experts is None or len(self.experts) == len(self.token_ids) - 1, (
            f"sequence {self.sequence_id}: experts of {len(self.experts)} of {len(self.token_ids)} tokens"
        )
        for name, values in self.fields.items():
            assert np.shape(values) == (self.response_len,), (
                f"{name} has shape {np.shape(values)}, R={self.response_len}"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def response_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_loss_tokens(self) -> int:
        """Response tokens that the loss is over: those that the field `kept` marks, all without one."""
        return int(self.fields["kept"].sum()) if "kept" in self.fields else self.response_len

    @classmethod
    def of(
        cls,
        sequence_id: int,
        trajectory: Trajectory,
        fields: Mapping[str, np.ndarray] | None = None,
        experts: np.ndarray | None = None,
    ) -> TokenSequence:
        prompt, response = trajectory.prompt.token_ids, trajectory.completion.token_ids
        return cls(sequence_id, np.concatenate([prompt, response]), len(prompt), fields or {}, experts)


def pack(
    sequences: Sequence[TokenSequence],
    *,
    dp_size: int,
    max_tokens: int,
    max_sequences: int | None = None,
    quadratic_tokens: float | None = None,
) -> list[list[PackedBatch]]:
    """Distributes sequences over `dp_size` ranks and packs each rank's share into microbatches: [rank][i].

    Every rank gets the same number of microbatches, none empty, each of at most `max_tokens` tokens (and
    `max_sequences` sequences), about as few as the budget allows. Costs are even over all microbatches: the
    ranks of an expert-parallel group wait for each other in every one; those of one index i are the closest.
    The cost of a sequence is its tokens, plus tokens**2 / `quadratic_tokens` when given: the length at which
    attention scores cost as much as the rest. Where the sequences admit no such split a filler microbatch of
    at most two tokens, without loss and with sequence id -1, takes the free place. Deterministic.

    Raises ConfigError when a sequence exceeds the budget or there are fewer sequences than ranks.
    """
    _check(sequences, dp_size, max_tokens, max_sequences)
    lengths = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64)
    most = -(-len(sequences) // dp_size)
    num_microbatches = min(most, _fewest_microbatches(lengths, dp_size, max_tokens, max_sequences))
    while True:
        num_bins = dp_size * num_microbatches
        padded = [*sequences, *[_filler(sequences)] * (num_bins - len(sequences))]
        lengths = np.array([sequence.num_tokens for sequence in padded], dtype=np.int64)
        costs = lengths + (lengths.astype(np.float64) ** 2 / quadratic_tokens if quadratic_tokens else 0.0)
        bins = partition(costs, num_bins, equal_size=max_sequences is not None)
        if num_microbatches == most or max(int(lengths[members].sum()) for members in bins) <= max_tokens:
            break
        num_microbatches = min(most, num_microbatches + max(1, num_microbatches // 32))
    placed = _place(bins, costs, dp_size)
    return [[_packed([padded[item] for item in members]) for members in rank] for rank in placed]


def unpack(batch: PackedBatch, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Response-aligned rows: a mask float32 [S, Rmax], then padded rows [S, Rmax] of each of `values` [T]; Rmax is at
    least 1.

    Row s column j speaks of the j-th response token of sequence s. Differentiable; padding is 0 and passes no
    gradient back, whatever stands at the unused positions.
    """
    device, spans = values[0].device, _response_spans(batch)
    columns = torch.arange(max(1, int(spans[1].max())), device=device)
    starts, response_lens = (part.to(device, non_blocking=True) for part in spans)
    inside = columns < response_lens[:, None]
    positions = torch.where(inside, starts[:, None] + columns, 0)
    return inside.float(), *(torch.where(inside, value[positions], 0) for value in values)


def split_by_sequence(values: torch.Tensor, batch: PackedBatch) -> dict[int, torch.Tensor]:
    """The response-aligned slice [R] of `values` [T] (a view) by sequence id; fillers are left out."""
    starts, response_lens = _response_spans(batch)
    spans = zip(batch.sequence_ids.tolist(), starts.tolist(), response_lens.tolist(), strict=True)
    return {key: values[start : start + count] for key, start, count in spans if key != FILLER_ID}


def split_experts(experts: np.ndarray, batch: PackedBatch) -> dict[int, np.ndarray]:
    """As TokenSequence has them (views), by sequence id, of a microbatch's [T, layers, k]; fillers are left out."""
    bounds = batch.cu_seqlens.tolist()
    spans = zip(batch.sequence_ids.tolist(), bounds, bounds[1:], strict=False)
    return {key: experts[start : end - 1] for key, start, end in spans if key != FILLER_ID}


def _response_spans(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """First predicting position and number of response tokens, int64 [S] each."""
    offsets, prompt_lens = batch.cu_seqlens.long(), batch.prompt_lens.long()
    return offsets[:-1] + prompt_lens - 1, offsets.diff() - prompt_lens


def _check(sequences: Sequence[TokenSequence], dp_size: int, max_tokens: int, max_sequences: int | None) -> None:
    if len(sequences) < dp_size:
        raise ConfigError(
            f"{len(sequences)} sequences can't feed dp_size={dp_size} ranks; raise data.train_batch_size or "
            f"actor_rollout_ref.rollout.n until each optimizer step has {dp_size}, or use fewer ranks"
        )
    if max_sequences is not None and max_sequences < 1:
        raise ConfigError(f"micro batch size {max_sequences} must be at least 1")
    longest = max(sequences, key=lambda sequence: sequence.num_tokens)
    if longest.num_tokens > max_tokens:
        raise ConfigError(
            f"sequence {longest.sequence_id} has {longest.num_tokens} tokens, the budget per microbatch is "
            f"{max_tokens}; set ppo_max_token_len_per_gpu to at least {longest.num_tokens} "
            "(max_prompt_length + max_response_length is always enough)"
        )
    identifiers = {sequence.sequence_id for sequence in sequences}
    assert len(identifiers) == len(sequences) and FILLER_ID not in identifiers, "sequence ids must be unique"
    assert len({(frozenset(s.fields), s.experts is None) for s in sequences}) == 1, "fields must be the same in all"


def _fewest_microbatches(lengths: np.ndarray, dp_size: int, max_tokens: int, max_sequences: int | None) -> int:
    """A lower bound per rank: by total, by count, and as at most m sequences above budget/(m+1) share one."""
    bins = [-(-int(lengths.sum()) // max_tokens)]
    bins += [-(-int((lengths * (m + 1) > max_tokens).sum()) // m) for m in range(1, 9)]
    if max_sequences is not None:
        bins.append(-(-len(lengths) // max_sequences))
    return -(-max(bins) // dp_size)


def _filler(sequences: Sequence[TokenSequence]) -> TokenSequence:
    tokens, experts = sequences[0].token_ids[:2], sequences[0].experts
    return TokenSequence(
        FILLER_ID,
        tokens,
        len(tokens),
        {name: np.zeros(0, np.float32) for name in sequences[0].fields},
        None if experts is None else experts[: len(tokens) - 1],
    )


def _place(bins: list[list[int]], costs: np.ndarray, dp_size: int) -> list[list[list[int]]]:
    """Bins of similar cost share an index over the ranks; the least loaded rank takes the largest of them."""
    bin_costs = [float(costs[members].sum()) for members in bins]
    by_cost = sorted(range(len(bins)), key=lambda b: (-bin_costs[b], bins[b]))
    placed: list[list[list[int]]] = [[] for _ in range(dp_size)]
    loads = [0.0] * dp_size
    for start in range(0, len(bins), dp_size):
        ranks = sorted(range(dp_size), key=lambda rank: (loads[rank], rank))
        for rank, b in zip(ranks, by_cost[start : start + dp_size], strict=True):
            placed[rank].append(bins[b])
            loads[rank] += bin_costs[b]
    return placed


def _packed(sequences: Sequence[TokenSequence]) -> PackedBatch:
    lengths = np.array([sequence.num_tokens for sequence in sequences])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = np.zeros(offsets[-1], np.float32)
    fields = {name: np.zeros(offsets[-1], np.float32) for name in sequences[0].fields}
    for sequence, start, end in zip(sequences, offsets[:-1], offsets[1:], strict=True):
        predicting = slice(start + sequence.prompt_len - 1, end - 1)
        mask[predicting] = 1.0
        for name, target in fields.items():
            target[predicting] = sequence.fields[name]
    return PackedBatch(
        input_ids=torch.from_numpy(np.concatenate([s.token_ids for s in sequences]).astype(np.int64)),
        position_ids=torch.from_numpy(positions.astype(np.int64)),
        cu_seqlens=torch.from_numpy(offsets.astype(np.int32)),
        prompt_lens=torch.tensor([s.prompt_len for s in sequences], dtype=torch.int32),
        loss_mask=torch.from_numpy(mask),
        sequence_ids=torch.tensor([s.sequence_id for s in sequences], dtype=torch.int64),
        token_fields={name: torch.from_numpy(values) for name, values in fields.items()},
        experts=None if sequences[0].experts is None else torch.from_numpy(_packed_experts(sequences, offsets)),
    )


def _packed_experts(sequences: Sequence[TokenSequence], offsets: np.ndarray) -> np.ndarray:
    """[T, layers, k]"""
    first = sequences[0].experts
    assert first is not None
    packed = np.zeros((offsets[-1], *first.shape[1:]), first.dtype)
    for sequence, start in zip(sequences, offsets[:-1], strict=True):
        packed[start : start + sequence.num_tokens - 1] = sequence.experts
    return packed
