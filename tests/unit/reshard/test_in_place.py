"""Which experts can be the same memory on both sides, against what the buffers hold, laid out in numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rlhpc.errors import ConfigError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.in_place import expert_buffers, in_place, without
from rlhpc.reshard.plan import plan
from tests.unit.reshard.test_plan_layouts import MODELS, Side, rollout, trainer, trainers

MODEL = "qwen3_moe"


def experts(side: Side, rank: int) -> dict[str, np.ndarray]:
    return {name: array for name, array in side.buffers[rank].items() if ".experts." in name}


@pytest.mark.parametrize("model", [name for name, config in MODELS.items() if "num_experts_per_tok" in config])
def test_pairs_hold_the_same_on_every_rank_and_refusals_are_due(model: str) -> None:
    rng, outcomes = random.Random(5), {"shared": 0, "refused": 0}
    for layout in trainers(model):
        for tp in (tp for tp in (1, 2, 4) if layout.world_size % tp == 0):
            src = trainer(model, layout)
            dst = rollout(model, tp, range(layout.world_size), expert_parallel=tp > 1 and rng.random() < 0.5)
            held = {rank: {a.tobytes() for a in experts(src, rank).values()} for rank in src.buffers}
            needed = {rank: {a.tobytes() for a in experts(dst, rank).values()} for rank in dst.buffers}
            try:
                pairs = in_place(src.specs, dst.specs)
            except ConfigError:
                outcomes["refused"] += 1
                assert held != needed
                continue
            outcomes["shared"] += 1
            assert held == needed
            for rank in src.buffers:
                assert pairs.keys() == experts(src, rank).keys() and {*pairs.values()} == experts(dst, rank).keys()
                for mine, theirs in pairs.items():
                    np.testing.assert_array_equal(src.buffers[rank][mine], dst.buffers[rank][theirs])
            left = plan(src.specs, without(dst.specs, pairs.values())).copies
            assert not any(".experts." in copy.src_buffer + copy.dst_buffer for copy in left)
            assert {copy.tensor for copy in left} == {s.name for s in dst.specs if ".experts." not in s.name}
    assert min(outcomes.values()) > 5, outcomes


def test_a_layout_of_one_rank_is_shared_by_these_names() -> None:
    src, dst = trainer(MODEL, ParallelLayout()), rollout(MODEL, 1, range(1), False)
    assert in_place(src.specs, dst.specs) == {
        f"decoder.layers.{i}.mlp.experts.{mine}": f"model.layers.{i}.mlp.experts.routed_experts.{mine}_weight"
        for i in (0, 1)
        for mine in ("w13", "w2")
    }
    assert expert_buffers(dst.specs) == {name for name in dst.buffers[0] if ".experts." in name}


def test_a_refusal_names_tensor_rank_and_both_places() -> None:
    """Of 4 experts, rank 1 trains the last two, and generates with half of each."""
    src, dst = trainer(MODEL, ParallelLayout(ep=2, world_size=2)), rollout(MODEL, 2, range(2), False)
    with pytest.raises(ConfigError) as caught:
        in_place(src.specs, dst.specs)
    assert str(caught.value) == (
        "model.layers.0.mlp.experts.0.gate_proj.weight on rank 0: the trainer has [0:4, 0:8] at [0, 0, 0] of "
        "decoder.layers.0.mlp.experts.w13, the engine [0:2, 0:8] at [0, 0, 0] of "
        "model.layers.0.mlp.experts.routed_experts.w13_weight"
    )


def spec(name: str, *shards: Shard, dtype: str = "bfloat16") -> ShardSpec:
    return ShardSpec(name, (2, 3), dtype, shards)


def at(rank: int, buffer: str, *offset: int) -> Shard:
    return Shard(rank, (0, 0), (2, 3), buffer, offset)


def test_the_same_boxes_elsewhere_in_the_buffer_are_refused() -> None:
    src = [spec("e0", at(0, "w", 0, 0, 0)), spec("e1", at(0, "w", 1, 0, 0))]
    dst = [spec("e0", at(0, "v", 1, 0, 0)), spec("e1", at(0, "v", 0, 0, 0))]
    with pytest.raises(ConfigError, match=r"e0 on rank 0: .* at \[0, 0, 0\] of w, .* at \[1, 0, 0\] of v"):
        in_place(src, dst)


def test_one_buffer_in_two_and_other_dtypes_are_refused() -> None:
    src = [spec("e0", at(0, "w", 0, 0, 0)), spec("e1", at(0, "w", 1, 0, 0))]
    with pytest.raises(ConfigError, match="e1: what w holds lies in v and in u"):
        in_place(src, [spec("e0", at(0, "v", 0, 0, 0)), spec("e1", at(0, "u", 1, 0, 0))])
    with pytest.raises(ConfigError, match="e0: the trainer's dtype bfloat16 is not the engine's float32"):
        in_place(src, [spec("e0", at(0, "v", 0, 0, 0), dtype="float32")])


def test_a_rank_that_lacks_an_expert_is_named() -> None:
    src = [spec("e0", at(0, "w", 0, 0, 0))]
    dst = [spec("e0", at(0, "v", 0, 0, 0), at(1, "v", 0, 0, 0))]
    with pytest.raises(ConfigError, match=r"e0 on rank 1: the trainer has nothing, the engine \[0:2, 0:3\]"):
        in_place(src, dst)
