"""One table of what rlhpc, verl and TRL took for the same steps, from the rows that each wrote.

usage: python -m scripts.bench.peers.compare NAME rlhpc=RUN/metrics.jsonl verl=OUT/metrics.jsonl TRL=OUT.jsonl ...
           --hardware "1 x NVIDIA H200" --versions torch=2.11.0 ... [--skip 2]

Prints medians over the steps after the first `--skip`, which compile and warm up, in Markdown, and writes every row
into scripts/bench/results/NAME.json. Seconds are each system's own: against_peers.md says what each counts where.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from scripts.bench.machine import RESULTS

PHASES = ("gen", "reward", "old_log_prob", "update_actor", "update_weights")
KEPT = ("timing_s/", "perf/", "critic/score/mean", "response_length/mean", "training/rollout_", "actor/grad_norm")


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The training steps in a file; verl puts a row's metrics one level lower."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [{"step": row["step"], **row.get("data", row)} for row in rows]
    steps = [row for row in rows if row.get("timing_s/gen") is not None]
    if not steps:
        raise SystemExit(f"{file}: no row has timing_s/gen; the run ended before its first step did")
    return [{name: row[name] for name in row if name == "step" or name.startswith(KEPT)} for row in steps]


def medians(rows: list[dict[str, Any]], skip: int) -> dict[str, float]:
    """Seconds of each phase and of what is left of a step, its tokens, and tokens per second over the whole of it."""
    counted = rows[skip:] or rows[-1:]
    median = statistics.median
    seconds = {phase: median([row.get(f"timing_s/{phase}", 0.0) for row in counted]) for phase in PHASES}
    rest = [row["timing_s/step"] - sum(row.get(f"timing_s/{phase}", 0.0) for phase in PHASES) for row in counted]
    return seconds | {
        "other": median(rest),
        "step": median([row["timing_s/step"] for row in counted]),
        "tokens": median([row["perf/total_num_tokens"] for row in counted]),
        "tokens/s": median([row["perf/total_num_tokens"] / row["timing_s/step"] for row in counted]),
        "steps": len(counted),
    }


def table(systems: dict[str, dict[str, float]]) -> str:
    columns = (*PHASES, "other", "step")
    lines = [
        "| | steps | tokens | " + " | ".join(columns) + " | tokens/s |",
        "|---|" + "---|" * (len(columns) + 3),
    ]
    for name, values in systems.items():
        seconds = " | ".join(f"{values[column]:.2f} s" for column in columns)
        tokens, rate = f"{values['tokens'] / 1e3:.0f}k", f"{values['tokens/s'] / 1e3:.1f}k"
        lines.append(f"| {name} | {values['steps']} | {tokens} | {seconds} | {rate} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the result, hardware included: against-peers-h200")
    parser.add_argument("files", nargs="+", metavar="SYSTEM=FILE")
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--versions", nargs="+", required=True, metavar="PACKAGE=VERSION")
    parser.add_argument("--command", default="scripts/bench/against_peers.md")
    parser.add_argument("--skip", type=int, default=2, help="steps at the beginning that don't count")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = {name: rows_of(Path(file)) for name, file in (pair.split("=", 1) for pair in args.files)}
    report = {
        "command": args.command,
        "hardware": args.hardware,
        "versions": dict(pair.split("=", 1) for pair in args.versions),
        "medians": {name: medians(steps, args.skip) for name, steps in rows.items()},
        "steps": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(report["medians"]))


if __name__ == "__main__":
    main()
