"""Flat ranges as boxes and as parts of canonical tensors, against numpy's flatten and slice. test_saved.py carries them
between layouts."""

from __future__ import annotations

import random
from collections import defaultdict
from math import prod

import numpy as np
import pytest
import torch

from rlhpc.errors import ModelError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.execute import Resharder
from rlhpc.reshard.families import family_for
from rlhpc.reshard.flat import FlatRange, flat_boxes, flat_buffers, flat_specs
from rlhpc.reshard.plan import plan
from tests.unit.reshard.reference import Arrays
from tests.unit.reshard.test_plan_layouts import MODELS, Side, trainer

States = dict[int, dict[str, torch.Tensor]]  # by rank, by parameter


def test_boxes_by_hand() -> None:
    # Of 3 x 3 x 3: the last two of the first row, two whole rows, a whole plane, a whole row, two of the next.
    assert flat_boxes((3, 3, 3), 1, 23) == [
        ((0, 0, 1), (0 + 1, 1, 3)), ((0, 1, 0), (1, 3, 3)), ((1, 0, 0), (2, 3, 3)), ((2, 0, 0), (3, 1, 3)),
        ((2, 1, 0), (3, 2, 2)),
    ]  # fmt: skip
    assert flat_boxes((4, 5), 7, 9) == [((1, 2), (2, 4))]
    assert flat_boxes((7,), 2, 7) == [((2,), (7,))]
    assert flat_boxes((4, 5), 5, 5) == []
    assert flat_boxes((), 0, 1) == [((), ())]


def test_boxes_of_random_ranges() -> None:
    rng = random.Random(0)
    largest = 0
    for _ in range(5000):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
        start, stop = sorted(rng.choices(range(prod(shape) + 1), k=2))
        elements = np.arange(prod(shape)).reshape(shape)
        parts = [elements[tuple(map(slice, *box))].ravel() for box in flat_boxes(shape, start, stop)]
        np.testing.assert_array_equal(np.concatenate([[], *parts]), np.arange(start, stop))
        assert all(part.size for part in parts) and len(parts) <= 2 * len(shape) - 1
        largest = max(largest, len(parts))
    assert largest == 7  # the bound is reached


def test_a_fused_range_by_hand() -> None:
    # A column-parallel w13 of one rank, [2 experts, gate and up rows, 3]: the range ends in the second expert's gate.
    shards = {
        f"{e}.{name}": Shard(4, (2, 0), (4, 3), "w13", (e, rows, 0))
        for e in (0, 1)
        for name, rows in (("gate", 0), ("up", 2))
    }
    specs = [ShardSpec(name, (4, 3), "bfloat16", (shard,)) for name, shard in shards.items()]
    held = FlatRange(4, "w13", (2, 4, 3), 4, 16)
    assert [view[:3] for view in held.views()] == [("w13[4:6]", 0, 2), ("w13[6:12]", 2, 8), ("w13[12:15]", 8, 11),
                                                   ("w13[15:16]", 11, 12)]  # fmt: skip
    got = {spec.name: spec.shards for spec in flat_specs(specs, [held])}
    assert got == {
        "0.gate": (Shard(4, (3, 1), (4, 3), "w13[4:6]", (0, 0, 0)),),
        "0.up": (Shard(4, (2, 0), (4, 3), "w13[6:12]", (0, 0, 0)),),
        "1.gate": (
            Shard(4, (2, 0), (3, 3), "w13[12:15]", (0, 0, 0)),
            Shard(4, (3, 0), (4, 1), "w13[15:16]", (0, 0, 0)),
        ),
    }  # fmt: skip
    assert {spec.dtype for spec in flat_specs(specs, [held])} == {"float32"}
    state = torch.arange(12.0)
    views = flat_buffers([held], {"w13": state})
    views["w13[6:12]"][0, 1, 2] = -1.0
    assert views["w13[6:12]"].shape == (1, 2, 3) and state[2 + 5] == -1.0
    with pytest.raises(ValueError, match="has no elements 4..25"):
        FlatRange(4, "w13", (2, 4, 3), 4, 25)


def random_ranges(rng: random.Random, side: Side, layout: ParallelLayout) -> list[FlatRange]:
    """Each parameter, cut anywhere into as many ranges as ranks hold it; some are empty."""
    holders: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, buffers in side.buffers.items():
        at = layout.coords(rank)
        for name in buffers:
            place = (at.etp, at.ep, at.pp) if ".experts." in name else (at.tp, at.pp)
            holders[name, place].append(rank)
    ranges = []
    for (name, _), ranks in holders.items():
        shape = side.buffers[ranks[0]][name].shape
        cuts = sorted(rng.choices(range(prod(shape) + 1), k=len(ranks) - 1))
        for rank, start, stop in zip(ranks, [0, *cuts], [*cuts, prod(shape)], strict=True):
            ranges.append(FlatRange(rank, name, shape, start, stop))
    return ranges


def states(ranges: list[FlatRange], buffers: dict[int, Arrays]) -> States:
    result: States = defaultdict(dict)
    for r in ranges:
        flat = buffers[r.rank][r.parameter].ravel()[r.start : r.stop]
        result[r.rank][r.parameter] = torch.from_numpy(flat.astype(np.float32))
    return result


def test_one_rank_reshards_within_itself() -> None:
    """Through the Resharder; and what is missing is named."""
    layout = ParallelLayout(1, 1, 1, 1, 1, 1)
    side = trainer("qwen3_moe", layout)
    ranges = random_ranges(random.Random(0), side, layout)
    specs, state = flat_specs(side.specs, ranges), states(ranges, side.buffers)[0]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    Resharder(plan(specs, specs), 0).run(flat_buffers(ranges, state), flat_buffers(ranges, loaded))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    short = [FlatRange(r.rank, r.parameter, r.shape, r.start, r.stop - (r.shape == (8, 8))) for r in ranges]
    name = "model.layers.0.self_attn.o_proj.weight"
    assert family_for(MODELS["qwen3_moe"]).canonical_tensors(MODELS["qwen3_moe"])[name] == (8, 8)
    with pytest.raises(ModelError, match=r"o_proj.weight\[7:8, 7:8\]: rank 0 needs this region"):
        plan(flat_specs(side.specs, short), specs)
