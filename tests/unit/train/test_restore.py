"""Falling back: real checkpoints, damaged as disks and copies do it, and a reader that verifies every chunk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rlhpc.checkpoint.manifest import CheckpointManifest
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.cluster.stop import StopRequested
from rlhpc.errors import CheckpointError
from rlhpc.train.restore import newest_loadable
from tests.saved_runs import flip_byte, write_checkpoint

WEIGHTS = {"a.weight": torch.arange(30_000.0).view(300, 100), "b.weight": torch.ones(50)}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step, WEIGHTS, num_ranks=2, chunk_bytes=4096)
    return CheckpointStore(tmp_path / "checkpoints")


class Restoring:
    """What the ranks do with a manifest, and what is said."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store, self.said = store, list[str]()

    def run(self) -> CheckpointManifest | None:
        def damaged(step: int, error: CheckpointError) -> None:
            self.store.distrust(step, str(error))
            self.said.append(f"{step}: {error}")

        return newest_loadable(self.store.root, self.store.newest_first(), CheckpointManifest.verify, damaged)


def shard(store: CheckpointStore, step: int, rank: int = 1) -> Path:
    return store.root / f"step-{step:06d}/rank-{rank:05d}-0000.safetensors"


def test_the_newest_of_all_whole_ones(store: CheckpointStore, tmp_path: Path) -> None:
    restoring = Restoring(store)
    assert (found := restoring.run()) is not None and found.step == 6 and restoring.said == []
    nothing = CheckpointStore(tmp_path / "nothing")
    assert Restoring(nothing).run() is None


def test_damage_is_named_and_its_step_is_saved_again(store: CheckpointStore, tmp_path: Path) -> None:
    flip_byte(shard(store, 6), 5000)  # in its second chunk: sizes don't tell
    os.truncate(shard(store, 4), 1000)
    restoring = Restoring(store)
    assert (found := restoring.run()) is not None and found.step == 2
    flipped, truncated = restoring.said
    assert flipped.startswith(f"6: {shard(store, 6)}: chunk 1 has xxh3 ") and ", the manifest says " in flipped
    assert truncated.startswith(f"4: {shard(store, 4)}: 1000 bytes, the manifest says ")
    assert store.steps() == [2, 4, 6]  # all are left where they are
    assert not store.has(6, checksums=False) and not store.has(4, checksums=False)
    assert store.retain(1) == []  # neither counts as a newer one
    for step in (4, 6):
        store.save(step, [({"rng/torch": torch.arange(9)}, {})], {})
        assert store.has(step)
    assert Restoring(CheckpointStore(store.root)).run().step == 6  # type: ignore[union-attr]


def test_none_usable_is_refused_with_every_reason(store: CheckpointStore) -> None:
    flip_byte(shard(store, 6), 9)
    shard(store, 4).unlink()
    (store.root / "step-000002/manifest.json").write_text("{}")
    before = sorted(store.root.rglob("*"))
    with pytest.raises(CheckpointError) as raised:
        Restoring(store).run()
    first, flipped, missing, manifest, _ = str(raised.value).splitlines()
    assert first == f"none of the 3 checkpoints of {store.root} can be used:"
    assert flipped.startswith(f"  step 6: {shard(store, 6)}: chunk 0 has xxh3 ")
    assert missing == f"  step 4: {shard(store, 4)}: No such file or directory"
    assert manifest.startswith(f"  step 2: {store.root}/step-000002/manifest.json: not a manifest")
    assert sorted(store.root.rglob("*")) == before


def test_a_stop_is_no_damage(store: CheckpointStore) -> None:
    def load(manifest: CheckpointManifest) -> None:
        raise StopRequested("SIGTERM")

    with pytest.raises(StopRequested):
        newest_loadable(store.root, store.newest_first(), load, lambda step, error: pytest.fail(f"{step}: {error}"))
