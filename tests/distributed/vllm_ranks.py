"""What the ranks of test_vllm.py run: real engines on gloo, weights written from Hugging Face files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.config.schema import RunConfig
from rlhpc.train.protocols import SamplingSpec

Weights = Mapping[str, torch.Tensor]


def run_config(world_size: int, tp: int, **rollout: Any) -> RunConfig:
    cfg = RunConfig()
    cfg.data.max_prompt_length, cfg.data.max_response_length = 192, 64
    cfg.actor_rollout_ref.model.dtype = "float32"
    options = {"tensor_model_parallel_size": tp, "max_num_seqs": 256, "cpu_kv_cache_gib": 0.1} | rollout
    for name, value in options.items():
        setattr(cfg.actor_rollout_ref.rollout, name, value)
    cfg.trainer.n_gpus_per_node = world_size
    return cfg


def spec(**changes: Any) -> SamplingSpec:
    return SamplingSpec(
        **{
            "n": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_response_length": 16,
            "ignore_eos": True,
        }
        | changes
    )


def new_engine(model_dir: str, tp: int, ident: str, **rollout: Any) -> Any:
    from rlhpc.backends.vllm.engine import VllmEngine

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    hf_config = json.loads(Path(model_dir, "config.json").read_text())
    cfg = run_config(world_size, tp, **rollout)
    return VllmEngine(cfg, hf_config, Path(model_dir), "cpu", rank, world_size, ident)


@contextmanager
def engine(model_dir: str, tp: int, ident: str, **rollout: Any) -> Any:
    running = new_engine(model_dir, tp, ident, **rollout)
    try:
        yield running
    finally:
        running.close()


def read_weights(model_dir: str) -> Weights:
    from safetensors.torch import load_file

    return load_file(Path(model_dir, "model.safetensors"))


def publish(running: Any, weights: Weights) -> float:
    """Writes this rank's boxes of the canonical tensors; returns the seconds that building and adopting took."""
    started = time.perf_counter()
    buffers = running.begin_publish()
    seconds = time.perf_counter() - started
    rank = int(os.environ["RANK"])
    for tensor in running.sink_specs():
        for shard in tensor.shards:
            if shard.rank == rank:
                extents = [b - a for a, b in zip(shard.start, shard.stop, strict=True)]
                lead = len(shard.offset) - len(extents)
                index = shard.offset[:lead] + tuple(
                    slice(o, o + e) for o, e in zip(shard.offset[lead:], extents, strict=True)
                )
                source = tuple(slice(a, b) for a, b in zip(shard.start, shard.stop, strict=True))
                buffers[shard.buffer][index] = weights[tensor.name][source]
    started = time.perf_counter()
    running.end_publish(1)
    return seconds + time.perf_counter() - started
