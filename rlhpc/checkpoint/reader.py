"""Reading byte ranges of a shard file, nothing of which is handed out before its chunk has verified. Standard library
and xxhash only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from rlhpc.checkpoint.durable import patiently
from rlhpc.checkpoint.manifest import FileEntry
from rlhpc.errors import CheckpointError

Sink = memoryview | Callable[[int, memoryview], None]


class ChunkReader:
    """Reads ranges of one file of a checkpoint, and of the file only the chunks that the ranges touch, each once.

    `bytes_read` counts them. `scratch` is memory of at least a chunk for several readers to take turns with; without it
    the reader has its own while it reads.
    """

    def __init__(self, directory: Path, entry: FileEntry, scratch: bytearray | None = None) -> None:
        self._directory, self._entry, self._path = directory, entry, directory / entry.name
        self._scratch = scratch
        self.bytes_read = 0

    def read(self, ranges: Iterable[tuple[int, int, Sink]]) -> None:
        """Fills sinks with the bytes [begin, end) of the file, in the order of `begin`. A sink is a memoryview of bytes
        as long as the range, or a function that is called with (position within the range, bytes) for the parts of the
        range in turn; those bytes are valid during the call. A file that goes stale meanwhile (another node of a
        network file system has replaced it) is read again from the first range on.

        Raises CheckpointError naming the file, the chunk, and what was got and expected; sinks are then filled in part.
        """
        ordered = sorted(ranges, key=lambda item: item[:2])
        for begin, end, sink in ordered:
            if not 0 <= begin <= end <= self._entry.size_bytes:
                raise ValueError(f"{self._path} has {self._entry.size_bytes} bytes, not {begin}..{end}")
            if isinstance(sink, memoryview) and len(sink) != end - begin:
                raise ValueError(f"a sink of {len(sink)} bytes for {begin}..{end} of {self._path}")
        ordered = [item for item in ordered if item[0] < item[1]]
        if not ordered:
            return
        try:
            patiently(self._path, lambda: self._read_file(ordered))
        except OSError as error:
            raise CheckpointError(f"{self._path}: {error.strerror}") from error

    def _read_file(self, ordered: list[tuple[int, int, Sink]]) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read_chunks(fd, ordered)
        finally:
            os.close(fd)

    def _read_chunks(self, fd: int, ordered: list[tuple[int, int, Sink]]) -> None:
        size = self._entry.chunk_bytes
        longest = min(size, self._entry.size_bytes)
        scratch = memoryview(self._scratch if self._scratch is not None else bytearray(longest))
        active: list[tuple[int, int, Sink]] = []  # ranges that go on beyond the chunks read so far
        following = 0
        chunk = ordered[0][0] // size
        while active or following < len(ordered):
            if not active:
                chunk = ordered[following][0] // size
            low, high = chunk * size, min((chunk + 1) * size, self._entry.size_bytes)
            while following < len(ordered) and ordered[following][0] < high:
                active.append(ordered[following])
                following += 1
            direct = self._whole_chunk(active, low, high)
            data = scratch[: high - low] if direct is None else direct
            self._read_chunk(fd, chunk, low, data)
            for begin, end, sink in active if direct is None else ():
                first, last = max(begin, low), min(end, high)
                part = data[first - low : last - low]
                if isinstance(sink, memoryview):
                    sink[first - begin : last - begin] = part
                else:
                    sink(first - begin, part)
            active = [item for item in active if item[1] > high]
            chunk += 1

    @staticmethod
    def _whole_chunk(active: list[tuple[int, int, Sink]], low: int, high: int) -> memoryview | None:
        """The part of a sink that a chunk can be read into at once: the chunk lies in this range, and in no other."""
        if len(active) == 1:
            begin, end, sink = active[0]
            if isinstance(sink, memoryview) and begin <= low and high <= end:
                return sink[low - begin : high - begin]
        return None

    def _read_chunk(self, fd: int, chunk: int, begin: int, data: memoryview) -> None:
        count = 0
        while count < len(data):
            got = os.preadv(fd, [data[count:]], begin + count)
            if not got:
                raise CheckpointError(
                    f"{self._path}: {begin + count} bytes, the manifest says {self._entry.size_bytes}"
                )
            count += got
        self.bytes_read += count
        self._entry.compare(self._directory, chunk, xxhash.xxh3_64_hexdigest(data))
