"""Plans between random real layouts of every family, against the owners of every element worked out in numpy."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np
import pytest

from rlhpc.errors import ConfigError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.families import family_for, model_facts
from rlhpc.reshard.plan import ShardCopy, plan
from tests.unit.reshard.reference import CONFIGS, Arrays, rollout_buffers, trainer_buffers
from tests.unit.reshard.test_plan import by_ranks

SMALL = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "intermediate_size": 4, "vocab_size": 13,
}  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "moe_intermediate_size")
MODELS = {
    name: config | SMALL | {key: 4 for key in EXPERTS if key in config}
    | ({"num_key_value_heads": 4} if "kv_lora_rank" in config else {})
    for name, config in CONFIGS.items()
}  # fmt: skip
WORLD_SIZES = (1, 2, 3, 4, 6, 8)
NUM_RANKS = 16
Index = tuple[int, ...]


class Side(NamedTuple):
    """A layout as the planner is told it, and as numpy lays it out: what each rank's buffers hold, 0 being padding."""

    specs: list[ShardSpec]
    buffers: dict[int, Arrays]


@cache
def tensors(model: str) -> Arrays:
    """Every element has a number of its own, from 1."""
    shapes = family_for(MODELS[model]).canonical_tensors(MODELS[model])
    ends = np.cumsum([prod(shape) for shape in shapes.values()])
    parts = np.split(np.arange(1, ends[-1] + 1), ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


@cache
def trainers(model: str) -> list[ParallelLayout]:
    return list(_valid_layouts(model))


def _valid_layouts(model: str) -> Iterator[ParallelLayout]:
    for size, tp, pp, ep, etp in itertools.product(WORLD_SIZES, (1, 2, 4, 8), (1, 2), (1, 2, 4), (1, 2)):
        try:
            layout = ParallelLayout(tp, pp, 1, ep, etp, size)
            model_facts(MODELS[model]).check_trainer(layout)
        except ConfigError:
            continue
        yield layout


@cache
def trainer(model: str, layout: ParallelLayout) -> Side:
    facts = model_facts(MODELS[model])
    specs = family_for(MODELS[model]).trainer_specs(MODELS[model], layout, "float32")
    ranks = range(layout.world_size)
    return Side(specs, {rank: trainer_buffers(tensors(model), facts, layout, rank) for rank in ranks})


@cache
def rollout(model: str, tp: int, ranks: range, expert_parallel: bool) -> Side:
    facts = model_facts(MODELS[model])
    specs = family_for(MODELS[model]).rollout_specs(
        MODELS[model], tp, ranks, "float32", expert_parallel=expert_parallel
    )
    parts = [rollout_buffers(tensors(model), facts, t, tp, expert_parallel=expert_parallel) for t in range(tp)]
    return Side(specs, {rank: parts[i % tp] for i, rank in enumerate(ranks)})


def random_pair(rng: random.Random, model: str) -> tuple[Side, Side]:
    """From a trainer to a trainer of any size, or to rollout replicas on its own ranks, on some or on others."""
    layout = rng.choice(trainers(model))
    if rng.random() < 0.3:
        return trainer(model, layout), trainer(model, rng.choice(trainers(model)))
    size = layout.world_size
    tp = rng.choice([tp for tp in (1, 2, 4) if tp <= size])
    ranks = rng.choice([range(size), range(size), range(tp), range(size, size + tp * 2)])
    expert_parallel = "num_experts_per_tok" in MODELS[model] and rng.random() < 0.5
    return trainer(model, layout), rollout(model, tp, ranks[: len(ranks) // tp * tp], expert_parallel)


def empty(side: Side) -> dict[int, Arrays]:
    return {rank: {name: np.zeros_like(a) for name, a in buffers.items()} for rank, buffers in side.buffers.items()}


def check(src: Side, dst: Side, rank: int) -> None:
    copies = plan(src.specs, dst.specs)
    mine = by_ranks(copies.copies_of(rank))
    assert mine == {ranks: part for ranks, part in by_ranks(copies.copies).items() if rank in ranks}
    size = 1 + max(int(array.max()) for buffers in src.buffers.values() for array in buffers.values())
    owned = np.zeros((size, NUM_RANKS), bool)  # of every element, by rank
    for rank, buffers in src.buffers.items():
        for array in buffers.values():
            owned[array, rank] = True
    owned[0] = False
    got, writes = empty(dst), empty(dst)
    sent: dict[tuple[str, Index, Index], Counter[int]] = {}
    received = np.zeros(NUM_RANKS, int)
    for copy in copies.copies:
        values = src.buffers[copy.src_rank][copy.src_buffer][_slices(copy.src_offset, copy.shape)]
        where = _slices(copy.dst_offset, copy.shape)
        got[copy.dst_rank][copy.dst_buffer][where] = values
        writes[copy.dst_rank][copy.dst_buffer][where] += 1
        if not copy.is_local:
            owners = owned[values.ravel()]
            assert not owners[:, copy.dst_rank].any()  # what it has, it copies within itself
            able = np.flatnonzero(owners.all(0)).tolist()
            sent.setdefault(copy[:3], Counter(dict.fromkeys(able, 0)))[copy.src_rank] += 1
            received[copy.dst_rank] += 4 * values.size
    for rank, buffers in dst.buffers.items():
        for name, array in buffers.items():
            assert (got[rank][name] == array).all(), name
            assert (writes[rank][name] == (array > 0)).all(), name  # once, and no padding
    assert all(max(counts.values()) - min(counts.values()) <= 1 for counts in sent.values())
    assert received.tolist() == [copies.received_bytes(rank) for rank in range(NUM_RANKS)]


def _slices(offset: Index, shape: Index) -> tuple[slice | int, ...]:
    lead = len(offset) - len(shape)
    return (*offset[:lead], *(slice(o, o + n) for o, n in zip(offset[lead:], shape, strict=True)))


@pytest.mark.parametrize("model", MODELS)
def test_every_element_arrives_once_from_a_fair_owner(model: str) -> None:
    rng = random.Random(model)
    for _ in range(250):
        check(*random_pair(rng, model), rank=rng.randrange(8))


def test_replicas_share_all_that_experts_and_layers_repeat() -> None:
    # 4 replicas of each expert, none of which the rollout's ranks hold.
    layout = ParallelLayout(tp=1, pp=1, cp=1, ep=2, etp=1, world_size=8)
    config = MODELS["qwen3_moe"] | {"num_hidden_layers": 9}
    family = family_for(config)
    src = family.trainer_specs(config, layout, "float32")
    copies = plan(src, family.rollout_specs(config, 1, range(8, 11), "float32"))
    experts: Counter[int] = Counter()
    largest = 0
    senders: dict[tuple[str, int], set[int]] = {}

    def part(copy: ShardCopy) -> str:
        return copy.tensor.rsplit("experts.")[0] + copy.tensor.rsplit(".")[-2]

    for copy in (copy for copy in copies.copies if "experts" in copy.tensor):
        experts[copy.src_rank] += copies.copy_bytes(copy)
        largest = max(largest, copies.copy_bytes(copy))
        senders.setdefault((part(copy) + str(copy.src_rank % 2), copy.dst_rank), set()).add(copy.src_rank)
    by_half = [[experts[rank] for rank in range(8) if rank % 2 == half] for half in (0, 1)]
    for sent in by_half:
        assert sum(sent) == 3 * 9 * 2 * 3 * largest  # receivers, layers, experts, and gate, up and down
        assert max(sent) - min(sent) <= 2 * 2 * largest  # one turn: gate and up of two experts to one rank
    assert all(len(ranks) == 1 for ranks in senders.values())  # neighbouring experts travel together
