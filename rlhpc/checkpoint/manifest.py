"""What a checkpoint consists of: the manifest, its files and their checksums. docs/checkpoint-format.md is
the format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from rlhpc.checkpoint.durable import publish_file
from rlhpc.errors import CheckpointError

FORMAT = "rlhpc-checkpoint"
SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
STEP_NAME = re.compile(r"step-(\d{6,})")
CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class FileEntry:
    """One shard file: who wrote it, how long it is, and the XXH3-64 of each `chunk_bytes` of it."""

    name: str
    rank: int
    size_bytes: int
    checksums: tuple[str, ...]
    chunk_bytes: int = CHUNK_BYTES

    def verify(self, directory: Path, *, checksums: bool = True) -> None:
        """Raises CheckpointError naming the file and what is wrong with it: missing, another size, another
        content."""
        path = directory / self.name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        if size != self.size_bytes:
            raise CheckpointError(f"{path}: {size} bytes, the manifest says {self.size_bytes}")
        if not checksums:
            return
        for index, (got, expected) in enumerate(
            zip(chunk_checksums(path, self.chunk_bytes), self.checksums, strict=True)
        ):
            if got != expected:
                raise CheckpointError(f"{path}: chunk {index} has xxh3 {got}, the manifest says {expected}")


@dataclass(frozen=True)
class CheckpointManifest:
    """A committed checkpoint. `state` is the driver's JSON: cursor, wandb id, config digest, metrics."""

    directory: Path  # where it was read from; not part of the file
    step: int
    policy_version: int
    files: tuple[FileEntry, ...]
    layout: Mapping[str, Any] = field(default_factory=dict)  # the parallel layout that wrote it
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return 1 + max(entry.rank for entry in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    def of_rank(self, rank: int) -> tuple[FileEntry, ...]:
        """The files that a rank wrote. Raises CheckpointError when there was no such rank."""
        entries = tuple(entry for entry in self.files if entry.rank == rank)
        if not entries:
            raise CheckpointError(
                f"{self.directory} was written by {self.world_size} ranks and has nothing of rank {rank}; "
                f"resume with as many ranks as wrote it"
            )
        return entries

    def verify(self, *, checksums: bool = True) -> None:
        """Raises CheckpointError naming the first file that is missing or differs; sizes only if so asked."""
        for entry in self.files:
            entry.verify(self.directory, checksums=checksums)


def committed_steps(root: Path) -> dict[int, Path]:
    """The directories below `root` that were committed, by step, ascending; their files may be damaged."""
    if not root.is_dir():
        return {}
    found = ((STEP_NAME.fullmatch(path.name), path) for path in root.iterdir())
    steps = {int(match[1]): path for match, path in found if match and (path / MANIFEST_NAME).exists()}
    return dict(sorted(steps.items()))


def chunk_checksums(path: Path, chunk_bytes: int = CHUNK_BYTES) -> list[str]:
    """XXH3-64, as 16 hexadecimal digits, of each `chunk_bytes` of a file; an empty file has none."""
    checksums: list[str] = []
    buffer = bytearray(4 * 2**20)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while True:
            digest, length = xxhash.xxh3_64(), 0
            while length < chunk_bytes and (count := file.readinto(view[: chunk_bytes - length])):
                digest.update(view[:count])
                length += count
            if not length:
                return checksums
            checksums.append(digest.hexdigest())


def write_manifest(manifest: CheckpointManifest) -> None:
    """Writes manifest.json, with a checksum of itself, durably into the manifest's directory.

    Raises CheckpointError when `state` or `layout` holds something that JSON doesn't, or the disk is full.
    """
    document: dict[str, Any] = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "step": manifest.step,
        "policy_version": manifest.policy_version,
        "world_size": manifest.world_size,
        "layout": dict(manifest.layout),
        "state": dict(manifest.state),
        "files": [
            {
                "name": entry.name,
                "rank": entry.rank,
                "size_bytes": entry.size_bytes,
                "chunk_bytes": entry.chunk_bytes,
                "xxh3": list(entry.checksums),
            }
            for entry in manifest.files
        ],
    }
    try:
        document = json.loads(json.dumps(document))  # what a reader will see: string keys, lists
    except TypeError as error:
        raise CheckpointError(f"the state of step {manifest.step} is not JSON: {error}") from error
    text = json.dumps(document | {"xxh3": _self_checksum(document)}, indent=1)

    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    publish_file(manifest.directory / MANIFEST_NAME, write)


def read_manifest(directory: Path) -> CheckpointManifest:
    """Reads a manifest and verifies it against its own checksum, not the files it lists.

    Raises CheckpointError naming the file and the reason.
    """
    path = directory / MANIFEST_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a manifest of format {FORMAT!r}")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: schema version {document.get('schema_version')!r}; this rlhpc reads {SCHEMA_VERSION}"
        )
    checksum = document.pop("xxh3", None)
    if checksum != _self_checksum(document):
        raise CheckpointError(f"{path}: has xxh3 {_self_checksum(document)}, but says {checksum}; it was changed")
    return CheckpointManifest(
        directory=directory,
        step=document["step"],
        policy_version=document["policy_version"],
        layout=document["layout"],
        state=document["state"],
        files=_file_entries(document["files"]),
    )


def _file_entries(files: Sequence[Mapping[str, Any]]) -> tuple[FileEntry, ...]:
    return tuple(FileEntry(f["name"], f["rank"], f["size_bytes"], tuple(f["xxh3"]), f["chunk_bytes"]) for f in files)


def _self_checksum(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(canonical.encode())
