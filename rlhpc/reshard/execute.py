"""Carries out a plan with torch.distributed: local copies, then bounded buckets through all-to-all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from rlhpc.errors import ModelError
from rlhpc.reshard.plan import ITEM_BYTES, Index, ReshardPlan, ShardCopy


def region(buffer: torch.Tensor, offset: Index, extent: Index) -> torch.Tensor:
    """The box of `buffer` that begins at `offset`, as a view of shape `extent`."""
    for dim, (start, length) in enumerate(zip(offset, extent, strict=True)):
        buffer = buffer.narrow(dim, start, length)
    return buffer


class Move(NamedTuple):
    """A box of one local buffer to a box of another with as many elements in the same order. The extents
    differ at most by leading ones."""

    src_rank: int
    src_buffer: str
    src_offset: Index
    src_extent: Index
    dst_rank: int
    dst_buffer: str
    dst_offset: Index
    dst_extent: Index

    @classmethod
    def of(cls, copy: ShardCopy) -> Move:
        shape = copy.shape
        src_extent = (1,) * (len(copy.src_offset) - len(shape)) + shape
        dst_extent = (1,) * (len(copy.dst_offset) - len(shape)) + shape
        return cls(*copy[3:6], src_extent, *copy[6:9], dst_extent)

    @property
    def numel(self) -> int:
        return prod(self.dst_extent)

    def followed_by(self, other: Move) -> Move | None:
        """Both as one where `other` continues this along the stacking dimension of both buffers: consecutive
        experts, whose copies would otherwise be launched one by one."""
        stacked = len(self.src_offset) == len(self.dst_offset) > 2
        if (
            stacked
            and (self.src_buffer, self.dst_buffer) == (other.src_buffer, other.dst_buffer)
            and (self.src_extent[1:], self.dst_extent[1:]) == (other.src_extent[1:], other.dst_extent[1:])
            and (self.src_offset[1:], self.dst_offset[1:]) == (other.src_offset[1:], other.dst_offset[1:])
            and self.src_offset[0] + self.src_extent[0] == other.src_offset[0]
            and self.dst_offset[0] + self.dst_extent[0] == other.dst_offset[0]
        ):
            count = self.dst_extent[0] + other.dst_extent[0]
            extent = (count, *self.dst_extent[1:])
            return self._replace(src_extent=extent, dst_extent=extent)
        return None

    def split(self, max_numel: int) -> Iterator[Move]:
        """Parts of at most `max_numel` elements, cut along the outermost dimension that can be cut."""
        if self.numel <= max_numel:
            yield self
            return
        shared = min(len(self.src_extent), len(self.dst_extent))
        dim = next(d for d in range(-shared, 0) if self.dst_extent[d] > 1)
        half = self.dst_extent[dim] // 2
        first = self._replace(src_extent=_put(self.src_extent, dim, half), dst_extent=_put(self.dst_extent, dim, half))
        second = self._replace(
            src_offset=_put(self.src_offset, dim, self.src_offset[dim] + half),
            dst_offset=_put(self.dst_offset, dim, self.dst_offset[dim] + half),
            src_extent=_put(self.src_extent, dim, self.src_extent[dim] - half),
            dst_extent=_put(self.dst_extent, dim, self.dst_extent[dim] - half),
        )
        yield from first.split(max_numel)
        yield from second.split(max_numel)


def _put(index: Index, dim: int, value: int) -> Index:
    values = list(index)
    values[dim] = value
    return tuple(values)


def merge(copies: Iterable[ShardCopy]) -> list[Move]:
    """Moves of the copies in order, consecutive experts of a pair of ranks merged."""
    moves: list[Move] = []
    last: dict[tuple[int, int], int] = {}  # index of a pair's latest move
    for copy in copies:
        move = Move.of(copy)
        pair = (move.src_rank, move.dst_rank)
        if pair in last and (both := moves[last[pair]].followed_by(move)):
            moves[last[pair]] = both
        else:
            last[pair] = len(moves)
            moves.append(move)
    return moves


@dataclass
class Round:
    """One exchange: what this rank sends to and receives from each rank, and the dtype that travels."""

    dtype: str
    sends: dict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))


def rounds(plan: ReshardPlan, rank: int, bucket_bytes: int) -> list[Round]:
    """The remote copies of `plan` as exchanges in which no rank holds more than `bucket_bytes` of data to
    send and received together. Every rank computes the same number of rounds."""
    by_dtype: dict[str, list[ShardCopy]] = defaultdict(list)
    for copy in plan.copies:
        if not copy.is_local:
            by_dtype[plan.dst_dtypes[copy.tensor]].append(copy)
    result: list[Round] = []
    for dtype, copies in by_dtype.items():
        capacity = bucket_bytes // ITEM_BYTES[dtype]
        if capacity < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} doesn't hold one {dtype} element")
        begin = len(result)
        used: list[dict[int, int]] = []
        latest: dict[int, int] = defaultdict(int)  # by rank: moves of a pair stay in order
        for move in (part for whole in merge(copies) for part in whole.split(max(capacity // 2, 1))):
            i = max(latest[move.src_rank], latest[move.dst_rank])
            while i < len(used) and any(used[i][r] + move.numel > capacity for r in (move.src_rank, move.dst_rank)):
                i += 1
            if i == len(used):
                used.append(defaultdict(int))
                result.append(Round(dtype))
            for r in (move.src_rank, move.dst_rank):
                used[i][r] += move.numel
                latest[r] = i
            if move.src_rank == rank:
                result[begin + i].sends[move.dst_rank].append(move)
            if move.dst_rank == rank:
                result[begin + i].receives[move.src_rank].append(move)
    return result


class Resharder:
    """One rank's part in a plan. Ranks of the plan are the ranks of `group` (default: the world).

    The extra memory at any time is one send and one receive buffer, together at most `bucket_bytes`. The same
    object may run any number of times.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 512 * 1024**2,
    ) -> None:
        self.plan, self.rank, self.group = plan, rank, group
        self.received_bytes = 0  # by the latest run
        self._local = merge(c for c in plan.copies if c.is_local and c.dst_rank == rank)
        self._rounds = rounds(plan, rank, bucket_bytes)
        self._src_dtypes = {c.src_buffer: plan.src_dtypes[c.tensor] for c in plan.copies if c.src_rank == rank}
        self._dst_dtypes = {c.dst_buffer: plan.dst_dtypes[c.tensor] for c in plan.copies if c.dst_rank == rank}

    def run(self, src_buffers: Mapping[str, torch.Tensor], dst_buffers: Mapping[str, torch.Tensor]) -> None:
        """Copies every region of the plan. Collective; buffers on one device. Raises ModelError, before
        anything is sent, for a missing buffer or one of another dtype than the specs say."""
        _check_buffers("source", src_buffers, self._src_dtypes)
        _check_buffers("destination", dst_buffers, self._dst_dtypes)
        self.received_bytes = 0
        with torch.no_grad():
            for move in self._local:
                src = region(src_buffers[move.src_buffer], move.src_offset, move.src_extent)
                dst = region(dst_buffers[move.dst_buffer], move.dst_offset, move.dst_extent)
                dst.copy_(src.reshape(move.dst_extent))
            if self._rounds:
                device = next(iter((*src_buffers.values(), *dst_buffers.values()))).device
                for exchange in self._rounds:
                    self._exchange(exchange, src_buffers, dst_buffers, device)

    def _exchange(
        self,
        exchange: Round,
        src_buffers: Mapping[str, torch.Tensor],
        dst_buffers: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        dtype = getattr(torch, exchange.dtype)
        peers = range(dist.get_world_size(self.group))
        send_sizes = [sum(move.numel for move in exchange.sends[peer]) for peer in peers]
        receive_sizes = [sum(move.numel for move in exchange.receives[peer]) for peer in peers]
        outgoing = torch.empty(sum(send_sizes), dtype=dtype, device=device)
        incoming = torch.empty(sum(receive_sizes), dtype=dtype, device=device)
        at = 0
        for move in (move for peer in peers for move in exchange.sends[peer]):
            src = region(src_buffers[move.src_buffer], move.src_offset, move.src_extent)
            outgoing[at : at + move.numel].view(move.src_extent).copy_(src)  # casts
            at += move.numel
        item = ITEM_BYTES[exchange.dtype]
        dist.all_to_all_single(  # as bytes: no backend needs to know the dtype
            incoming.view(torch.uint8),
            outgoing.view(torch.uint8),
            [size * item for size in receive_sizes],
            [size * item for size in send_sizes],
            group=self.group,
        )
        at = 0
        for move in (move for peer in peers for move in exchange.receives[peer]):
            dst = region(dst_buffers[move.dst_buffer], move.dst_offset, move.dst_extent)
            dst.copy_(incoming[at : at + move.numel].view(move.dst_extent))
            at += move.numel
        self.received_bytes += incoming.numel() * item


def _check_buffers(side: str, buffers: Mapping[str, torch.Tensor], dtypes: Mapping[str, str]) -> None:
    for name, dtype in dtypes.items():
        if name not in buffers:
            raise ModelError(f"the {side} has no buffer {name}; it has {', '.join(list(buffers)[:8])}, ...")
        if buffers[name].dtype != getattr(torch, dtype):
            raise ModelError(f"the {side}'s buffer {name} is {buffers[name].dtype}, the specs say {dtype}")
