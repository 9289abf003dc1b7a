"""Processes that a bench measures in: the ranks of a world, or one of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.cluster.ports import claim_block


def on_ranks(num_ranks: int, device: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` gave on the first of `num_ranks` ranks, in JSON. They are one world of
    torch.distributed with torchrun's environment; on "cuda" each has a device and NCCL."""
    with tempfile.TemporaryDirectory() as folder, closing(claim_block("bench", os.getpid())) as ports:
        result = Path(folder, "result.json")
        torch.multiprocessing.spawn(
            _run_rank, (num_ranks, ports["master"], device, result, function, arguments), num_ranks
        )
        return json.loads(result.read_text())


def _run_rank(
    rank: int,
    num_ranks: int,
    port: int,
    device: str,
    result: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    found = function(*arguments)
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def in_a_process_of_its_own(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` gives, while this process holds no memory of the device. Raises BrokenProcessPool
    where it dies."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
