"""Files with an XXH3-64 of every chunk: written in one pass, from memory. Standard library and xxhash only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

CHUNK_BYTES = 64 * 2**20
BLOCK_BYTES = 4 * 2**20  # of one system call: the processor's cache still holds what was just read or hashed
IOV_MAX = os.sysconf("SC_IOV_MAX")  # buffers of one system call


class ChunkWriter:
    """Appends to an empty file and computes the XXH3-64 of each `chunk_bytes` of what passes through.

    The device begins with a chunk as soon as it is complete, so that the final fsync finds little to do, and the page
    cache doesn't fill with what nobody reads soon.
    """

    def __init__(self, fd: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._fd, self._chunk_bytes = fd, chunk_bytes
        self._waiting: list[memoryview] = []  # hashed, not yet written
        self._waiting_bytes = 0
        self._position = 0
        self._digest = xxhash.xxh3_64()
        self._checksums: list[str] = []

    def append(self, data: memoryview) -> None:
        """`data` is bytes; it must not change before `flush`. Raises OSError."""
        while data:
            left = min(self._chunk_bytes - self._position % self._chunk_bytes, BLOCK_BYTES - self._waiting_bytes)
            part, data = data[:left], data[left:]
            self._digest.update(part)
            self._waiting.append(part)
            self._waiting_bytes += len(part)
            self._position += len(part)
            complete = self._position % self._chunk_bytes == 0
            if complete or self._waiting_bytes == BLOCK_BYTES or len(self._waiting) == IOV_MAX:
                self.flush()
            if complete:
                self._end_chunk(self._chunk_bytes)

    def finish(self) -> tuple[str, ...]:
        """Writes the rest, flushes everything to the device and returns the checksums. Raises OSError."""
        self.flush()
        if rest := self._position % self._chunk_bytes:
            self._end_chunk(rest)
        os.fsync(self._fd)
        return tuple(self._checksums)

    def flush(self) -> None:
        """Has the kernel take what was appended, which may change from then on. Raises OSError."""
        while self._waiting:
            written = os.writev(self._fd, self._waiting)
            while self._waiting and written >= len(self._waiting[0]):
                written -= len(self._waiting.pop(0))
            if written:  # the system call took a part only
                self._waiting[0] = self._waiting[0][written:]
        self._waiting_bytes = 0

    def _end_chunk(self, length: int) -> None:
        self._checksums.append(self._digest.hexdigest())
        self._digest.reset()
        # For dirty pages this advice means: begin to write them.
        os.posix_fadvise(self._fd, self._position - length, length, os.POSIX_FADV_DONTNEED)


def chunk_checksums(
    path: Path, chunk_bytes: int = CHUNK_BYTES, advance: Callable[[int], object] = lambda num_bytes: None
) -> Iterator[str]:
    """XXH3-64, as 16 hexadecimal digits, of each `chunk_bytes` of a file in turn; an empty file has none. `advance` is
    called with the number of bytes of each block that was read. Raises OSError."""
    view = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while True:
            digest, length = xxhash.xxh3_64(), 0
            while length < chunk_bytes and (count := file.readinto(view[: chunk_bytes - length])):
                digest.update(view[:count])
                length += count
                advance(count)
            if not length:
                return
            yield digest.hexdigest()


def drop_cached(fd: int) -> None:
    """Has the next reader of a flushed file get what is on the device, not what is in this machine's memory."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
