"""A checkpoint of DeepSeek-V3 by 512 ranks, without its data: how long it takes to commit, choose and plan.

usage: python -m scripts.bench.checkpoint_scale [--directory DIR] [--out scripts/bench/results]

Every rank's files are laid out as they would be written, made sparse (8 TB long, no disk taken but the manifest) and
committed. Then single ranks of the same and of other layouts, each in a fresh process, read the manifest and plan what
they load; the plan is checked to fill every element of the rank's masters and moments once, from pieces that hold it.
Writes checkpoint-scale-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import combinations
from math import prod
from operator import add, le, mul, sub
from pathlib import Path
from typing import Any

import torch

from rlhpc.checkpoint.chunks import CHUNK_BYTES
from rlhpc.checkpoint.manifest import MANIFEST_NAME, FileEntry, read_manifest
from rlhpc.checkpoint.pieces import ITEM_BYTES, TRAINED_KINDS, Piece, StoredPiece
from rlhpc.checkpoint.shards import lay_out
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.errors import CheckpointError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import Shard, ShardSpec
from rlhpc.reshard.flat import flat_specs
from rlhpc.reshard.plan import ShardCopy
from rlhpc.reshard.saved import planned_reads
from scripts.bench.deepseek import trainer_specs
from scripts.bench.flat_ranges import distributed_ranges, held_specs
from scripts.bench.machine import RESULTS, hardware, place, versions

SAVED = ParallelLayout(tp=8, ep=64, world_size=512)
LOADED = (
    SAVED,
    ParallelLayout(tp=4, ep=32, world_size=256),
    ParallelLayout(tp=16, ep=16, etp=4, world_size=1024),
)
STEP = 12


class Stopwatch:
    """Seconds by stage, each from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stage(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now


def commit(root: Path) -> dict[str, Any]:
    """Leaves the checkpoint in `root`; returns its sizes and seconds: to lay out the files of all ranks, to make them,
    to commit them (the ranks' reports read, sizes looked at, the manifest written), to read the manifest, and to
    choose the checkpoint (the manifest read, sizes looked at)."""
    specs = trainer_specs(SAVED)
    held: dict[int, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
    for spec in flat_specs(specs, distributed_ranges(specs, SAVED)):
        for shard in spec.shards:
            tensor = torch.empty(shard.shape, device="meta")
            held[shard.rank] += ((Piece(kind, spec.name, shard.start, shard.stop), tensor) for kind in TRAINED_KINDS)
    shapes = {spec.name: spec.shape for spec in specs}
    watch = Stopwatch()
    entries = [
        replace(layout.entry, checksums=invented(layout.entry))
        for rank in sorted(held)
        for layout in lay_out(rank, held[rank], shapes, {}, {"optimizer": {"step": STEP}})
    ]
    watch.stage("lay_out")
    store = CheckpointStore(root)
    pending = store.begin(STEP)
    for entry in entries:
        with (pending.directory / entry.name).open("wb") as file:
            file.truncate(entry.size_bytes)
    reports = [json.dumps(entry.to_json()) for entry in entries]
    watch.stage("sparse_files")
    manifest = store.commit(
        pending, [FileEntry.from_json(json.loads(text)) for text in reports], {}, layout=asdict(SAVED)
    )
    watch.stage("commit")
    read_manifest(manifest.directory)
    watch.stage("read_manifest")
    _, chosen = next(iter(store.newest_first()))
    watch.stage("choose")
    assert not isinstance(chosen, CheckpointError), chosen
    assert [file.checksums for file in chosen.files] == [file.checksums for file in manifest.files]
    assert all(list(chosen.pieces(kind)) == list(manifest.pieces(kind)) for kind in TRAINED_KINDS)
    return {
        "parameters": sum(map(prod, shapes.values())),
        "tensors": len(shapes),
        "pieces": sum(map(len, held.values())),
        "files": len(entries),
        "bytes": manifest.size_bytes,
        "chunks": sum(len(entry.checksums) for entry in entries),
        "manifest_bytes": (manifest.directory / MANIFEST_NAME).stat().st_size,
        "report_bytes_of_a_rank": max(map(len, reports)),
        "seconds": watch.seconds,
    }


def invented(entry: FileEntry) -> tuple[str, ...]:
    """Checksums of chunks that nobody reads."""
    return tuple(secrets.token_hex(8) for _ in range(-(-entry.size_bytes // entry.chunk_bytes)))


def load_plan(directory: Path, layout: ParallelLayout, rank: int) -> dict[str, Any]:
    """Of one rank of a layout, in a process of its own."""
    specs = trainer_specs(layout)
    needed = held_specs(specs, distributed_ranges(specs, layout), rank)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins again
    before = peak_bytes()
    watch = Stopwatch()
    manifest = read_manifest(directory)
    watch.stage("read_manifest")
    reads = [planned_reads(manifest, kind, needed, rank) for kind in TRAINED_KINDS]
    watch.stage("plan")
    extra = peak_bytes() - before
    for copies in reads:
        check(needed, copies)
    chunks = {chunk for copies in reads for copy, piece in copies for chunk in chunks_of(copy, piece)}
    entries = {entry.name: entry for entry in manifest.files}
    whole = [min(c, entries[name].size_bytes - i * c) for name, i in chunks for c in [entries[name].chunk_bytes]]
    return {
        "rank": rank,
        "pieces": sum(len(spec.shards) for spec in needed) * len(TRAINED_KINDS),
        "copies": sum(map(len, reads)),
        "files": len({name for name, _ in chunks}),
        "bytes": sum(prod(shard.shape) for spec in needed for shard in spec.shards) * 4 * len(TRAINED_KINDS),
        "bytes_of_whole_chunks": sum(whole),
        "peak_memory_bytes": extra,
        "seconds": watch.seconds,
    }


def check(needed: Sequence[ShardSpec], copies: Iterable[tuple[ShardCopy, StoredPiece]]) -> None:
    """Raises AssertionError unless the copies fill every element that is needed once, each from a piece that has it."""
    parts: dict[tuple[str, str], list[ShardCopy]] = defaultdict(list)
    for copy, piece in copies:
        parts[copy.tensor, copy.dst_buffer].append(copy)
        inside = all(map(le, piece.start, copy.start)) and all(map(le, copy.stop, piece.stop))
        assert inside and piece.name == copy.tensor, (copy, piece)
        assert copy.src_offset == tuple(map(sub, copy.start, piece.start)), (copy, piece)
    shards: dict[tuple[str, str], list[Shard]] = defaultdict(list)
    for spec in needed:
        for shard in spec.shards:
            shards[spec.name, shard.buffer].append(shard)
    assert parts.keys() == shards.keys()
    for key, held in shards.items():
        for a, b in combinations(parts[key], 2):
            apart = any(p >= q or r >= s for p, q, r, s in zip(a.start, b.stop, b.start, a.stop, strict=True))
            assert apart, (a, b)
        assert sum(prod(part.shape) for part in parts[key]) == sum(prod(shard.shape) for shard in held), key
        for part in parts[key]:
            assert any(is_part(part, shard) for shard in held), part


def is_part(copy: ShardCopy, shard: Shard) -> bool:
    """Whether the copy lies in the shard's box, and goes to its place in the shard's buffer."""
    lead = len(shard.offset) - len(shard.start)
    begin = tuple(map(add, shard.offset[lead:], map(sub, copy.start, shard.start)))
    inside = all(map(le, shard.start, copy.start)) and all(map(le, copy.stop, shard.stop))
    return inside and copy.dst_offset == (*shard.offset[:lead], *begin)


def chunks_of(copy: ShardCopy, piece: StoredPiece) -> Iterable[tuple[str, int]]:
    """The chunks of 64 MiB of the piece's file from the copy's first to its last element."""
    strides = [prod(piece.extent[d + 1 :]) for d in range(len(piece.extent))]
    first = sum(map(mul, copy.src_offset, strides))
    last = first + sum(map(mul, (n - 1 for n in copy.shape), strides))
    low, high = (piece.begin + index * ITEM_BYTES[piece.dtype] for index in (first, last))
    return ((piece.file, chunk) for chunk in range(low // CHUNK_BYTES, high // CHUNK_BYTES + 1))


def peak_bytes() -> int:
    """The most memory that was ever resident."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def describe(layout: ParallelLayout) -> str:
    axes = (f"{axis.upper()}{size}" for axis in ("tp", "ep", "etp") if (size := getattr(layout, axis)) > 1)
    return f"{'·'.join(axes)} on {layout.world_size} ranks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="default: where temporary files go")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    loads = []
    with tempfile.TemporaryDirectory(prefix="checkpoint-scale-", dir=args.directory) as folder:
        saved = commit(Path(folder))
        print(json.dumps(saved, indent=1))
        directory = Path(folder, f"step-{STEP:06d}")
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
            for layout in LOADED:
                for rank in (0, layout.world_size // 2 + 1):
                    planned = pool.submit(load_plan, directory, layout, rank).result()
                    loads.append({"layout": describe(layout), **planned})
                    print(json.dumps(loads[-1], ensure_ascii=False))
    report = {
        "command": " ".join(["python -m scripts.bench.checkpoint_scale", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions("torch", "xxhash"),
        "load_average": os.getloadavg()[0],
        "layout": describe(SAVED),
        "saved": saved,
        "loads": loads,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"checkpoint-scale-{place()}.json"
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
