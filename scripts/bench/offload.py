"""What it costs to move the trainer's state to host memory and back, against the rate of PCIe, and how much of that is
seen by whoever trains.

usage: python -m scripts.bench.offload [--layers 8] [--model DIR] [--tokens 16384] [--microbatches 8] [--cycles 5]
           [--ranks 1] [--ep 1] [--out scripts/bench/results]

A slice of Qwen3-30B-A3B's shape with random weights (8 layers, 5.6 B parameters: 73 GiB of host memory). PCIe's rate is
that of one copy of 2 GiB each way, between the device and host memory of the same kind, on every rank at once. Then
cycles after a step each: everything moves while nothing else happens; or it leaves while the weights are copied on the
device, as a publish reads them, and arrives while logprobs and a step of all microbatches are computed. Without CUDA
nothing moves, which the tiny model then shows. Writes offload-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.train.protocols import LossSpec
from scripts.bench.machine import hardware, place, versions
from scripts.bench.train import batches_of, build, on_slice, seconds, sequences, slice_arguments, synchronize

PROBE_BYTES = 2**31


def pcie_rates(device: str, repeats: int = 5) -> dict[str, float]:
    """Bytes/s of one copy each way, the best; nothing without CUDA."""
    if device == "cpu":
        return {}
    from rlhpc.backends.megatron.host_memory import page_locked

    host = page_locked(PROBE_BYTES)
    on_device = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    out = min(seconds(device, host.copy_, on_device, True) for _ in range(repeats))
    back = min(seconds(device, on_device.copy_, host, True) for _ in range(repeats))
    return {"to_host": PROBE_BYTES / out, "to_device": PROBE_BYTES / back}


class Cycle:
    """One trainer, its batches, and the seconds of what it does, by name, in order of time."""

    def __init__(self, trainer: Any, args: argparse.Namespace, device: str, vocab_size: int) -> None:
        self._trainer, self._device = trainer, device
        self._args = args
        all_tokens = argparse.Namespace(**vars(args) | {"tokens": args.tokens * args.microbatches})
        self._made = sequences(all_tokens, vocab_size, seed=0)
        num_predicted = sum(s.response_len for s in self._made)
        self._loss = LossSpec(
            loss_mode="vanilla", clip_low=0.2, clip_high=0.2, clip_c=3.0, loss_agg_mode="token-mean",
            num_global_tokens=float(num_predicted), num_global_seqs=float(len(self._made)), loss_scale_factor=None,
            entropy_coeff=0.0, kl_coef=0.0, kl_type="k3", temperature=1.0,
        )  # fmt: skip
        self._published = {name: torch.empty_like(value) for name, value in trainer.source_buffers().items()}
        self.times: dict[str, list[float]] = defaultdict(list)

    def run(self, name: str, function: Callable[[], object]) -> None:
        self.times[name].append(seconds(self._device, function))

    def train(self) -> None:
        begin = time.perf_counter()
        batches = batches_of(self._trainer, self._made, self._args)
        self.times["logprobs"].append(time.perf_counter() - begin)
        self._trainer.step(batches, self._loss)

    def read(self) -> None:
        """As a publish reads the weights."""
        for name, value in self._trainer.source_buffers().items():
            self._published[name].copy_(value)
        if self._device == "cuda":
            torch.cuda.current_stream().synchronize()

    def alone(self) -> None:
        """Device idle otherwise."""
        self.run("sleep", self._trainer.sleep)
        self.run("wake", self._wake)
        self.run("train", self.train)  # with gradients' memory to take
        self.run("train again", self.train)
        self.run("read", self.read)

    def _wake(self) -> None:
        begin = time.perf_counter()
        self._trainer.wake()
        self.times["wake returns"].append(time.perf_counter() - begin)
        if self._device == "cuda":
            torch.cuda.current_stream().synchronize()
        self.times["weights are there"].append(time.perf_counter() - begin)
        for part in self._trainer._host._parts:
            self._trainer._host.wait_for(part)

    def leave_and_read(self) -> None:
        begin = time.perf_counter()
        self._trainer.begin_sleep()
        self.times["begin_sleep returns"].append(time.perf_counter() - begin)
        self.read()
        self.times["read while leaving"].append(time.perf_counter() - begin)
        self._trainer.sleep()

    def arrive_and_train(self) -> None:
        self._trainer.wake()
        begin = time.perf_counter()
        batches = batches_of(self._trainer, self._made, self._args)
        self.times["logprobs after wake"].append(time.perf_counter() - begin)
        self._trainer.step(batches, self._loss)


def measure(trainer: Any, args: argparse.Namespace, device: str, vocab_size: int) -> dict[str, Any]:
    cycle = Cycle(trainer, args, device, vocab_size)
    for _ in range(args.warm_up):
        cycle.train()
    synchronize(device)
    used = [_allocated(device)]
    begin = time.perf_counter()
    trainer.begin_sleep()
    cycle.times["first begin_sleep"].append(time.perf_counter() - begin)
    used.append(_allocated(device))
    trainer.sleep()
    used.append(_allocated(device))
    trainer.wake()
    cycle.train()
    for _ in range(args.cycles):
        cycle.alone()
        cycle.run("leave and read", cycle.leave_and_read)
        cycle.run("arrive and train", cycle.arrive_and_train)
    host = trainer._host
    parts = {name: sum(map(len, part.device)) for name, part in host._parts.items() if part.device}
    return {"bytes": parts, "allocated": used, "times": dict(cycle.times)}


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def measure_rank(model: Path, args: argparse.Namespace, device: str) -> dict[str, Any]:
    rates = pcie_rates(device)
    if device == "cuda":
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        print("PCIe, GB/s:", {way: round(rate / 1e9, 1) for way, rate in rates.items()}, flush=True)
    trainer = build(model, args, device)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    return measure(trainer, args, device, vocab_size) | {"pcie": rates}


def report_of(result: dict[str, Any]) -> dict[str, Any]:
    """Rates are those of all bytes over the seconds of the whole call, memory given back or taken included. Exposed is
    what a step takes longer than one of a trainer that never sleeps and is read at once."""
    median = {name: statistics.median(values) for name, values in result["times"].items()}
    total, pcie = sum(result["bytes"].values()), result["pcie"]
    awake, leaving, asleep = result["allocated"]
    report: dict[str, Any] = {
        "gib_moved": {name: size / 2**30 for name, size in result["bytes"].items()},
        "gib_freed": {"gradients": (awake - leaving) / 2**30, "the rest": (leaving - asleep) / 2**30},
        "seconds": median,
        "all_seconds": result["times"],
        "exposed_s": {
            "sleep": median["leave and read"] - median["read"],
            "wake": median["arrive and train"] - median["train again"],
        },
    }
    if total:
        report["pcie_gb_per_s"] = {way: rate / 1e9 for way, rate in pcie.items()}
        report["floor_s"] = {way: total / rate for way, rate in pcie.items()}
        report["of_pcie"] = {
            "sleep": total / median["sleep"] / pcie["to_host"],
            "leave and read": total / median["leave and read"] / pcie["to_host"],
            "wake": total / median["wake"] / pcie["to_device"],
        }
    return report


def main() -> None:
    parser = slice_arguments(__doc__)
    parser.add_argument("--microbatches", type=int, default=8, help="of each rank in a step")
    parser.add_argument("--cycles", type=int, default=5, help="measured")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before; the first compile")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _, result = on_slice(measure_rank, args, device)
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    report = {
        "command": " ".join(["python -m scripts.bench.offload", *sys.argv[1:]]),
        "hardware": gpu or hardware(),
        "versions": versions("torch", "megatron-core"),
        "tokens_per_rank": args.tokens * args.microbatches,
        "model": f"{args.layers} layers of Qwen3-30B-A3B's shape" if gpu else "the tiny model's shape",
        **report_of(result),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"offload-{place(gpu, args.ranks)}.json").write_text(json.dumps(report, indent=2) + "\n")
    if not result["bytes"]:
        print("nothing moves on a CPU: the state is in host memory already")
    for name in ("gib_moved", "gib_freed", "seconds", "exposed_s", "pcie_gb_per_s", "floor_s", "of_pcie"):
        for key, value in report.get(name, {}).items():
            print(f"{name:14} {key:22} {value:9.4f}")


if __name__ == "__main__":
    main()
