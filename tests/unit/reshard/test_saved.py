"""Checkpoints written under one layout and loaded under others: real files, compared element by element with numpy."""

from __future__ import annotations

import random
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.checkpoint.manifest import CheckpointManifest, read_manifest, write_manifest
from rlhpc.checkpoint.pieces import Index, Piece
from rlhpc.checkpoint.shards import write_shard
from rlhpc.errors import CheckpointError
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.flat import FlatRange, flat_buffers, flat_specs
from rlhpc.reshard.saved import WEIGHT_KINDS, Wanted, load_saved, load_together, pieces_of, saved_specs
from tests.unit.reshard.test_flat import random_ranges, states
from tests.unit.reshard.test_plan_layouts import MODELS, tensors, trainer, trainers

KINDS = ("master", "exp_avg", "exp_avg_sq")
State = dict[str, torch.Tensor]  # a rank's tensors by parameter
Pieces = list[tuple[Piece, torch.Tensor]]


def write(
    directory: Path, by_rank: Mapping[int, Pieces], shapes: Mapping[str, Index], **sizes: int
) -> CheckpointManifest:
    """As the ranks and the driver do, through the files."""
    files = []
    for rank, pieces in by_rank.items():
        held = {piece.name: shapes[piece.name] for piece, _ in pieces}
        files += write_shard(directory, rank, pieces, held, {}, {}, **sizes)
    write_manifest(CheckpointManifest(directory, 1, 1, tuple(files), shapes=shapes))
    return read_manifest(directory)


def pieces_by_rank(
    specs: Sequence[ShardSpec], ranges: Sequence[FlatRange], state: Mapping[int, State]
) -> dict[int, Pieces]:
    """The state as masters; its moments are minus one and minus two times as much."""
    flat = flat_specs(specs, ranges)
    result: dict[int, Pieces] = {}
    for rank, held in state.items():
        own = [r for r in ranges if r.rank == rank]
        result[rank] = [
            item
            for factor, kind in zip((1, -1, -2), KINDS, strict=True)
            for item in pieces_of(kind, flat, rank, flat_buffers(own, {name: factor * t for name, t in held.items()}))
        ]
    return result


def check_loaded(
    manifest: CheckpointManifest, specs: Sequence[ShardSpec], ranges: Sequence[FlatRange], expected: Mapping[int, State]
) -> None:
    """Every element of every rank's masters and moments; padding (0) stays as it was."""
    flat = flat_specs(specs, ranges)
    for rank, held in expected.items():
        own = [r for r in ranges if r.rank == rank]
        loaded = {kind: {name: torch.full_like(t, 0.5) for name, t in held.items()} for kind in KINDS}
        load_together(manifest, rank, [Wanted(kind, flat, flat_buffers(own, loaded[kind])) for kind in KINDS])
        for factor, kind in zip((1, -1, -2), KINDS, strict=True):
            for name, tensor in held.items():
                wanted = torch.where(tensor == 0, torch.tensor(0.5), factor * tensor)
                assert torch.equal(loaded[kind][name], wanted), (rank, kind, name)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.integers(0, 2**32), st.sampled_from([64, 256, 4096]), st.booleans())
def test_any_layout_loads_under_any_other(model: str, seed: int, chunk_bytes: int, many_files: bool) -> None:
    """Real families under random pairs of TP, PP, EP, ETP, DP and world size, cut anywhere into flat ranges."""
    rng = random.Random(seed)
    layouts = rng.choices(trainers(model), k=2)
    src, dst = (trainer(model, layout) for layout in layouts)
    src_ranges, dst_ranges = (random_ranges(rng, *pair) for pair in zip((src, dst), layouts, strict=True))
    shapes = {spec.name: spec.shape for spec in src.specs}
    sizes = {"chunk_bytes": chunk_bytes} | ({"max_file_bytes": 1024} if many_files else {})
    with tempfile.TemporaryDirectory() as folder:
        saved = pieces_by_rank(src.specs, src_ranges, states(src_ranges, src.buffers))
        manifest = write(Path(folder), saved, shapes, **sizes)
        check_loaded(manifest, dst.specs, dst_ranges, states(dst_ranges, dst.buffers))


class Odd:
    """Tensors of odd shapes, each cut unevenly along some dimension into parameters with some padding before, which
    groups of `num_ranks` ranks hold; and those cut anywhere into flat ranges, one of each rank."""

    def __init__(self, shapes: Mapping[str, Index], num_ranks: int, rng: random.Random) -> None:
        self.specs: list[ShardSpec] = []
        self.ranges: list[FlatRange] = []
        self.states: dict[int, State] = {rank: {} for rank in range(num_ranks)}
        first = 1
        for name, shape in shapes.items():
            values = np.arange(first, first + prod(shape), dtype=np.float32).reshape(shape)
            first += prod(shape)
            shards = [s for part in self._cut(name, shape, num_ranks, rng) for s in self._hold(values, *part, rng)]
            self.specs.append(ShardSpec(name, shape, "float32", tuple(shards)))

    @staticmethod
    def _cut(
        name: str, shape: Index, num_ranks: int, rng: random.Random
    ) -> Iterator[tuple[str, Index, Index, list[int]]]:
        dim = rng.randrange(len(shape)) if shape else 0
        num_parts = min(rng.randint(1, num_ranks), shape[dim] if shape else 1)
        bounds = [0, *sorted(rng.sample(range(1, shape[dim]), num_parts - 1)), shape[dim]] if shape else [0, 1]
        dealt = rng.sample(range(num_ranks), num_ranks)
        for i, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            start = tuple(low if d == dim else 0 for d in range(len(shape)))
            stop = tuple(high if d == dim else n for d, n in enumerate(shape))
            yield f"p.{name}.{i}", start, stop, dealt[i::num_parts]

    def _hold(
        self, values: np.ndarray, parameter: str, start: Index, stop: Index, ranks: list[int], rng: random.Random
    ) -> Iterator[Shard]:
        part = values[tuple(map(slice, start, stop))]
        padding = rng.randint(0, 2) if part.ndim else 0
        local = np.concatenate([np.zeros((padding, *part.shape[1:]), np.float32), part]) if part.ndim else part
        cuts = sorted(rng.choices(range(local.size + 1), k=len(ranks) - 1))
        for rank, low, high in zip(ranks, [0, *cuts], [*cuts, local.size], strict=True):
            self.ranges.append(FlatRange(rank, parameter, local.shape, low, high))
            self.states[rank][parameter] = torch.from_numpy(local.ravel()[low:high].copy())
            yield Shard(rank, start, stop, parameter, (padding, 0, 0, 0)[: part.ndim])


shapes_strategy = st.lists(
    st.lists(st.integers(1, 7), max_size=4).map(tuple), min_size=1, max_size=4
).map(lambda shapes: {f"t{i}": shape for i, shape in enumerate(shapes)})  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(shapes_strategy, st.sampled_from([1, 2, 3, 8]), st.integers(0, 2**32), st.sampled_from([28, 100, 4096]))
def test_any_number_of_ranks_loads_any_other(
    shapes: dict[str, Index], num_ranks: int, seed: int, chunk_bytes: int
) -> None:
    """Eight ranks' checkpoint of scalars, vectors and whatever has odd sizes on as many, fewer and one; and back."""
    rng = random.Random(seed)
    for src, dst in (
        (Odd(shapes, 8, rng), Odd(shapes, num_ranks, rng)),
        (Odd(shapes, num_ranks, rng), Odd(shapes, 8, rng)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            saved = pieces_by_rank(src.specs, src.ranges, src.states)
            manifest = write(Path(folder), saved, shapes, chunk_bytes=chunk_bytes)
            check_loaded(manifest, dst.specs, dst.ranges, dst.states)
