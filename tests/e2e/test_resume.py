"""The real command, killed or stopped anywhere, ends bitwise where an uninterrupted run ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rlhpc.checkpoint.manifest import committed_steps
from rlhpc.checkpoint.store import CheckpointStore
from tests.e2e.runs import (
    DYNAMIC,
    ROOT,
    assert_same_end,
    command,
    final_tensors,
    leftovers,
    rows,
    run_to_end,
    start,
    wait_for,
)  # fmt: skip
from tests.saved_runs import flip_byte


def test_the_uninterrupted_run_trains(reference: Path) -> None:
    metrics = rows(reference)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4, 5, 6]
    assert all("val-core/digits/reward/mean@1" in metrics[step] for step in (0, 3, 6))
    assert all(row["actor/grad_norm"] > 0 for row in metrics[1:])
    # On the same weights both engines agree: the first mini-batch of a step is on-policy.
    assert max(row["training/rollout_probs_diff_max"] for row in metrics[1:]) < 1e-4
    assert metrics[6]["val-core/digits/reward/mean@1"] != metrics[0]["val-core/digits/reward/mean@1"]


def test_groups_are_drawn_until_a_step_is_full(reference: Path) -> None:
    """Every drawn group is trained on, alike, or too many; the prompts of all go by, epoch after epoch."""
    batches, name = 0, "training/filter_groups"
    for row in rows(reference)[1:]:
        batches += row["train/num_gen_batches"]
        alike, surplus = row[f"{name}/evicted_samples"], row[f"{name}/discarded_surplus_samples"]
        assert 8 + alike + surplus == 6 * row["train/num_gen_batches"] and alike > 0
        assert row["reward/zero_std_group_ratio"] == 0.0
        assert row["training/epoch"] == batches * 6 // 24
        # Digits' share is at most 1; nearly all answers run into the limit, which costs 1.
        assert row["overlong/penalty/mean"] < -0.5 and row["critic/score/mean"] < 0 <= row[f"{name}/sampled_score/mean"]
    assert batches > 2 * 6


def test_what_the_ranks_measured_is_part_of_what_the_driver_did(reference: Path) -> None:
    trained = {"gen", "old_log_prob", "update_actor", "update_weights"}
    for row in rows(reference):
        step = row["step"]
        seconds = {name: value for name, value in row.items() if name.startswith("timing_s/ranks/")}
        phases = {name.split("/")[2] for name in seconds}
        validated, saved = {"testing"} if step in (0, 3, 6) else set(), {"save_checkpoint"} if step in (2, 4) else set()
        assert phases - {"save_checkpoint"} == (trained if step else {"update_weights"}) | validated, step
        assert saved <= phases
        for phase in phases:
            assert 0 < row[f"timing_s/ranks/{phase}"] < row[f"timing_s/{phase}"], (step, phase)
            parts = [value for name, value in seconds.items() if name.startswith(f"timing_s/ranks/{phase}/")]
            assert max(parts, default=0) <= row[f"timing_s/ranks/{phase}"]  # each of its slowest rank
            assert 0 < row[f"perf/host_memory_gb/{phase}"] < 1.01 * row["perf/cpu_memory_used_gb"]
        assert row["timing_s/ranks/update_weights/sync"] > 0


def test_the_weights_change(reference: Path) -> None:
    moments: Counter[str] = Counter()  # of all parts of each tensor
    for name, tensor in final_tensors(reference).items():
        if "exp_avg_sq/" in name:
            moments[name.partition("/")[2].partition("[")[0]] += float(tensor.sum())
    assert moments and all(total > 0 for total in moments.values())


def test_killed_between_and_within_steps_then_damaged(task: Path, reference: Path, tmp_path: Path) -> None:
    """SIGKILL right after a step that isn't committed, then at a random moment; then the disk loses a bit."""
    arguments, log, run_dir = command(task, tmp_path / "run", *DYNAMIC), tmp_path / "log", tmp_path / "run"
    process = start(arguments, log)
    wait_for(lambda: len(rows(run_dir)) >= 4, process, log)  # step 3 is logged, 2 the newest checkpoint
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert max(row["step"] for row in rows(run_dir)) >= 3

    process = start(arguments, log)
    wait_for(lambda: 4 in committed_steps(run_dir / "checkpoints"), process, log)
    time.sleep(random.Random(7).uniform(0.0, 1.5))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    before, newest = sorted(committed_steps(run_dir / "checkpoints"))[-2:]
    shard = run_dir / f"checkpoints/step-{newest:06d}/rank-00001-0000.safetensors"
    flip_byte(shard, shard.stat().st_size // 2)
    log.unlink()
    run_to_end(arguments, log)
    said = " ".join(log.read_text().split())
    assert f"the checkpoint of step {newest} can't be used, trying the one before: rank 1: {shard}: chunk 0 has" in said
    assert f"resuming after step {before} from" in said
    assert_same_end(run_dir, reference)
    assert CheckpointStore(run_dir / "checkpoints").has(newest)  # it was saved again
    assert leftovers() == []


def test_another_run_takes_over_the_whole_state_under_another_layout(
    task: Path, reference: Path, tmp_path: Path
) -> None:
    """Two ranks with half of the experts each wrote it, one rank goes on: the same losses but for rounding."""
    origin, run_dir, log = reference / "checkpoints/step-000004", tmp_path / "run", tmp_path / "log"
    layout = [
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    ]
    run_to_end(command(task, run_dir, *DYNAMIC, *layout, f"resume.from={origin}"), log)
    said = " ".join(log.read_text().split())
    assert f"starting after step 4 with the whole state of {origin}, saved" in said
    assert "differs actor_rollout_ref.actor.megatron.expert_model_parallel_size: 2 -> 1" in said
    ours, theirs = rows(run_dir), rows(reference)[4:]
    assert [row["step"] for row in ours] == [4, 5, 6]
    for own, other in zip(ours, theirs, strict=True):
        for name in ("critic/rewards/mean", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr"):
            assert own[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (own["step"], name)
    assert ours[2]["val-core/digits/reward/mean@1"] == pytest.approx(theirs[2]["val-core/digits/reward/mean@1"])


def test_a_run_begins_with_exported_weights(task: Path, reference: Path, tmp_path: Path) -> None:
    """Its first validation is the last one of the run that trained them; the KL is to the model's own directory."""
    exported, run_dir, log = tmp_path / "exported", tmp_path / "run", tmp_path / "log"
    export = [sys.executable, "-m", "rlhpc.cli.main", "export", str(reference), str(exported), "--dtype", "float32"]
    subprocess.run(export, cwd=ROOT, check=True, capture_output=True)
    warm = [f"resume.from={exported}", "resume.what=weights", "trainer.total_training_steps=1"]
    run_to_end(command(task, run_dir, *warm, "actor_rollout_ref.actor.use_kl_loss=true"), log)
    said = " ".join(log.read_text().split())
    assert f"starting at step 0 with the weights of {exported}" in said
    first, second = rows(run_dir)
    score = "val-core/digits/reward/mean@1"
    assert first[score] == rows(reference)[6][score] != rows(reference)[0][score]
    assert second["actor/kl_loss"] > 1e-5 and second["actor/lr"] == rows(reference)[1]["actor/lr"]
