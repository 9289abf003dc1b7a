"""What a checkpoint consists of: the manifest, its files, their pieces and checksums. docs/checkpoint-format.md is the
format."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from rlhpc.checkpoint.chunks import CHUNK_BYTES, chunk_checksums
from rlhpc.checkpoint.conformity import violations
from rlhpc.checkpoint.durable import patiently, publish_file
from rlhpc.checkpoint.pieces import CRITIC_PREFIX, Box, Index, Run, Section, StoredPiece, kind_order
from rlhpc.errors import CheckpointError

FORMAT = "rlhpc-checkpoint"
SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
NUM_READERS = 8  # files at once; a parallel file system takes milliseconds to answer each question
STEP_NAME = re.compile(r"step-(\d{6,})")


class RankTensor(NamedTuple):
    """A tensor of a rank's own (the state of a random generator), row-major from byte `begin` of its file."""

    dtype: str
    shape: Index
    begin: int


@dataclass(frozen=True)
class FileEntry:
    """One shard file: who wrote it, its length, the XXH3-64 of each `chunk_bytes` of it, and what lies where in it."""

    name: str
    rank: int
    size_bytes: int
    checksums: tuple[str, ...]
    chunk_bytes: int = CHUNK_BYTES
    runs: tuple[Run, ...] = ()
    shapes: Mapping[str, Index] = field(default_factory=dict)  # of the canonical tensors, at least of those in `runs`
    rank_tensors: Mapping[str, RankTensor] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)  # the rank's JSON state, in its first file only

    def pieces(self) -> Iterator[StoredPiece]:
        """In the order in which they lie in the file, run by run."""
        for run in self.runs:
            for section in run.sections:
                for box, begin in run.places(section):
                    yield StoredPiece(section.kind, *box, section.dtype, self.rank, self.name, begin)

    def verify(self, directory: Path, *, checksums: bool = True) -> None:
        """Raises CheckpointError naming the file and what is wrong with it: missing, another size, another
        content."""
        path = directory / self.name
        try:
            size = patiently(path, path.stat).st_size
            if size != self.size_bytes:
                raise CheckpointError(f"{path}: {size} bytes, the manifest says {self.size_bytes}")
            if not checksums:
                return
            found = list(chunk_checksums(path, self.chunk_bytes))
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        if len(found) != len(self.checksums):
            raise CheckpointError(f"{path}: {len(found)} chunks, the manifest has checksums of {len(self.checksums)}")
        for chunk, checksum in enumerate(found):
            self.compare(directory, chunk, checksum)

    def compare(self, directory: Path, chunk: int, got: str) -> None:
        """Raises CheckpointError naming file and chunk unless `got` is the chunk's checksum."""
        if got != (expected := self.checksums[chunk]):
            path = directory / self.name
            raise CheckpointError(f"{path}: chunk {chunk} has xxh3 {got}, the manifest says {expected}")

    def to_json(self) -> dict[str, Any]:
        """Complete in itself, unlike the entry in a manifest, which has the tensors' names and shapes in one place."""
        names = sorted({box.name for run in self.runs for box in run.boxes})
        table = [[name, list(self.shapes[name])] for name in names]
        return {"tensors": table} | _encode(self, {name: i for i, name in enumerate(names)}, self.shapes)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FileEntry:
        shapes = {name: tuple(shape) for name, shape in document["tensors"]}
        return _decode(document, list(shapes), shapes)


@dataclass(frozen=True)
class CheckpointManifest:
    """A committed checkpoint. `state` is the driver's JSON: cursor, wandb id, metrics."""

    directory: Path  # where it was read from; not part of the file
    step: int
    policy_version: int
    files: tuple[FileEntry, ...]
    layout: Mapping[str, Any] = field(default_factory=dict)  # the parallel layout that wrote it
    state: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Index] = field(default_factory=dict)  # of all canonical tensors
    config_digest: str = ""

    @property
    def world_size(self) -> int:
        return 1 + max(entry.rank for entry in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that are stored, in the order of KINDS."""
        found = {section.kind for entry in self.files for run in entry.runs for section in run.sections}
        return tuple(sorted(found, key=kind_order))

    def pieces(self, kind: str, names: Collection[str] | None = None) -> Iterator[StoredPiece]:
        """The stored pieces of a kind, of the given canonical tensors or of all, file by file. What several ranks hold
        alike may come from each of them. One pass takes a fraction of a second for the largest models: give it all
        names at once, as a set."""
        for entry in self.files:
            for run in entry.runs:
                for section in run.sections:
                    if section.kind != kind:
                        continue
                    for box, begin in run.places(section):
                        if names is None or box.name in names:
                            yield StoredPiece(kind, *box, section.dtype, entry.rank, entry.name, begin)

    def entry(self, name: str) -> FileEntry:
        """The file of that name. Raises KeyError."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, FileEntry]:
        return {entry.name: entry for entry in self.files}

    def of_rank(self, rank: int) -> tuple[FileEntry, ...]:
        """The files that a rank wrote. Raises CheckpointError when there was no such rank."""
        entries = tuple(entry for entry in self.files if entry.rank == rank)
        if not entries:
            raise CheckpointError(
                f"{self.directory} was written by ranks 0 to {self.world_size - 1} and has nothing of rank {rank}'s own"
            )
        return entries

    @property
    def has_critic(self) -> bool:
        return any(name.startswith(CRITIC_PREFIX) for name in self.shapes)

    def other_than(self, shapes: Mapping[str, Index], *, critic: bool = True) -> str:
        """How the stored tensors differ from those of a model, whose shapes these are, by the first that does; "" where
        all are the same. Without `critic` those of a critic don't count."""
        stored = {name: shape for name, shape in self.shapes.items() if critic or not name.startswith(CRITIC_PREFIX)}
        for name in sorted(stored.keys() | shapes.keys()):
            if name not in stored:
                return f"it has no {name}"
            if name not in shapes:
                return f"it has {name}, the model hasn't"
            if stored[name] != shapes[name]:
                return f"{name} has shape {stored[name]}, the model's has {shapes[name]}"
        return ""

    def require_whole(self) -> None:
        """Raises CheckpointError naming a tensor of which the ranks hold a part only, in one of its kinds. Equal boxes
        count once; different ones that overlap are not looked for."""
        sections = ((section, run) for entry in self.files for run in entry.runs for section in run.sections)
        boxes = {(section.kind, box) for section, run in sections for box in run.boxes}
        held: Counter[tuple[str, str]] = Counter()
        for kind, box in boxes:
            held[kind, box.name] += box.num_elements
        for (kind, name), found in held.items():
            if found < (needed := prod(self.shapes[name])):
                raise CheckpointError(
                    f"step {self.step}: the ranks hold {found} of the {needed} elements of {kind} {name}"
                )

    def verify(self, *, checksums: bool = True) -> None:
        """Raises CheckpointError naming the first file that is missing or differs; sizes only if so asked. Nothing is
        read before all sizes are right."""
        with ThreadPoolExecutor(NUM_READERS) as pool:
            for content in (False, True) if checksums else (False,):
                verify = partial(FileEntry.verify, directory=self.directory, checksums=content)
                for _ in pool.map(verify, self.files):
                    pass


def committed_steps(root: Path) -> dict[int, Path]:
    """The directories below `root` that were committed, by step, ascending; their files may be damaged."""
    return {step: path for step, path in step_directories(root).items() if (path / MANIFEST_NAME).exists()}


def step_directories(root: Path) -> dict[int, Path]:
    """Those named as checkpoints, by step, ascending; some may have lost their manifest."""
    if not root.is_dir():
        return {}
    found = ((STEP_NAME.fullmatch(path.name), path) for path in root.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match and path.is_dir()))


def write_manifest(manifest: CheckpointManifest) -> None:
    """Writes manifest.json, with a checksum of itself, durably into the manifest's directory.

    Raises CheckpointError when `state` or `layout` holds something that JSON doesn't, or the disk is full.
    """
    names = sorted(manifest.shapes)
    positions = {name: position for position, name in enumerate(names)}
    document: dict[str, Any] = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "step": manifest.step,
        "policy_version": manifest.policy_version,
        "world_size": manifest.world_size,
        "config_digest": manifest.config_digest,
        "layout": dict(manifest.layout),
        "state": dict(manifest.state),
        "tensors": [[name, list(manifest.shapes[name])] for name in names],
        "files": [_encode(entry, positions, manifest.shapes) for entry in manifest.files],
    }
    try:
        text = json.dumps(document, separators=(",", ":"))
    except TypeError as error:
        raise CheckpointError(f"the state of step {manifest.step} is not JSON: {error}") from error
    body = text.encode("ascii")
    data = body[:-1] + _seal(body)

    def write(path: Path) -> None:
        path.write_bytes(data)

    publish_file(manifest.directory / MANIFEST_NAME, write, len(data))


def read_manifest(directory: Path) -> CheckpointManifest:
    """Reads a manifest and verifies it against its own checksum, its format and its directory's name, not the files it
    lists.

    Raises CheckpointError naming the file and the reason.
    """
    path = directory / MANIFEST_NAME
    try:
        data = patiently(path, path.read_bytes)
        document = json.loads(data)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a manifest of format {FORMAT!r}")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path}: schema version {document.get('schema_version')!r}; this rlhpc reads {SCHEMA_VERSION}: go on with "
            f"the rlhpc that wrote it, or choose another run_dir"
        )
    body = data[:-_SEAL_BYTES] + b"}"
    if (seal := _seal(body)) != data[-_SEAL_BYTES:]:
        raise CheckpointError(
            f"{path}: its content has xxh3 {seal[-19:-3].decode()}, but it says {document.get('xxh3')}; it was changed"
        )
    try:
        manifest = _decode_manifest(directory, document)
        problem = next(violations(manifest), None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = repr(error)
    if problem:
        raise CheckpointError(f"{path}: not a manifest as docs/checkpoint-format.md describes it: {problem}")
    if (named := STEP_NAME.fullmatch(directory.absolute().name)) and int(named[1]) != manifest.step:
        raise CheckpointError(f"{directory} is a copy of step {manifest.step} under another name; name it after that")
    return manifest


def _decode_manifest(directory: Path, document: Mapping[str, Any]) -> CheckpointManifest:
    shapes = {name: tuple(shape) for name, shape in document["tensors"]}
    names = list(shapes)
    if len(names) < len(document["tensors"]):
        raise ValueError("two tensors have the same name")
    return CheckpointManifest(
        directory=directory,
        step=document["step"],
        policy_version=document["policy_version"],
        layout=document["layout"],
        state=document["state"],
        files=tuple(_decode(entry, names, shapes) for entry in document["files"]),
        shapes=shapes,
        config_digest=document["config_digest"],
    )


def _seal(body: bytes) -> bytes:
    """What stands in the file instead of the document's closing brace: the checksum of the bytes without it."""
    return b',"xxh3":"%s"}\n' % xxhash.xxh3_64_hexdigest(body).encode()


_SEAL_BYTES = len(_seal(b""))


def _encode(entry: FileEntry, positions: Mapping[str, int], shapes: Mapping[str, Index]) -> dict[str, Any]:
    """A box is `[tensor, start..., stop...]`, or `[tensor]` where it is all of it."""

    def encode(box: Box) -> list[int]:
        whole = box.stop == shapes[box.name] and not any(box.start)
        return [positions[box.name]] if whole else [positions[box.name], *box.start, *box.stop]

    return {
        "name": entry.name,
        "rank": entry.rank,
        "size_bytes": entry.size_bytes,
        "chunk_bytes": entry.chunk_bytes,
        "xxh3": list(entry.checksums),
        "runs": [
            {"sections": [list(section) for section in run.sections], "boxes": [encode(box) for box in run.boxes]}
            for run in entry.runs
        ],
        "rank_tensors": {name: list(tensor) for name, tensor in entry.rank_tensors.items()},
        "scalars": dict(entry.scalars),
    }


def _decode(document: Mapping[str, Any], names: list[str], shapes: Mapping[str, Index]) -> FileEntry:
    def decode(numbers: list[int]) -> Box:
        if numbers[0] < 0:
            raise IndexError(f"a box of tensor {numbers[0]}")
        name, dims = names[numbers[0]], len(numbers) // 2
        if not dims:
            return Box(name, (0,) * len(shapes[name]), shapes[name])
        return Box(name, tuple(numbers[1 : 1 + dims]), tuple(numbers[1 + dims :]))

    return FileEntry(
        name=document["name"],
        rank=document["rank"],
        size_bytes=document["size_bytes"],
        checksums=tuple(document["xxh3"]),
        chunk_bytes=document["chunk_bytes"],
        runs=tuple(
            Run(tuple(map(decode, run["boxes"])), tuple(Section(*section) for section in run["sections"]))
            for run in document["runs"]
        ),
        shapes=shapes,
        rank_tensors={
            name: RankTensor(dtype, tuple(shape), begin)
            for name, (dtype, shape, begin) in document["rank_tensors"].items()
        },
        scalars=document["scalars"],
    )
