"""What a weight sync costs: planning, bytes, and seconds against the floor that the same machine sets.

usage: python -m scripts.bench.sync [--device cpu|cuda] [--ranks 1 2 4] [--repeats 10] [--out scripts/bench/results]

The floor of a case is measured in the same run: a contiguous copy of as many bytes as a rank moves within itself, then
one all-to-all of as many bytes as it exchanges with each other rank, on all ranks at once. The best repeats are
compared, because machines are shared. Every sync is verified. Writes sync-<hardware>.json and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.execute import Resharder
from rlhpc.reshard.families import family_for
from rlhpc.reshard.plan import ReshardPlan, plan
from rlhpc.reshard.verify import verify
from scripts.bench.machine import RESULTS, hardware, place, versions
from scripts.bench.processes import on_ranks
from scripts.make_tiny_model import tiny_config

SMOLLM2_MOE = {  # SmolLM2-135M upcycled to 4 experts
    "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 576, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536,
    "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 49152, "rms_norm_eps": 1e-5,
    "rope_theta": 1e5, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3_SHAPE = QWEN3_30B | {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "moe_intermediate_size": 2048, "num_experts": 256, "vocab_size": 129280,
}  # fmt: skip
MODELS = {
    "tiny": tiny_config(),
    "smollm2-moe": SMOLLM2_MOE,
    "qwen3-30b, 12 layers": QWEN3_30B | {"num_hidden_layers": 12},
    "qwen3-30b": QWEN3_30B,
}


@dataclass(frozen=True)
class Case:
    model: str
    num_ranks: int
    trainer: dict[str, int] = field(default_factory=dict)
    rollout_tp: int = 1
    expert_parallel: bool = False

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(**self.trainer, world_size=self.num_ranks)

    @property
    def name(self) -> str:
        source = "·".join(f"{axis.upper()}{size}" for axis, size in self.trainer.items()) or f"DP{self.num_ranks}"
        replicas = self.num_ranks // self.rollout_tp
        target = f"{'EP' if self.expert_parallel else 'TP'}{self.rollout_tp}" if self.rollout_tp > 1 else "whole"
        return f"{source} → {target}" + (f" × {replicas}" if replicas > 1 else "")


CASES = (
    Case("tiny", 1),
    Case("tiny", 2),
    Case("tiny", 2, {"ep": 2}),
    Case("tiny", 2, {"ep": 2}, 2),
    Case("tiny", 2, {"tp": 2}, 2),
    Case("tiny", 4, {"ep": 4}),
    Case("tiny", 4, {"ep": 4}, 2),
    Case("tiny", 4, {"tp": 2, "pp": 2, "ep": 2}, 4),
    Case("smollm2-moe", 1),
    Case("smollm2-moe", 2),
    Case("smollm2-moe", 2, {"ep": 2}),
    Case("smollm2-moe", 2, {"pp": 2}),
    Case("smollm2-moe", 4, {"ep": 4}),
    Case("smollm2-moe", 4, {"ep": 2, "etp": 2}),
    Case("qwen3-30b, 12 layers", 1),
    Case("qwen3-30b, 12 layers", 2, {"ep": 2}, 2),
    Case("qwen3-30b, 12 layers", 2, {"ep": 2}, 2, expert_parallel=True),
    Case("qwen3-30b", 2, {"ep": 2}, 2),
    Case("qwen3-30b", 2, {"ep": 2}, 2, expert_parallel=True),
    Case("qwen3-30b, 12 layers", 4, {"ep": 4}, 4),
    Case("qwen3-30b, 12 layers", 4, {"tp": 2, "ep": 4}, 4, expert_parallel=True),
)
# Planning alone: model, trainer, its ranks, rollout_tp, expert_parallel.
PLANNED: tuple[tuple[str, dict[str, Any], ParallelLayout, int, bool], ...] = (
    ("Qwen3-30B-A3B", QWEN3_30B, ParallelLayout(tp=4, pp=2, ep=8, world_size=32), 8, False),
    ("DeepSeek-V3's shape", DEEPSEEK_V3_SHAPE, ParallelLayout(tp=8, ep=64, world_size=512), 32, True),
)


def local_buffers(
    specs: Sequence[ShardSpec], rank: int, device: str, make: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors as large as the rank's shards need."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        for shard in spec.on(rank):
            shapes[shard.buffer] = tuple(map(max, shapes.get(shard.buffer, shard.end), shard.end))
    dtype = getattr(torch, specs[0].dtype)
    return {name: make(shape, device=device, dtype=dtype) for name, shape in shapes.items()}


def seconds(device: str, repeats: int, run: Callable[..., object], *arguments: Any) -> list[float]:
    """Of the slowest rank, for every repeat after one that doesn't count."""
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    measured = []
    for _ in range(repeats + 1):
        dist.barrier()
        finish()
        begin = time.perf_counter()
        run(*arguments)
        finish()
        measured.append(time.perf_counter() - begin)
    every: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, measured[1:])
    return [max(ranks) for ranks in zip(*every, strict=True)]


def floors(copies: ReshardPlan, rank: int, device: str, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of one contiguous local copy and of one all-to-all of this plan's bytes."""
    filled = partial(torch.ones, dtype=torch.uint8, device=device)  # fresh zeros are one page of memory, read often
    source, target = filled(copies.local_bytes(rank)), filled(copies.local_bytes(rank))
    if device == "cpu":  # memcpy, which torch's own copies don't reach
        local = seconds(device, repeats, np.copyto, target.numpy(), source.numpy())
    else:
        local = seconds(device, repeats, target.copy_, source)
    del source, target
    sends, receives = ([0] * dist.get_world_size() for _ in range(2))
    for copy in copies.copies_of(rank):
        if not copy.is_local:
            side, peer = (sends, copy.dst_rank) if copy.src_rank == rank else (receives, copy.src_rank)
            side[peer] += copies.copy_bytes(copy)
    if not copies.remote_bytes:
        return local, [0.0]
    outgoing, incoming = filled(sum(sends)), filled(sum(receives))
    return local, seconds(device, repeats, dist.all_to_all_single, incoming, outgoing, receives, sends)


def planned(
    config: dict[str, Any], layout: ParallelLayout, tp: int, expert_parallel: bool, dtype: str, rank: int
) -> tuple[list[ShardSpec], list[ShardSpec], Resharder, dict[str, float]]:
    """Source and destination specs, what `rank` does between them, and the seconds of each stage."""
    family, stages = family_for(config), [time.perf_counter()]
    src = family.trainer_specs(config, layout, dtype)
    ranks = range(layout.world_size)
    dst = family.rollout_specs(config, tp, ranks, dtype, expert_parallel=expert_parallel)
    stages.append(time.perf_counter())
    copies = plan(src, dst)
    stages.append(time.perf_counter())
    resharder = Resharder(copies, rank)
    stages.append(time.perf_counter())
    spent = {name: b - a for name, a, b in zip(("specs", "plan", "rounds"), stages[:-1], stages[1:], strict=True)}
    return src, dst, resharder, spent | {"total": stages[-1] - stages[0]}


def measure(case: Case, device: str, dtype: str, repeats: int) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), range(case.num_ranks)
    arguments = (MODELS[case.model], case.layout, case.rollout_tp, case.expert_parallel, dtype)
    src, dst, resharder, planning = planned(*arguments, rank)
    held, needed = local_buffers(src, rank, device, torch.randn), local_buffers(dst, rank, device, torch.zeros)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sync = seconds(device, repeats, resharder.run, held, needed)
    extra = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    verify(resharder.plan, held, needed, rank)
    del held, needed
    local, remote = floors(resharder.plan, rank, device, repeats)
    every: list[float] = [0.0] * case.num_ranks
    dist.all_gather_object(every, planning["total"])
    return {
        "model": case.model,
        "layouts": case.name,
        "ranks": case.num_ranks,
        "parameters": sum(prod(spec.shape) for spec in src),
        "dtype": dtype,
        "planning_s": round(max(every), 4),
        "local_bytes": [resharder.plan.local_bytes(r) for r in ranks],
        "received_bytes": [resharder.plan.received_bytes(r) for r in ranks],
        "extra_bytes": extra,  # of device memory, at most, while it runs
        "sync_s": summary(sync),
        "floor_local_s": summary(local),
        "floor_remote_s": summary(remote),
        "times_floor": round(min(sync) / (min(local) + min(remote)), 2),
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    stages = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in stages.items()}


def measure_all(cases: Sequence[Case], device: str, repeats: int) -> list[dict[str, Any]]:
    """Those of one number of ranks, in one start of them."""
    torch.set_num_threads(1)
    return [measure(case, device, "float32" if device == "cpu" else "bfloat16", repeats) for case in cases]


def planning_alone() -> list[dict[str, Any]]:
    rows = []
    for name, config, layout, tp, expert_parallel in PLANNED:
        rank = layout.world_size // 2
        _, _, resharder, spent = planned(config, layout, tp, expert_parallel, "bfloat16", rank)
        axes = "·".join(
            f"{axis.upper()}{getattr(layout, axis)}" for axis in ("tp", "pp", "ep") if getattr(layout, axis) > 1
        )
        rows.append(
            {
                "model": name,
                "layouts": f"{axes} → {'EP' if expert_parallel else 'TP'}{tp} × {layout.world_size // tp}",
                "ranks": layout.world_size,
                "seconds": {stage: round(value, 3) for stage, value in spent.items()},
                "received_bytes": resharder.plan.received_bytes(rank),
            }
        )
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{row['model']}, {row['ranks']} ranks: {row['layouts']}" for row in rows]
    places = range(len(rows), 0, -1)
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.3 * len(rows)), layout="constrained")
    axes.barh(places, [row["sync_s"]["min"] for row in rows], color="tab:blue", label="sync")
    bottom = [row["floor_local_s"]["min"] for row in rows]
    remote = [row["floor_remote_s"]["min"] for row in rows]
    axes.barh(places, bottom, height=0.35, color="tab:orange", label="floor: contiguous copy")
    axes.barh(places, remote, left=bottom, height=0.35, color="tab:red", label="floor: all-to-all")
    axes.set_yticks(places, labels, fontsize=8)
    axes.set(xlabel="seconds (best repeat)", xscale="log")
    axes.legend(fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, help="default: all on CUDA, where the largest takes 70 GB of each of two"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    models = args.models or (list(MODELS) if args.device == "cuda" else ["tiny", "smollm2-moe"])
    most = torch.cuda.device_count() if args.device == "cuda" else max(args.ranks)
    rows: list[dict[str, Any]] = []
    for num_ranks in (n for n in args.ranks if n <= most):  # NCCL wants a device per rank
        if cases := [case for case in CASES if case.num_ranks == num_ranks and case.model in models]:
            rows += on_ranks(num_ranks, args.device, measure_all, cases, args.device, args.repeats)
    rows.sort(key=lambda row: list(MODELS).index(row["model"]))
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    name = f"sync-{place(gpu, most)}"
    report = {
        "command": " ".join(["python -m scripts.bench.sync", *sys.argv[1:]]),
        "hardware": hardware() + (f", {most} x {gpu}" if gpu else ""),
        "versions": versions("torch"),
        "load_average": os.getloadavg()[0],
        "planning": planning_alone(),
        "syncs": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    plot(rows, args.out / f"{name}.png")
    for row in report["planning"]:
        print(f"planning {row['model']}, {row['ranks']} ranks, {row['layouts']}: {row['seconds']}")
    for row in rows:
        moved = [max(row[side]) / 1e6 for side in ("local_bytes", "received_bytes")]
        print(
            f"{row['model']:22} {row['layouts']:22} {moved[0]:8.1f} MB local {moved[1]:8.1f} MB received "
            f"{row['sync_s']['median']:9.4f} s, at best {row['sync_s']['min']:.4f} s, {row['times_floor']} x floor"
        )


if __name__ == "__main__":
    main()
