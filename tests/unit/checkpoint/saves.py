"""Saves whose content tells the step, and ways to end a process in the middle of one."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from rlhpc.checkpoint.manifest import CheckpointManifest, FileEntry
from rlhpc.checkpoint.pieces import Piece
from rlhpc.checkpoint.reader import ChunkReader
from rlhpc.checkpoint.shards import as_bytes, read_rank_state, write_shard
from rlhpc.checkpoint.store import CheckpointStore, PendingCheckpoint

NUM_RANKS = 2
SHAPES = {"w": (2 * NUM_RANKS, 50), "frozen": (3,)}


def content(step: int, piece: Piece) -> torch.Tensor:
    """Of a piece: every element is another one, and another one at every step."""
    numbers = torch.arange(200).view(SHAPES["w"]) if piece.name == "w" else torch.arange(3)
    kind = ("master", "exp_avg", "exp_avg_sq", "weight").index(piece.kind)
    return (numbers[tuple(map(slice, piece.start, piece.stop))] + 1000 * step + 200 * kind).float()


def write_rank(
    pending: PendingCheckpoint, rank: int, *, max_file_bytes: int = 1000, read_back: bool = False
) -> list[FileEntry]:
    """Of several chunks, in two files unless they may be larger."""
    pieces = [Piece(k, "w", (2 * rank, 0), (2 * rank + 2, 50)) for k in ("master", "exp_avg", "exp_avg_sq")]
    pieces += [Piece("weight", "frozen", (0,), (3,))]
    return write_shard(
        pending.directory,
        rank,
        [(piece, content(pending.step, piece)) for piece in pieces],
        SHAPES,
        {"rng": torch.tensor([pending.step, rank])},
        {"step": pending.step},
        max_file_bytes=max_file_bytes,
        chunk_bytes=600,
        read_back=read_back,
    )


def save(store: CheckpointStore, step: int, *, max_file_bytes: int = 1000) -> None:
    pending = store.begin(step)
    entries = [e for rank in range(NUM_RANKS) for e in write_rank(pending, rank, max_file_bytes=max_file_bytes)]
    store.commit(pending, entries, {"step": step})


def newest_whole(root: Path) -> CheckpointManifest | None:
    """The newest checkpoint all of whose checksums are right."""
    store = CheckpointStore(root)
    return next((store.load(step) for step in reversed(store.steps()) if store.has(step)), None)


def loaded_step(root: Path) -> int:
    """The step that a restart would go on from, after comparing every element of every rank with it."""
    manifest = newest_whole(root)
    assert manifest is not None
    assert manifest.state == {"step": manifest.step}
    for rank in range(NUM_RANKS):
        tensors, scalars = read_rank_state(manifest, rank)
        assert scalars == {"step": manifest.step} and tensors["rng"].tolist() == [manifest.step, rank]
    compared = 0
    for entry in manifest.files:
        found = {stored: torch.empty(stored.extent) for stored in entry.pieces()}
        ChunkReader(manifest.directory, entry).read((p.begin, p.end, as_bytes(t)) for p, t in found.items())
        for stored, tensor in found.items():
            assert torch.equal(tensor, content(manifest.step, stored.piece)), stored
            compared += tensor.numel()
    assert compared == 3 * 200 + NUM_RANKS * 3
    return manifest.step


def in_child(body: Callable[[], None]) -> int:
    """Forks a process that runs `body`; returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    return pid


def at_disk_call(number: int, action: Callable[[], None]) -> None:
    """Has this process do something when it is about to enter, for the n-th time, a C function that may change what is
    on a disk."""
    changes = {
        "fsync",
        "ftruncate",
        "mkdir",
        "open",
        "remove",
        "rename",
        "replace",
        "rmdir",
        "unlink",
        "write",
        "writev",
    }
    seen = 0

    def profile(frame: FrameType, what: str, function: object) -> None:
        nonlocal seen
        if what != "c_call":
            return
        owner = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        if owner in ("posix", "_io") and getattr(function, "__name__", "") in changes:
            if seen == number:
                action()
            seen += 1

    sys.setprofile(profile)
