"""Shards stored by structure read like the shards one by one."""

from __future__ import annotations

import pickle

from rlhpc.layout.spec import Replicas, Shard, Shards, ShardSpec

REPLICAS = (
    Replicas((0, 2), (0, 0), (2, 4), "w", (1, 0, 0)),
    Replicas((1, 3), (2, 0), (4, 4), "w", (1, 0, 0)),
    Replicas((3,), (0, 0), (2, 4), "copy", (0, 0)),
)
LISTED = (
    Shard(0, (0, 0), (2, 4), "layers.5.w", (1, 0, 0)),
    Shard(2, (0, 0), (2, 4), "layers.5.w", (1, 0, 0)),
    Shard(1, (2, 0), (4, 4), "layers.5.w", (1, 0, 0)),
    Shard(3, (2, 0), (4, 4), "layers.5.w", (1, 0, 0)),
    Shard(3, (0, 0), (2, 4), "layers.5.copy", (0, 0)),
)


def test_shared_replicas_are_the_shards_under_each_prefix() -> None:
    shards = Shards(REPLICAS, "layers.5.")
    assert tuple(shards) == LISTED
    assert (len(shards), shards[1], shards[-1], shards[1:3]) == (5, LISTED[1], LISTED[4], LISTED[1:3])
    assert shards == Shards(REPLICAS, "layers.5.") != Shards(REPLICAS, "layers.6.")
    assert [shard.buffer for shard in Shards(REPLICAS, "layers.6.")][::4] == ["layers.6.w", "layers.6.copy"]
    assert Shards.of(shards) is shards
    assert tuple(Shards.of(LISTED)) == LISTED
    assert pickle.loads(pickle.dumps(shards)) == shards


def test_a_rank_sees_its_own() -> None:
    for shards in (LISTED, Shards(REPLICAS, "layers.5.")):
        spec = ShardSpec("layers.5.weight", (4, 4), "float32", shards)
        assert list(spec.on(3)) == list(LISTED[3:])
        assert list(spec.on(2)) == [LISTED[1]]
        assert list(spec.on(4)) == []


def test_where_a_shard_lies_in_its_buffer() -> None:
    stacked, flat = Shard(0, (2, 0), (4, 3), "w", (1, 5, 0)), Shard(0, (2,), (9,), "norm", (0,))
    assert (stacked.shape, stacked.extent, stacked.end) == ((2, 3), (1, 2, 3), (2, 7, 3))
    assert (flat.shape, flat.extent, flat.end) == ((7,), (7,), (7,))


def test_the_buffers_of_all_ranks() -> None:
    for shards in (LISTED, Shards(REPLICAS, "layers.5.")):
        assert ShardSpec("layers.5.weight", (4, 4), "float32", shards).buffers == {"layers.5.w", "layers.5.copy"}
