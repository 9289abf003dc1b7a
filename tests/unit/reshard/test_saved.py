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
from rlhpc.checkpoint.pieces import TRAINED_KINDS, Index, Piece
from rlhpc.checkpoint.shards import write_shard
from rlhpc.errors import CheckpointError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.flat import FlatRange, flat_buffers, flat_specs
from rlhpc.reshard.saved import WEIGHT_KINDS, Wanted, load_saved, load_together, pieces_of, saved_specs
from tests.unit.reshard.test_flat import random_ranges, states
from tests.unit.reshard.test_plan_layouts import MODELS, trainer, trainers

State = dict[str, torch.Tensor]  # a rank's tensors by parameter
Pieces = list[tuple[Piece, torch.Tensor]]
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # hundreds of files, each flushed


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
            for factor, kind in zip((1, -1, -2), TRAINED_KINDS, strict=True)
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
        loaded = {kind: {name: torch.full_like(t, 0.5) for name, t in held.items()} for kind in TRAINED_KINDS}
        load_together(manifest, rank, [Wanted(kind, flat, flat_buffers(own, loaded[kind])) for kind in TRAINED_KINDS])
        for factor, kind in zip((1, -1, -2), TRAINED_KINDS, strict=True):
            for name, tensor in held.items():
                wanted = torch.where(tensor == 0, torch.tensor(0.5), factor * tensor)
                assert torch.equal(loaded[kind][name], wanted), (rank, kind, name)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.integers(0, 2**32), st.sampled_from([64, 256, 4096]), st.booleans())
def test_any_layout_loads_under_any_other(model: str, seed: int, chunk_bytes: int, many_files: bool) -> None:
    """Real families under random pairs of TP, PP, EP, ETP, DP and world size, cut anywhere into flat ranges."""
    rng = random.Random(seed)
    layouts = rng.choices(trainers(model), k=2)
    src, dst = (trainer(model, layout) for layout in layouts)
    src_ranges, dst_ranges = (random_ranges(rng, *pair) for pair in zip((src, dst), layouts, strict=True))
    shapes = {spec.name: spec.shape for spec in src.specs}
    sizes = {"chunk_bytes": chunk_bytes} | ({"max_file_bytes": 1024} if many_files else {})
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
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


@settings(max_examples=30, deadline=None)
@given(shapes_strategy, st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 2**32), st.sampled_from([28, 100, 4096]))
def test_any_number_of_ranks_loads_any_other(
    shapes: dict[str, Index], num_ranks: int, seed: int, chunk_bytes: int
) -> None:
    """Eight ranks' checkpoint of scalars, vectors and whatever has odd sizes on as many, fewer and one; and back."""
    rng = random.Random(seed)
    for src, dst in (
        (Odd(shapes, 8, rng), Odd(shapes, num_ranks, rng)),
        (Odd(shapes, num_ranks, rng), Odd(shapes, 8, rng)),
    ):
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            saved = pieces_by_rank(src.specs, src.ranges, src.states)
            manifest = write(Path(folder), saved, shapes, chunk_bytes=chunk_bytes)
            check_loaded(manifest, dst.specs, dst.ranges, dst.states)


def masters(model: str, layout: ParallelLayout, seed: int) -> tuple[list[ShardSpec], list[FlatRange], dict[int, State]]:
    side = trainer(model, layout)
    ranges = random_ranges(random.Random(seed), side, layout)
    return side.specs, ranges, states(ranges, side.buffers)


def write_masters(directory: Path, layout: ParallelLayout, **sizes: int) -> CheckpointManifest:
    specs, ranges, held = masters("qwen3_moe", layout, 0)
    pieces = {rank: [item for item in found if item[0].kind == "master"] for rank, found in
              pieces_by_rank(specs, ranges, held).items()}  # fmt: skip
    return write(directory, pieces, {spec.name: spec.shape for spec in specs}, **sizes)


def load_masters(
    manifest: CheckpointManifest, layout: ParallelLayout, rank: int, seed: int = 1
) -> tuple[int, State, State]:
    """Bytes read, what the rank then holds, and what it has to hold."""
    specs, ranges, held = masters("qwen3_moe", layout, seed)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in held[rank].items()}
    own = [r for r in ranges if r.rank == rank]
    count = load_saved(manifest, "master", flat_specs(specs, own), rank, flat_buffers(own, loaded))
    return count, loaded, held[rank]


def chunk_values(path: Path, chunk_bytes: int) -> list[set[float]]:
    """The elements of which each chunk of a file of float32 has at least a part. Every element of the model is another
    number."""
    data = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    begin = 8 + header_bytes
    found: list[set[float]] = [set() for _ in range(-(-len(data) // chunk_bytes))]
    for i, value in enumerate(np.frombuffer(data, np.float32, offset=begin).tolist()):
        for byte in (begin + 4 * i, begin + 4 * i + 3):
            found[byte // chunk_bytes].add(value)
    return found


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)


def test_reads_and_verifies_the_chunks_of_its_own_boxes_alone(tmp_path: Path) -> None:
    """Eight ranks' checkpoint, no element of which two ranks hold, on four others: each loads although every chunk
    that holds nothing of its own is damaged, and refuses, naming it, any one of those that do."""
    chunk_bytes = 128
    manifest = write_masters(tmp_path, ParallelLayout(pp=2, ep=2, world_size=8), chunk_bytes=chunk_bytes)
    originals = {entry.name: (tmp_path / entry.name).read_bytes() for entry in manifest.files}
    other = ParallelLayout(tp=2, ep=4, world_size=4)
    rng = random.Random(0)
    for rank in range(4):
        needed = {value for tensor in masters("qwen3_moe", other, 1)[2][rank].values() for value in tensor.tolist()} - {
            0
        }
        mine: list[tuple[Path, int, int]] = []
        for name, original in originals.items():
            path = tmp_path / name
            path.write_bytes(original)
            for chunk, values in enumerate(chunk_values(path, chunk_bytes)):
                begin, end = chunk * chunk_bytes, min((chunk + 1) * chunk_bytes, len(original))
                if values & needed:
                    mine.append((path, chunk, end - begin))
                else:
                    flip(path, rng.randrange(begin, end))
        count, loaded, expected = load_masters(manifest, other, rank)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        assert count == sum(size for _, _, size in mine) < sum(map(len, originals.values()))
        path, chunk, size = rng.choice(mine)
        flip(path, chunk * chunk_bytes + rng.randrange(size))
        with pytest.raises(CheckpointError, match=re.escape(f"{path}: chunk {chunk} has xxh3")):
            load_masters(manifest, other, rank)


def test_under_the_same_layout_a_rank_opens_its_own_files_alone(tmp_path: Path) -> None:
    """Though under TP every rank of a group has the same norms."""
    layout = ParallelLayout(tp=4, ep=2, world_size=8)
    manifest = write_masters(tmp_path, layout, max_file_bytes=256)
    for rank in range(8):
        kept = {entry.name for entry in manifest.of_rank(rank)}
        hidden = [path.rename(path.with_suffix(".gone")) for path in tmp_path.glob("rank-*s") if path.name not in kept]
        _, loaded, expected = load_masters(manifest, layout, rank, seed=0)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        for path in hidden:
            path.rename(path.with_suffix(".safetensors"))


def test_replicas_come_from_a_file_that_is_read_anyway(tmp_path: Path) -> None:
    norm, matrix = torch.arange(4.0), torch.arange(24.0).view(6, 4)
    whole_norm = Piece("master", "norm", (0,), (4,))
    rows = [(Piece("master", "matrix", (2 * i, 0), (2 * i + 2, 4)), matrix[2 * i : 2 * i + 2]) for i in range(3)]
    manifest = write(tmp_path, {i: [(whole_norm, norm), rows[i]] for i in range(3)}, {"norm": (4,), "matrix": (6, 4)})
    part = (Shard(7, (4, 0), (6, 4), "m", (0, 0)),)
    specs = [ShardSpec.whole("norm", (4,), "float32", (7,)), ShardSpec("matrix", (6, 4), "float32", part)]
    loaded = {"norm": torch.zeros(4), "m": torch.zeros(2, 4)}
    for i in range(2):
        (tmp_path / f"rank-0000{i}-0000.safetensors").unlink()
    load_saved(manifest, "master", specs, 7, loaded)
    assert torch.equal(loaded["norm"], norm) and torch.equal(loaded["m"], matrix[4:])


def test_large_boxes_with_gaps_and_casts(tmp_path: Path) -> None:
    """Columns of a matrix of 80 MB go to their place slab by slab, over several chunks; in a cast too."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(5000, 4000, generator=generator)
    manifest = write(tmp_path, {0: [(Piece("master", "m", (0, 0), (5000, 4000)), matrix)]}, {"m": (5000, 4000)},
                     chunk_bytes=2**20)  # fmt: skip
    columns = (Shard(0, (7, 1000), (4990, 3001), "c", (2, 1, 3)),)
    buffers = {"c": torch.zeros(3, 4984, 2004), "m": torch.zeros(5000, 4000, dtype=torch.bfloat16)}
    load_saved(manifest, "master", [ShardSpec("m", (5000, 4000), "float32", columns)], 0, buffers)
    assert torch.equal(buffers["c"][2, 1:, 3:], matrix[7:4990, 1000:3001])
    assert not buffers["c"][:2].any() and not buffers["c"][2, 0].any() and not buffers["c"][2, :, :3].any()
    whole = [ShardSpec.whole("m", (5000, 4000), "bfloat16", (0,))]
    load_saved(manifest, "master", whole, 0, buffers, cast=True)
    assert torch.equal(buffers["m"], matrix.bfloat16())
    with pytest.raises(CheckpointError, match="has the master of m in float32, here it is bfloat16"):
        load_saved(manifest, "master", whole, 0, buffers)


def test_weights_are_masters_or_what_was_frozen(tmp_path: Path) -> None:
    trained, frozen = torch.rand(3, 2), torch.rand(4).bfloat16()
    pieces = [(Piece(kind, "a", (0, 0), (3, 2)), trained) for kind in TRAINED_KINDS]
    pieces.append((Piece("weight", "b", (0,), (4,)), frozen))
    manifest = write(tmp_path, {0: pieces}, {"a": (3, 2), "b": (4,)})
    assert [(spec.name, spec.dtype) for spec in saved_specs(manifest, WEIGHT_KINDS, {"a", "b", "c"})] == [
        ("b", "bfloat16"), ("a", "float32"),
    ]  # fmt: skip
    specs = [ShardSpec.whole(name, shape, "float32", (0,)) for name, shape in manifest.shapes.items()]
    loaded = {"a": torch.zeros(3, 2), "b": torch.zeros(4)}
    load_saved(manifest, WEIGHT_KINDS, specs, 0, loaded, cast=True)
    assert torch.equal(loaded["a"], trained) and torch.equal(loaded["b"], frozen.float())
    for kinds, spec, problem in (
        ("master", specs[1], "has no master of b, only weight: freeze what was frozen there, and nothing else"),
        (WEIGHT_KINDS, ShardSpec.whole("c", (1,), "float32", (0,)), "has no master or weight of c"),
        ("master", ShardSpec.whole("a", (2, 3), "float32", (0,)), "has a in shape (3, 2), here (2, 3)"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path} {problem}") + "$"):
            load_saved(manifest, kinds, [spec], 0, loaded, cast=True)


def test_a_missing_region_is_named(tmp_path: Path) -> None:
    manifest = write(tmp_path, {0: [(Piece("master", "a", (0, 0), (3, 2)), torch.rand(3, 2))]}, {"a": (4, 2)})
    with pytest.raises(CheckpointError, match=re.escape("can't be loaded: a[3:4, 0:2]: rank 5 needs this region")):
        load_saved(manifest, "master", [ShardSpec.whole("a", (4, 2), "float32", (5,))], 5, {"a": torch.zeros(4, 2)})
