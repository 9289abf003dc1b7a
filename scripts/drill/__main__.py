"""usage: see scripts/preemption_drill.sh"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rlhpc.cluster.attempt import past_attempts
from scripts.bench.machine import hardware, versions
from scripts.drill import plan, report, strike
from scripts.drill.run import PATIENCE_S, Run, Shape, prepare
from tests.e2e.runs import assert_same_end
from tests.slurm.cluster import Cluster, named_cluster


def drill(cluster: Cluster, directory: Path, shape: Shape, events: list[plan.Event], rng: random.Random) -> list[str]:
    """Interrupts a run and compares its end with one that was left alone. Returns the rules that were broken."""
    task = prepare(directory)
    reference = Run(cluster, task, directory / "reference", shape, "high")
    if (state := cluster.wait_end(reference.job, PATIENCE_S)) != "COMPLETED":
        raise SystemExit(f"the uninterrupted run ended as {state}\n{reference.log()[-5000:]}")
    if restarts := cluster.restarts(reference.job):
        print(f"the undisturbed run lost {restarts} attempts by itself")
    expected_s = reference.expected_s()
    print("seconds per phase, undisturbed: " + ", ".join(f"{k} {v:.3f}" for k, v in sorted(expected_s.items())))

    run = Run(cluster, task, directory / "run", shape, events[0].kind.partition)
    outcomes, broken = [], []
    print(report.heading(), flush=True)
    for number, event in enumerate(events):
        if number:
            strike.prepare(run, event.kind)
        outcomes.append(outcome := strike.strike(run, event, expected_s, rng))
        broken += outcome.broken_rules()
        print(report.row(outcome), flush=True)
    if (state := cluster.wait_end(run.job, PATIENCE_S)) != "COMPLETED":
        broken.append(f"the run ended as {state}:\n{run.log()[-5000:]}")
    if left := cluster.processes(run.job):
        broken.append(f"processes are left: {left}")
    lines = [*past_attempts(reference.directory), *past_attempts(run.directory)]
    print(report.summary(outcomes, lines))
    found = {
        "command": " ".join(["bash scripts/preemption_drill.sh", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions("torch", "megatron-core", "ray"),
        "events": [asdict(outcome) for outcome in outcomes],
        "attempts": lines,
    }
    (directory / "drill.json").write_text(json.dumps(found, indent=1) + "\n")
    unplanned = cluster.restarts(run.job) - len(events) - run.requeued_by_us
    print(f"attempts: {len(lines) - 1} for {len(events)} events; {unplanned} ended by themselves")
    try:
        assert_same_end(run.directory, reference.directory)
        print(f"bitwise: the end of step {shape.steps} equals that of the uninterrupted run")
    except AssertionError as error:
        broken.append(f"the end differs from that of the uninterrupted run: {error}")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/preemption_drill.sh", description="Interrupts a run N times.")
    parser.add_argument("events", type=int, metavar="N", help="how many interruptions; 20 hit every phase twice")
    parser.add_argument("--seed", type=int, default=0, help="of the events (default 0)")
    parser.add_argument("--nodes", type=int, default=3, help="of the job (default 3)")
    parser.add_argument("--ranks", type=int, default=1, help="per node (default 1)")
    parser.add_argument("--steps", type=int, help="of the run (default 3 N + 4)")
    parser.add_argument("--json", type=Path, help="where to write events and attempts")
    parser.add_argument("--dir", type=Path, help="where the runs go, and stay (default: a temporary directory)")
    arguments = parser.parse_args()
    with suppress(PermissionError):  # only then a busy machine can't make it miss a phase of milliseconds
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    rng = random.Random(arguments.seed)
    shape = Shape(arguments.nodes, arguments.ranks, arguments.steps or 3 * arguments.events + 4)
    directory = arguments.dir or Path(tempfile.mkdtemp(prefix="rlhpc-drill-"))
    directory.mkdir(parents=True, exist_ok=True)
    with named_cluster("d", arguments.nodes + 1) as cluster:  # a node more than the job has
        broken = drill(cluster, directory, shape, plan.events(arguments.events, rng), rng)
    if arguments.json:
        shutil.copy(directory / "drill.json", arguments.json)
    for rule in broken:
        print(f"BROKEN: {rule}")
    if broken:
        print(f"everything is in {directory}")
        return 1
    if not arguments.dir:
        shutil.rmtree(directory)
    print("no rule was broken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
