"""What each rank does in test_reshard.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.errors import CheckpointError, EngineError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.reshard.execute import Resharder
from rlhpc.reshard.families import family_for, model_facts
from rlhpc.reshard.hf import load_hf, save_hf
from rlhpc.reshard.plan import plan
from rlhpc.reshard.verify import verify
from tests.unit.reshard.reference import CONFIG, canonical_arrays, rollout_buffers, trainer_buffers

Tensors = dict[str, torch.Tensor]


def _tensors(arrays: dict[str, np.ndarray], dtype: str) -> Tensors:
    return {name: torch.from_numpy(array.copy()).to(getattr(torch, dtype)) for name, array in arrays.items()}


def publish(
    sizes: dict[str, int], tp: int, dtypes: tuple[str, str], bucket_bytes: int, tamper: int | None = None
) -> dict[str, Any]:
    """Publishes twice, the second time with other weights; then the rank `tamper` flips one bit of an expert."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout = ParallelLayout(world_size=world_size, **sizes)
    family, facts = family_for(CONFIG), model_facts(CONFIG)
    src_specs = family.trainer_specs(CONFIG, layout, dtypes[0])
    copies = plan(src_specs, family.rollout_specs(CONFIG, tp, range(world_size), dtypes[1]))
    resharder = Resharder(copies, rank, None, bucket_bytes)
    report: dict[str, Any] = {"digest": copies.digest, "planned": copies.received_bytes(rank), "received": []}
    for seed in range(2):
        arrays = canonical_arrays(family.canonical_tensors(CONFIG), seed)
        src = _tensors(trainer_buffers(arrays, facts, layout, rank), dtypes[0])
        expected = _tensors(rollout_buffers(arrays, facts, rank % tp, tp, expert_parallel=False), dtypes[1])
        dst = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        resharder.run(src, dst)
        report["received"].append(resharder.received_bytes)
        report[f"wrong-{seed}"] = [name for name in expected if not torch.equal(dst[name], expected[name])]
        verify(copies, src, dst, rank)
    if tamper is not None:
        if rank == tamper:
            buffer = dst["model.layers.3.mlp.experts.routed_experts.w2_weight"]
            swapped = buffer[6, [1, 0]]  # the same values in another order
            buffer[6, :2] = swapped
        try:
            verify(copies, src, dst, rank)
        except EngineError as error:
            report["error"] = str(error)
    dist.destroy_process_group()
    return report


def save_and_load(source: str, directory: str, config: dict[str, Any], sizes: dict[str, int], dtype: str) -> None:
    """Loads `source` into the trainer's parameters and saves them to `directory`."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layout = ParallelLayout(world_size=dist.get_world_size(), **sizes)
    family, facts = family_for(config), model_facts(config)
    specs = family.trainer_specs(config, layout, dtype)
    shapes = family.canonical_tensors(config)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    buffers = _tensors(trainer_buffers(zeros, facts, layout, rank), dtype)
    load_hf(Path(source), specs, rank, buffers)
    save_hf(Path(directory), specs, rank, None, buffers, Path(source))
    dist.destroy_process_group()


def save_where_one_rank_fails(source: str, directory: str) -> str:
    """The second rank's file can't be written: something that isn't a file has its name."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    specs = family_for(CONFIG).trainer_specs(CONFIG, ParallelLayout(1, 1, 1, 2, 1, 2), "float32")
    layout = ParallelLayout(1, 1, 1, 2, 1, 2)
    arrays = canonical_arrays(family_for(CONFIG).canonical_tensors(CONFIG))
    buffers = _tensors(trainer_buffers(arrays, model_facts(CONFIG), layout, rank), "float32")
    try:
        save_hf(Path(directory), specs, rank, None, buffers, Path(source))
    except CheckpointError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""
