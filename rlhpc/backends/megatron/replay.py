"""Router replay: in a policy's microbatch each token goes to the experts that the engine chose for it (R3, arXiv
2510.11370), or that the policy itself chose before the step's updates (R2, arXiv 2507.18071). Megatron-core has a
RouterReplay, whose routings for recomputation queue up by layer; here they go with the microbatch through forward and
backward, whatever is recomputed and however many microbatches are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rlhpc.data.types import EXPERT_DTYPES, PackedBatch
from rlhpc.reshard.families import ModelFacts


@dataclass(frozen=True)
class Routing:
    """The choices to replay for the tokens of a microbatch that this rank routes, T of them: `experts` [T, layers, k],
    and bool [T] which of these are `known`."""

    experts: torch.Tensor
    known: torch.Tensor

    @classmethod
    def of(cls, batch: PackedBatch, order: torch.Tensor, parts: int, part: int) -> Routing | None:
        """`order` says which token of the batch stands at each place; filled up to a multiple of `parts`, one of which
        is this rank's (sequence parallelism). None where the batch brings no routing."""
        if batch.experts is None:
            return None
        known = torch.ones(batch.num_tokens, dtype=torch.bool, device=order.device)
        known[batch.cu_seqlens[1:].long() - 1] = False  # an engine is not fed the last, which predicts nothing
        experts, known = batch.experts[order], known[order]
        if filler := -len(order) % parts:
            experts = torch.cat([experts, experts.new_zeros(filler, *experts.shape[1:])])
            known = torch.cat([known, known.new_zeros(filler)])
        return cls(experts.chunk(parts)[part], known.chunk(parts)[part])


@dataclass(frozen=True)
class Replay:
    """What one layer's router is given instead of Megatron's RouterReplay, for one microbatch: `experts` [T, k] and
    `known` as in Routing. With `follow` false it only compares. `count` takes how many of the known tokens the router
    would have sent to other experts, and how many these are, int64 [2]."""

    experts: torch.Tensor
    known: torch.Tensor
    follow: bool
    count: torch.Tensor | None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron's name. scores [T, experts] -> those chosen and their numbers, [T, k] each: `experts` where they
        differ from the router's own, which are computed from the scores exactly as without replay."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self.experts.long()
        differs = self.known & (own.sort(dim=1).values != experts.sort(dim=1).values).any(dim=1)
        if self.count is not None:
            self.count.add_(torch.stack([differs.sum(), self.known.sum()]))
        if not self.follow:
            return values, own
        chosen = torch.where(differs[:, None], experts, own)
        return scores.gather(1, chosen), chosen


@dataclass(frozen=True)
class Record:
    """What one layer's router is given to tell its choice for one microbatch: `experts` [T, k], to be written."""

    experts: torch.Tensor

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Replay's, without any replay."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.experts.copy_(own)
        return values, own


class Recording:
    """What the routers of this rank choose in a pass without gradients, one microbatch after the other. Kept as small
    as an engine's choices are, and until the pass is over only what this rank routes: its layers, its tokens."""

    def __init__(self, layers: Iterable[int], facts: ModelFacts) -> None:
        """`layers` are those that have experts here, by their index in the whole model."""
        self._layers, self._facts = list(layers), facts
        self._orders: list[torch.Tensor] = []
        self._chosen: list[torch.Tensor] = []

    def begin(self, order: torch.Tensor, parts: int) -> dict[int, Record]:
        """By layer, of the next microbatch; `order` and `parts` as in Routing."""
        shape = -(-len(order) // parts), len(self._layers), self._facts.experts_per_token
        dtype = EXPERT_DTYPES[self._facts.expert_number_bytes]
        chosen = torch.empty(shape, dtype=dtype, device=order.device)
        self._orders.append(order)
        self._chosen.append(chosen)
        return {layer: Record(chosen[:, i]) for i, layer in enumerate(self._layers)}

    def whole(self) -> list[np.ndarray]:
        """[T, layers, k] of every microbatch, as in PackedBatch, on the first of the ranks that hold the model
        together; on the others nothing. Collective over these ranks."""
        group = parallel_state.get_model_parallel_group()
        part = parallel_state.get_tensor_model_parallel_rank()
        layers = torch.tensor(self._layers, dtype=torch.long)
        found = []
        while self._chosen:
            order, chosen = self._orders.pop(0), self._chosen.pop(0)
            rows = order[part * len(chosen) : (part + 1) * len(chosen)]  # behind them come fillers
            whole = chosen.new_zeros(len(order), self._facts.num_layers, chosen.shape[2])
            whole[rows[:, None], layers.to(rows.device)] = chosen[: len(rows)]
            if group.size() > 1:  # bytes that are zero on all ranks but one; NCCL adds no int16
                dist.reduce(whole.view(torch.uint8), group=group, group_dst=0)
            if group.rank() == 0:
                found.append(whole.cpu().numpy())
        return found


def clear_counts(routers: Iterable[Any]) -> None:
    for router in routers:
        router.differing.zero_()


def routing_difference(routers: Iterable[Any], device: torch.device) -> float:
    """The share of tokens, averaged over layers, for which the trainer's routers chose other experts than the engine's,
    since the counts were cleared. Collective over the world."""
    total = torch.zeros(2, dtype=torch.int64, device=device)
    for router in routers:
        total += router.differing
    dist.all_reduce(total)
    differing, known = total.tolist()
    return differing / max(1, known)
