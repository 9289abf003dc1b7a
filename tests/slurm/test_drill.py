"""A short preemption drill as a user runs it: real training over two nodes, interrupted in three ways."""

import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from scripts.drill import plan, strike
from tests.slurm.cluster import ROOT, Cluster

SEED = 493  # preempted while it saves, a rank killed in publish, preempted with grace in an update


@pytest.mark.timeout(900)
def test_short_drill(slurm: Cluster, tmp_path: Path) -> None:
    environ = slurm.environ(
        MINISLURM_DIR=str(slurm.directory), MINISLURM_PORT=str(slurm.port), MINISLURM_PREFIX=slurm.prefix,
        MINISLURM_NODES=str(slurm.nodes), RLHPC_VENV=os.environ.get("RLHPC_VENV", ".venv"),
    )  # fmt: skip
    command = ["bash", str(ROOT / "scripts/preemption_drill.sh"), "3", f"--seed={SEED}", "--nodes=2", "--steps=12"]
    done = subprocess.run(
        [*command, f"--dir={tmp_path}"], env=environ, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert re.search(r"told of its end \(2 events\): 0 finished steps repeated", done.stdout)
    assert "bitwise: the end of step 12 equals" in done.stdout


def test_twenty_events_hit_every_phase_twice_and_every_kind() -> None:
    events = plan.events(20, random.Random(1))
    assert sorted(event.phase for event in events) == sorted(2 * plan.PHASES)
    assert {event.kind for event in events} == {*plan.TOLD, *plan.KILLED}
    assert [event.kind.told for event in events] == [True, False] * 10
    assert all(event.kind is not plan.RANK for event in events if event.phase == "start")


@pytest.mark.parametrize(
    ("kind", "phase", "step", "committed", "requeued", "broken"),
    [
        (plan.PREEMPTED, "generate", 8, 7, 1, []),
        (plan.PREEMPTED, "generate", 8, 6, 1, ["1 finished steps are repeated, 0 allowed"]),
        (plan.PREEMPTED, "publish", 8, 7, 1, ["1 finished steps are repeated, 0 allowed"]),
        (plan.SIGUSR2, "update", 8, 6, 1, []),  # cut in mid-update
        (plan.RANK, "score", 8, 5, 1, []),  # save_freq is 2
        (plan.NODE, "score", 8, 4, 1, ["3 finished steps are repeated, 2 allowed"]),
        (plan.DRIVER, "save", 8, 8, 2, ["requeued 2 times, not once"]),
    ],
)
def test_rules(kind: plan.Kind, phase: str, step: int, committed: int, requeued: int, broken: list[str]) -> None:
    event, begun = plan.Event(kind, phase, 0.5, 1), phase in strike.OF_THE_STEP
    outcome = strike.Outcome(event, "7-0", step, None, step - begun, committed, begun, None, None, requeued)
    where = f"{kind.name} in {phase} of step 8 (7-0): "
    assert outcome.broken_rules() == [where + rule for rule in broken]
