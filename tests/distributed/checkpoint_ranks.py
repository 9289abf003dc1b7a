"""What each rank does in test_checkpoint_layouts.py: trains, saves, loads under other layouts, trains on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.checkpoint.shards import write_shard
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.errors import RlhpcError
from tests.distributed import megatron_ranks
from tests.distributed.critic_ranks import critic_step
from tests.distributed.megatron_ranks import make_trainer

CHUNK_BYTES = 1 << 16  # a rank's file has dozens


def in_turn(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Several of the functions below in one start of the ranks."""
    return megatron_ranks.in_turn(calls, globals())


def begin(steps: range, save_to: Path, model_dir: Path, sizes: Mapping[str, int], **settings: Any) -> dict[str, Any]:
    """Trains, saves, and trains two steps more."""
    trainer = make_trainer(model_dir, sizes, **settings)
    list(train(trainer, steps))
    torch.rand(5), np.random.rand(5), random.random()  # the streams stand elsewhere than in a new process
    save(trainer, save_to)
    return go_on(trainer, steps.stop)


def resume(
    load_from: Path,
    save_to: Path,
    step: int,
    model_dir: Path,
    sizes: Mapping[str, int],
    load: str = "load_checkpoint",
    **settings: Any,
) -> dict[str, Any]:
    """Takes the same two steps after a load, which it saves again."""
    trainer = make_trainer(model_dir, sizes, **settings)
    getattr(trainer, load)(load_from)
    save(trainer, save_to)
    return go_on(trainer, step)


warm_start = partial(resume, load="load_weights")


def refusal(load_from: Path, model_dir: Path, sizes: Mapping[str, int], **settings: Any) -> str:
    """The error of a load that fails, perhaps on one rank alone."""
    trainer = make_trainer(model_dir, sizes, **settings)
    try:
        trainer.load_checkpoint(load_from)
    except RlhpcError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def train(trainer: Any, steps: range) -> Iterator[dict[str, float]]:
    """Steps of the policy, and of the critic where there is one."""
    for step, metrics in zip(steps, megatron_ranks.train(trainer, steps), strict=True):
        yield metrics | (critic_step(trainer, seed=200 + step) if trainer.critic else {})


def save(trainer: Any, root: Path) -> None:
    """What workers and driver do: every rank writes its part, one process commits."""
    store = CheckpointStore(root)
    pending = [store.begin(1) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(pending)
    state = trainer.state_pieces()
    entries: list[Any] = [None] * dist.get_world_size()
    mine = write_shard(
        pending[0].directory, dist.get_rank(), state.pieces, state.shapes, state.rank_tensors, state.scalars,
        chunk_bytes=CHUNK_BYTES,
    )  # fmt: skip
    dist.all_gather_object(entries, mine)
    if dist.get_rank() == 0:
        store.commit(pending[0], [entry for each in entries for entry in each], {}, layout=asdict(trainer.layout))
    dist.barrier()


def go_on(trainer: Any, step: int) -> dict[str, Any]:
    """Two steps' metrics, the first as it was computed from the state, the second from what an update made of it."""
    draws = [torch.rand(3).tolist(), float(np.random.rand()), random.random()]
    metrics = list(train(trainer, range(step, step + 2)))
    weights = {name: value.view(torch.uint8).cpu().numpy().copy() for name, value in trainer.source_buffers().items()}
    return {"dp_rank": trainer.data_parallel_rank, "metrics": metrics, "random": draws, "weights": weights}
