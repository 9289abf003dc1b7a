"""Manifests with a right checksum and a wrong content: refused before anything that they name is opened."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from rlhpc.checkpoint.manifest import read_manifest
from rlhpc.checkpoint.pieces import Piece
from rlhpc.checkpoint.shards import write_shard
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.errors import CheckpointError

SHAPES = {"a.weight": (3, 4), "b": ()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "checkpoints")
    pending = store.begin(7)
    pieces = [
        (Piece("master", "a.weight", (1, 0), (3, 4)), torch.arange(8.0).view(2, 4)),
        (Piece("master", "a.weight", (0, 0), (1, 4)), torch.ones(1, 4)),
        (Piece("master", "b", (), ()), torch.tensor(0.5)),
    ]
    entries = write_shard(pending.directory, 0, pieces, SHAPES, {"rng/torch": torch.zeros(16, dtype=torch.uint8)}, {})
    return store.commit(pending, entries, {"train": {}}).directory


def change(directory: Path, edit: Callable[[Any, Any], object]) -> None:
    """Edits the manifest, given with its only file's entry, and seals it again."""
    path = directory / "manifest.json"
    document = json.loads(path.read_bytes())
    del document["xxh3"]
    edit(document, document["files"][0])
    body = json.dumps(document, separators=(",", ":")).encode()
    path.write_bytes(body[:-1] + b',"xxh3":"%s"}\n' % xxhash.xxh3_64_hexdigest(body).encode())


def first_box(file: Any, *numbers: int) -> None:
    file["runs"][0]["boxes"][0] = list(numbers)


def section(file: Any, place: int, value: object) -> None:
    file["runs"][0]["sections"][0][place] = value


def random_state(file: Any, place: int, value: object) -> None:
    file["rank_tensors"]["rng/torch"][place] = value


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda d, f: f.update(name="../../secret.safetensors"), "lies beside its manifest"),
        (lambda d, f: f.update(name="/etc/passwd"), "lies beside its manifest"),
        (lambda d, f: d.update(files=[]), r"files of ranks \[\]"),
        (lambda d, f: f.update(rank=10**9), r"files of ranks \[1000000000\]"),
        (lambda d, f: d["files"].append(f), "two files have the same name"),
        (lambda d, f: d["tensors"].append(d["tensors"][0]), "two tensors have the same name"),
        (lambda d, f: d.pop("tensors"), "KeyError"),
        (lambda d, f: f.pop("runs"), "KeyError"),
        (lambda d, f: d.update(step="7"), "step is '7'"),
        (lambda d, f: d.update(state=None), "state is None"),
        (lambda d, f: f.update(scalars=[1]), r"scalars is \[1\]"),
        (lambda d, f: f.update(chunk_bytes=0), "chunk_bytes 0"),
        (lambda d, f: f.update(size_bytes=2**30 + 1), "1 checksums, 1073741825 bytes have 17"),
        (lambda d, f: f.update(xxh3=[]), "0 checksums"),
        (lambda d, f: section(f, 1, "complex64"), "has dtype 'complex64'"),
        (lambda d, f: section(f, 2, -8), "from -8 of"),
        (lambda d, f: section(f, 2, 1.5), "from 1.5 of"),
        (lambda d, f: section(f, 2, f["size_bytes"] - 51), "would take 52 bytes"),
        (lambda d, f: first_box(f, 9), "IndexError"),
        (lambda d, f: first_box(f, -1), "box of tensor -1"),
        (lambda d, f: first_box(f, 0, 0, 0, 4, 4), "no box of a.weight"),
        (lambda d, f: first_box(f, 0, 2, 0, 1, 4), "no box of a.weight"),
        (lambda d, f: first_box(f, 0, 0, 3), "no box of a.weight"),
        (lambda d, f: d["tensors"][0].__setitem__(1, [-3, -4]), "has shape"),
        (lambda d, f: random_state(f, 0, "nn"), "has dtype 'nn'"),
        (lambda d, f: random_state(f, 1, [10**12]), "would take 1000000000000 bytes"),
        (lambda d, f: random_state(f, 2, 10**12), "from 1000000000000 of"),
    ],
)
def test_a_manifest_that_is_not_as_described_is_refused(
    directory: Path, edit: Callable[[Any, Any], object], told: str
) -> None:
    read_manifest(directory)
    change(directory, edit)
    with pytest.raises(CheckpointError, match=f"manifest.json: not a manifest as .* describes it: .*{told}"):
        read_manifest(directory)


def test_a_copy_under_another_steps_name_is_no_checkpoint_of_that_step(directory: Path) -> None:
    """Else its state would be taken for step 9, and the run's own step 9 never be saved."""
    shutil.copytree(directory, directory.with_name("step-000009"))
    store = CheckpointStore(directory.parent)
    assert not store.has(9)
    with pytest.raises(CheckpointError, match="step-000009 is a copy of step 7 under another name"):
        store.load(9)
    assert store.load(7).step == 7
