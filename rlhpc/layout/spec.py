"""What a rank holds of a tensor, as axis-aligned boxes of the canonical (HF-named) tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple, overload


@dataclass(frozen=True)
class Shard:
    """One box of a canonical tensor and where it lives.

    The box covers `start[d] <= index[d] < stop[d]` of the canonical tensor. In the rank's local tensor
    `buffer` it begins at `offset`, whose length is the local tensor's rank: leading dimensions beyond the
    canonical tensor's (the expert dimension of stacked experts) are plain indices of extent one.
    """

    rank: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    buffer: str
    offset: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box, with the canonical tensor's rank."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def extent(self) -> tuple[int, ...]:
        """Of the box, with the buffer's rank: `shape` after the ones of leading dimensions."""
        return (1,) * (len(self.offset) - len(self.start)) + self.shape

    @property
    def end(self) -> tuple[int, ...]:
        """Where the box ends in the buffer, exclusive."""
        return tuple(map(add, self.offset, self.extent))


class Replicas(NamedTuple):
    """The same shard on several ranks."""

    ranks: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    buffer: str
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Shards(Sequence[Shard]):
    """All shards of a tensor, stored as what repeats: layers share one `replicas` and differ in `prefix`, which
    precedes every buffer's name. So a model's specs take space for its structure, not for each rank's every tensor.
    """

    replicas: tuple[Replicas, ...]
    prefix: str = ""

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Shards:
        if isinstance(shards, Shards):
            return shards
        return cls(tuple(Replicas((s.rank,), s.start, s.stop, s.buffer, s.offset) for s in shards))

    def __len__(self) -> int:
        return sum(len(same.ranks) for same in self.replicas)

    def __iter__(self) -> Iterator[Shard]:
        for ranks, start, stop, buffer, offset in self.replicas:
            for rank in ranks:
                yield Shard(rank, start, stop, self.prefix + buffer, offset)

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Shard, ...]: ...
    def __getitem__(self, index: int | slice) -> Shard | tuple[Shard, ...]:
        return tuple(self)[index]


@dataclass(frozen=True)
class ShardSpec:
    """A canonical tensor under one layout: all shards of all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", ...
    shards: Sequence[Shard]  # a tuple, or Shards

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], dtype: str, ranks: tuple[int, ...]) -> ShardSpec:
        """The tensor in one piece on each of the ranks, in a buffer of its own name."""
        origin = (0,) * len(shape)
        return cls(name, shape, dtype, Shards((Replicas(ranks, origin, shape, name, origin),)))

    @property
    def buffers(self) -> set[str]:
        """The buffers of all ranks that hold a part."""
        shards = Shards.of(self.shards)
        return {shards.prefix + same.buffer for same in shards.replicas}

    def on(self, rank: int) -> Iterator[Shard]:
        """The shards of one rank."""
        shards = Shards.of(self.shards)
        for ranks, start, stop, buffer, offset in shards.replicas:
            if rank in ranks:
                yield Shard(rank, start, stop, shards.prefix + buffer, offset)
