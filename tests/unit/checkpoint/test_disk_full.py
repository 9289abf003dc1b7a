"""A save that runs out of room, on a file system that is really full."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhpc.checkpoint.durable import DiskFullError, free_bytes
from rlhpc.checkpoint.pieces import Piece
from rlhpc.checkpoint.shards import lay_out, read_rank_state, write_shard
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.errors import CheckpointError

MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An 8 MiB file system of its own. Mounting needs root; CI has it."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root; test_a_file_size_limit covers the path without")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "rlhpc-test", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[Path]:
    """A directory with a quota of 8 MiB on a file system with more room, which is all that statvfs tells."""
    if os.geteuid() != 0 or not shutil.which("mkfs.btrfs"):
        pytest.skip("a quota needs root and btrfs-progs; test_a_file_size_limit covers the path without")
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    mounted.mkdir()
    subprocess.run(["mkfs.btrfs", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mounted], check=True)
    for command in (["subvolume", "create", mounted / "run"], ["quota", "enable", mounted]):
        subprocess.run(["btrfs", *command], check=True)
    subprocess.run(["btrfs", "qgroup", "limit", "8M", mounted / "run"], check=True)
    yield mounted / "run"
    subprocess.run(["umount", mounted], check=True)


def shard(num_bytes: int, value: int) -> list[tuple[dict[str, torch.Tensor], dict[str, object]]]:
    return [({"weight": torch.full((num_bytes,), value, dtype=torch.uint8)}, {})]


def assert_only_first_left(root: Path) -> None:
    assert sorted(path.name for path in root.iterdir()) == ["latest", "owner.json", "step-000001"]
    manifest = CheckpointStore(root).load(1)
    assert read_rank_state(manifest, 0)[0]["weight"].unique().tolist() == [1]


def test_too_large_is_known_beforehand(small_disk: Path) -> None:
    store = CheckpointStore(small_disk)
    store.save(1, shard(5 * MIB, 1), {})
    free = free_bytes(small_disk)
    with pytest.raises(
        DiskFullError, match=rf"has {free} bytes .* free, a checkpoint needs {5 * MIB} bytes .* free some"
    ):
        store.save(2, shard(5 * MIB, 2), {})
    assert_only_first_left(small_disk)


def test_full_while_a_shard_is_written(small_disk: Path) -> None:
    """Two files that have as many bytes together as are free, but take a page more: the estimate passes."""
    store = CheckpointStore(small_disk)
    store.save(1, shard(5 * MIB, 1), {})
    pending = store.begin(2)
    free = free_bytes(small_disk)

    def state(second: int) -> tuple[list[tuple[Piece, torch.Tensor]], dict[str, tuple[int, ...]]]:
        shapes: dict[str, tuple[int, ...]] = {"a": (MIB,), "b": (second,)}
        return [(Piece("weight", n, (0,), s), torch.zeros(s, dtype=torch.uint8)) for n, s in shapes.items()], shapes

    def sizes(second: int) -> list[int]:
        return [file.entry.size_bytes for file in lay_out(0, *state(second), {}, {}, max_file_bytes=MIB)]

    second = free - MIB - (sum(sizes(free - MIB)) - free)
    assert sum(sizes(second)) == free
    reason = rf"-0001.safetensors: No space left on device; needed {sizes(second)[1]} bytes"
    with pytest.raises(DiskFullError, match=reason):
        write_shard(pending.directory, 0, *state(second), {}, {}, max_file_bytes=MIB)
    assert [path.name for path in pending.directory.iterdir()] == ["rank-00000-0000.safetensors"]
    store.abandon(pending)
    assert_only_first_left(small_disk)
    store.save(2, shard(2 * MIB, 2), {})  # training went on, and there is room again
    assert store.steps() == [1, 2]


def test_full_while_the_manifest_is_written(small_disk: Path) -> None:
    store = CheckpointStore(small_disk)
    store.save(1, shard(5 * MIB, 1), {})
    with pytest.raises(DiskFullError, match=r"manifest.json: No space left on device"):
        store.save(2, shard(2 * MIB, 2), {"text": "x" * 2 * MIB})
    assert_only_first_left(small_disk)


def test_a_file_system_that_turns_read_only(small_disk: Path) -> None:
    """As the kernel makes it after errors: nothing can be written, and what a failed write began not removed."""
    store = CheckpointStore(small_disk / "checkpoints")
    store.save(1, shard(2**20, 1), {})
    pending = store.begin(2)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match="can't write .*rank-00000-0000.safetensors: .*Read-only file system"):
        write_shard(pending.directory, 0, [], {}, {"x": torch.ones(4)}, {})
    with pytest.raises(CheckpointError, match="can't write .*owner.json: .*Read-only file system"):
        CheckpointStore(small_disk / "checkpoints").begin(2)
    assert store.load(1).step == 1


def test_no_place_for_a_directory(tmp_path: Path) -> None:
    link = tmp_path / "checkpoints"
    link.symlink_to(tmp_path / "scratch")
    with pytest.raises(CheckpointError, match="checkpoints is a file, or a link to nothing, where"):
        CheckpointStore(link).begin(1)
    (tmp_path / "scratch").mkdir()
    CheckpointStore(link).save(1, shard(100, 1), {})
    assert (tmp_path / "scratch" / "step-000001" / "manifest.json").is_file()


def test_a_quota(quota: Path) -> None:
    store = CheckpointStore(quota)
    store.save(1, shard(5 * MIB, 1), {})
    assert free_bytes(quota) > 20 * MIB
    with pytest.raises(DiskFullError, match=r"-0000.safetensors: Disk quota exceeded; needed \d+ bytes .* raise the q"):
        store.save(2, shard(5 * MIB, 2), {})
    assert_only_first_left(quota)
    store.save(2, shard(MIB, 2), {})
    assert store.steps() == [1, 2]


def test_a_file_size_limit(tmp_path: Path) -> None:
    """RLIMIT_FSIZE ends a write in its middle as a quota does, without root."""
    store = CheckpointStore(tmp_path)
    store.save(1, shard(MIB, 1), {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, limits[1]))
    try:
        with pytest.raises(DiskFullError, match=r"rank-00000-0000.safetensors: File too large; needed \d+ bytes"):
            store.save(2, shard(MIB, 2), {})
        pending = store.begin(2)
        with pytest.raises(DiskFullError):
            write_shard(pending.directory, 0, [], {}, *shard(MIB, 2)[0])
        assert list(pending.directory.iterdir()) == []  # a rank cleans up after itself
        store.abandon(pending)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_only_first_left(tmp_path)
