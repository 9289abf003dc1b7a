"""One rank's part of a checkpoint: safetensors files, written durably and read back only when they verify."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from rlhpc.checkpoint.durable import ensure_space, publish_file
from rlhpc.checkpoint.manifest import CheckpointManifest, FileEntry, chunk_checksums
from rlhpc.errors import CheckpointError

MAX_FILE_BYTES = 4 * 2**30
METADATA_KEY = "rlhpc"


@dataclass(frozen=True)
class Placement:
    """Which box of which canonical tensor a stored tensor is: `start[d] <= index[d] < start[d] +
    extent[d]`."""

    name: str  # canonical (HF) name
    shape: tuple[int, ...]  # of the whole canonical tensor
    start: tuple[int, ...]


def write_shard(
    directory: Path,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, object],
    placements: Mapping[str, Placement] | None = None,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[FileEntry]:
    """Writes a rank's tensors and JSON-able scalars as `rank-00000-0000.safetensors`, -0001, ...; returns
    the entries.

    A file takes as many tensors as fit in `max_file_bytes`, at least one. Scalars stand in the first file's
    metadata, placements in the metadata of their tensor's file. Each file is written under another name,
    flushed and renamed. Raises DiskFullError (needed and free bytes in the message) or CheckpointError; no
    partial file stays.
    """
    placements = placements or {}
    if unknown := sorted(set(placements) - set(tensors)):
        raise CheckpointError(f"placements of tensors that rank {rank} doesn't save: {', '.join(unknown)}")
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    try:
        ensure_space(directory, num_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} is gone: the save was given up, or another run has taken over the run directory"
        ) from error
    entries = []
    for index, names in enumerate(_parts(tensors, max_file_bytes)):
        metadata = {
            "rank": rank,
            "scalars": dict(scalars) if index == 0 else {},
            "placements": {name: asdict(placements[name]) for name in names if name in placements},
        }
        path = directory / f"rank-{rank:05d}-{index:04d}.safetensors"
        _write_file(path, {name: tensors[name] for name in names}, metadata)
        entries.append(FileEntry(path.name, rank, path.stat().st_size, tuple(chunk_checksums(path))))
    return entries


def read_shard(manifest: CheckpointManifest, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A rank's tensors (on CPU) and scalars, of files whose size and checksums verify.

    Raises CheckpointError naming the file and what is wrong with it.
    """
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for entry in manifest.of_rank(rank):
        entry.verify(manifest.directory)
        path = manifest.directory / entry.name
        try:
            with safe_open(path, framework="pt") as file:
                scalars |= _metadata(path, file.metadata())["scalars"]
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return tensors, scalars


def read_placements(manifest: CheckpointManifest, rank: int) -> dict[str, Placement]:
    """Where a rank's tensors lie in the canonical ones, from the files' headers alone."""
    placements = {}
    for entry in manifest.of_rank(rank):
        path = manifest.directory / entry.name
        try:
            with safe_open(path, framework="pt") as file:
                stored = _metadata(path, file.metadata())["placements"]
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}") from error
        for name, box in stored.items():
            placements[name] = Placement(box["name"], tuple(box["shape"]), tuple(box["start"]))
    return placements


def _parts(tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> Iterator[Sequence[str]]:
    """Tensor names, file by file; one empty part when there is no tensor, for the scalars."""
    part: list[str] = []
    part_bytes = 0
    for name, tensor in tensors.items():
        if part and part_bytes + tensor.nbytes > max_file_bytes:
            yield part
            part, part_bytes = [], 0
        part.append(name)
        part_bytes += tensor.nbytes
    yield part


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, object]) -> None:
    try:
        text = json.dumps(metadata)
    except TypeError as error:
        raise CheckpointError(f"the scalars of {path.name} are not JSON: {error}") from error
    # Pointers, since safetensors.torch refuses tensors that share a storage, as views of a flat buffer do.
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in dense.items()
    }

    def write(partial: Path) -> None:
        try:
            serialize_file(specs, partial, metadata={METADATA_KEY: text})
        except SafetensorError as error:
            raise _os_error(error) from error

    publish_file(path, write)


def _os_error(error: SafetensorError) -> OSError:
    """The operating system's error inside one of safetensors', which tells it only as text."""
    found = re.search(r"os error (\d+)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))


def _metadata(path: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    if not metadata or METADATA_KEY not in metadata:
        raise CheckpointError(f"{path}: no {METADATA_KEY!r} metadata; rlhpc didn't write it")
    document: dict[str, Any] = json.loads(metadata[METADATA_KEY])
    return document
