"""Paths of a run before submission, on this machine's real file systems."""

import os
from pathlib import Path

import pytest

from rlhpc.cluster.storage import cautions, filesystem, refusals
from rlhpc.config.schema import RunConfig

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
server:/odd /mnt/odd\\040name nfs4 rw 0 0
/dev/nvme0 /home/scratch xfs rw 0 0
tmpfs /home/scratch tmpfs rw 0 0
"""


def config(run_dir, **changes):
    cfg = RunConfig()
    cfg.run_dir = str(run_dir)
    cfg.actor_rollout_ref.model.path, cfg.data.train_files = "/proc/self", "/proc/self/stat"
    for key, value in changes.items():
        section, _, name = key.partition("_")
        setattr(getattr(cfg, section), name, value)
    return cfg


def refused(cfg, *, elsewhere=False, checkpoint_bytes=1000):
    return list(refusals(cfg, elsewhere=elsewhere, checkpoint_bytes=checkpoint_bytes))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/dev/shm/x/y", "tmpfs"),
        ("/dev/shmother", "ext4"),
        ("/home/me", "nfs4"),
        ("/home/scratch/a", "tmpfs"),  # mounted last
        ("/mnt/odd name/run", "nfs4"),
    ],
)
def test_filesystem_of_a_path(path, kind, tmp_path):
    root = tmp_path.resolve()  # paths need not exist: the nearest that does decides, so make them
    mounts = "\n".join(
        line.replace(" /", f" {root}/", 1).replace(f"{root}/ ", f"{root} ") for line in MOUNTS.splitlines()
    )
    (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    assert filesystem(root / path.lstrip("/"), mounts) == kind


def test_a_writable_place_is_needed(tmp_path):
    assert refused(config(tmp_path / "new/run")) == []
    (tmp_path / "file").write_text("")
    assert refused(config(tmp_path / "file/run")) == [
        f"run_dir={tmp_path}/file/run: {tmp_path}/file is not a directory that you may write to; choose another"
    ]


def test_memory_of_this_machine_is_seen_by_no_node(tmp_path):
    assert refused(config("/dev/shm/run")) == []  # nodes that are this machine
    assert refused(config("/dev/shm/run"), elsewhere=True) == [
        "run_dir=/dev/shm/run is in this machine's memory (tmpfs), which no node sees; use a shared file system"
    ]
    cfg = config(tmp_path)
    cfg.critic.model.path = "/dev/shm/critic"
    assert refused(cfg, elsewhere=True) == [
        "critic.model.path=/dev/shm/critic is in this machine's memory (tmpfs), which no node sees; use a shared file "
        "system"
    ]
    assert list(cautions(config(tmp_path), elsewhere=False)) == []


def test_disk_space_is_counted_with_what_older_checkpoints_give_back(tmp_path):
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    assert refused(config(tmp_path, checkpoint_keep=3), checkpoint_bytes=free // 5) == []
    [line] = refused(config(tmp_path, checkpoint_keep=3), checkpoint_bytes=free // 3)
    assert line.startswith("checkpoint.keep=3 needs") and "for 4 checkpoints of" in line
    assert "set checkpoint.keep=2, or set trainer.default_local_dir elsewhere" in line
    [line] = refused(config(tmp_path, checkpoint_keep=1), checkpoint_bytes=free)
    assert "free some, or set trainer.default_local_dir elsewhere" in line
    sparse = tmp_path / "checkpoints/step-000001/model.safetensors"
    sparse.parent.mkdir(parents=True)
    with sparse.open("wb") as file:
        file.truncate(2 * free)
    assert refused(config(tmp_path, checkpoint_keep=3), checkpoint_bytes=free // 3) == []


def test_temp_roots():
    assert refused(config("/tmp/run", cluster_ray_temp_root="/tmp")) == []
    assert refused(config("/tmp/run", cluster_ray_temp_root="tmp")) == [
        "cluster.ray_temp_root=tmp must be an absolute path, such as /tmp"
    ]
    # 43 bytes less /rlhpc-<uid>/ and 8 for the session's name
    most = 43 - len(f"/rlhpc-{os.getuid()}/") - 8
    longest = "/" + "a" * (most - 1)
    assert refused(config("/tmp/run", cluster_ray_temp_root=longest)) == []
    [line] = refused(config("/tmp/run", cluster_ray_temp_root=longest + "a"))
    assert f"has {most + 1} bytes, Ray's sockets leave {most}; use a shorter" in line


def test_percent_signs_are_slurms(tmp_path):
    assert refused(config(tmp_path / "50%")) == [
        f"run_dir={tmp_path}/50% has a %, which Slurm replaces in the names of logs; choose another"
    ]


def test_disks_of_this_machine_are_named(tmp_path):
    kinds = {filesystem(Path(__file__)), filesystem(tmp_path)}
    lines = list(cautions(config(tmp_path), elsewhere=True))
    if kinds & {"ext4", "xfs", "btrfs", "overlay"}:
        assert lines[0].startswith("on a disk of this machine; every node needs the same there: ")
    else:
        assert lines == []
