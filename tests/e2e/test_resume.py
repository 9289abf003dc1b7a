"""The real command, killed or stopped anywhere, ends bitwise where an uninterrupted run ends."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from tests.e2e.runs import (
    assert_same_end,
    command,
    final_tensors,
    leftovers,
    rows,
    run_to_end,
    start,
    wait_for,
)  # fmt: skip


def test_the_uninterrupted_run_trains(reference: Path) -> None:
    metrics = rows(reference)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4, 5, 6]
    assert all("val-core/digits/reward/mean@1" in metrics[step] for step in (0, 3, 6))
    assert all(row["actor/grad_norm"] > 0 for row in metrics[1:])
    # On the same weights both engines agree: the first mini-batch of a step is on-policy.
    assert max(row["training/rollout_probs_diff_max"] for row in metrics[1:]) < 1e-4
    assert metrics[6]["val-core/digits/reward/mean@1"] != metrics[0]["val-core/digits/reward/mean@1"]


def test_the_weights_change(reference: Path) -> None:
    moments: Counter[str] = Counter()  # of all parts of each tensor
    for name, tensor in final_tensors(reference).items():
        if "exp_avg_sq/" in name:
            moments[name.partition("/")[2].partition("[")[0]] += float(tensor.sum())
    assert moments and all(total > 0 for total in moments.values())


def test_killed_between_and_within_steps(task: Path, reference: Path, tmp_path: Path) -> None:
    """SIGKILL right after a step that isn't committed, then at random moments until a run gets through."""
    arguments, log, run_dir = command(task, tmp_path / "run"), tmp_path / "log", tmp_path / "run"
    process = start(arguments, log)
    wait_for(lambda: len(rows(run_dir)) >= 4, process, log)  # step 3 is logged, 2 the newest checkpoint
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert max(row["step"] for row in rows(run_dir)) >= 3

    draw = random.Random(7)
    process = start(arguments, log)
    known = len(rows(run_dir))
    wait_for(lambda: len(rows(run_dir)) != known, process, log)  # cut back: training goes on now
    time.sleep(draw.uniform(0.0, 1.5))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    run_to_end(arguments, log)
    assert_same_end(run_dir, reference)
    assert leftovers() == []
