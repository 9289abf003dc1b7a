"""A rank's state, written while training goes on: as it lies, or from a copy where it is about to change."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

ALIGNMENT = 64  # bytes; a multiple of every element's size
SLICE_BYTES = 16 * 2**20  # copied at once by one thread

Move = tuple[Callable[[int, int, int], object], int, int, int]  # memmove or memset with its arguments


class Snapshot:
    """Host memory for one copy of a rank's tensors, used again by every `take`. A trainer asleep holds its state in
    host memory, from which this copies as fast as `num_threads` cores can."""

    def __init__(self, num_threads: int = 1) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="snapshot")

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes the memory that a copy of `tensors` needs, where it isn't there yet: the kernel gives pages more slowly
        than a copy fills them. Raises OSError where there is no such memory."""
        needed = copy_bytes(tensors)
        if needed <= self.num_bytes:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
        _, self._memory = fresh_memory(needed, self._threads)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous CPU tensors with the present content of `tensors`. They hold until the next `take`: whoever reads
        them has to be done by then. Raises OSError as `reserve` does."""
        self.reserve(tensors)
        copies, moves, begin = [], [], 0
        for tensor in tensors:
            copy = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if tensor.is_cpu and tensor.is_contiguous():
                to, source = copy.data_ptr(), tensor.data_ptr()
                moves += [(ctypes.memmove, to + at, source + at, length) for at, length in _slices(tensor.nbytes)]
            else:
                copy.copy_(tensor.detach())
            copies.append(copy)
            begin += aligned(tensor.nbytes)
        _together(moves, self._threads)
        return copies


def fresh_memory(num_bytes: int, threads: Executor) -> tuple[memoryview, torch.Tensor]:
    """A mapping of this size, with its pages in place: a view of it, and the uint8 tensor that keeps the view alive.
    Raises OSError where there is no such memory."""
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages, which are given twice as fast
        mapped.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapped)
    memory = torch.frombuffer(view, dtype=torch.uint8)
    begin = memory.data_ptr()
    _together([(ctypes.memset, begin + at, 0, length) for at, length in _slices(num_bytes)], threads)
    return view, memory


def _together(moves: Sequence[Move], threads: Executor) -> None:
    """memmove and memset let other threads run meanwhile. What is small isn't worth a thread's attention."""
    large = []
    for function, to, source, length in moves:
        if length == SLICE_BYTES:
            large.append(threads.submit(function, to, source, length))
        else:
            function(to, source, length)
    for done in large:
        done.result()


class Lent:
    """Tensors that one thread reads once, while they stay as they are; who is about to change them calls `settle`
    before, which copies what isn't read yet. So who reads fast enough costs no copy."""

    def __init__(self, snapshot: Snapshot, tensors: Sequence[torch.Tensor]) -> None:
        """Reserves the memory that copies of all would need. Raises OSError as `Snapshot.reserve` does."""
        snapshot.reserve(tensors)
        self._snapshot = snapshot
        self._content = {id(tensor): tensor for tensor in tensors}
        self._unread = Counter(map(id, tensors))  # the same tensor may be lent twice
        self._lock = threading.Lock()
        self._asked, self._settled = threading.Event(), threading.Event()
        self.copied_s = 0.0  # for which `settle` kept its caller

    @contextmanager
    def reading(self, tensor: torch.Tensor, last: bool) -> Iterator[torch.Tensor]:
        """The content that `tensor` was lent with, which stays for the length of the context; `last` if it won't be
        read again. A tensor that wasn't lent is its own content."""
        if self._asked.is_set():  # a lock that is released and taken again at once is seldom given to who waits for it
            self._settled.wait()
        with self._lock:
            yield self._content.get(id(tensor), tensor)
            self._unread[id(tensor)] -= last

    def settle(self) -> None:
        """Returns when the lent tensors may change: waits for the slice that is being read, and copies the rest."""
        if self._settled.is_set():
            return
        begin = time.monotonic()
        self._asked.set()
        with self._lock:
            left = {key: tensor for key, tensor in self._content.items() if self._unread[key] > 0}
            copies = self._snapshot.take(list(left.values()))
            self._content |= zip(left, copies, strict=True)
        self._settled.set()
        self.copied_s = time.monotonic() - begin


def _slices(num_bytes: int) -> Iterator[tuple[int, int]]:
    """(begin, length) of each."""
    for begin in range(0, num_bytes, SLICE_BYTES):
        yield begin, min(SLICE_BYTES, num_bytes - begin)


def copy_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """That a Snapshot of them takes."""
    return sum(aligned(tensor.nbytes) for tensor in tensors)


def aligned(num_bytes: int) -> int:
    """What so many bytes take of the memory, so that what comes behind them is aligned."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
