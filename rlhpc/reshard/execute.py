"""Carries out a plan with torch.distributed: local copies, and bounded buckets through all-to-all beside them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import add, sub
from typing import NamedTuple

import torch
import torch.distributed as dist

from rlhpc.checkpoint.pieces import ITEM_BYTES
from rlhpc.errors import ConfigError, ModelError
from rlhpc.reshard.flat import flat_boxes
from rlhpc.reshard.plan import Index, ReshardPlan, ShardCopy, Traffic

_BLOCK_BYTES = 16 * 2**20  # from here on a block of memory is copied by itself
_GRAIN = 64  # elements: large buckets are cut between these, so that boxes in them stay aligned


def region(buffer: torch.Tensor, offset: Index, extent: Index) -> torch.Tensor:
    """The box of `buffer` that begins at `offset`, as a view of shape `extent`."""
    for dim, (start, length) in enumerate(zip(offset, extent, strict=True)):
        if (start, length) != (0, buffer.shape[dim]):
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
        """Both as one where `other` continues this along one dimension in both buffers: consecutive experts, then the
        gate and up rows of the same experts. One copy of a large block is faster than many of small ones."""
        apart = [d for d, (a, b) in enumerate(zip(self.src_offset, other.src_offset, strict=False)) if a != b]
        if len(apart) != 1 or (self.src_buffer, self.dst_buffer) != (other.src_buffer, other.dst_buffer):
            return None
        (d,) = apart
        extent, length = self.src_extent, self.src_extent[d]
        if (
            self.dst_extent == extent
            and other.src_extent == other.dst_extent == (*extent[:d], other.src_extent[d], *extent[d + 1 :])
            and other.src_offset[d] == self.src_offset[d] + length
            and other.dst_offset == (*self.dst_offset[:d], self.dst_offset[d] + length, *self.dst_offset[d + 1 :])
        ):
            extent = (*extent[:d], length + other.src_extent[d], *extent[d + 1 :])
            return self._replace(src_extent=extent, dst_extent=extent)
        return None

    def cut(self, begin: int, end: int) -> Iterator[Move]:
        """Elements [begin, end) of the box in their order."""
        if (begin, end) == (0, self.numel):
            yield self
            return
        whole = max(self.src_extent, self.dst_extent, key=len)
        src, dst = len(whole) - len(self.src_extent), len(whole) - len(self.dst_extent)  # leading ones that it lacks
        for low, high in flat_boxes(whole, begin, end):
            extent = tuple(map(sub, high, low))
            src_offset = tuple(map(add, self.src_offset, low[src:]))
            dst_offset = tuple(map(add, self.dst_offset, low[dst:]))
            yield Move(*self[:2], src_offset, extent[src:], *self[4:6], dst_offset, extent[dst:])


def merge(copies: Iterable[ShardCopy]) -> list[Move]:
    """Moves of the copies in order, those of a pair of ranks merged where one continues the other."""
    return _merge(_merge(map(Move.of, copies)))  # experts, then gate and up of as many


def _merge(moves: Iterable[Move]) -> list[Move]:
    merged: list[Move] = []
    last: dict[tuple[int, int], int] = {}  # index of a pair's latest move
    for move in moves:
        pair = (move.src_rank, move.dst_rank)
        if pair in last and (both := merged[last[pair]].followed_by(move)):
            merged[last[pair]] = both
        else:
            last[pair] = len(merged)
            merged.append(move)
    return merged


@dataclass(frozen=True)
class Round:
    """One exchange: what this rank sends to and receives from each rank, and the dtype that travels."""

    dtype: str
    sends: dict[int, list[Move]] = field(default_factory=dict)
    receives: dict[int, list[Move]] = field(default_factory=dict)

    def num_bytes(self, moves: Iterable[Move]) -> int:
        return sum(move.numel for move in moves) * ITEM_BYTES[self.dtype]

    @property
    def sent_bytes(self) -> int:
        return sum(map(self.num_bytes, self.sends.values()))

    @property
    def received_bytes(self) -> int:
        return sum(map(self.num_bytes, self.receives.values()))


def rounds(plan: ReshardPlan, rank: int, bucket_bytes: int) -> list[Round]:
    """The remote copies of `rank` as exchanges in which no rank has more than `bucket_bytes` to send and received
    together.

    What each pair of ranks has to exchange is cut into as many equal parts as there are rounds. So every rank knows
    the number of rounds, and its parts of each, without looking at the copies of others, and all rounds are alike.
    """
    pairs: dict[str, dict[tuple[int, int], list[ShardCopy]]] = defaultdict(lambda: defaultdict(list))
    for copy in plan.copies_of(rank):
        if not copy.is_local:
            pairs[plan.dst_dtypes[copy.tensor]][copy.src_rank, copy.dst_rank].append(copy)
    result: list[Round] = []
    for dtype, traffic in plan.traffic.items():
        exchanges = [Round(dtype) for _ in range(_num_rounds(traffic, dtype, bucket_bytes))]
        for (src, dst), copies in pairs[dtype].items():
            parts = _deal(merge(copies), len(exchanges), _grain(bucket_bytes))
            for exchange, moves in zip(exchanges, parts, strict=True):
                if moves and src == rank:
                    exchange.sends[dst] = moves
                elif moves:
                    exchange.receives[src] = moves
        result += exchanges
    return result


def _num_rounds(traffic: Traffic, dtype: str, bucket_bytes: int) -> int:
    item = ITEM_BYTES[dtype] * _grain(bucket_bytes)
    ranks = traffic.sent.keys() | traffic.received.keys()
    if not ranks:
        return 0
    largest = max(traffic.sent.get(r, 0) + traffic.received.get(r, 0) for r in ranks)
    if largest <= bucket_bytes:
        return 1
    rounding = 2 * (len(ranks) - 1) * item  # a part may be one grain more than its share, to and from each peer
    if bucket_bytes <= rounding:
        raise ConfigError(
            f"a bucket of {bucket_bytes} bytes must be more than {rounding}: one {dtype} element to and one from each "
            f"of {len(ranks) - 1} ranks; raise reshard.bucket_bytes, which two buckets share"
        )
    return -(-largest // (bucket_bytes - rounding))


def _grain(bucket_bytes: int) -> int:
    return _GRAIN if bucket_bytes >= 2**20 else 1


def _deal(moves: Sequence[Move], num_parts: int, grain: int) -> list[list[Move]]:
    """The moves' elements, in order, in parts of equal size, give or take one grain."""
    total = sum(move.numel for move in moves)
    parts: list[list[Move]] = [[] for _ in range(num_parts)]
    at = i = 0  # elements before this move, the part that is being filled
    for move in moves:
        begin = 0
        while begin < move.numel:
            part_end = total if i + 1 == num_parts else (i + 1) * total // num_parts // grain * grain
            end = min(move.numel, part_end - at)
            if begin < end:
                parts[i] += move.cut(begin, end)
                begin = end
            else:
                i += 1
        at += move.numel
    return parts


class _Arriving(NamedTuple):
    """A round on its way: when it is there, where, and which boxes it brings, in order."""

    work: dist.Work
    incoming: torch.Tensor
    moves: list[Move]


class Resharder:
    """One rank's part in a plan. Ranks of the plan are the ranks of `group` (default: the world).

    The extra memory during a run is at most `bucket_bytes`: two buckets, each of which holds what a round sends and
    what it receives. The same object may run any number of times.
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
        self._rounds = rounds(plan, rank, bucket_bytes // 2)
        local: list[ShardCopy] = []
        self._src_dtypes: dict[str, str] = {}
        self._dst_dtypes: dict[str, str] = {}
        for copy in plan.copies_of(rank):
            if copy.src_rank == rank:
                self._src_dtypes[copy.src_buffer] = plan.src_dtypes[copy.tensor]
            if copy.dst_rank == rank:
                self._dst_dtypes[copy.dst_buffer] = plan.dst_dtypes[copy.tensor]
            if copy.is_local:
                local.append(copy)
        self._local = merge(local)

    def run(self, src_buffers: Mapping[str, torch.Tensor], dst_buffers: Mapping[str, torch.Tensor]) -> None:
        """Copies every region of the plan. Collective; buffers on one device. Raises ModelError, before
        anything is sent, for a missing buffer or one of another dtype than the specs say.

        While a round's bytes travel, those of the one before are unpacked and those of the next packed.
        """
        _check_buffers("source", src_buffers, self._src_dtypes)
        _check_buffers("destination", dst_buffers, self._dst_dtypes)
        self.received_bytes = 0
        with torch.no_grad():
            arriving: _Arriving | None = None
            buckets = self._buckets(src_buffers, dst_buffers)
            for each, bucket in zip(self._rounds, itertools.cycle(buckets), strict=False):
                leaving = self._exchange(each, src_buffers, bucket)
                self._take(arriving, src_buffers, dst_buffers)
                arriving = leaving
            self._take(arriving, src_buffers, dst_buffers)

    def _buckets(
        self, src_buffers: Mapping[str, torch.Tensor], dst_buffers: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Made once for all rounds: fresh host memory costs as much time as filling it."""
        if not self._rounds:
            return [torch.empty(0)]
        device = next(iter((*src_buffers.values(), *dst_buffers.values()))).device
        largest = max(each.sent_bytes + each.received_bytes for each in self._rounds)
        return [torch.empty(largest, dtype=torch.uint8, device=device) for _ in self._rounds[:2]]

    def _exchange(self, exchange: Round, src_buffers: Mapping[str, torch.Tensor], bucket: torch.Tensor) -> _Arriving:
        """Packs what the round sends, and sets it off."""
        dtype = getattr(torch, exchange.dtype)
        peers = range(dist.get_world_size(self.group))
        sends, receives = ([side.get(peer, []) for peer in peers] for side in (exchange.sends, exchange.receives))
        outgoing, incoming, _ = torch.tensor_split(
            bucket, (exchange.sent_bytes, exchange.sent_bytes + exchange.received_bytes)
        )
        leaving = [move for moves in sends for move in moves]
        _copy_each(  # casts
            _parts(outgoing.view(dtype), [move.src_extent for move in leaving]),
            [region(src_buffers[m.src_buffer], m.src_offset, m.src_extent) for m in leaving],
        )
        work = dist.all_to_all_single(  # as bytes: no backend needs to know the dtype
            incoming,
            outgoing,
            [exchange.num_bytes(moves) for moves in receives],
            [exchange.num_bytes(moves) for moves in sends],
            group=self.group,
            async_op=True,
        )
        return _Arriving(work, incoming.view(dtype), [move for moves in receives for move in moves])

    def _take(
        self,
        arriving: _Arriving | None,
        src_buffers: Mapping[str, torch.Tensor],
        dst_buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Unpacks a round; before there is one, copies what stays on this rank."""
        if arriving is None:
            _copy_moves(self._local, src_buffers, dst_buffers)
            return
        arriving.work.wait()  # on CUDA it is the stream that waits
        _copy_each(
            [region(dst_buffers[m.dst_buffer], m.dst_offset, m.dst_extent) for m in arriving.moves],
            _parts(arriving.incoming, [move.dst_extent for move in arriving.moves]),
        )
        self.received_bytes += arriving.incoming.nbytes


def _parts(bucket: torch.Tensor, extents: Sequence[Index]) -> list[torch.Tensor]:
    sizes = [prod(extent) for extent in extents]
    return [part.view(extent) for part, extent in zip(torch.split(bucket, sizes), extents, strict=True)]


def _copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """On CUDA large blocks of memory go one by one as the driver copies them, at 4.0 of an H200's 4.2 TB/s; small ones
    share a launch, which costs more than they do (2.8 TB/s); rows go as the widest type that fits (3.8, else 1.7)."""
    blocks: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for target, source in zip(targets, sources, strict=True):
        if not target.is_cuda:
            target.copy_(source)
        elif target.is_contiguous() and source.is_contiguous():
            if target.nbytes >= _BLOCK_BYTES:
                target.copy_(source)
            else:
                blocks[target.dtype, source.dtype].append((target.view(-1), source.view(-1)))
        else:
            wide = widest(target, source)
            target.view(wide).copy_(source.view(wide))
    for pairs in blocks.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def widest(target: torch.Tensor, source: torch.Tensor) -> torch.dtype:
    """The widest type as which both can be viewed, so that a copy moves as many bytes at a time; their own where they
    differ."""
    if target.dtype == source.dtype and target.dim():
        for dtype in (torch.complex128, torch.int64, torch.int32):
            ratio = dtype.itemsize // target.itemsize
            if ratio > 1 and _divides(ratio, target) and _divides(ratio, source):
                return dtype
    return target.dtype


def _divides(ratio: int, tensor: torch.Tensor) -> bool:
    *strides, last = tensor.stride()
    return last == 1 and not any(n % ratio for n in (tensor.shape[-1], tensor.storage_offset(), *strides))


def _copy_moves(
    moves: Sequence[Move], src_buffers: Mapping[str, torch.Tensor], dst_buffers: Mapping[str, torch.Tensor]
) -> None:
    sources = (region(src_buffers[m.src_buffer], m.src_offset, m.src_extent) for m in moves)
    _copy_each(
        [region(dst_buffers[m.dst_buffer], m.dst_offset, m.dst_extent) for m in moves],
        [source.reshape(m.dst_extent) for source, m in zip(sources, moves, strict=True)],
    )


def _check_buffers(side: str, buffers: Mapping[str, torch.Tensor], dtypes: Mapping[str, str]) -> None:
    for name, dtype in dtypes.items():
        if name not in buffers:
            raise ModelError(f"the {side} has no buffer {name}; it has {', '.join(list(buffers)[:8])}, ...")
        if buffers[name].dtype != getattr(torch, dtype):
            raise ModelError(f"the {side}'s buffer {name} is {buffers[name].dtype}, the specs say {dtype}")
