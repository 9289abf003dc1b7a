"""A committed checkpoint as the planner's source: any rank of any layout reads its boxes, and no more than those.

Not collective: each rank plans for itself, from the manifest alone. What it reads is whole chunks of files, verified.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from rlhpc.checkpoint.manifest import CheckpointManifest
from rlhpc.checkpoint.pieces import Index, Piece, StoredPiece
from rlhpc.checkpoint.reader import ChunkReader, Sink
from rlhpc.checkpoint.shards import as_bytes
from rlhpc.errors import CheckpointError, ModelError
from rlhpc.layout.spec import Replicas, Shards, ShardSpec
from rlhpc.reshard.execute import region
from rlhpc.reshard.plan import ShardCopy, plan

WEIGHT_KINDS = ("master", "weight")  # a tensor was trained, or it was frozen
NUM_READERS = 4  # files at once: one stream doesn't fill a parallel file system
SLAB_BYTES = 32 * 2**20  # read at once of a box that has gaps between its rows, needs a cast or goes to a device

_Stored = dict[tuple[int, str], StoredPiece]  # by the rank that wrote it and its key: a buffer in the planner's terms
_Read = tuple[int, int, Sink]  # bytes [begin, end) of a file, and where they go


def pieces_of(
    kind: str, specs: Iterable[ShardSpec], rank: int, buffers: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """What a rank holds under a layout, as pieces to save: each with a view of its buffer, of the box's extent."""
    for spec in specs:
        for shard in spec.on(rank):
            box = region(buffers[shard.buffer], shard.offset, shard.extent)
            yield Piece(kind, spec.name, shard.start, shard.stop), box.view(shard.shape)


def saved_specs(manifest: CheckpointManifest, kinds: str | Sequence[str], names: Collection[str]) -> list[ShardSpec]:
    """The checkpoint's pieces of the named tensors: each is a buffer, named by its key, of the ranks that wrote it.

    Where several `kinds` are given, each tensor is of the first of them that it was saved as. Tensors that were saved
    as none of them are left out.
    """
    return _saved(manifest, kinds, names)[0]


class Wanted(NamedTuple):
    """Tensors to be read and the buffers that they go into; `kinds` as in `saved_specs`. `cast` allows the checkpoint
    another dtype than the specs'."""

    kinds: str | Sequence[str]
    specs: Iterable[ShardSpec]
    buffers: Mapping[str, torch.Tensor]
    cast: bool = False


def load_saved(
    manifest: CheckpointManifest,
    kinds: str | Sequence[str],
    dst_specs: Iterable[ShardSpec],
    rank: int,
    dst_buffers: Mapping[str, torch.Tensor],
    *,
    cast: bool = False,
) -> int:
    """Fills the rank's buffers with its boxes of the checkpoint's tensors, whatever layout wrote them. See
    `load_together`."""
    return load_together(manifest, rank, [Wanted(kinds, dst_specs, dst_buffers, cast)])


def load_together(manifest: CheckpointManifest, rank: int, wanted: Iterable[Wanted]) -> int:
    """Fills the rank's buffers with its boxes of all that is wanted; returns the bytes read.

    Reads the chunks in which those boxes lie, each once, and verifies each. Elements that the specs don't name stay as
    they are. Raises CheckpointError, naming file and chunk, for damage, and naming the tensor where the checkpoint
    hasn't (all of) it, has it in another shape, or, without `cast`, in another dtype.
    """
    reads: dict[str, list[_Read]] = defaultdict(list)
    for kinds, specs, buffers, cast in wanted:
        for copy, piece in planned_reads(manifest, kinds, specs, rank, cast=cast):
            reads[piece.file] += _reads(piece, copy, buffers[copy.dst_buffer])

    def read(name: str) -> int:
        reader = ChunkReader(manifest.directory, manifest.entry(name))
        with torch.no_grad():
            reader.read(reads[name])
        return reader.bytes_read

    with ThreadPoolExecutor(NUM_READERS) as pool:
        return sum(pool.map(read, sorted(reads)))


def planned_reads(
    manifest: CheckpointManifest,
    kinds: str | Sequence[str],
    dst_specs: Iterable[ShardSpec],
    rank: int,
    *,
    cast: bool = False,
) -> list[tuple[ShardCopy, StoredPiece]]:
    """What `load_saved` reads, and of which pieces; opens no file. Raises CheckpointError as it does."""
    own = ((spec, tuple(spec.on(rank))) for spec in dst_specs)
    needed = [replace(spec, shards=shards) for spec, shards in own if shards]
    specs, stored = _saved(manifest, kinds, {spec.name for spec in needed})
    sources = {spec.name: spec for spec in specs}
    for spec in needed:
        _check(manifest, kinds, spec, sources.get(spec.name), cast)
    try:
        copies = _plan(sources, [replace(spec, dtype=sources[spec.name].dtype) for spec in needed], rank)
    except ModelError as error:
        raise CheckpointError(f"{manifest.directory} can't be loaded: {error}") from error
    return [(copy, stored[copy.src_rank, copy.src_buffer]) for copy in copies]


def _saved(
    manifest: CheckpointManifest, kinds: str | Sequence[str], names: Collection[str]
) -> tuple[list[ShardSpec], _Stored]:
    found: dict[str, list[StoredPiece]] = {}
    for kind in (kinds,) if isinstance(kinds, str) else kinds:
        of_kind: dict[str, list[StoredPiece]] = defaultdict(list)
        for piece in manifest.pieces(kind, names):
            of_kind[piece.name].append(piece)
        found = of_kind | found
    specs: list[ShardSpec] = []
    stored: _Stored = {}
    for name, pieces in found.items():
        if len(dtypes := {piece.dtype for piece in pieces}) > 1:
            raise CheckpointError(f"{manifest.directory}: {name} is stored in several dtypes: {', '.join(dtypes)}")
        writers: dict[tuple[Index, Index], list[StoredPiece]] = defaultdict(list)
        for piece in pieces:
            writers[piece.start, piece.stop].append(piece)
        replicas = []
        for (start, stop), same in writers.items():
            key = same[0].piece.key
            stored |= {(piece.rank, key): piece for piece in same}
            replicas.append(Replicas(tuple(piece.rank for piece in same), start, stop, key, (0,) * len(start)))
        specs.append(ShardSpec(name, tuple(manifest.shapes[name]), dtypes.pop(), Shards(tuple(replicas))))
    return specs, stored


def _check(
    manifest: CheckpointManifest, kinds: str | Sequence[str], needed: ShardSpec, source: ShardSpec | None, cast: bool
) -> None:
    what = f"{kinds if isinstance(kinds, str) else ' or '.join(kinds)} of {needed.name}"
    if source is None:
        others = [kind for kind in manifest.kinds if saved_specs(manifest, kind, {needed.name})]
        only = f", only {', '.join(others)}: freeze what was frozen there, and nothing else" if others else ""
        raise CheckpointError(f"{manifest.directory} has no {what}{only}")
    if source.shape != needed.shape:
        raise CheckpointError(f"{manifest.directory} has {needed.name} in shape {source.shape}, here {needed.shape}")
    if source.dtype != needed.dtype and not cast:
        raise CheckpointError(f"{manifest.directory} has the {what} in {source.dtype}, here it is {needed.dtype}")


def _plan(sources: Mapping[str, ShardSpec], dst_specs: Iterable[ShardSpec], rank: int) -> list[ShardCopy]:
    """Of equal boxes that several ranks wrote, such as norms, the rank reads that of the writer from which it has most
    to read anyway: a small box anywhere else would cost a chunk."""
    with_replicas: list[ShardSpec] = []
    without: list[ShardSpec] = []
    for spec in dst_specs:
        (with_replicas if _has_replicas(sources[spec.name]) else without).append(spec)
    copies = list(plan((sources[spec.name] for spec in without), without).copies_of(rank))
    elements: Counter[int] = Counter()
    for copy in copies:
        elements[copy.src_rank] += prod(copy.shape)

    def chosen(same: Replicas) -> Replicas:
        return same._replace(ranks=(max(same.ranks, key=lambda r: (elements[r], -r)),))

    narrowed = (
        replace(source, shards=Shards(tuple(map(chosen, Shards.of(source.shards).replicas))))
        for source in (sources[spec.name] for spec in with_replicas)
    )
    return copies + list(plan(narrowed, with_replicas).copies_of(rank))


def _has_replicas(spec: ShardSpec) -> bool:
    return any(len(same.ranks) > 1 for same in Shards.of(spec.shards).replicas)


def _reads(piece: StoredPiece, copy: ShardCopy, buffer: torch.Tensor) -> Iterator[_Read]:
    """The copy as ranges of the piece's file. Where its elements are consecutive on both sides they go to their place
    at once, else slab by slab."""
    extent, shape = copy.shape or (1,), piece.extent or (1,)
    lead = (1,) * (len(copy.dst_offset) - len(copy.start))
    target = region(buffer, copy.dst_offset, lead + copy.shape).view(extent)
    dtype: torch.dtype = getattr(torch, piece.dtype)
    strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    begin = piece.begin + dtype.itemsize * sum(a * b for a, b in zip(copy.src_offset, strides, strict=False))
    consecutive = _span(extent, strides) == prod(extent) and target.is_contiguous()
    if consecutive and target.dtype == dtype and target.device.type == "cpu":
        yield begin, begin + target.nbytes, as_bytes(target)
        return
    row_bytes = strides[0] * dtype.itemsize
    num_rows = max(1, SLAB_BYTES // row_bytes)
    for row in range(0, extent[0], num_rows):
        slab = _Slab(target[row : row + num_rows], strides, dtype)
        yield begin + row * row_bytes, begin + row * row_bytes + slab.num_bytes, slab


def _span(extent: Index, strides: Index) -> int:
    """Elements from a box's first to its last one, those in between that aren't its own included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(extent, strides, strict=True))


class _Slab:
    """Takes a slab's bytes in parts; the last one sends it on to its place."""

    def __init__(self, target: torch.Tensor, strides: Index, dtype: torch.dtype) -> None:
        self._target, self._strides, self._dtype = target, strides, dtype
        self.num_bytes = _span(tuple(target.shape), strides) * dtype.itemsize
        self._bytes: torch.Tensor | None = None

    def __call__(self, position: int, part: memoryview) -> None:
        if self._bytes is None:
            self._bytes = torch.empty(self.num_bytes, dtype=torch.uint8)
        end = position + len(part)
        as_bytes(self._bytes)[position:end] = part
        if end == self.num_bytes:
            self._target.copy_(self._bytes.view(self._dtype).as_strided(self._target.shape, self._strides))
            self._bytes = None
