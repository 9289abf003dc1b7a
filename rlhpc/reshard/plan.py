"""Which boxes travel from where to where: the intersection of two sets of shards. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import sub
from typing import NamedTuple

import xxhash

from rlhpc.errors import ModelError
from rlhpc.layout.spec import Shard, ShardSpec

Index = tuple[int, ...]
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
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


@dataclass(frozen=True)
class ReshardPlan:
    """Copies of all ranks in a fixed order, the same on every rank. Bytes are counted in the destination's
    dtype, which is what travels."""

    copies: tuple[ShardCopy, ...]
    src_dtypes: dict[str, str]  # by tensor
    dst_dtypes: dict[str, str]
    digest: str

    def copy_bytes(self, copy: ShardCopy) -> int:
        return prod(copy.shape) * ITEM_BYTES[self.dst_dtypes[copy.tensor]]

    @cached_property
    def _traffic(self) -> dict[tuple[int, int], int]:
        """Bytes by (source rank, destination rank)."""
        traffic: dict[tuple[int, int], int] = defaultdict(int)
        for copy in self.copies:
            traffic[copy.src_rank, copy.dst_rank] += self.copy_bytes(copy)
        return dict(traffic)

    def local_bytes(self, rank: int) -> int:
        """Bytes that the rank copies within itself."""
        return self._traffic.get((rank, rank), 0)

    def received_bytes(self, rank: int) -> int:
        """Bytes that the rank receives from others."""
        return sum(size for (src, dst), size in self._traffic.items() if dst == rank != src)

    def sent_bytes(self, rank: int) -> int:
        """Bytes that the rank sends to others."""
        return sum(size for (src, dst), size in self._traffic.items() if src == rank != dst)

    @property
    def total_bytes(self) -> int:
        return sum(self._traffic.values())

    @property
    def remote_bytes(self) -> int:
        return sum(size for (src, dst), size in self._traffic.items() if src != dst)


class _Cover(NamedTuple):
    """A part of a destination shard, and the source shards (by index) any one of which can provide it."""

    start: Index
    stop: Index
    numel: int
    sources: tuple[int, ...]


def plan(src_specs: Iterable[ShardSpec], dst_specs: Iterable[ShardSpec]) -> ReshardPlan:
    """Copies that bring every destination shard's content from the source shards.

    Invariants (tested on random layouts):
    - every element of every destination shard is written exactly once; - what the destination's rank holds
    itself is copied locally, so a rank receives only what it lacks; - among replicas (source shards with the
    same box on several ranks) the one that has sent the fewest bytes so
      far sends next, the lowest rank on a tie: where all replicas can serve all copies, the bytes that they
      send differ by at most one copy;
    - the result depends only on the two lists, so all ranks compute the same plan and digest.

    Source tensors that no destination names are left out. Raises ModelError, naming the tensor, where a
    destination has no source, or shapes differ, or dtypes differ other than by a cast in CASTS.
    """
    sources = {spec.name: spec for spec in src_specs}
    covers: dict[object, list[list[_Cover]]] = {}  # experts and layers share few distinct geometries
    sent: dict[int, int] = defaultdict(int)
    copies: list[ShardCopy] = []
    src_dtypes: dict[str, str] = {}
    dst_dtypes: dict[str, str] = {}
    for dst in dst_specs:
        src = sources.get(dst.name)
        if src is None:
            raise ModelError(f"{dst.name}: the destination needs this tensor and the source has none of it")
        _check_pair(src, dst)
        src_dtypes[dst.name], dst_dtypes[dst.name] = src.dtype, dst.dtype
        key = (src.shape, _geometry(src.shards), _geometry(dst.shards))
        if key not in covers:
            covers[key] = [_cover(dst.name, shard, src.shards) for shard in dst.shards]
        for shard, parts in zip(dst.shards, covers[key], strict=True):
            for start, stop, numel, candidates in parts:
                origin = src.shards[candidates[0]]
                if origin.rank != shard.rank:
                    origin = min((src.shards[c] for c in candidates), key=lambda s: (sent[s.rank], s.rank))
                    sent[origin.rank] += numel * ITEM_BYTES[dst.dtype]
                copies.append(
                    ShardCopy(
                        dst.name, start, stop,
                        origin.rank, origin.buffer, _within(origin, start),
                        shard.rank, shard.buffer, _within(shard, start),
                    )
                )  # fmt: skip
    return ReshardPlan(tuple(copies), src_dtypes, dst_dtypes, _digest(copies, src_dtypes, dst_dtypes))


def _check_pair(src: ShardSpec, dst: ShardSpec) -> None:
    if src.shape != dst.shape:
        raise ModelError(f"{dst.name}: the source's shape {src.shape} is not the destination's {dst.shape}")
    if src.dtype != dst.dtype and (src.dtype, dst.dtype) not in CASTS:
        casts = ", ".join(f"{a} -> {b}" for a, b in sorted(CASTS))
        raise ModelError(
            f"{dst.name}: the source's dtype {src.dtype} is not the destination's {dst.dtype}; "
            f"only these are converted: {casts}"
        )


def _geometry(shards: Sequence[Shard]) -> tuple[tuple[int, Index, Index], ...]:
    return tuple((shard.rank, shard.start, shard.stop) for shard in shards)


def _cover(tensor: str, dst: Shard, sources: Sequence[Shard]) -> list[_Cover]:
    """Disjoint parts that make up `dst`'s box: first what its own rank holds, then each distinct source
    box."""
    options: list[tuple[Index, Index, tuple[int, ...]]] = []
    replicas: dict[tuple[Index, Index], list[int]] = defaultdict(list)
    for i, shard in enumerate(sources):
        if shard.rank == dst.rank:
            options.append((shard.start, shard.stop, (i,)))
        else:
            replicas[shard.start, shard.stop].append(i)
    options += ((start, stop, tuple(indices)) for (start, stop), indices in replicas.items())

    parts: list[_Cover] = []
    missing = [(dst.start, dst.stop)]
    for start, stop, indices in options:
        still: list[tuple[Index, Index]] = []
        for box in missing:
            low = tuple(map(max, box[0], start))
            high = tuple(map(min, box[1], stop))
            if all(a < b for a, b in zip(low, high, strict=True)):
                parts.append(_Cover(low, high, prod(map(sub, high, low)), indices))
                still += _subtract(box, low, high)
            else:
                still.append(box)
        missing = still
        if not missing:
            return parts
    region = ", ".join(f"{a}:{b}" for a, b in zip(*missing[0], strict=True))
    raise ModelError(f"{tensor}[{region}]: rank {dst.rank} needs this region and no source rank holds it")


def _subtract(box: tuple[Index, Index], low: Index, high: Index) -> Iterator[tuple[Index, Index]]:
    """Disjoint boxes that make up `box` without [low, high), which lies inside it."""
    start, stop = box
    for d in range(len(start)):
        if start[d] < low[d]:
            yield start, (*stop[:d], low[d], *stop[d + 1 :])
        if high[d] < stop[d]:
            yield (*start[:d], high[d], *start[d + 1 :]), stop
        start = (*start[:d], low[d], *start[d + 1 :])
        stop = (*stop[:d], high[d], *stop[d + 1 :])


def _within(shard: Shard, start: Index) -> Index:
    """Where the box that begins at canonical index `start` begins in the shard's buffer."""
    if start == shard.start:
        return shard.offset
    lead = len(shard.offset) - len(start)
    moved = (o + a - b for o, a, b in zip(shard.offset[lead:], start, shard.start, strict=True))
    return (*shard.offset[:lead], *moved)


def _digest(copies: Sequence[ShardCopy], *dtypes: dict[str, str]) -> str:
    digest = xxhash.xxh3_128()
    for table in dtypes:
        digest.update(json.dumps(table).encode())
    for first in range(0, len(copies), 4096):  # in chunks: the text of all copies is many times their size
        digest.update(json.dumps(copies[first : first + 4096]).encode())
    return digest.hexdigest()
