"""Paths of a run as its nodes will see them: told before submission what can't be written, shared or held there.
Standard library only."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhpc.cluster.session import MAX_RAY_DIR_BYTES
from rlhpc.config.schema import RunConfig

IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
ON_DISK = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "squashfs"}  # of one machine
FEW_INODES = 1000
GIB = 1024**3


def refusals(cfg: RunConfig, *, elsewhere: bool, checkpoint_bytes: int) -> Iterator[str]:
    """What is wrong with the paths of a run; `elsewhere`: its nodes are other machines than this one."""
    checkpoints = cfg.checkpoint_root()
    for key, path in (("run_dir", Path(cfg.run_dir)), ("trainer.default_local_dir", checkpoints)):
        there = existing(path)
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            yield f"{key}={path}: {there} is not a directory that you may write to; choose another"
            return
    if elsewhere:
        for key, path in _paths(cfg):
            if (kind := filesystem(path)) in IN_MEMORY:
                yield f"{key}={path} is in this machine's memory ({kind}), which no node sees; use a shared file system"
    yield from _space(cfg, checkpoints, checkpoint_bytes)
    yield from _temp_root(cfg)
    if "%" in cfg.run_dir:
        yield f"run_dir={cfg.run_dir} has a %, which Slurm replaces in the names of logs; choose another"


def cautions(cfg: RunConfig, *, elsewhere: bool) -> Iterator[str]:
    """Paths on a disk of this machine: right only where every node has the same there."""
    if not elsewhere:
        return
    further = (("the program", Path(__file__)), ("Python", Path(sys.executable)))
    local = [
        f"{key}={path} ({kind})" for key, path in (*_paths(cfg), *further) if (kind := filesystem(path)) in ON_DISK
    ]
    if local:
        yield f"on a disk of this machine; every node needs the same there: {', '.join(local)}"


def _space(cfg: RunConfig, checkpoints: Path, checkpoint_bytes: int) -> Iterator[str]:
    keep, best, disk = cfg.checkpoint.keep, cfg.checkpoint.keep_best, os.statvfs(existing(checkpoints))
    free = disk.f_bavail * disk.f_frsize
    there = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file()) if checkpoints.is_dir() else 0
    needed = (keep + best + 1) * checkpoint_bytes  # the newest is whole before the oldest goes
    if free + there < needed:
        fits = (free + there) // max(1, checkpoint_bytes) - best - 1
        fix = f"set checkpoint.keep={fits}, or" if fits >= 1 else "free some, or"
        yield (
            f"checkpoint.keep={keep}{f' with keep_best={best}' if best else ''} needs {needed / GIB:.4g} GiB for "
            f"{keep + best + 1} checkpoints of {checkpoint_bytes / GIB:.4g} GiB, but {checkpoints} has "
            f"{(free + there) / GIB:.4g} GiB; {fix} set trainer.default_local_dir elsewhere"
        )
    if disk.f_files > 0 and disk.f_favail < FEW_INODES:
        yield f"{checkpoints}: its file system has {disk.f_favail} inodes left; remove files there, or choose another"


def _temp_root(cfg: RunConfig) -> Iterator[str]:
    root = cfg.cluster.ray_temp_root
    length = len(os.fsencode(f"{root.rstrip('/')}/rlhpc-{os.getuid()}/01234567"))
    if not root.startswith("/"):
        yield f"cluster.ray_temp_root={root} must be an absolute path, such as /tmp"
    elif length > MAX_RAY_DIR_BYTES:
        most = MAX_RAY_DIR_BYTES - length + len(os.fsencode(root))
        yield (
            f"cluster.ray_temp_root={root} has {len(os.fsencode(root))} bytes, Ray's sockets leave {most}; use a "
            "shorter node-local directory such as /tmp"
        )


def filesystem(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds a path, which need not exist yet (`mounts`: /proc/self/mounts)."""
    place = str(existing(path).resolve())
    found = ("", "unknown")
    for line in (mounts if mounts is not None else Path("/proc/self/mounts").read_text()).splitlines():
        _, escaped, kind, *_ = line.split(" ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), escaped)
        if (place + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(found[0]):
            found = (point, kind)  # of mounts over the same point the last counts
    return found[1]


def _paths(cfg: RunConfig) -> Iterator[tuple[str, Path]]:
    yield "run_dir", Path(cfg.run_dir)
    yield "actor_rollout_ref.model.path", Path(cfg.actor_rollout_ref.model.path)
    if cfg.critic.model.path:
        yield "critic.model.path", Path(cfg.critic.model.path)
    if cfg.trainer.default_local_dir:
        yield "trainer.default_local_dir", Path(cfg.trainer.default_local_dir)
    for key, files in (("data.train_files", cfg.data.train_files), ("data.val_files", cfg.data.val_files)):
        for file in _each(files):
            yield key, Path(file)


def _each(files: object) -> Iterable[str]:
    return [str(file) for file in (files if isinstance(files, list) else [files]) if file is not None]


def existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
