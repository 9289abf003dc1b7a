"""Reading byte ranges of a shard file, and verifying every chunk that holds some of them. Standard library and xxhash
only."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from rlhpc.checkpoint.chunks import BLOCK_BYTES, IOV_MAX
from rlhpc.checkpoint.durable import patiently
from rlhpc.checkpoint.manifest import FileEntry
from rlhpc.errors import CheckpointError

Sink = memoryview | Callable[[int, memoryview], None]

_Range = tuple[int, int, Sink]


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
        range in turn; those bytes have verified, and are valid during the call. A file that goes stale meanwhile
        (another node of a network file system has replaced it) is read again from the first range on.

        Raises CheckpointError naming the file, the chunk, and what was got and expected. What memoryviews then hold is
        undefined: the file is read straight into them.
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

    def _read_file(self, ordered: list[_Range]) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read_chunks(fd, ordered)
        finally:
            os.close(fd)

    def _read_chunks(self, fd: int, ordered: list[_Range]) -> None:
        size = self._entry.chunk_bytes
        scratch = memoryview(self._scratch or mmap.mmap(-1, min(size, self._entry.size_bytes)))  # untouched, no memory
        active: list[_Range] = []  # ranges that go on beyond the chunks read so far
        following = 0
        chunk = ordered[0][0] // size
        while active or following < len(ordered):
            if not active:
                chunk = ordered[following][0] // size
            low, high = chunk * size, min((chunk + 1) * size, self._entry.size_bytes)
            while following < len(ordered) and ordered[following][0] < high:
                active.append(ordered[following])
                following += 1
            views, indirect = _targets(active, low, high, scratch)
            self._read_chunk(fd, chunk, low, views)
            for begin, end, sink in indirect:
                first, last = max(begin, low), min(end, high)
                part = scratch[first - low : last - low]
                if isinstance(sink, memoryview):
                    sink[first - begin : last - begin] = part
                else:
                    sink(first - begin, part)
            active = [item for item in active if item[1] > high]
            chunk += 1

    def _read_chunk(self, fd: int, chunk: int, begin: int, views: list[memoryview]) -> None:
        digest, position = xxhash.xxh3_64(), begin
        for block in _blocks(views):
            self._fill(fd, position, block)
            for view in block:
                digest.update(view)
                position += len(view)
        self.bytes_read += position - begin
        self._entry.compare(self._directory, chunk, digest.hexdigest())

    def _fill(self, fd: int, position: int, views: list[memoryview]) -> None:
        """Reads on from byte `position`, into one view after the other."""
        waiting = list(views)
        while waiting:
            count = os.preadv(fd, waiting, position)
            if not count:
                raise CheckpointError(f"{self._path}: {position} bytes, the manifest says {self._entry.size_bytes}")
            position += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if count:  # the system call took a part only
                waiting[0] = waiting[0][count:]


def _targets(active: list[_Range], low: int, high: int, scratch: memoryview) -> tuple[list[memoryview], list[_Range]]:
    """Where the bytes [low, high) are read to: sinks that are memory and overlap no other range, scratch for the rest.
    And the ranges that get theirs from scratch then."""
    views, indirect = [], []
    position = reach = low
    for i, (begin, end, sink) in enumerate(active):
        first, last = max(begin, low), min(end, high)
        is_alone = reach <= first and (i + 1 == len(active) or last <= active[i + 1][0])
        if is_alone and isinstance(sink, memoryview):
            views += [scratch[position - low : first - low], sink[first - begin : last - begin]]
            position = last
        else:
            indirect.append((begin, end, sink))
        reach = max(reach, last)
    views.append(scratch[position - low : high - low])
    return [view for view in views if view], indirect


def _blocks(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in portions of one system call each."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for view in views:
        while view:
            part, view = view[:room], view[room:]
            block.append(part)
            room -= len(part)
            if not room or len(block) == IOV_MAX:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block
