"""Page-locked host memory of exactly the size that is asked for."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from rlhpc.checkpoint.snapshot import fresh_memory
from rlhpc.cluster.limits import free_memory
from rlhpc.errors import ConfigError

FIX = (
    "give the job more (cluster.memory_gib_per_node), or let parts stay on the GPU: set optimizer_offload=false or "
    "param_offload=false of actor_rollout_ref.actor.megatron"
)


def check_free(num_bytes: int, num_ranks: int = 1) -> None:
    """Raises ConfigError unless `num_ranks` of this node can each take so much."""
    if num_bytes * num_ranks > (free := free_memory()):
        ranks = f"{num_ranks} ranks here want {_gib(num_bytes)} each" if num_ranks > 1 else f"{_gib(num_bytes)} wanted"
        raise ConfigError(
            f"host memory for the trainer's state while the engine generates: {ranks}, {_gib(free)} free; {FIX}"
        )


def page_locked(num_bytes: int, *, lock: bool = True) -> torch.Tensor:
    """uint8 [num_bytes], which a GPU reads and writes at PCIe's rate. Not from torch's allocator of such memory, which
    rounds up to the next power of two. Without `lock` plain memory. Raises ConfigError where there isn't as much."""
    check_free(num_bytes)
    num_threads = max(1, min(8, len(os.sched_getaffinity(0)) // ranks_here()))
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="host-memory") as threads:
            view, memory = fresh_memory(num_bytes, threads)
    except OSError as error:
        raise ConfigError(f"no {_gib(num_bytes)} of host memory: {error}; {FIX}") from error
    if lock:
        cuda, begin = torch.cuda.cudart(), memory.data_ptr()
        code = cuda.cudaHostRegister(begin, num_bytes, 0)
        if code != cuda.cudaError.success:
            reason = cuda.cudaGetErrorString(code)
            raise ConfigError(f"the driver can't page-lock {_gib(num_bytes)} of host memory: {reason}; {FIX}")
        weakref.finalize(view, _unlock, begin, view.obj).atexit = False
    return memory


def _unlock(begin: int, mapped: object) -> None:
    """`mapped` is held until here: a mapping that dies is gone before its own finalizers are called."""
    torch.cuda.cudart().cudaHostUnregister(begin)


def ranks_here() -> int:
    """Of this run on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
