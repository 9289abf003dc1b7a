"""What each phase of a step costs one rank: seconds, and memory when it ended.

`timing_s/ranks/<phase>` are seconds inside the rank's methods, so at most the driver's `timing_s/<phase>`; the rest of
that is Ray and the driver's own work. `timing_s/ranks/<phase>/<part>` are parts of them, where the device passes
between trainer and engine: `offload`, the trainer's state goes or comes; `engine`, the engine's memory does; `sync`,
weights go from one to the other. Phases have the driver's names.

`perf/device_memory_gb/<phase>` is all memory taken on the device, by whomever; `perf/allocated_memory_gb/<phase>` what
torch's allocator has given out, in which the engine's memory counts while it sleeps too; both only with CUDA.
`perf/host_memory_gb/<phase>` is what the process holds. GiB (1024**3 bytes), at the end of the phase.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GIB = 2**30


class Usage:
    """Of the methods that run within `phase` and of their `part`s, since it was last taken."""

    def __init__(self) -> None:
        self._phase = ""
        self._seconds: dict[str, float] = defaultdict(float)
        self._memory: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase entered again adds up. An exception's time counts too. Nothing is measured under an empty name."""
        self._phase, begin = name, time.perf_counter()
        try:
            yield
        finally:
            if name:
                self._seconds[name] += time.perf_counter() - begin
                self._memory |= {f"perf/{kind}_memory_gb/{name}": amount / GIB for kind, amount in memory().items()}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the phase, to the end of what it put into the device's current stream."""
        begin = time.perf_counter()
        yield
        _finish_stream()
        self._seconds[f"{self._phase}/{name}"] += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """The metrics since the last call, and the highest of memory since the start."""
        metrics = {f"timing_s/ranks/{name}": seconds for name, seconds in self._seconds.items() if name[0] != "/"}
        metrics |= self._memory | peaks()
        self._seconds.clear()
        self._memory.clear()
        return metrics


def memory() -> dict[str, int]:
    """Bytes in use now, by kind."""
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    used = {"host": pages * os.sysconf("SC_PAGE_SIZE")}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used |= {"device": total - free, "allocated": torch.cuda.memory_allocated()}
    return used


def peaks() -> dict[str, float]:
    """The highest of this process so far, GiB."""
    import resource

    import torch

    peak = {"perf/cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    if torch.cuda.is_available():
        peak["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / GIB
        peak["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / GIB
    return peak


def _finish_stream() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
