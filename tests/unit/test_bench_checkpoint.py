"""Where the benches cut the distributed optimizer's buffer."""

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.flat import FlatRange
from scripts.bench.flat_ranges import distributed_ranges, held_specs


def test_where_the_buffer_is_cut() -> None:
    """By hand: b lies at 0..60 and a at 64..164 of 256 elements, 128 a rank; an expert is all of its rank's buffer."""
    both = (Shard(0, (0, 0), (10, 10), "a", (0, 0)), Shard(1, (0, 0), (10, 10), "a", (0, 0)))
    specs = [
        ShardSpec("a", (10, 10), "float32", both),
        ShardSpec("b", (60,), "float32", tuple(Shard(rank, (0,), (60,), "b", (0,)) for rank in (0, 1))),
        *(
            ShardSpec(f"e{rank}", (2, 3), "float32", (Shard(rank, (0, 0), (2, 3), "mlp.experts.w", (0, 0, 0)),))
            for rank in (0, 1)
        ),
    ]
    ranges = list(distributed_ranges(specs, ParallelLayout(ep=2, world_size=2)))
    assert sorted(ranges, key=lambda held: (held.rank, held.parameter)) == [
        FlatRange(0, "a", (10, 10), 0, 64),
        FlatRange(0, "b", (60,), 0, 60),
        FlatRange(0, "mlp.experts.w", (1, 2, 3), 0, 6),
        FlatRange(1, "a", (10, 10), 64, 100),
        FlatRange(1, "mlp.experts.w", (1, 2, 3), 0, 6),
    ]
    held = {spec.name: [(s.start, s.stop) for s in spec.shards] for spec in held_specs(specs, ranges, 1)}
    assert held == {"a": [((6, 4), (7, 10)), ((7, 0), (10, 10))], "e1": [((0, 0), (2, 3))]}
