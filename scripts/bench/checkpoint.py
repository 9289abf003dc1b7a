"""What a checkpoint costs: the seconds for which training stands still, and bytes per second against dd's.

usage: python -m scripts.bench.checkpoint [--cases 6x1 6x2 6x4 30x2] [--turns 3] [--directory DIR] [--out DIR]

A case is masters and moments of the SmolLM2 mixture cut to 6 or 30 layers (1.2 and 4.5 GB), as the distributed
optimizer lays them out over 1, 2 or 4 ranks with experts parallel. A turn does each of these once, on all ranks at the
same time, and counts the seconds of the slowest:

  dd_write    dd writes as many bytes as the rank has, and waits for the device (conv=fsync); dd_write_direct: past the
              page cache (oflag=direct); every other turn after the save
  save        write_shard from the live tensors, then the commit: a synchronous save with checkpoint.read_back=false
  blocked     the copy of everything into host buffers: what training waits for at most, where its next optimizer step
              comes at once; nothing where all is written by then
  behind      that copy written, read back from the device and compared, then the commit: as long as a synchronous save
  dd_read     dd reads the rank's files, which the page cache doesn't hold; dd_read_direct: past it (iflag=direct)
  load        the rank's state under the layout that wrote it, which the page cache doesn't hold; every chunk verified
  load_other  the same under another layout

What was loaded is compared with what was saved. Writes checkpoint-<hardware>.json and .png. Needs memory for three
times the state, and twice its bytes of disk in DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from rlhpc.checkpoint.chunks import drop_cached
from rlhpc.checkpoint.manifest import CheckpointManifest, FileEntry, read_manifest
from rlhpc.checkpoint.pieces import TRAINED_KINDS, Piece
from rlhpc.checkpoint.shards import write_shard
from rlhpc.checkpoint.snapshot import Snapshot
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.reshard.families import family_for
from rlhpc.reshard.flat import flat_buffers
from rlhpc.reshard.saved import Wanted, load_together, pieces_of
from scripts.bench.flat_ranges import distributed_ranges, held_specs
from scripts.bench.machine import RESULTS, hardware, place, versions
from scripts.bench.processes import on_ranks
from scripts.bench.sync import SMOLLM2_MOE, summary

PHASES = ("dd_write", "dd_write_direct", "save", "blocked", "behind", "dd_read", "dd_read_direct", "load", "load_other")
OFFSETS = 2**16  # where in the noise a tensor's content begins

Pieces = list[tuple[Piece, torch.Tensor]]


class RankState:
    """One rank's masters and moments under a layout, NaN at first."""

    def __init__(self, config: dict[str, Any], layout: ParallelLayout, rank: int, device: str) -> None:
        specs = family_for(config).trainer_specs(config, layout, "float32")
        own = [held for held in distributed_ranges(specs, layout) if held.rank == rank]
        self.rank, self.specs = rank, held_specs(specs, own, rank)
        self.shapes = {spec.name: spec.shape for spec in self.specs}
        nan = partial(torch.full, fill_value=float("nan"), device=device)
        self.buffers = {
            kind: flat_buffers(own, {r.parameter: nan((r.stop - r.start,)) for r in own}) for kind in TRAINED_KINDS
        }
        self.pieces: Pieces = [
            piece for kind in TRAINED_KINDS for piece in pieces_of(kind, self.specs, rank, self.buffers[kind])
        ]

    def load(self, directory: Path) -> int:
        """Returns the bytes read."""
        wanted = [Wanted(kind, self.specs, self.buffers[kind]) for kind in TRAINED_KINDS]
        return load_together(read_manifest(directory), self.rank, wanted)

    def forget(self) -> None:
        for _, tensor in self.pieces:
            tensor.fill_(float("nan"))

    def fill(self, noise: torch.Tensor) -> None:
        for (_, tensor), content in zip(self.pieces, self._contents(noise), strict=True):
            tensor.copy_(content)

    def check(self, noise: torch.Tensor) -> None:
        for (piece, tensor), content in zip(self.pieces, self._contents(noise), strict=True):
            if not torch.equal(tensor.cpu(), content):
                raise AssertionError(f"rank {self.rank} loaded another {piece.key} than was saved")

    def _contents(self, noise: torch.Tensor) -> Iterator[torch.Tensor]:
        """Of each piece, the same under every layout."""
        for piece, _ in self.pieces:
            shape = self.shapes[piece.name]
            begin = xxhash.xxh3_64_intdigest(f"{piece.kind}/{piece.name}".encode()) % OFFSETS
            whole = noise[begin : begin + prod(shape)].view(shape)
            yield whole[tuple(map(slice, piece.start, piece.stop))]


class Turn:
    """The phases of a turn on one rank, in their order."""

    def __init__(self, args: argparse.Namespace, layers: int, root: Path) -> None:
        self.rank, self.num_ranks, self.device = dist.get_rank(), dist.get_world_size(), args.device
        self.config = SMOLLM2_MOE | {"num_hidden_layers": layers}
        layout, other = (ParallelLayout(ep=ep, world_size=self.num_ranks) for ep in (self.num_ranks, 1))
        self.state = RankState(self.config, layout, self.rank, self.device)
        self.other = RankState(self.config, other, self.rank, self.device) if other != layout else None
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.state.pieces)
        largest = max(map(prod, family_for(self.config).canonical_tensors(self.config).values()))
        self.noise = torch.randn(largest + OFFSETS, generator=torch.Generator().manual_seed(0))
        self.state.fill(self.noise)
        self.store, self.step = CheckpointStore(root), 0  # only rank 0's is used to write
        self.scratch = root / f"dd-{self.rank}"
        self.snapshot = Snapshot(torch.get_num_threads())

    def run(self, dd_first: bool) -> dict[str, float]:
        """Seconds of the slowest rank, by phase."""
        spent: dict[str, float] = {}
        for is_dd in (dd_first, not dd_first):
            if is_dd:
                for name, flags in (("dd_write", []), ("dd_write_direct", ["oflag=direct"])):
                    spent[name] = timed(self.dd_write, flags)
                    self.scratch.unlink()
            else:
                spent["save"] = timed(self.write, self.begin(), self.state.pieces, False)
        directory = self.begin()
        spent["blocked"] = timed(self.copy)
        spent["behind"] = timed(self.write, directory, self.copied, True)
        saved = self.store.root / f"step-{self.step:06d}"
        files = sorted(saved.glob(f"rank-{self.rank:05d}-*.safetensors"))
        for name, flags in (("dd_read", []), ("dd_read_direct", ["iflag=direct"])):
            spent[name] = timed(self.dd_read, files, flags, cold=files)
        self.state.forget()
        spent["load"] = timed(self.state.load, saved, cold=files)
        self.state.check(self.noise)
        if self.other:
            self.other.forget()
            spent["load_other"] = timed(self.other.load, saved, cold=files)
            self.other.check(self.noise)
        return spent

    def begin(self) -> Path:
        """Deletes the last checkpoint and opens the next one."""
        self.step += 1
        opened: list[Any] = [None]
        if self.rank == 0:
            self.store.discard_after(-1)
            opened[0] = self.store.begin(self.step)
        dist.broadcast_object_list(opened)
        self.pending = opened[0]
        return self.pending.directory

    def dd_write(self, flags: Sequence[str]) -> None:
        size = [f"count={self.num_bytes}", "iflag=count_bytes"]
        dd("if=/dev/zero", f"of={self.scratch}", "conv=fsync", *size, *flags)

    def dd_read(self, files: Sequence[Path], flags: Sequence[str]) -> None:
        for path in files:
            dd(f"if={path}", "of=/dev/null", *flags)

    def copy(self) -> None:
        pieces, tensors = zip(*self.state.pieces, strict=True)
        self.copied = list(zip(pieces, self.snapshot.take(tensors), strict=True))

    def write(self, directory: Path, pieces: Pieces, read_back: bool) -> None:
        entries = write_shard(directory, self.rank, pieces, self.state.shapes, {}, {}, read_back=read_back)
        every: list[Any] | None = [None] * self.num_ranks if self.rank == 0 else None
        dist.gather_object([entry.to_json() for entry in entries], every)
        if every is not None:
            files = [FileEntry.from_json(entry) for entries in every for entry in entries]
            self.store.commit(self.pending, files, {})


def dd(*arguments: str) -> None:
    subprocess.run(["dd", "bs=4M", "status=none", *arguments], check=True)


def timed(run: Callable[..., object], *arguments: Any, cold: Sequence[Path] = ()) -> float:
    """Seconds of the slowest rank, begun together when the disk has nothing left to write and, of `cold`, the page
    cache holds nothing."""
    for path in cold:
        with path.open("rb") as file:
            drop_cached(file.fileno())
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    begin = time.perf_counter()
    run(*arguments)
    spent = time.perf_counter() - begin
    every = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, spent)
    return max(every)


def measure(layers: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A case, in an empty folder."""
    num_ranks = dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    turn = Turn(args, layers, folder)
    first = timed(turn.copy)  # also allocates
    turns = [turn.run(dd_first=i % 2 == 0) for i in range(args.turns)]
    every = [0] * num_ranks
    dist.all_gather_object(every, len(turn.state.pieces))
    return row(layers, turn.store.load(turn.step, checksums=False), sum(every), first, turns)


def row(
    layers: int, manifest: CheckpointManifest, num_pieces: int, first: float, turns: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """What is reported of a case."""
    seconds = {phase: [turn[phase] for turn in turns] for phase in PHASES if phase in turns[0]}
    ratios = {
        "write / dd": ("dd_write", "save"),  # rates
        "write / direct dd": ("dd_write_direct", "save"),
        "read / dd": ("dd_read", "load"),
        "blocked / save": ("blocked", "save"),  # seconds
        "blocked / save read back": ("blocked", "behind"),
    }
    return {
        "layers": layers,
        "ranks": manifest.world_size,
        "files": len(manifest.files),
        "pieces": num_pieces,
        "bytes": manifest.size_bytes,
        "seconds": {phase: summary(values) for phase, values in seconds.items()},
        "first_blocked_s": round(first, 4),
        "gb_per_s": {
            phase: round(manifest.size_bytes / 1e9 / statistics.median(values), 3) for phase, values in seconds.items()
        },
        "ratios": {name: summary([turn[a] / turn[b] for turn in turns]) for name, (a, b) in ratios.items()},
    }


def run_case(layers: int, num_ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="checkpoint-bench-", dir=args.directory) as folder:
        return on_ranks(num_ranks, "cpu", measure, layers, args, Path(folder))  # only the state may lie on a GPU


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{row['bytes'] / 1e9:.1f} GB\n{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}" for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    panels = (
        (
            left,
            "seconds",
            {"save": "synchronous save", "behind": "read back as well", "blocked": "blocked by one behind"},
        ),
        (
            right,
            "gb_per_s",
            {
                "dd_write": "dd, fsync",
                "dd_write_direct": "dd, direct",
                "save": "save",
                "dd_read": "dd, reading",
                "load": "load, verified",
            },
        ),
    )
    for axes, figures, shown in panels:
        for i, (phase, label) in enumerate(shown.items()):
            values = [row[figures][phase] for row in rows]
            heights = [value["median"] if figures == "seconds" else value for value in values]
            places = [j + (i - len(shown) / 2 + 0.5) * 0.8 / len(shown) for j in range(len(rows))]
            axes.bar(places, heights, 0.8 / len(shown), label=label)
        axes.set_xticks(range(len(rows)), labels, fontsize=8)
        axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(shown), frameon=False)
        axes.grid(axis="y", alpha=0.3)
    left.set(ylabel="seconds (median)")
    right.set(ylabel="GB/s (median), all ranks together")
    figure.savefig(path, dpi=110)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown: medians, of ratios with their ranges."""
    phases = [phase for phase in PHASES if phase != "blocked"]
    head = ["state", "ranks", "blocked", *(f"{phase}, GB/s" for phase in phases), *rows[0]["ratios"]]
    lines = [head, ["---"] * len(head)]
    for result in rows:
        rates, ratios = result["gb_per_s"], result["ratios"].values()
        lines.append(
            [
                f"{result['bytes'] / 1e9:.1f} GB",
                str(result["ranks"]),
                f"{result['seconds']['blocked']['median']:.2f} s",
                *(f"{rates[phase]:.2f}" if phase in rates else "" for phase in phases),
                *(f"{ratio['median']:.2f} ({ratio['min']:.2f} – {ratio['max']:.2f})" for ratio in ratios),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the state lives")
    parser.add_argument("--cases", nargs="+", default=["6x1", "6x2", "6x4", "30x2"], metavar="LAYERSxRANKS")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("."), help="on the disk to be measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = [run_case(*map(int, case.split("x")), args) for case in args.cases]
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    name = f"checkpoint-{place(gpu)}"
    report = {
        "command": " ".join(["python -m scripts.bench.checkpoint", *sys.argv[1:]]),
        "hardware": hardware() + (f", {gpu}" if gpu else ""),
        "versions": versions("torch", "xxhash"),
        "load_average": os.getloadavg()[0],
        "saves": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(rows, args.out / f"{name}.png")
    print(table(rows))


if __name__ == "__main__":
    main()
