"""Buckets, merging and splitting, and checksums; exchanges between real ranks are in tests/distributed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhpc.checkpoint.pieces import ITEM_BYTES
from rlhpc.errors import ConfigError, EngineError, ModelError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.execute import Move, Resharder, _deal, merge, region, rounds, widest
from rlhpc.reshard.families import family_for, model_facts
from rlhpc.reshard.plan import ReshardPlan, plan
from rlhpc.reshard.verify import fingerprint, verify
from tests.unit.reshard.reference import CONFIG, canonical_arrays, rollout_buffers, trainer_buffers

SINGLE = ParallelLayout(1, 1, 1, 1, 1, 1)
Rows = tuple[int, int]


def publish_plan(layout: ParallelLayout, tp: int, dtype: str = "float32") -> ReshardPlan:
    family = family_for(CONFIG)
    rollout = family.rollout_specs(CONFIG, tp, range(layout.world_size), dtype)
    return plan(family.trainer_specs(CONFIG, layout, "float32"), rollout)


@pytest.mark.parametrize("bucket_bytes", [14, 16, 100, 4096, 10**6])
def test_no_round_exceeds_the_bucket(bucket_bytes: int) -> None:
    copies = publish_plan(ParallelLayout(tp=2, pp=2, cp=1, ep=2, etp=1, world_size=4), 4, "bfloat16")
    by_rank = [rounds(copies, rank, bucket_bytes) for rank in range(4)]
    assert len({len(each) for each in by_rank}) == 1
    received = [0] * 4
    for exchange in zip(*by_rank, strict=True):
        for rank, mine in enumerate(exchange):
            item = ITEM_BYTES[mine.dtype]
            held = {
                side: sum(move.numel * item for moves in peers.values() for move in moves)
                for side, peers in (("sends", mine.sends), ("receives", mine.receives))
            }
            assert sum(held.values()) <= bucket_bytes
            received[rank] += held["receives"]
            for peer, moves in mine.sends.items():
                assert moves == exchange[peer].receives[rank]  # both ends agree on content and order
    assert received == [copies.received_bytes(rank) for rank in range(4)]


def test_a_bucket_must_hold_an_element_for_each_peer() -> None:
    copies = publish_plan(ParallelLayout(1, 1, 1, 4, 1, 4), 4)
    with pytest.raises(ConfigError, match="a bucket of 24 bytes must be more than 24: one float32 .* each of 3 ranks"):
        rounds(copies, 0, 24)


def test_consecutive_experts_travel_as_one() -> None:
    copies = publish_plan(ParallelLayout(1, 1, 1, 2, 1, 2), 2)
    moves = [m for m in merge(copies.copies) if m.src_rank == 0 and m.dst_rank == 1]
    # 4 layers of gate, up and down: each the other rank's half of all 4 local experts.
    assert len(moves) == 4 * 3
    assert (moves[0].src_offset, moves[0].src_extent) == ((0, 4, 0), (4, 4, 16))
    assert (moves[0].dst_offset, moves[0].dst_extent) == ((0, 0, 0), (4, 4, 16))
    # With whole experts on both sides their gate and up rows are one block too.
    copies = publish_plan(ParallelLayout(1, 1, 1, 2, 1, 2), 1)
    moves = [m for m in merge(copies.copies) if m.src_rank == 0 and m.dst_rank == 1]
    assert len(moves) == 4 * 2
    assert (moves[0].src_offset, moves[0].src_extent) == ((0, 0, 0), (4, 16, 16))
    assert (moves[0].dst_offset, moves[0].dst_extent) == ((0, 0, 0), (4, 16, 16))


@pytest.mark.parametrize("back", [False, True])
def test_a_cut_move_copies_the_same(back: bool) -> None:
    """A box of a stack to a box of a tensor without one, and back, in 7 parts of 36 elements: 5 or 6 each."""
    stacked, single = ((2, 1, 1, 0), (1, 4, 3, 3)), ((0, 2, 1), (4, 3, 3))
    stack, other = torch.arange(240.0).view(4, 5, 4, 3), -torch.arange(96.0).view(4, 6, 4)
    move = Move(0, "src", *stacked, 1, "dst", *single) if not back else Move(0, "src", *single, 1, "dst", *stacked)
    src, dst = (stack, other) if not back else (other, stack)
    expected = dst.clone()
    if back:
        expected[2, 1:, 1:] = src[:, 2:5, 1:]
    else:
        expected[:, 2:5, 1:] = src[2, 1:, 1:]
    assert [sum(part.numel for part in parts_of) for parts_of in _deal([move], 3, 8)] == [8, 16, 12]  # cut at 8 and 24
    parts = _deal([move], 7, 1)
    assert [sum(part.numel for part in parts_of) for parts_of in parts] == [5, 5, 5, 5, 5, 5, 6]
    for part in (part for parts_of in parts for part in parts_of):
        values = region(src, part.src_offset, part.src_extent)
        region(dst, part.dst_offset, part.dst_extent).copy_(values.reshape(part.dst_extent))
    assert torch.equal(dst, expected)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (slice(0, 16), torch.complex128),  # 16 of 48: 8 bfloat16 are 16 bytes
        (slice(8, 32), torch.complex128),
        (slice(4, 16), torch.int64),  # begins at 8 bytes
        (slice(0, 4), torch.int64),
        (slice(2, 8), torch.int32),
        (slice(1, 17), torch.bfloat16),  # begins at 2 bytes
        (slice(0, 3), torch.bfloat16),
    ],
)
def test_rows_are_copied_as_the_widest_type_that_fits(columns: slice, expected: torch.dtype) -> None:
    source = torch.randn(3, 5, 48, dtype=torch.bfloat16)[:, :, columns]
    target = torch.zeros(source.shape, dtype=torch.bfloat16)
    wide = widest(target, source)
    assert wide == expected
    target.view(wide).copy_(source.view(wide))
    assert torch.equal(target, source)
    assert widest(target.float(), source) == torch.float32  # a cast
    assert widest(target.mT, source.mT) == torch.bfloat16  # no rows


def filled() -> tuple[ReshardPlan, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, np.ndarray]]:
    arrays, facts = canonical_arrays(family_for(CONFIG).canonical_tensors(CONFIG)), model_facts(CONFIG)
    src = {n: torch.from_numpy(a.copy()) for n, a in trainer_buffers(arrays, facts, SINGLE, 0).items()}
    expected = rollout_buffers(arrays, facts, 0, 1, expert_parallel=False)
    return publish_plan(SINGLE, 1), src, {n: torch.zeros(a.shape) for n, a in expected.items()}, expected


def test_one_rank_needs_no_process_group() -> None:
    copies, src, dst, expected = filled()
    Resharder(copies, 0).run(src, dst)
    for name, array in expected.items():
        np.testing.assert_array_equal(dst[name].numpy(), array, err_msg=name)
    verify(copies, src, dst, 0)


def test_wrong_buffers_are_refused_before_anything_is_written() -> None:
    copies, src, dst, _ = filled()
    resharder = Resharder(copies, 0)
    with pytest.raises(
        ModelError, match="destination's buffer model.norm.weight is torch.float64, the specs say float32"
    ):
        resharder.run(src, dst | {"model.norm.weight": torch.zeros(16, dtype=torch.float64)})
    del src["output_layer.weight"]
    with pytest.raises(ModelError, match="the source has no buffer output_layer.weight"):
        resharder.run(src, dst)
    assert all(not tensor.any() for tensor in dst.values())


def test_verify_names_every_kind_of_difference() -> None:
    copies, src, dst, _ = filled()
    Resharder(copies, 0).run(src, dst)
    name = "model.layers.1.mlp.experts.routed_experts.w13_weight"
    correct = dst[name].clone()
    dst[name][3, 8:] = correct[3, 8:].flip(0)  # up rows in another order
    with pytest.raises(EngineError, match=r"model.layers.1.mlp.experts.3.up_proj.weight\[0:8, 0:16\] in .*w13_weight"):
        verify(copies, src, dst, 0)
    dst[name].copy_(correct)
    dst[name][:, :8] = 0.0
    with pytest.raises(EngineError, match="experts.0.gate_proj.*and 4 more regions of rank 0"):
        verify(copies, src, dst, 0)
    dst[name].copy_(correct)
    verify(copies, src, dst, 0)


def test_fingerprint_by_hand() -> None:
    k, mask = 0x1E3779B97F4A7C15, 2**64 - 1
    values = torch.tensor([1.0, -2.0, 0.5])
    words = [0x3F800000, 0xC0000000 - 2**32, 0x3F000000]
    expected = sum(word * ((i * k & mask) | 1) for i, word in enumerate(words)) & mask
    assert int(fingerprint(values)) & mask == expected
    long = torch.arange(3_000_000, dtype=torch.bfloat16)  # several chunks
    changed = long.clone()
    changed[2_500_000] += 1e5
    assert int(fingerprint(long)) != int(fingerprint(changed))
    assert int(fingerprint(long.view(3, -1)[1])) == int(fingerprint(long[1_000_000:2_000_000]))


def test_regions_with_and_without_a_stacking_dimension() -> None:
    flat = ShardSpec("w", (2, 3), "float32", (Shard(0, (0, 0), (2, 3), "flat", (0, 0)),))
    stacked = ShardSpec("w", (2, 3), "float32", (Shard(0, (0, 0), (2, 3), "stacked", (1, 0, 2)),))
    buffers = {"flat": torch.arange(6.0).view(2, 3), "stacked": torch.zeros(2, 2, 5)}
    Resharder(plan([flat], [stacked]), 0).run(buffers, buffers)
    assert torch.equal(buffers["stacked"][1, :, 2:], torch.arange(6.0).view(2, 3))
    assert buffers["stacked"].count_nonzero() == 5
    back = {"flat": torch.zeros(2, 3)}
    Resharder(plan([stacked], [flat]), 0).run(buffers, back)
    assert torch.equal(back["flat"], torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize(
    ("src_rows", "dst_rows", "merged"),
    [((0, 1), (2, 3), 1), ((0, 2), (2, 3), 2), ((0, 1), (2, 4), 2), ((1, 0), (3, 2), 2)],
)
def test_only_rows_that_follow_on_both_sides_merge(src_rows: Rows, dst_rows: Rows, merged: int) -> None:
    def specs(buffer: str, rows: Rows) -> list[ShardSpec]:
        shards = [Shard(0, (0, 0), (2, 3), buffer, (row, 0, 0)) for row in rows]
        return [ShardSpec(f"w{i}", (2, 3), "float32", (shard,)) for i, shard in enumerate(shards)]

    copies = plan(specs("src", src_rows), specs("dst", dst_rows))
    assert len(merge(copies.copies)) == merged
    src, dst = torch.arange(30.0).view(5, 2, 3), torch.zeros(5, 2, 3)
    Resharder(copies, 0).run({"src": src}, {"dst": dst})
    assert torch.equal(dst[list(dst_rows)], src[list(src_rows)])
