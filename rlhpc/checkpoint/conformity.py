"""What a manifest has to say before anything that it names is opened: whoever can write JSON can write its checksum.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from rlhpc.checkpoint.pieces import ITEM_BYTES, Index, Run

if TYPE_CHECKING:
    from rlhpc.checkpoint.manifest import CheckpointManifest, FileEntry

FILE_NAME = re.compile(r"rank-[0-9]{5,}-[0-9]{4,}\.safetensors")  # so that no name leads out of the directory


def violations(manifest: CheckpointManifest) -> Iterator[str]:
    """What of it isn't as docs/checkpoint-format.md says; nothing is opened. Raises TypeError where something is of
    another type altogether."""
    for name, value in (("step", manifest.step), ("policy_version", manifest.policy_version)):
        if not _natural(value):
            yield f"{name} is {value!r}, not a number from 0 on"
    yield from _of_object("layout", manifest.layout)
    yield from _of_object("state", manifest.state)
    for name, shape in manifest.shapes.items():
        if not all(map(_natural, shape)):
            yield f"tensor {name} has shape {shape}"
    ranks = {entry.rank for entry in manifest.files}
    if not ranks or ranks != set(range(len(ranks))):
        yield f"there are files of ranks {sorted(ranks)}, not of 0 to some N-1"
    if len({entry.name for entry in manifest.files}) < len(manifest.files):
        yield "two files have the same name"
    for entry in manifest.files:
        yield from (f"{entry.name!r}: {problem}" for problem in _of_file(entry))


def _of_file(entry: FileEntry) -> Iterator[str]:
    if not FILE_NAME.fullmatch(entry.name):
        yield "a file is named rank-<rank>-<number>.safetensors, and lies beside its manifest"
    if not _natural(entry.size_bytes) or not _natural(entry.chunk_bytes) or not entry.chunk_bytes:
        yield f"size_bytes is {entry.size_bytes!r} and chunk_bytes {entry.chunk_bytes!r}"
        return
    if len(entry.checksums) != (needed := -(-entry.size_bytes // entry.chunk_bytes)):
        yield f"{len(entry.checksums)} checksums, {entry.size_bytes} bytes have {needed}"
    yield from _of_object("scalars", entry.scalars)
    for run in entry.runs:
        yield from _of_run(entry, run)
    for name, (dtype, shape, begin) in entry.rank_tensors.items():
        if not all(map(_natural, shape)):
            yield f"rank tensor {name} has shape {shape}"
        else:
            yield from _of_range(entry, f"rank tensor {name}", dtype, begin, prod(shape))


def _of_run(entry: FileEntry, run: Run) -> Iterator[str]:
    """A box that is all of its tensor is right by construction; those of a large model are nearly all like that."""
    for box in run.boxes:
        if box.stop is not (shape := entry.shapes[box.name]) and not _inside(box.start, box.stop, shape):
            yield f"{box.start}:{box.stop} is no box of {box.name}, whose shape is {shape}"
            return
    num_elements = sum(box.num_elements for box in run.boxes)
    for kind, dtype, begin in run.sections:
        yield from _of_range(entry, kind, dtype, begin, num_elements)


def _of_range(entry: FileEntry, what: str, dtype: str, begin: int, num_elements: int) -> Iterator[str]:
    if dtype not in ITEM_BYTES:
        yield f"{what} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}"
    elif not _natural(begin) or begin + num_elements * ITEM_BYTES[dtype] > entry.size_bytes:
        yield f"{what} would take {num_elements * ITEM_BYTES[dtype]} bytes from {begin} of {entry.size_bytes}"


def _inside(start: Index, stop: Index, shape: Index) -> bool:
    return len(start) == len(stop) == len(shape) and all(
        _natural(a) and _natural(b) and a < b <= n for a, b, n in zip(start, stop, shape, strict=True)
    )


def _of_object(what: str, value: object) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{what} is {value!r}, not an object"


def _natural(value: object) -> bool:
    return type(value) is int and value >= 0
