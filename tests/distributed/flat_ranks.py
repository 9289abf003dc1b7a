"""What each rank does in test_flat.py: optimizer state of one layout, carried to others in the same processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.reshard.execute import Resharder
from rlhpc.reshard.flat import FlatRange, flat_buffers, flat_specs
from rlhpc.reshard.plan import plan
from tests.distributed.megatron_ranks import forget_groups, make_trainer, train

MOMENTS = ("exp_avg", "exp_avg_sq")
States = dict[str, dict[str, torch.Tensor]]  # by kind, by parameter


def held(trainer: Any) -> tuple[list[FlatRange], States]:
    """This rank's flat ranges and live state tensors."""
    shapes = {name: tuple(value.shape) for name, value in trainer.source_buffers().items()}
    ranges, states = [], {kind: {} for kind in ("master", *MOMENTS)}
    for shard in trainer._optimizer.shards():
        ranges.append(FlatRange(dist.get_rank(), shard.name, shapes[shard.name], shard.start, shard.stop))
        states["master"][shard.name] = shard.master.detach()
        for kind in MOMENTS:
            states[kind][shard.name] = shard.state[kind]
    return ranges, states


def gathered(ranges: list[FlatRange]) -> list[FlatRange]:
    every: list[list[FlatRange]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, ranges)
    return [held for each in every for held in each]


def carry_over(
    model_dir: Path, sizes: Mapping[str, int], others: Sequence[Mapping[str, int]], num_steps: int
) -> list[dict[str, Any]]:
    """Before any step, masters are compared bit for bit with those that the other layout made of the same files. After
    `num_steps` the whole state goes over, and both layouts take one more step."""
    trainer = make_trainer(model_dir, sizes)
    ranges, states = held(trainer)
    specs = flat_specs(trainer.source_specs(), gathered(ranges))
    fresh = {name: value.clone() for name, value in states["master"].items()}
    list(train(trainer, range(num_steps)))
    state = {kind: {name: value.clone() for name, value in of.items()} for kind, of in states.items()}
    _, scalars = trainer.state_tensors()
    (last,) = train(trainer, range(num_steps, num_steps + 1))
    outcomes = []
    for other in others:
        forget_groups()
        trainer = make_trainer(model_dir, other)
        other_ranges, other_states = held(trainer)
        other_specs = flat_specs(trainer.source_specs(), gathered(other_ranges))
        resharder = Resharder(plan(specs, other_specs), dist.get_rank(), bucket_bytes=1 << 16)
        expected = other_states["master"]
        got = {name: torch.full_like(value, float("nan")) for name, value in expected.items()}
        initial = {name: value.clone() for name, value in expected.items()}
        resharder.run(flat_buffers(ranges, fresh), flat_buffers(other_ranges, got))
        missed = {name: value.isnan() for name, value in got.items()}
        for kind in ("master", *MOMENTS):
            resharder.run(flat_buffers(ranges, state[kind]), flat_buffers(other_ranges, other_states[kind]))
        for shard in trainer._optimizer.shards():
            shard.state["step"].fill_(num_steps)
        trainer._optimizer.schedule.num_steps = 0
        trainer._optimizer.schedule.step(increment=scalars["optimizer"]["step"])
        trainer._optimizer.publish_masters()
        (metrics,) = train(trainer, range(num_steps, num_steps + 1))
        outcomes.append(
            {
                "wrong": [n for n, v in got.items() if not torch.equal(v[~missed[n]], initial[n][~missed[n]])],
                "missed": {n: initial[n][gap].tolist() for n, gap in missed.items() if gap.any()},
                "num_ranges": len(other_ranges),
                "received": resharder.received_bytes,
                "metrics": metrics,
                "same_layout_metrics": last,
            }
        )
    return outcomes
