"""Page-locked host memory of exactly the size that is asked for."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from rlhpc.checkpoint.snapshot import fresh_memory
from rlhpc.errors import ConfigError


def page_locked(num_bytes: int, *, lock: bool = True) -> torch.Tensor:
    """uint8 [num_bytes], which a GPU reads and writes at PCIe's rate. Not from torch's allocator of such memory, which
    rounds up to the next power of two. Without `lock` plain memory. Raises ConfigError where there isn't as much."""
    fix = (
        "give the job more (cluster.memory_gib_per_node), or let parts stay on the GPU: set optimizer_offload=false or "
        "param_offload=false of actor_rollout_ref.actor.megatron"
    )
    wanted = f"{num_bytes / 2**30:.2f} GiB of host memory, where the trainer's state goes while the engine generates"
    num_threads = max(1, min(8, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="host-memory") as threads:
            mapped, memory = fresh_memory(num_bytes, threads)
    except OSError as error:
        raise ConfigError(f"there is no {wanted}: {error}; {fix}") from error
    if lock:
        cuda, begin = torch.cuda.cudart(), memory.data_ptr()
        code = cuda.cudaHostRegister(begin, num_bytes, 0)
        if code != cuda.cudaError.success:
            raise ConfigError(f"the driver can't page-lock {wanted}: {cuda.cudaGetErrorString(code)}; {fix}")
        weakref.finalize(mapped, cuda.cudaHostUnregister, begin).atexit = False  # before it is unmapped
    return memory
