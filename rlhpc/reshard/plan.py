"""Which boxes travel from where to where: the intersection of two sets of shards. Pure.

Layers and experts repeat, so a plan is made and kept by structure: tensors whose shards have the same boxes on the
same ranks form a group, and what is worked out for a group holds for each of its tensors. The copies of one rank are
then listed without looking at those of any other.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import sub
from typing import NamedTuple

import numpy as np
import xxhash

from rlhpc.checkpoint.pieces import ITEM_BYTES
from rlhpc.errors import ModelError
from rlhpc.layout.spec import Replicas, Shards, ShardSpec

Index = tuple[int, ...]
Box = tuple[Index, Index]  # start, stop
CASTS = {("float32", "bfloat16")}  # master weights to a bfloat16 engine; anything else is a mistake


class ShardCopy(NamedTuple):
    """The box [start, stop) of canonical tensor `tensor`, from one rank's buffer to another's. Offsets are
    those of the box within the local buffers and as long as the buffers' ranks (see layout.spec.Shard)."""

    tensor: str
    start: Index
    stop: Index
    src_rank: int
    src_buffer: str
    src_offset: Index
    dst_rank: int
    dst_buffer: str
    dst_offset: Index

    @property
    def shape(self) -> Index:
        return tuple(map(sub, self.stop, self.start))

    @property
    def is_local(self) -> bool:
        return self.src_rank == self.dst_rank


class Place(NamedTuple):
    """A rank, and which entry of a tensor's `Shards.replicas` describes what it holds."""

    rank: int
    entry: int


class Transfer(NamedTuple):
    """A box of every tensor of a group: who has it to give, in the order of their turns, and who takes it."""

    start: Index
    stop: Index
    senders: tuple[Place, ...]
    receivers: tuple[Place, ...]

    @property
    def is_local(self) -> bool:
        """Then it has one sender and one receiver."""
        return self.senders[0].rank == self.receivers[0].rank

    @property
    def numel(self) -> int:
        return prod(map(sub, self.stop, self.start))


class GroupTensor(NamedTuple):
    name: str
    src: Shards
    dst: Shards
    turn: int


@dataclass(frozen=True)
class Group:
    """Tensors with the same boxes on the same ranks. Stacked experts that lie in one buffer on both sides have one
    turn, so that they come from one sender as one message; every other tensor has a turn of its own."""

    tensors: tuple[GroupTensor, ...]
    dst_dtype: str
    transfers: tuple[Transfer, ...]

    def copies(self, rank: int | None = None) -> Iterator[ShardCopy]:
        """Those that `rank` sends or receives; all where it is None."""
        for transfer in self.transfers:
            num_senders, num_receivers = len(transfer.senders), len(transfer.receivers)
            takes = [i for i, place in enumerate(transfer.receivers) if rank in (None, place.rank)]
            gives = [i for i, place in enumerate(transfer.senders) if place.rank == rank]
            if not takes and not gives:
                continue
            for tensor in self.tensors:
                first = tensor.turn * num_receivers
                given = [j for i in gives for j in range((i - first) % num_senders, num_receivers, num_senders)]
                for j in takes if transfer.is_local else (*takes, *given):
                    sender = transfer.senders[(first + j) % num_senders]
                    yield _copy(tensor, transfer, sender, transfer.receivers[j])


@dataclass(frozen=True)
class Traffic:
    """Bytes by rank, in the destination's dtype, which is what travels."""

    local: dict[int, int]
    sent: dict[int, int]
    received: dict[int, int]


@dataclass(frozen=True)
class ReshardPlan:
    """The copies of all ranks, the same object on every rank."""

    groups: tuple[Group, ...]
    src_dtypes: dict[str, str]  # by tensor
    dst_dtypes: dict[str, str]
    traffic: Mapping[str, Traffic]  # by dtype
    digest: str

    @cached_property
    def copies(self) -> tuple[ShardCopy, ...]:
        """All of them, in a fixed order. Their number grows with the ranks: work with `copies_of` where it can be
        large."""
        return tuple(copy for group in self.groups for copy in group.copies())

    def copies_of(self, rank: int) -> Iterator[ShardCopy]:
        """Those that the rank sends or receives; what two ranks exchange comes in one order on both."""
        for group in self.groups:
            yield from group.copies(rank)

    def copy_bytes(self, copy: ShardCopy) -> int:
        return prod(copy.shape) * ITEM_BYTES[self.dst_dtypes[copy.tensor]]

    def local_bytes(self, rank: int) -> int:
        """Bytes that the rank copies within itself."""
        return sum(traffic.local.get(rank, 0) for traffic in self.traffic.values())

    def received_bytes(self, rank: int) -> int:
        """Bytes that the rank receives from others."""
        return sum(traffic.received.get(rank, 0) for traffic in self.traffic.values())

    def sent_bytes(self, rank: int) -> int:
        """Bytes that the rank sends to others."""
        return sum(traffic.sent.get(rank, 0) for traffic in self.traffic.values())

    @property
    def total_bytes(self) -> int:
        return self.remote_bytes + sum(sum(traffic.local.values()) for traffic in self.traffic.values())

    @property
    def remote_bytes(self) -> int:
        return sum(sum(traffic.received.values()) for traffic in self.traffic.values())


def plan(src_specs: Iterable[ShardSpec], dst_specs: Iterable[ShardSpec]) -> ReshardPlan:
    """Copies that bring every destination shard's content from the source shards.

    Invariants (tested on random layouts):
    - every element of every destination shard is written exactly once;
    - what the destination's rank holds itself is copied locally, so a rank receives only what it lacks;
    - replicas (source shards with the same box on several ranks) take turns: of a box that a group's tensors have in
      common each sends as often as the others or once more, and those that have sent the fewest bytes so far, the
      lowest rank on a tie, are the ones that send once more. Where all replicas can serve all copies, the bytes that
      they send differ by at most what one turn sends to one rank;
    - the result depends only on the two lists, so all ranks compute the same plan and digest.

    Source tensors that no destination names are left out. Raises ModelError, naming the tensor, where a
    destination has no source, or shapes differ, or dtypes differ other than by a cast in CASTS.
    """
    sources = {spec.name: spec for spec in src_specs}
    geometries = _Geometries()
    members: dict[tuple[Index, str, int, int], list[tuple[str, Shards, Shards]]] = defaultdict(list)
    src_dtypes: dict[str, str] = {}
    dst_dtypes: dict[str, str] = {}
    for dst in dst_specs:
        src = sources.get(dst.name)
        if src is None:
            raise ModelError(f"{dst.name}: the destination needs this tensor and the source has none of it")
        _check_pair(src, dst)
        src_dtypes[dst.name], dst_dtypes[dst.name] = src.dtype, dst.dtype
        held, needed = Shards.of(src.shards), Shards.of(dst.shards)
        key = (src.shape, dst.dtype, geometries.number(held), geometries.number(needed))
        members[key].append((dst.name, held, needed))
    traffic = {dtype: Traffic(Counter(), Counter(), Counter()) for dtype in sorted(set(dst_dtypes.values()))}
    sent: Counter[int] = Counter()
    groups = tuple(
        _group(shape, dtype, tensors, traffic[dtype], sent) for (shape, dtype, _, _), tensors in members.items()
    )
    return ReshardPlan(groups, src_dtypes, dst_dtypes, traffic, _digest(groups, src_dtypes, dst_dtypes))


def _check_pair(src: ShardSpec, dst: ShardSpec) -> None:
    if src.shape != dst.shape:
        raise ModelError(f"{dst.name}: the source's shape {src.shape} is not the destination's {dst.shape}")
    if src.dtype != dst.dtype and (src.dtype, dst.dtype) not in CASTS:
        casts = ", ".join(f"{a} -> {b}" for a, b in sorted(CASTS))
        raise ModelError(
            f"{dst.name}: the source's dtype {src.dtype} is not the destination's {dst.dtype}; "
            f"only these are converted: {casts}"
        )


class _Geometries:
    """Numbers what shards have in common beside their buffers. Layers share `replicas`, which are read once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[tuple[Index, Index, Index], ...], int] = {}
        self._read: dict[int, tuple[tuple[Replicas, ...], int]] = {}  # by id, of objects that are kept alive

    def number(self, shards: Shards) -> int:
        key = id(shards.replicas)
        if key not in self._read:
            geometry = tuple(same[:3] for same in shards.replicas)
            self._read[key] = (shards.replicas, self._numbers.setdefault(geometry, len(self._numbers)))
        return self._read[key][1]


def _group(
    shape: Index, dtype: str, tensors: Sequence[tuple[str, Shards, Shards]], traffic: Traffic, sent: Counter[int]
) -> Group:
    """Also adds the group's bytes to `traffic`, and to `sent` over all dtypes."""
    name, src, dst = tensors[0]
    members = tuple(
        GroupTensor(*tensor, turn) for tensor, turn in zip(tensors, _turns(len(shape), tensors), strict=True)
    )
    tensors_of_turn = list(Counter(tensor.turn for tensor in members).values())
    transfers = []
    for transfer in _transfers(name, src.replicas, dst.replicas):
        size = transfer.numel * ITEM_BYTES[dtype]
        if transfer.is_local:
            traffic.local[transfer.receivers[0].rank] += size * len(members)
        else:
            senders = tuple(sorted(transfer.senders, key=lambda place: (sent[place.rank], place.rank)))
            transfer = transfer._replace(senders=senders)
            counts = [len(members) * len(transfer.receivers)]
            if len(senders) > 1:
                of_copy = np.repeat(tensors_of_turn, len(transfer.receivers))
                counts = np.bincount(np.arange(len(of_copy)) % len(senders), of_copy, len(senders)).astype(int).tolist()
            for place, count in zip(senders, counts, strict=True):
                sent[place.rank] += size * count
                traffic.sent[place.rank] += size * count
            for place in transfer.receivers:
                traffic.received[place.rank] += size * len(members)
        transfers.append(transfer)
    return Group(members, dtype, tuple(transfers))


def _turns(num_dims: int, tensors: Sequence[tuple[str, Shards, Shards]]) -> Iterator[int]:
    turn, stack = -1, None
    for _, src, dst in tensors:
        first = [same for side in (src, dst) for same in side.replicas[:1]]
        stacked = all(len(same.offset) > num_dims for same in first)
        current = (src.prefix, dst.prefix, *(same.buffer for same in first)) if stacked else None
        turn += current is None or current != stack
        stack = current
        yield turn


def _transfers(tensor: str, src: Sequence[Replicas], dst: Sequence[Replicas]) -> Iterator[Transfer]:
    """What makes up the destination's boxes, senders in the order of the source."""
    senders: dict[Box, dict[int, int]] = defaultdict(dict)  # index by rank, by box
    own: dict[int, list[Box]] = defaultdict(list)
    for i, same in enumerate(src):
        box = (same.start, same.stop)
        for rank in same.ranks:
            if rank not in senders[box]:
                own[rank].append(box)
            senders[box].setdefault(rank, i)
    covers: dict[tuple[Box, ...], list[tuple[Box, Box]]] = {}
    receivers: dict[tuple[Box, Box], list[Place]] = defaultdict(list)
    for j, same in enumerate(dst):
        box = (same.start, same.stop)
        for rank in same.ranks:
            held = own.get(rank, ())
            if (key := (box, *held)) not in covers:
                covers[key] = _cover(tensor, rank, box, (*held, *senders))
            for part, source in covers[key]:
                if source in held:
                    yield Transfer(*part, (Place(rank, senders[source][rank]),), (Place(rank, j),))
                else:
                    receivers[part, source].append(Place(rank, j))
    for (part, source), places in receivers.items():
        yield Transfer(*part, tuple(Place(*item) for item in senders[source].items()), tuple(places))


def _cover(tensor: str, rank: int, box: Box, sources: Iterable[Box]) -> list[tuple[Box, Box]]:
    """Disjoint parts that make up `box`, each with the first of the sources that has it."""
    parts: list[tuple[Box, Box]] = []
    missing = [box]
    for source in sources:
        still: list[Box] = []
        for rest in missing:
            low = tuple(map(max, rest[0], source[0]))
            high = tuple(map(min, rest[1], source[1]))
            if all(a < b for a, b in zip(low, high, strict=True)):
                parts.append(((low, high), source))
                still += _subtract(rest, low, high)
            else:
                still.append(rest)
        missing = still
        if not missing:
            return parts
    region = ", ".join(f"{a}:{b}" for a, b in zip(*missing[0], strict=True))
    raise ModelError(f"{tensor}[{region}]: rank {rank} needs this region and no source rank holds it")


def _subtract(box: Box, low: Index, high: Index) -> Iterator[Box]:
    """Disjoint boxes that make up `box` without [low, high), which lies inside it."""
    start, stop = box
    for d in range(len(start)):
        if start[d] < low[d]:
            yield start, (*stop[:d], low[d], *stop[d + 1 :])
        if high[d] < stop[d]:
            yield (*start[:d], high[d], *start[d + 1 :]), stop
        start = (*start[:d], low[d], *start[d + 1 :])
        stop = (*stop[:d], high[d], *stop[d + 1 :])


def _copy(tensor: GroupTensor, transfer: Transfer, sender: Place, receiver: Place) -> ShardCopy:
    src, dst = tensor.src.replicas[sender.entry], tensor.dst.replicas[receiver.entry]
    start, stop = transfer.start, transfer.stop
    return ShardCopy(
        tensor.name, start, stop,
        sender.rank, tensor.src.prefix + src.buffer, _within(src, start),
        receiver.rank, tensor.dst.prefix + dst.buffer, _within(dst, start),
    )  # fmt: skip


def _within(same: Replicas, start: Index) -> Index:
    """Where the box that begins at canonical index `start` begins in the shard's buffer."""
    if start == same.start:
        return same.offset
    lead = len(same.offset) - len(start)
    moved = (o + a - b for o, a, b in zip(same.offset[lead:], start, same.start, strict=True))
    return (*same.offset[:lead], *moved)


def _digest(groups: Sequence[Group], *dtypes: dict[str, str]) -> str:
    digest = xxhash.xxh3_128(json.dumps(dtypes).encode())
    told: dict[int, int] = {}  # replicas, which layers share, by id: their number

    def tell(shards: Shards) -> tuple[str, int]:
        if id(shards.replicas) not in told:
            told[id(shards.replicas)] = len(told)
            digest.update(json.dumps(shards.replicas).encode())
        return shards.prefix, told[id(shards.replicas)]

    for group in groups:
        members = [(tensor.name, tensor.turn, *tell(tensor.src), *tell(tensor.dst)) for tensor in group.tensors]
        digest.update(json.dumps((group.transfers, members)).encode())
    return digest.hexdigest()
