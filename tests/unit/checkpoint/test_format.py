"""The files on disk, read without rlhpc: docs/checkpoint-format.md must be enough for anybody."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from rlhpc.checkpoint.manifest import CHUNK_BYTES, FileEntry, chunk_checksums
from rlhpc.checkpoint.shards import Placement, read_placements, write_shard
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.errors import CheckpointError


def test_a_reader_of_the_document_alone_finds_everything(tmp_path: Path) -> None:
    weight = torch.arange(6, dtype=torch.float32).view(2, 3)
    store = CheckpointStore(tmp_path)
    pending = store.begin(12)
    placement = {"w": Placement("model.embed.weight", (4, 3), (2, 0))}
    entries = write_shard(pending.directory, 0, {"w": weight}, {"lr": 0.5}, placement)
    manifest = store.commit(pending, entries, {"cursor": 5}, layout={"tp": 2})

    document = json.loads((tmp_path / "step-000012" / "manifest.json").read_text())
    checksum = document.pop("xxh3")
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    assert xxhash.xxh3_64(canonical).hexdigest() == checksum
    (entry,) = document.pop("files")
    assert document == {
        "format": "rlhpc-checkpoint",
        "schema_version": 1,
        "step": 12,
        "policy_version": 12,
        "world_size": 1,
        "layout": {"tp": 2},
        "state": {"cursor": 5},
    }
    data = (tmp_path / "step-000012" / entry["name"]).read_bytes()
    assert (entry["name"], entry["rank"]) == ("rank-00000-0000.safetensors", 0)
    assert (entry["size_bytes"], entry["chunk_bytes"]) == (len(data), 64 * 2**20)
    assert entry["xxh3"] == [xxhash.xxh3_64(data).hexdigest()]

    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    metadata = json.loads(header["__metadata__"]["rlhpc"])
    assert metadata == {
        "rank": 0,
        "scalars": {"lr": 0.5},
        "placements": {"w": {"name": "model.embed.weight", "shape": [4, 3], "start": [2, 0]}},
    }
    begin, end = header["w"]["data_offsets"]
    body = np.frombuffer(data[8 + header_bytes :][begin:end], dtype="<f4").reshape(header["w"]["shape"])
    np.testing.assert_array_equal(body, [[0, 1, 2], [3, 4, 5]])
    assert read_placements(manifest, 0) == placement


def test_chunks(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 2500, dtype=np.uint8).tobytes()
    path = tmp_path / "file"
    path.write_bytes(data)
    expected = [xxhash.xxh3_64(data[begin : begin + 1000]).hexdigest() for begin in (0, 1000, 2000)]
    assert chunk_checksums(path, 1000) == expected
    entry = FileEntry("file", 0, 2500, tuple(expected), 1000)
    entry.verify(tmp_path)
    path.write_bytes(data[:1500] + bytes([data[1500] ^ 128]) + data[1501:])
    with pytest.raises(CheckpointError, match="file: chunk 1 has xxh3"):
        entry.verify(tmp_path)
    path.write_bytes(b"")
    assert chunk_checksums(path) == []


def test_a_chunk_is_64_mib(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(CHUNK_BYTES + 3)  # sparse
    assert chunk_checksums(path) == [xxhash.xxh3_64(bytes(n)).hexdigest() for n in (64 * 2**20, 3)]


def test_placements_name_saved_tensors_only(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="placements of tensors that rank 3 doesn't save: b"):
        write_shard(tmp_path, 3, {"a": torch.zeros(1)}, {}, {"b": Placement("b", (1,), (0,))})
