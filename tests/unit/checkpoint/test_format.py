"""The files on disk, read without rlhpc: docs/checkpoint-format.md must be enough for anybody."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open

from rlhpc.checkpoint.chunks import CHUNK_BYTES, chunk_checksums
from rlhpc.checkpoint.manifest import FileEntry, read_manifest
from rlhpc.checkpoint.pieces import Piece
from rlhpc.checkpoint.shards import read_rank_state, write_shard
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.errors import CheckpointError

WEIGHT, SCALE, NORM = "model.layers.0.mlp.up_proj.weight", "model.scale", "model.norm.weight"
SHAPES: dict[str, tuple[int, ...]] = {WEIGHT: (4, 3), SCALE: (), NORM: (3,)}


def rank_pieces(rank: int) -> list[tuple[Piece, torch.Tensor]]:
    """Rank 0 has rows 0 and 1 of the weight, rank 1 has rows 2 and 3, the frozen norm and the scale: in fp32 and, the
    frozen one, in bf16. Elements count from 0 in a master, from 100 and 200 in the moments."""
    rows = slice(2 * rank, 2 * rank + 2)
    whole = torch.arange(12, dtype=torch.float32).view(4, 3)
    pieces = [
        (Piece(kind, WEIGHT, (2 * rank, 0), (2 * rank + 2, 3)), whole[rows] + offset)
        for kind, offset in (("master", 0), ("exp_avg", 100), ("exp_avg_sq", 200))
    ]
    if rank == 1:
        pieces.append((Piece("weight", NORM, (0,), (3,)), torch.tensor([1.0, 1.5, -2.0], dtype=torch.bfloat16)))
        pieces.append((Piece("master", SCALE, (), ()), torch.tensor(7.0)))
    return pieces


def written(root: Path, chunk_bytes: int = CHUNK_BYTES) -> Path:
    store = CheckpointStore(root)
    pending = store.begin(12)
    entries = []
    for rank in range(2):
        generator = {"rng/cpu": torch.arange(5, dtype=torch.uint8) + rank, "rng/words": torch.tensor([rank, 2**40])}
        found = write_shard(
            pending.directory,
            rank,
            rank_pieces(rank),
            SHAPES,
            generator,
            {"lr": 0.5, "r": rank},
            chunk_bytes=chunk_bytes,
        )
        entries += [FileEntry.from_json(json.loads(json.dumps(entry.to_json()))) for entry in found]  # as ranks tell it
    return store.commit(pending, entries, {"cursor": 5}, layout={"tp": 2}, config_digest="c0ffee").directory


def test_a_reader_of_the_document_alone_finds_everything(tmp_path: Path) -> None:
    directory = written(tmp_path, chunk_bytes=100)
    data = (directory / "manifest.json").read_bytes()
    document = json.loads(data)
    tail = b',"xxh3":"' + document["xxh3"].encode() + b'"}\n'
    assert data.endswith(tail)
    assert xxhash.xxh3_64_hexdigest(data.removesuffix(tail) + b"}") == document.pop("xxh3")
    files, tensors = document.pop("files"), document.pop("tensors")
    assert document == {
        "format": "rlhpc-checkpoint",
        "schema_version": 2,
        "step": 12,
        "policy_version": 12,
        "world_size": 2,
        "config_digest": "c0ffee",
        "layout": {"tp": 2},
        "state": {"cursor": 5},
    }
    assert {name: tuple(shape) for name, shape in tensors} == SHAPES

    item_bytes = {"float32": 4, "bfloat16": 2}
    whole = {(kind, WEIGHT): np.full((4, 3), np.nan) for kind in ("master", "exp_avg", "exp_avg_sq")}
    for rank, file in enumerate(files):
        assert (file["name"], file["rank"]) == (f"rank-{rank:05d}-0000.safetensors", rank)
        assert file["scalars"] == {"lr": 0.5, "r": rank}
        data = (directory / file["name"]).read_bytes()
        assert (file["size_bytes"], file["chunk_bytes"]) == (len(data), 100)
        assert file["xxh3"] == [xxhash.xxh3_64_hexdigest(data[i : i + 100]) for i in range(0, len(data), 100)]
        dtype, shape, begin = file["rank_tensors"]["rng/cpu"]
        assert (dtype, shape, list(data[begin : begin + 5])) == ("uint8", [5], [rank + i for i in range(5)])
        dtype, shape, begin = file["rank_tensors"]["rng/words"]
        assert (dtype, shape) == ("int64", [2]) and struct.unpack("<2q", data[begin : begin + 16]) == (rank, 2**40)
        for run in file["runs"]:
            for kind, dtype, begin in run["sections"]:
                for index, *numbers in run["boxes"]:
                    name, shape = tensors[index]
                    numbers = numbers or [0] * len(shape) + shape
                    start, stop = numbers[: len(shape)], numbers[len(shape) :]
                    extent = [b - a for a, b in zip(start, stop, strict=True)]
                    assert begin % item_bytes[dtype] == 0
                    end = begin + int(np.prod(extent)) * item_bytes[dtype]
                    if name == WEIGHT:
                        values = np.frombuffer(data[begin:end], "<f4").reshape(extent)
                        whole[kind, name][tuple(map(slice, start, stop))] = values
                    elif name == SCALE:
                        assert (kind, struct.unpack("<f", data[begin:end])) == ("master", (7.0,))
                    else:
                        assert (kind, data[begin:end]) == ("weight", b"\x80\x3f\xc0\x3f\x00\xc0")  # 1, 1.5, -2
                    begin = end
    for (kind, _), values in whole.items():
        offset = {"master": 0, "exp_avg": 100, "exp_avg_sq": 200}[kind]
        np.testing.assert_array_equal(values, np.arange(12).reshape(4, 3) + offset)


def test_safetensors_and_a_reader_by_hand_find_the_same(tmp_path: Path) -> None:
    path = written(tmp_path) / "rank-00001-0000.safetensors"
    expected = {piece.key: tensor for piece, tensor in rank_pieces(1)}
    assert f"exp_avg/{WEIGHT}[2:4,0:3]" in expected and f"master/{SCALE}[]" in expected
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {*expected, "rng/cpu", "rng/words"}
        for key, tensor in expected.items():
            assert file.get_tensor(key).dtype == tensor.dtype and torch.equal(file.get_tensor(key), tensor)
    data = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    assert header_bytes % 8 == 0
    header = json.loads(data[8 : 8 + header_bytes])
    assert json.loads(header.pop("__metadata__")["rlhpc"]) == {"rank": 1}
    begin, end = header[f"master/{WEIGHT}[2:4,0:3]"]["data_offsets"]
    body = np.frombuffer(data[8 + header_bytes :][begin:end], "<f4").reshape(2, 3)
    np.testing.assert_array_equal(body, [[6, 7, 8], [9, 10, 11]])
    places = {piece.piece.key: piece for piece in read_manifest(path.parent).entry(path.name).pieces()}
    assert places.keys() == expected.keys()
    for key, piece in places.items():  # manifest and header agree
        begin, end = header[key]["data_offsets"]
        assert (piece.begin, piece.end) == (8 + header_bytes + begin, 8 + header_bytes + end)


def test_pieces_are_found_by_kind_and_name(tmp_path: Path) -> None:
    manifest = read_manifest(written(tmp_path))
    assert manifest.kinds == ("master", "exp_avg", "exp_avg_sq", "weight")
    assert dict(manifest.shapes) == SHAPES
    assert [(p.rank, p.start, p.stop, p.dtype) for p in manifest.pieces("exp_avg", {WEIGHT})] == [
        (0, (0, 0), (2, 3), "float32"),
        (1, (2, 0), (4, 3), "float32"),
    ]
    assert [p.name for p in manifest.pieces("master")] == [WEIGHT, WEIGHT, SCALE]
    assert list(manifest.pieces("weight", {WEIGHT})) == []
    assert read_rank_state(manifest, 1)[1] == {"lr": 0.5, "r": 1}


def test_boxes_stay_whole_and_their_kinds_together(tmp_path: Path) -> None:
    """Three boxes of 24 bytes in three kinds, 72 bytes each, in files of at most 150."""
    pieces = [
        (Piece(kind, f"t{i}", (0, 0), (2, 3)), torch.full((2, 3), float(10 * i + k)))
        for k, kind in enumerate(("master", "exp_avg", "exp_avg_sq"))
        for i in range(3)
    ]
    shapes = {f"t{i}": (2, 3) for i in range(3)}
    entries = write_shard(tmp_path, 5, pieces, shapes, {"rng": torch.zeros(4)}, {"a": 1}, max_file_bytes=150)
    assert [entry.name for entry in entries] == ["rank-00005-0000.safetensors", "rank-00005-0001.safetensors"]
    assert [sorted({piece.name for piece in entry.pieces()}) for entry in entries] == [["t0", "t1"], ["t2"]]
    assert [(list(entry.rank_tensors), entry.scalars) for entry in entries] == [(["rng"], {"a": 1}), ([], {})]
    assert len(entries[0].runs) == 1 and len(entries[0].runs[0].sections) == 3


def test_what_is_no_box_is_refused(tmp_path: Path) -> None:
    two = torch.zeros(2)
    for piece, tensor, match in [
        (Piece("master", "w", (3,), (5,)), two, r"master/w\[3:5\] is no box of a tensor of shape \(4,\)"),
        (Piece("master", "w", (0, 0), (2, 1)), two.view(2, 1), "is no box"),
        (Piece("master", "w", (0,), (3,)), two, r"master/w\[0:3\] has elements of shape \(2,\)"),
        (Piece("master", "other", (0,), (2,)), two, "whose shape is not given"),
        (Piece("master", "w", (0,), (2,)), two.to(torch.complex64), "dtype complex64 can't be stored"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            write_shard(tmp_path, 3, [(piece, tensor)], {"w": (4,)}, {}, {})
    piece = Piece("master", "w", (0,), (2,))
    with pytest.raises(CheckpointError, match="is given twice"):
        write_shard(tmp_path, 3, [(piece, two), (piece, two)], {"w": (4,)}, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_lacks_a_part_is_not_committed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    pending = store.begin(1)
    entries = write_shard(pending.directory, 0, rank_pieces(0), SHAPES, {}, {})
    with pytest.raises(CheckpointError, match=f"step 1: the ranks hold 6 of the 12 elements of .* {WEIGHT}"):
        store.commit(pending, entries, {})
    pending = store.begin(1)
    entries = write_shard(pending.directory, 0, rank_pieces(0), SHAPES, {}, {})
    entries += write_shard(pending.directory, 1, rank_pieces(1), {**SHAPES, WEIGHT: (5, 3)}, {}, {})
    with pytest.raises(CheckpointError, match=rf"{WEIGHT} has shape \(4, 3\), but \(5, 3\) on rank 1"):
        store.commit(pending, entries, {})
    assert store.steps() == []


def test_chunks(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 2500, dtype=np.uint8).tobytes()
    path = tmp_path / "file"
    path.write_bytes(data)
    expected = [xxhash.xxh3_64(data[begin : begin + 1000]).hexdigest() for begin in (0, 1000, 2000)]
    assert list(chunk_checksums(path, 1000)) == expected
    entry = FileEntry("file", 0, 2500, tuple(expected), 1000)
    entry.verify(tmp_path)
    with pytest.raises(CheckpointError, match="file: 3 chunks, the manifest has checksums of 2"):
        FileEntry("file", 0, 2500, tuple(expected[:2]), 1000).verify(tmp_path)
    path.write_bytes(data[:1500] + bytes([data[1500] ^ 128]) + data[1501:])
    with pytest.raises(CheckpointError, match="file: chunk 1 has xxh3"):
        entry.verify(tmp_path)
    path.write_bytes(b"")
    assert list(chunk_checksums(path)) == []


def test_a_chunk_is_64_mib(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(CHUNK_BYTES + 3)  # sparse
    assert list(chunk_checksums(path)) == [xxhash.xxh3_64(bytes(n)).hexdigest() for n in (64 * 2**20, 3)]
