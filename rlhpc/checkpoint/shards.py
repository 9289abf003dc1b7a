"""One rank's part of a checkpoint: safetensors files with a checksum of every chunk, written durably in one pass."""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhpc.checkpoint.chunks import CHUNK_BYTES, ChunkWriter, chunk_checksums, drop_cached
from rlhpc.checkpoint.durable import ensure_space, patiently, publish_file
from rlhpc.checkpoint.manifest import CheckpointManifest, FileEntry, RankTensor
from rlhpc.checkpoint.pieces import ITEM_BYTES, Box, Index, Piece, Run, Section, kind_order
from rlhpc.checkpoint.reader import ChunkReader
from rlhpc.checkpoint.snapshot import SLICE_BYTES
from rlhpc.errors import CheckpointError

MAX_FILE_BYTES = 4 * 2**30
METADATA_KEY = "rlhpc"
SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


Reading = Callable[[torch.Tensor, bool], AbstractContextManager[torch.Tensor]]  # as `snapshot.Lent.reading`


class Segment(NamedTuple):
    """Tensors that lie together in a file: one kind of the boxes of a run, or (without boxes) a tensor of the rank."""

    boxes: tuple[Box, ...]
    kind: str  # or the rank tensor's name
    dtype: str
    tensors: Mapping[str, torch.Tensor]  # by key in the file


class FileLayout(NamedTuple):
    """A file as it will be; `entry` lacks the checksums."""

    entry: FileEntry
    header: bytes
    segments: Sequence[Segment]


def lay_out(
    rank: int,
    pieces: Sequence[tuple[Piece, torch.Tensor]],
    shapes: Mapping[str, Index],
    rank_tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Any],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[FileLayout]:
    """The files that `write_shard` writes, in which nothing depends on the tensors' content (they may be on any device,
    "meta" included). Raises CheckpointError for what is no piece of the given shapes, or no JSON."""
    _check(rank, pieces, shapes)
    try:
        scalars = json.loads(json.dumps(dict(scalars)))  # what a reader will see: string keys, lists
    except TypeError as error:
        raise CheckpointError(f"the scalars of rank {rank} are not JSON: {error}") from error
    layouts = []
    for index, blocks in enumerate(_files(pieces, max_file_bytes)):
        segments = _segments(blocks, rank_tensors if index == 0 else {})
        header = _header(segments, rank)
        runs, places = _places(segments, len(header))
        entry = FileEntry(
            name=f"rank-{rank:05d}-{index:04d}.safetensors",
            rank=rank,
            size_bytes=len(header) + sum(tensor.nbytes for s in segments for tensor in s.tensors.values()),
            checksums=(),
            chunk_bytes=chunk_bytes,
            runs=runs,
            shapes={box.name: tuple(shapes[box.name]) for box in blocks},
            rank_tensors=places,
            scalars=scalars if index == 0 else {},
        )
        layouts.append(FileLayout(entry, header, segments))
    return layouts


def write_shard(
    directory: Path,
    rank: int,
    pieces: Sequence[tuple[Piece, torch.Tensor]],
    shapes: Mapping[str, Index],
    rank_tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Any],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
    read_back: bool = False,
    reading: Reading | None = None,
) -> list[FileEntry]:
    """Writes a rank's part as `rank-00000-0000.safetensors`, -0001, ...; returns what the driver commits.

    `pieces` are boxes of canonical tensors with their elements, `shapes` has the shapes of the whole tensors;
    `rank_tensors` and the JSON-able `scalars` are of the rank alone and go into its first file. A file takes as many
    boxes, each in all its kinds, as fit in `max_file_bytes`, at least one. Tensors that are contiguous and on the CPU
    are written as they lie there; they must not change meanwhile, unless `reading` (see `Lent`) gives their content.
    `read_back` compares every chunk with what the device then holds.

    Each file is written under another name, flushed and renamed. Raises DiskFullError (needed and free bytes in the
    message) or CheckpointError; no partial file stays.
    """
    layouts = lay_out(
        rank, pieces, shapes, rank_tensors, scalars, max_file_bytes=max_file_bytes, chunk_bytes=chunk_bytes
    )
    try:
        num_bytes = sum(layout.entry.size_bytes for layout in layouts)
        patiently(directory, lambda: ensure_space(directory, num_bytes, len(layouts)))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} is gone: the save was given up, or another run has taken over the run directory"
        ) from error
    return [_write_file(directory, layout, read_back, reading) for layout in layouts]


def read_rank_state(manifest: CheckpointManifest, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and scalars of a rank's own, which `write_shard` was given.

    Reads and verifies the chunks that hold them. Raises CheckpointError naming file and chunk, or when no such rank
    wrote the checkpoint.
    """
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for entry in manifest.of_rank(rank):
        scalars |= entry.scalars
        ranges = []
        for name, (dtype, shape, begin) in entry.rank_tensors.items():
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            data = as_bytes(tensors[name])
            ranges.append((begin, begin + len(data), data))
        if ranges:
            ChunkReader(manifest.directory, entry).read(ranges)
    return tensors, scalars


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied: writing to them writes to the tensor."""
    data: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def dtype_name(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"a tensor of dtype {name} can't be stored; choose from {', '.join(SAFETENSORS_DTYPES)}")
    return name


def _check(rank: int, pieces: Sequence[tuple[Piece, torch.Tensor]], shapes: Mapping[str, Index]) -> None:
    """What a reader relies on; a violation is the trainer's bug and must not become a checkpoint."""
    seen = set()
    for piece, tensor in pieces:
        if piece.name not in shapes:
            raise CheckpointError(f"rank {rank}: {piece.key} is a box of a tensor whose shape is not given")
        shape = shapes[piece.name]
        inside = len(piece.start) == len(piece.stop) == len(shape)
        if not inside or not all(0 <= a < b <= n for a, b, n in zip(piece.start, piece.stop, shape, strict=True)):
            raise CheckpointError(f"rank {rank}: {piece.key} is no box of a tensor of shape {tuple(shape)}")
        if tuple(tensor.shape) != piece.extent:
            raise CheckpointError(f"rank {rank}: {piece.key} has elements of shape {tuple(tensor.shape)}")
        if piece in seen:
            raise CheckpointError(f"rank {rank}: {piece.key} is given twice")
        seen.add(piece)


def _files(
    pieces: Sequence[tuple[Piece, torch.Tensor]], max_file_bytes: int
) -> Iterator[dict[Box, dict[str, torch.Tensor]]]:
    """Boxes, each in all its kinds, file by file; one empty file where there are none, for the rank's own state."""
    blocks: dict[Box, dict[str, torch.Tensor]] = defaultdict(dict)
    for piece, tensor in pieces:
        blocks[piece.box][piece.kind] = tensor
    file: dict[Box, dict[str, torch.Tensor]] = {}
    file_bytes = 0
    for box, kinds in blocks.items():
        num_bytes = sum(tensor.nbytes for tensor in kinds.values())
        if file and file_bytes + num_bytes > max_file_bytes:
            yield file
            file, file_bytes = {}, 0
        file[box] = kinds
        file_bytes += num_bytes
    yield file


def _segments(
    blocks: Mapping[Box, Mapping[str, torch.Tensor]], rank_tensors: Mapping[str, torch.Tensor]
) -> list[Segment]:
    """In the order of the file: larger elements first, so that every tensor lies at a multiple of its element's size.
    Boxes that come in the same kinds and dtypes make a run, whose kinds lie apart: who wants weights skips moments."""
    alike: dict[tuple[tuple[str, str], ...], list[Box]] = defaultdict(list)
    for box, kinds in blocks.items():
        alike[tuple((kind, dtype_name(kinds[kind])) for kind in sorted(kinds, key=kind_order))].append(box)
    segments = [Segment((), name, dtype_name(tensor), {name: tensor}) for name, tensor in rank_tensors.items()]
    for kinds_and_dtypes, boxes in alike.items():
        for kind, dtype in kinds_and_dtypes:
            tensors = {Piece(kind, *box).key: blocks[box][kind] for box in boxes}
            segments.append(Segment(tuple(boxes), kind, dtype, tensors))
    return sorted(segments, key=lambda segment: -ITEM_BYTES[segment.dtype])


def _places(segments: Sequence[Segment], begin: int) -> tuple[tuple[Run, ...], dict[str, RankTensor]]:
    """Where everything lies in a file whose data begins at `begin`."""
    sections: dict[tuple[Box, ...], list[Section]] = defaultdict(list)
    rank_tensors = {}
    for boxes, kind, dtype, tensors in segments:
        if boxes:
            sections[boxes].append(Section(kind, dtype, begin))
        else:
            rank_tensors[kind] = RankTensor(dtype, tuple(tensors[kind].shape), begin)
        begin += sum(tensor.nbytes for tensor in tensors.values())
    return tuple(Run(boxes, tuple(found)) for boxes, found in sections.items()), rank_tensors


def _header(segments: Sequence[Segment], rank: int) -> bytes:
    """The beginning of a safetensors file: the length of the JSON as a little-endian 64-bit number, then the JSON, in
    which offsets count from its end. Source: safetensors 0.8, README.md, "Format"."""
    document: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps({"rank": rank})}}
    end = 0
    for segment in segments:
        for key, tensor in segment.tensors.items():
            begin, end = end, end + tensor.nbytes
            document[key] = {
                "dtype": SAFETENSORS_DTYPES[segment.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _append(writer: ChunkWriter, tensor: torch.Tensor, reading: Reading | None) -> None:
    if reading is None:
        writer.append(as_bytes(tensor.detach().cpu().contiguous()))
        return
    for begin in range(0, tensor.nbytes, SLICE_BYTES):
        end = begin + SLICE_BYTES
        with reading(tensor, end >= tensor.nbytes) as content:
            flat = content.detach().contiguous().view(-1).view(torch.uint8)
            writer.append(as_bytes(flat[begin:end].cpu()))
            writer.flush()  # outside of the context the content may change


def _write_file(directory: Path, layout: FileLayout, read_back: bool, reading: Reading | None) -> FileEntry:
    entry, header, segments = layout
    checksums: tuple[str, ...] = ()

    def write(partial: Path) -> None:
        nonlocal checksums
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            writer = ChunkWriter(fd, entry.chunk_bytes)
            writer.append(memoryview(header))
            for segment in segments:
                for tensor in segment.tensors.values():
                    _append(writer, tensor, reading)
            checksums = writer.finish()
            if read_back:
                drop_cached(fd)
        finally:
            os.close(fd)
        if read_back:
            _compare(partial, checksums, entry.chunk_bytes)

    publish_file(directory / entry.name, write, entry.size_bytes)
    return replace(entry, checksums=checksums)


def _compare(path: Path, checksums: Sequence[str], chunk_bytes: int) -> None:
    for index, (got, written) in enumerate(zip(chunk_checksums(path, chunk_bytes), checksums, strict=True)):
        if got != written:
            raise CheckpointError(
                f"{path}: the device gives back chunk {index} with xxh3 {got}, written was {written}; "
                "the disk or its connection is broken"
            )
