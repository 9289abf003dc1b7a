"""The store's promises: what was committed comes back bit for bit, and what is damaged is named and passed over."""

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhpc.checkpoint.chunks import chunk_checksums
from rlhpc.checkpoint.manifest import MANIFEST_NAME, FileEntry
from rlhpc.checkpoint.shards import read_rank_state, write_shard
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.checkpoint.writer import Writer
from rlhpc.errors import CheckpointError
from tests.unit.checkpoint.saves import newest_whole


def shards(value: float) -> list[tuple[dict[str, torch.Tensor], dict[str, object]]]:
    """Two ranks whose content tells the step."""
    return [({"weight": torch.full((3, 5), value + rank)}, {"rank": rank, "value": value}) for rank in range(2)]


def saved(root: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(root)
    for step in steps:
        store.save(step, shards(step), {"cursor": step * 10})
    return store


@pytest.fixture
def other_process() -> Iterator[Writer]:
    """A live process of this host that isn't this one."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    yield Writer(Writer.current().host, process.pid, int(stat[19]))
    process.kill()
    process.wait()


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    flat = torch.arange(12, dtype=torch.float32)
    tensors = {
        "bf16": torch.tensor([1.0, float("nan"), float("-inf"), 1e-30], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 7),
        "f64": torch.tensor([[1e-308, 0.1]], dtype=torch.float64),
        "fp8": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn),
        "i64": torch.tensor([-(2**63), 2**63 - 1]),
        "scalar": torch.tensor(3, dtype=torch.int32),
        "transposed": flat.view(3, 4).t(),
        "u8": torch.arange(256, dtype=torch.uint8),
        "view": flat[:5],  # overlaps the next: safetensors.torch refuses such a pair
        "overlapping": flat[3:],
    }
    scalars = {"lr": 0.1, "names": ["a", "b"], "none": None}
    manifest = CheckpointStore(tmp_path).save(1, [(tensors, scalars)], {})
    read, read_scalars = read_rank_state(manifest, 0)
    assert read_scalars == scalars
    assert read.keys() == tensors.keys()
    by_safetensors = load_file(manifest.directory / manifest.files[0].name)
    for name, tensor in tensors.items():
        for found in (read[name], by_safetensors[name]):
            assert found.dtype == tensor.dtype and found.shape == tensor.shape, name
            as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, tensor)]
            assert torch.equal(*as_bytes), name


def test_state_and_layout_come_back(tmp_path: Path) -> None:
    state = {
        "cursor": {"epoch": 2, "counts": {2: "two", 10: "ten"}},
        "loss": 0.1 + 0.2,
        "wandb": None,
        "text": "ü",
    }
    CheckpointStore(tmp_path).save(7, shards(7), state, policy_version=9, layout={"tp": 1, "ep": 2})
    manifest = CheckpointStore(tmp_path).load(7)
    assert (manifest.step, manifest.policy_version, manifest.world_size) == (7, 9, 2)
    assert manifest.layout == {"tp": 1, "ep": 2}
    assert manifest.state == json.loads(json.dumps(state))
    assert [read_rank_state(manifest, rank)[0]["weight"].unique().tolist() for rank in (0, 1)] == [[7.0], [8.0]]
    with pytest.raises(CheckpointError, match=r"written by ranks 0 to 1 and has nothing of rank 2"):
        read_rank_state(manifest, 2)


def test_nothing_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "absent")
    assert store.steps() == [] and list(store.newest_first()) == []
    assert not (tmp_path / "absent").exists()  # reading leaves no trace
    with pytest.raises(CheckpointError, match="no checkpoint of step 3 in .*; committed steps: none"):
        store.load(3)


def flip_byte(directory: Path) -> str:
    path = directory / "rank-00001-0000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return r"rank-00001-0000\.safetensors: chunk 0 has xxh3"


def truncate(directory: Path) -> str:
    path = directory / "rank-00000-0000.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    return rf"rank-00000-0000\.safetensors: {size - 1} bytes, the manifest says {size}"


def remove_shard(directory: Path) -> str:
    (directory / "rank-00001-0000.safetensors").unlink()
    return r"rank-00001-0000\.safetensors: No such file or directory"


def remove_manifest(directory: Path) -> str:
    (directory / MANIFEST_NAME).unlink()
    return r"manifest\.json: No such file or directory"


def cut_manifest(directory: Path) -> str:
    path = directory / MANIFEST_NAME
    path.write_text(path.read_text()[:-20])
    return r"manifest\.json: not JSON"


def edit_manifest(directory: Path) -> str:
    path = directory / MANIFEST_NAME
    path.write_text(path.read_text().replace('"cursor":20', '"cursor":21'))
    return r"manifest\.json: its content has xxh3 .* it was changed"


def other_schema(directory: Path) -> str:
    path = directory / MANIFEST_NAME
    path.write_text(path.read_text().replace('"schema_version":2', '"schema_version":1'))
    return r"manifest\.json: schema version 1; this rlhpc reads 2: go on with the rlhpc that wrote it"


DAMAGES = [flip_byte, truncate, remove_shard, remove_manifest, cut_manifest, edit_manifest, other_schema]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_older_one_loads(tmp_path: Path, damage) -> None:
    store = saved(tmp_path, 1, 2)
    reason = damage(tmp_path / "step-000002")
    with pytest.raises(CheckpointError, match=reason):
        store.load(2)
    manifest = newest_whole(tmp_path)
    assert manifest is not None and manifest.state == {"cursor": 10}
    # Training goes on from 1 and saves 2 again, over the damaged one.
    store.save(2, shards(2), {"cursor": 22})
    assert store.load(2).state == {"cursor": 22}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "owner.json", "step-000001", "step-000002"]


def test_a_shard_that_changes_after_the_choice_is_not_read(tmp_path: Path) -> None:
    manifest = saved(tmp_path, 1).load(1, checksums=False)
    flip_byte(manifest.directory)
    read_rank_state(manifest, 0)
    with pytest.raises(CheckpointError, match="chunk 0 has xxh3"):
        read_rank_state(manifest, 1)


def test_a_complete_step_is_not_overwritten(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"step 1 is already committed .* discard_after\(0\)"):
        store.begin(1)
    assert store.discard_after(0) == [1]
    store.save(1, shards(5), {})


def test_retention_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    store = saved(tmp_path, *range(1, 7))
    truncate(tmp_path / "step-000006")
    truncate(tmp_path / "step-000002")
    assert store.retain(2) == [3, 2, 1]
    assert store.steps() == [4, 5, 6]  # 6 is damaged and newer: it neither counts nor goes
    assert (tmp_path / "latest").read_text() == "step-000006\n"  # what was committed, and no promise
    assert store.discard_after(4) == [6, 5]
    assert store.steps() == [4]
    assert (tmp_path / "latest").read_text() == "step-000004\n"
    with pytest.raises(ValueError, match="newest=0 would delete the only checkpoint"):
        store.retain(0)


def test_what_storage_does_not_let_go_of_stays_until_later(tmp_path: Path, caplog) -> None:
    """A mount point can't be renamed, not even by root."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    store = saved(tmp_path, 1, 2, 3, 4)
    busy = tmp_path / "step-000003"
    subprocess.run(["mount", "--bind", busy, busy], check=True)
    try:
        with caplog.at_level(logging.WARNING):
            assert store.retain(1) == [2, 1]
        assert "step 3 need not stay, but can't be deleted: " in caplog.text and "busy" in caplog.text
        with pytest.raises(CheckpointError, match=f"can't delete {busy}: .* busy; delete it"):
            store.discard_after(2)
    finally:
        subprocess.run(["umount", busy], check=True)
    saved(tmp_path, 5)
    assert store.retain(1) == [3]
    assert store.steps() == [5]


def test_commit_wants_every_rank_and_what_they_say(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    pending = store.begin(2)
    entries = write_shard(pending.directory, 1, [], {}, *shards(2)[1])
    with pytest.raises(CheckpointError, match=r"step 2: no files of ranks \[0\]"):
        store.commit(pending, entries, {})
    pending = store.begin(2)
    with pytest.raises(CheckpointError, match="rank-00000-0000.safetensors: No such file"):
        store.commit(pending, [FileEntry("rank-00000-0000.safetensors", 0, 10, ())], {})
    pending = store.begin(2)
    with pytest.raises(CheckpointError, match="the state of step 2 is not JSON: .*Tensor"):
        store.commit(pending, write_shard(pending.directory, 0, [], {}, *shards(2)[0]), {"loss": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match="the scalars of rank 0 are not JSON"):
        store.save(2, [({}, {"set": {1}})], {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "owner.json", "step-000001"]


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path, other_process: Writer) -> None:
    saved(tmp_path, 1)
    owner = {"host": other_process.host, "pid": other_process.pid, "started": other_process.started}
    (tmp_path / "owner.json").write_text(json.dumps(owner))
    with pytest.raises(CheckpointError, match=f"is being written by process {other_process.pid} on"):
        CheckpointStore(tmp_path).begin(2)
    (tmp_path / "owner.json").write_text(json.dumps(owner | {"started": other_process.started - 1}))
    CheckpointStore(tmp_path).save(2, shards(2), {})  # the pid was given to a new process: the writer itself is dead


def test_a_writer_that_lost_the_root_cannot_publish(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    pending = store.begin(2)
    entries = write_shard(pending.directory, 0, [], {}, *shards(2)[0])
    (tmp_path / "owner.json").write_text(json.dumps({"host": "another-node", "pid": 1, "started": 1}))
    with pytest.raises(
        CheckpointError, match="now belongs to another run .process 1 on another-node.; this one must not publish"
    ):
        store.commit(pending, entries, {})
    assert store.steps() == [1] and not pending.directory.exists()
    # The process of another node can't be asked whether it lives, but what was lost once is lost for good.
    with pytest.raises(CheckpointError, match="now belongs to another run"):
        store.begin(2)


def test_a_newer_try_of_a_job_takes_over_from_one_that_still_runs(tmp_path: Path) -> None:
    """Both in this process, so that each sees the other alive."""
    older, newer = CheckpointStore(tmp_path, "17_2-9"), CheckpointStore(tmp_path, "17_2-10")
    older.save(1, shards(1), {})
    pending = older.begin(2)
    entries = [
        entry for rank, shard in enumerate(shards(2)) for entry in write_shard(pending.directory, rank, [], {}, *shard)
    ]
    newer.save(2, shards(7), {})
    assert not pending.directory.exists(), "what the older try had begun takes no room"
    with pytest.raises(CheckpointError, match="belongs to another run .attempt 17_2-10, process"):
        older.commit(pending, entries, {})
    with pytest.raises(CheckpointError, match="belongs to another run"):
        older.require_ownership()
    with pytest.raises(CheckpointError, match="belongs to another run"):
        CheckpointStore(tmp_path, "17_2-9").begin(3)  # a late start of the older try
    assert float(read_rank_state(newer.load(2), 0)[0]["weight"][0, 0]) == 7
    newer.save(3, shards(3), {})


def test_other_jobs_and_other_tasks_of_an_array_are_refused(tmp_path: Path, other_process: Writer) -> None:
    owner = {"host": other_process.host, "pid": other_process.pid, "started": other_process.started}
    (tmp_path / "owner.json").write_text(json.dumps(owner | {"attempt": "17_2-3"}))
    for attempt in ("", "17_3-4", "18-0", "17_2-3"):
        with pytest.raises(CheckpointError, match=f"is being written by process {other_process.pid} on"):
            CheckpointStore(tmp_path, attempt).acquire()
    CheckpointStore(tmp_path, "17_2-4").acquire()


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path, other_process: Writer) -> None:
    host = other_process.host
    dead = [f"tmp-step-000009-{host}.{other_process.pid}.1", f"tmp-delete-step-000001-{host}.999999999.5"]
    alive = [f"tmp-step-000009-{other_process}", "tmp-step-000009-another.node.example.12.34", "tmp-mine"]
    for name in dead + alive:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000-0000.safetensors.partial").write_bytes(b"x")
    saved(tmp_path, 1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*alive, "latest", "owner.json", "step-000001"}


def test_a_rank_whose_save_was_given_up_is_told(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    pending = store.begin(1)
    store.abandon(pending)
    with pytest.raises(CheckpointError, match="is gone: the save was given up"):
        write_shard(pending.directory, 0, [], {}, *shards(1)[0])


def test_pickles_are_never_read(tmp_path: Path) -> None:
    """A shard replaced by a pickle of the same length, checksums and all, is taken for the numbers that it isn't."""
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return marker.touch, ()

    store = CheckpointStore(tmp_path)
    pending = store.begin(1)
    (entry,) = write_shard(pending.directory, 0, [], {}, *shards(1)[0])
    path = pending.directory / entry.name
    data = pickle.dumps(Evil()).ljust(entry.size_bytes, b"\0")
    path.write_bytes(data)
    forged = replace(entry, checksums=tuple(chunk_checksums(path)))
    read_rank_state(store.commit(pending, [forged], {}), 0)
    assert not marker.exists()
