"""The planner's invariants on random layouts, carried out element by element in numpy."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np
import pytest

from rlhpc.errors import ModelError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.families import family_for
from rlhpc.reshard.plan import ReshardPlan, ShardCopy, plan
from tests.unit.reshard.reference import CONFIG

Box = tuple[tuple[int, ...], tuple[int, ...]]
NUM_RANKS = 5


def random_partition(rng: random.Random, box: Box, cuts: int) -> list[Box]:
    """Disjoint boxes that make up `box`."""
    start, stop = box
    dims = [d for d in range(len(start)) if stop[d] - start[d] > 1]
    if cuts == 0 or not dims:
        return [box]
    d = rng.choice(dims)
    at = rng.randrange(start[d] + 1, stop[d])
    left = (start, (*stop[:d], at, *stop[d + 1 :]))
    right = ((*start[:d], at, *start[d + 1 :]), stop)
    return random_partition(rng, left, cuts - 1) + random_partition(rng, right, rng.randrange(cuts))


def random_spec(rng: random.Random, name: str, shape: tuple[int, ...], side: str, *, covers: bool) -> ShardSpec:
    """One or two random partitions (which then overlap), each box on one or more ranks, in a buffer of its own with
    a margin around it and sometimes leading dimensions. A destination may lack some boxes."""
    shards = []
    for part in range(rng.choice((1, 1, 2))):
        for i, (start, stop) in enumerate(random_partition(rng, ((0,) * len(shape), shape), rng.randrange(4))):
            low = 1 if covers and part == 0 else 0
            for rank in rng.sample(range(NUM_RANKS), rng.randint(low, 3)):
                lead = tuple(rng.randrange(2) for _ in range(rng.randrange(3)))
                offset = lead + tuple(rng.randrange(2) for _ in shape)
                shards.append(Shard(rank, start, stop, f"{side}.{name}.{part}.{i}", offset))
    return ShardSpec(name, shape, "float32", tuple(shards))


def local_region(shard: Shard, offset: tuple[int, ...], extent: tuple[int, ...]) -> tuple[slice, ...]:
    full = (1,) * (len(offset) - len(extent)) + extent
    return tuple(slice(o, o + n) for o, n in zip(offset, full, strict=True))


def allocate(specs: list[ShardSpec]) -> dict[tuple[int, str], np.ndarray]:
    buffers = {}
    for spec in specs:
        for s in spec.shards:
            extent = tuple(b - a for a, b in zip(s.start, s.stop, strict=True))
            lead = len(s.offset) - len(extent)
            shape = tuple(o + n + 1 for o, n in zip(s.offset, (1,) * lead + extent, strict=True))
            buffers[s.rank, s.buffer] = np.full(shape, -1.0)
    return buffers


def check(copies: ReshardPlan, src: list[ShardSpec], dst: list[ShardSpec]) -> None:
    canonical = {s.name: np.arange(prod(s.shape), dtype=float).reshape(s.shape) for s in src}
    held, got = allocate(src), allocate(dst)
    writes = {key: np.zeros(array.shape, int) for key, array in got.items()}
    expected = {key: array.copy() for key, array in got.items()}
    for specs, target in ((src, held), (dst, expected)):
        for spec in specs:
            for s in spec.shards:
                box = canonical[spec.name][tuple(map(slice, s.start, s.stop))]
                target[s.rank, s.buffer][local_region(s, s.offset, box.shape)] = box.reshape(
                    (1,) * (len(s.offset) - box.ndim) + box.shape
                )
    sources = {s.name: s for s in src}
    for c in copies.copies:
        to = local_region(None, c.dst_offset, c.shape)
        values = held[c.src_rank, c.src_buffer][local_region(None, c.src_offset, c.shape)]
        got[c.dst_rank, c.dst_buffer][to] = values.reshape(got[c.dst_rank, c.dst_buffer][to].shape)
        writes[c.dst_rank, c.dst_buffer][to] += 1
        if not c.is_local:  # the receiver must hold none of it
            for s in sources[c.tensor].shards:
                apart = any(min(b, d) <= max(a, e) for a, b, e, d in zip(c.start, c.stop, s.start, s.stop, strict=True))
                assert s.rank != c.dst_rank or apart
    for key, array in expected.items():
        np.testing.assert_array_equal(got[key], array)
        np.testing.assert_array_equal(writes[key], (array >= 0).astype(int))  # exactly once, nothing else
    elements = sum(int((array >= 0).sum()) for array in expected.values())
    assert copies.total_bytes == 4 * elements
    received = sum(copies.received_bytes(r) for r in range(NUM_RANKS))
    assert received == sum(copies.sent_bytes(r) for r in range(NUM_RANKS)) == copies.remote_bytes
    assert received + sum(copies.local_bytes(r) for r in range(NUM_RANKS)) == copies.total_bytes
    exchanges = by_ranks(copies.copies)
    for rank in range(NUM_RANKS):  # a rank's own list is a part of it, and both ends see an exchange in one order
        mine = by_ranks(copies.copies_of(rank))
        assert mine == {ranks: part for ranks, part in exchanges.items() if rank in ranks}
        sent = sum(copies.copy_bytes(c) for (src, dst), part in mine.items() if src == rank != dst for c in part)
        assert copies.sent_bytes(rank) == sent


def by_ranks(copies: Iterable[ShardCopy]) -> dict[tuple[int, int], list[ShardCopy]]:
    result: dict[tuple[int, int], list[ShardCopy]] = defaultdict(list)
    for copy in copies:
        result[copy.src_rank, copy.dst_rank].append(copy)
    return result


@pytest.mark.parametrize("seed", range(10))
def test_random_layouts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        shapes = {f"t{i}": tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3))) for i in range(2)}
        src = [random_spec(rng, name, shape, "src", covers=True) for name, shape in shapes.items()]
        dst = [random_spec(rng, name, shape, "dst", covers=False) for name, shape in shapes.items()]
        copies = plan(src, dst)
        check(copies, src, dst)
        assert plan(src, dst) == copies


def whole(name: str, shape: tuple[int, ...], ranks: range, dtype: str = "float32") -> ShardSpec:
    zero = (0,) * len(shape)
    return ShardSpec(name, shape, dtype, tuple(Shard(r, zero, shape, name, zero) for r in ranks))


def test_replicas_share_the_sending() -> None:
    rng = random.Random(0)
    shapes = {f"t{i}": (rng.randint(1, 50), rng.randint(1, 50)) for i in range(60)}
    src = [whole(name, shape, range(4)) for name, shape in shapes.items()]
    dst = [whole(name, shape, range(4, 11)) for name, shape in shapes.items()]
    sent = [plan(src, dst).sent_bytes(r) for r in range(4)]
    assert max(sent) - min(sent) <= max(4 * a * b for a, b in shapes.values())
    assert sum(sent) == 7 * 4 * sum(a * b for a, b in shapes.values())


def test_expert_to_tensor_parallel_by_hand() -> None:
    # EP=2 to TP=2: of its 4 experts a rank keeps half of each and sends the other half; all else is replicated.
    family = family_for(CONFIG)
    src = family.trainer_specs(CONFIG, ParallelLayout(tp=1, pp=1, cp=1, ep=2, etp=1, world_size=2), "float32")
    copies = plan(src, family.rollout_specs(CONFIG, 2, range(2), "float32"))
    expert = 3 * 8 * 16  # gate, up and down of one expert
    for rank in range(2):
        assert copies.received_bytes(rank) == copies.sent_bytes(rank) == 4 * 4 * (4 * expert // 2)  # layers, float32
    assert all("experts" in c.tensor for c in copies.copies if not c.is_local)
    down = next(
        c for c in copies.copies if c.tensor == "model.layers.1.mlp.experts.5.down_proj.weight" and not c.is_local
    )
    assert (down.src_rank, down.src_buffer, down.src_offset) == (1, "decoder.layers.1.mlp.experts.w2", (1, 0, 0))
    assert (down.dst_rank, down.dst_buffer) == (0, "model.layers.1.mlp.experts.routed_experts.w2_weight")
    assert (down.start, down.stop, down.dst_offset) == ((0, 0), (16, 4), (5, 0, 0))


def test_expert_parallel_rollout_needs_no_expert_traffic() -> None:
    family = family_for(CONFIG)
    src = family.trainer_specs(CONFIG, ParallelLayout(tp=1, pp=1, cp=1, ep=2, etp=1, world_size=2), "float32")
    copies = plan(src, family.rollout_specs(CONFIG, 2, range(2), "float32", expert_parallel=True))
    assert copies.remote_bytes == 0


def test_bytes_are_the_destinations() -> None:
    copies = plan([whole("w", (4, 8), range(1))], [whole("w", (4, 8), range(1, 2), "bfloat16")])
    assert copies.received_bytes(1) == copies.total_bytes == 4 * 8 * 2


LARGEST = CONFIG | {  # the shape of DeepSeek-V3 in this family
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "head_dim": 128, "moe_intermediate_size": 2048, "num_experts": 256, "vocab_size": 129280,
}  # fmt: skip


def test_the_largest_models_plan_in_seconds_on_512_ranks() -> None:
    """TP=8 and EP=64 to 16 replicas of 32 ranks with whole experts. Time is the process's own: others may run."""
    begin = time.process_time()
    family = family_for(LARGEST)
    layout = ParallelLayout(tp=8, pp=1, cp=1, ep=64, etp=1, world_size=512)
    src = family.trainer_specs(LARGEST, layout, "bfloat16")
    copies = plan(src, family.rollout_specs(LARGEST, 32, range(512), "bfloat16", expert_parallel=True))
    mine = list(copies.copies_of(100))
    assert time.process_time() - begin < 10.0  # 1.2 s on one idle core
    received = sum(copies.copy_bytes(c) for c in mine if c.dst_rank == 100 != c.src_rank)
    # It trains experts 144 to 147 of each layer and samples with 32 to 39; of the dense tensors it trains the fifth of
    # 8 parts and samples with the fifth of 32.
    attention = 4 * 128 * 128 * 7168 // 32
    table = 129280 * 7168 // 32
    assert received == copies.received_bytes(100) == 2 * (61 * (8 * 3 * 2048 * 7168 + attention) + 2 * table)
    assert len(mine) < 20_000


def test_digest_is_the_same_in_another_process() -> None:
    code = (
        "from rlhpc.layout.parallel import ParallelLayout as L; from rlhpc.reshard.families import family_for;"
        "from rlhpc.reshard.plan import plan; from tests.unit.reshard.reference import CONFIG as c; f = family_for(c);"
        "src, dst = f.trainer_specs(c, L(2, 2, 1, 2, 1, 8), 'float32'), f.rollout_specs(c, 4, range(8), 'bfloat16');"
        "print(plan(src, dst).digest)"
    )
    root = Path(__file__).resolve().parents[3]
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    (digest,) = (text.strip() for text in digests)
    family = family_for(CONFIG)
    src = family.trainer_specs(CONFIG, ParallelLayout(2, 2, 1, 2, 1, 8), "float32")
    assert plan(src, family.rollout_specs(CONFIG, 4, range(8), "bfloat16")).digest == digest
    assert plan(src, family.rollout_specs(CONFIG, 2, range(8), "bfloat16")).digest != digest


def test_errors_name_tensor_and_region() -> None:
    half = ShardSpec("w", (4, 8), "float32", (Shard(0, (0, 0), (4, 5), "w", (0, 0)),))
    with pytest.raises(ModelError, match=r"w\[0:4, 5:8\]: rank 3 needs this region and no source rank holds it"):
        plan([half], [whole("w", (4, 8), range(3, 4))])
    with pytest.raises(ModelError, match="v: the destination needs this tensor"):
        plan([half], [whole("v", (4, 8), range(1))])
    with pytest.raises(ModelError, match=r"w: the source's shape \(4, 8\) is not the destination's \(8, 4\)"):
        plan([half], [whole("w", (8, 4), range(1))])
    with pytest.raises(
        ModelError, match="w: the source's dtype bfloat16 is not the destination's float32; .*float32 -> b"
    ):
        plan([whole("w", (2,), range(1), "bfloat16")], [whole("w", (2,), range(1))])
