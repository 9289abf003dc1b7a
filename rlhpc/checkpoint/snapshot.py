"""A copy of a rank's state in host memory that is kept, so that training goes on while the copy is written."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

ALIGNMENT = 64  # bytes; a multiple of every element's size


class Snapshot:
    """Host memory for one copy of a rank's tensors. The first `take` allocates it, which takes longer, and the next
    ones use it again. A trainer asleep holds its state in pinned host memory, from which this is a copy at memory
    speed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous CPU tensors with the present content of `tensors`. They hold until the next `take`: whoever reads
        them has to be done by then. Raises OSError where there is no such memory."""
        needed = sum(map(_aligned, tensors))
        if needed > self.num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
            self._memory = _allocated(needed)
        copies, begin = [], 0
        for tensor in tensors:
            copy = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor.detach()))
            begin += _aligned(tensor)
        return copies


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _allocated(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] in huge pages where the kernel has them, which halves the time of the first copy."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
