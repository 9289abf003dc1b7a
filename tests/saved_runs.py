"""Run directories with committed checkpoints of a given model, cut among ranks as no layout is: for tests of what reads
checkpoints without training anything."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch

from rlhpc.checkpoint.manifest import CheckpointManifest
from rlhpc.checkpoint.pieces import Piece
from rlhpc.checkpoint.shards import write_shard
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.reshard.flat import flat_boxes

Pieces = list[tuple[Piece, torch.Tensor]]


def write_run(directory: Path, model_dir: Path, dtype: str = "float32") -> Path:
    """The run.json of a run that trains `model_dir`."""
    directory.mkdir(parents=True, exist_ok=True)
    model = {"path": str(model_dir), "dtype": dtype}
    config = {"actor_rollout_ref": {"model": model}, "trainer": {"default_local_dir": None}}
    identity = {"config": config, "model": json.loads((model_dir / "config.json").read_text())}
    (directory / "run.json").write_text(json.dumps(identity))
    return directory


def write_checkpoint(
    run_dir: Path,
    step: int,
    weights: Mapping[str, torch.Tensor],
    *,
    num_ranks: int = 3,
    frozen: Collection[str] = (),
    record: Mapping[str, float] | None = None,
    cursor: Mapping[str, int] | None = None,
    layout: Mapping[str, int] | None = None,
    max_file_bytes: int = 2**20,
    chunk_bytes: int = 2**16,
) -> CheckpointManifest:
    """Commits `weights` as masters with random moments, the `frozen` ones as weights in bfloat16."""
    store = CheckpointStore(run_dir / "checkpoints")
    pending = store.begin(step)
    entries = []
    for rank, pieces in enumerate(cut(weights, num_ranks, frozen)):
        entries += write_shard(
            pending.directory,
            rank,
            pieces,
            {name: tuple(tensor.shape) for name, tensor in weights.items()},
            {"rng/torch": torch.get_rng_state()},
            {"step": step},
            max_file_bytes=max_file_bytes,
            chunk_bytes=chunk_bytes,
        )
    state = {"train": {"step": step, "cursor": dict(cursor or {}), "record": dict(record or {})}, "wandb": None}
    return store.commit(pending, entries, state, layout=layout or {"world_size": num_ranks}, config_digest="0123abcd")


def cut(weights: Mapping[str, torch.Tensor], num_ranks: int, frozen: Collection[str] = ()) -> list[Pieces]:
    """Each tensor's elements dealt to the ranks at random places, as flat ranges; vectors whole to all of them."""
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    dealt: list[Pieces] = [[] for _ in range(num_ranks)]
    for name, tensor in weights.items():
        ends = [0, *sorted(rng.integers(0, tensor.numel() + 1, num_ranks - 1).tolist()), tensor.numel()]
        kinds = {"weight": tensor.bfloat16()} if name in frozen else {
            "master": tensor.float(),
            **{kind: torch.randn(tensor.shape, generator=generator) for kind in ("exp_avg", "exp_avg_sq")},
        }  # fmt: skip
        for rank in range(num_ranks):
            whole = tensor.ndim < 2
            begin, end = (0, tensor.numel()) if whole else (ends[rank], ends[rank + 1])
            for start, stop in flat_boxes(tuple(tensor.shape), begin, end):
                for kind, values in kinds.items():
                    dealt[rank].append((Piece(kind, name, start, stop), values[tuple(map(slice, start, stop))]))
    return dealt


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))
