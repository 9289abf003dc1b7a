"""Memory at the end of each phase of a run's steps, and whether it grows.

usage: python -m scripts.bench.memory RUN_DIR [--after 2]

Prints, from metrics.jsonl, GiB in the last step and growth per step, by least squares over the steps after --after
(the first ones compile and fill caches). Ends with 1 where a phase's memory grew by more than a quarter of a GiB in
all. What torch keeps cached while it trains comes and goes with the batches' lengths: the device's memory counts where
that cache was just given back, what is allocated and the host's everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.metrics.jsonl import MetricsFile

LEAK_GIB = 0.25
# Phases at whose end torch holds blocks that it doesn't use.
CACHED = ("old_log_prob", "ref", "values", "update_critic", "update_actor")

Memory = dict[str, dict[str, dict[str, float]]]  # kind -> phase -> first, last, per step


def memory_of(rows: Sequence[dict[str, Any]]) -> Memory:
    """GiB of each kind that rlhpc/train/usage.py tells, at the end of each phase that every row has."""
    found: Memory = {}
    for name in [name for name in rows[-1] if name.startswith("perf/") and "_memory_gb/" in name]:
        kind, phase = name.removeprefix("perf/").split("_memory_gb/")
        values = [row[name] for row in rows if name in row]
        if len(values) == len(rows):
            slope = float(np.polyfit(range(len(values)), values, 1)[0]) if len(values) > 1 else 0.0
            found.setdefault(kind, {})[phase] = {"first": values[0], "last": values[-1], "per step": slope}
    return found


def leaks(memory: Memory, num_steps: int) -> list[str]:
    """The kinds of memory that grew by more than LEAK_GIB over `num_steps`, and after which phases."""
    return [
        f"{kind} memory at the end of {phase} grew by {growth['per step'] * 1024:.1f} MiB a step"
        for kind, phases in memory.items()
        for phase, growth in phases.items()
        if growth["per step"] * (num_steps - 1) > LEAK_GIB and not (kind == "device" and phase in CACHED)
    ]


def table(memory: Memory) -> Iterator[str]:
    yield f"{'GiB at the end of':22}" + "".join(f"{kind:>22}" for kind in memory)
    for phase in next(iter(memory.values())):
        found = [phases[phase] for phases in memory.values()]
        cells = [f"{growth['last']:.2f} ({growth['per step'] * 1024:+z.1f} MiB)" for growth in found]
        yield f"{phase:22}" + "".join(f"{cell:>22}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--after", type=int, default=2, help="the last step that isn't counted")
    args = parser.parse_args()
    rows = [row for row in MetricsFile(args.run_dir / "metrics.jsonl").read() if row["step"] > args.after]
    if len(rows) < 2:
        raise SystemExit(f"{args.run_dir / 'metrics.jsonl'} has {len(rows)} steps after {args.after}; two are needed")
    memory = memory_of(rows)
    print(f"steps {rows[0]['step']} to {rows[-1]['step']}", *table(memory), sep="\n")
    if found := leaks(memory, len(rows)):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
