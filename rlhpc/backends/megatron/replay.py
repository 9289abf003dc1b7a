"""Router replay: in a policy's microbatch each token goes to the experts that the engine chose for it (R3, arXiv
2510.11370). Megatron-core has a RouterReplay, whose routings for recomputation queue up by layer; here they go with
the microbatch through forward and backward, whatever is recomputed and however many microbatches are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.data.types import PackedBatch


@dataclass(frozen=True)
class Routing:
    """The engine's choices for the tokens of a microbatch that this rank routes, T of them: `experts` [T, layers, k],
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
        known[batch.cu_seqlens[1:].long() - 1] = False  # an engine is not fed what it samples last
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
        """Megatron's name. scores [T, experts] -> those chosen and their numbers, [T, k] each: the engine's where they
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
