"""Keeps what a run measured as a committed result: its metrics by step, where it ran and with what.

usage: python -m scripts.bench.record RUN_DIR NAME --hardware "1 x NVIDIA H200" --command "..." --versions torch=2.11.0

Writes NAME.json and NAME.png into scripts/bench/results. The machine need not be the one that the run was on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rlhpc.cli.report import write_plot
from rlhpc.metrics.jsonl import MetricsFile
from scripts.bench.machine import RESULTS

KEPT = (
    "val-core/", "critic/score/mean", "reward/zero_std_group_ratio", "response_length/mean", "actor/grad_norm",
    "actor/entropy", "training/rollout_logprobs_diff_", "perf/", "timing_s/",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name", help="of the result, hardware included: tiny-arithmetic-h200")
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--versions", nargs="+", required=True, metavar="PACKAGE=VERSION")
    parser.add_argument("--note", help="what a reader must know to read the numbers rightly")
    args = parser.parse_args()
    rows = MetricsFile(args.run_dir / "metrics.jsonl").read()
    steps = [{name: row[name] for name in row if name == "step" or name.startswith(KEPT)} for row in rows]
    report = {
        "command": args.command,
        "hardware": args.hardware,
        "versions": dict(pair.split("=", 1) for pair in args.versions),
    } | ({"note": args.note} if args.note else {})
    (RESULTS / f"{args.name}.json").write_text(json.dumps(report | {"steps": steps}, indent=1) + "\n")
    print(write_plot(rows, RESULTS / f"{args.name}.png"))


if __name__ == "__main__":
    main()
