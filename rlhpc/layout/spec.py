"""What a rank holds of a tensor, as axis-aligned boxes of the canonical (HF-named) tensor."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class ShardSpec:
    """A canonical tensor under one layout: all shards of all ranks. Replicas are shards with the same box."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", ...
    shards: tuple[Shard, ...]
