"""A stop in phases of the real driver: what it commits, and that the run ends bitwise where an uninterrupted one
ends."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.cluster.attempt import Attempt, StopNotice, read_json
from rlhpc.cluster.submission import prepare
from rlhpc.config.load import load_file
from tests.e2e.runs import (
    DYNAMIC,
    ROOT,
    assert_same_end,
    command,
    finish,
    in_phase,
    leftovers,
    rows,
    run_to_end,
    start,
    wait_for,
)  # fmt: skip

# Where the driver answers differently; scripts/preemption_drill.sh hits every phase.
STOPS = {
    "validate": signal.SIGTERM,
    "start": signal.SIGUSR2,
    "score": signal.SIGINT,
    "update": signal.SIGUSR2,
    "save": signal.SIGTERM,
    "generate": signal.SIGTERM,
}


def committed(run_dir: Path) -> int:
    return max(CheckpointStore(run_dir / "checkpoints").steps(), default=-1)


@pytest.mark.timeout(1800)  # eight starts, which a busy machine takes a minute each for
def test_stopped_in_phase_after_phase(task: Path, reference: Path, tmp_path: Path) -> None:
    """One attempt after the other, each stopped in another phase; the first three before a step was trained."""
    log, run_dir, hang = tmp_path / "log", tmp_path / "run", task / "hang"
    arguments = command(task, run_dir, *DYNAMIC, "data.val_batch_size=2", "reward.timeout_s=3600")

    def hang_in(step: int) -> None:
        if read_json(run_dir / "progress.json")["step"] == step:
            hang.touch()

    for phase, number in STOPS.items():
        newest = committed(run_dir)
        process = start(arguments, log)
        while phase == "score" and not hang.exists():  # in the first batch of a step; of no further one rewards answer
            step = in_phase("score", run_dir, process, log, lambda pid: None)["step"]
            in_phase("generate", run_dir, process, log, lambda pid, step=step: hang_in(step))
        if phase == "generate":  # once a step was trained that isn't due for saving
            wait_for(lambda newest=newest: rows(run_dir)[-1]["step"] == newest + 1, process, log)
        # To the whole group, as timeout, Slurm and a terminal's Ctrl-C do: the ranks have to outlive the save.
        seen = in_phase(phase, run_dir, process, log, lambda pid, number=number: os.killpg(os.getpgid(pid), number))
        assert finish(process, log) == 75, log.read_text()[-3000:]
        hang.unlink(missing_ok=True)
        progress = read_json(run_dir / "progress.json")
        assert progress and progress["outcome"] == "stopped" and progress["stop"]["phase"] == phase
        step = seen["step"]
        expected = {
            "start": -1,
            "validate": -1,
            "score": -1,
            "update": step,
            "save": step,
            "generate": step - 1,
        }[phase]
        assert committed(run_dir) == expected, (phase, step)
        if phase in ("validate", "score"):
            assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["owner.json"]
            assert "no step was trained since the start, so there is nothing to save" in log.read_text()
            log.unlink()
        assert leftovers() == []

    newest, process = committed(run_dir), start(arguments, log)
    saving = in_phase("save", run_dir, process, log, lambda pid: os.kill(rank_pids(run_dir, 1)[-1], signal.SIGKILL))
    assert finish(process, log) == 1
    assert committed(run_dir) in (newest, saving["step"]), "lost is what rank 1 had not yet written, and nothing else"
    told = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert told[0].startswith("error: rank 1 died in ") and f"the end of {run_dir / 'logs'}" in told[1]
    progress = read_json(run_dir / "progress.json")
    assert progress and progress["outcome"] == "lost" and f"error: {progress['reason']}" == told[0]
    assert leftovers() == []

    newest = committed(run_dir)
    assert finish(start([*arguments, "algorithm.filter_groups.max_num_gen_batches=1"], log), log) == 1
    told = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert re.search(r"only \d of data.train_batch_size=8 groups .* after 6 prompts in 1 batches", told[-1])
    assert committed(run_dir) == newest

    run_to_end(arguments, log)
    assert_same_end(run_dir, reference)
    attempts_with_ranks = len(STOPS) - 1 + 3
    assert len(rank_pids(run_dir, 0)) == attempts_with_ranks, "one log over all attempts, each with its header"


def rank_pids(run_dir: Path, rank: int) -> list[int]:
    """The rank's processes, one an attempt, as the headers in its log tell."""
    log = run_dir / "logs" / f"rank-{rank:05d}.log"
    return [int(pid) for pid in re.findall(rf"^=== .*rank {rank} of 2 on \S+, pid (\d+)$", log.read_text(), re.M)]


def test_a_stop_does_not_wait_for_the_end_of_a_generation(task: Path, tmp_path: Path) -> None:
    """One call that would take the better part of an hour: 512 completions of 480 tokens, one after the other."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    rollout = {"chunk_prompts": 0, "ignore_eos": "true", "max_num_seqs": 1, "n": 64}
    arguments = command(
        task,
        run_dir,
        "trainer.val_before_train=false",
        "data.max_response_length=480",
        *(f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()),
    )
    process = start(arguments, log)
    wait_for(lambda: (read_json(run_dir / "progress.json") or {}).get("phase") == "generate", process, log)
    os.killpg(process.pid, signal.SIGTERM)
    assert finish(process, log) == 75, log.read_text()[-3000:]
    assert committed(run_dir) == -1
    assert leftovers() == []


def test_an_update_that_does_not_fit_before_the_deadline_is_cut(task: Path, tmp_path: Path) -> None:
    """An attempt on one node: the supervisor, Ray's daemons, the driver, and a stop.json as after Slurm's warning."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = command(task, run_dir, "trainer.save_freq=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    composed = subprocess.run([*arguments, "--cfg", "job"], cwd=ROOT, capture_output=True, text=True, check=True)
    (tmp_path / "config.yaml").write_text(composed.stdout)
    prepare(load_file(tmp_path / "config.yaml"))
    attempt = Attempt(run_dir, "4711", 0)
    attempt.create(secrets.token_hex(32))

    def warn(pid: int) -> None:
        now = time.time()
        attempt.notify(StopNotice("time_limit", "SIGUSR2", now, deadline=now))
        while not stop_signal_waits(pid):  # the supervisor has sent it
            time.sleep(0.01)

    process = start(
        [sys.executable, "-m", "rlhpc.cluster.node", str(run_dir)],
        log,
        PYTHONPATH=str(ROOT),
        SLURM_JOB_ID="4711",
        SLURM_JOB_NUM_NODES="1",
        SLURM_JOB_NODELIST="localhost",
        SLURMD_NODENAME="localhost",
    )
    seen = in_phase("update", run_dir, process, log, warn)
    assert finish(process, log) == 0
    ending, progress = attempt.ending(), read_json(run_dir / "progress.json")
    assert ending and (ending.outcome, ending.exit_code) == ("stopped", 75), log.read_text()[-3000:]
    assert progress and progress["stop"]["phase"] == "update"
    step = seen["step"]
    assert committed(run_dir) == (step - 1 or -1), "step 0 is the model itself, and not saved"
    assert re.search(rf"SIGTERM with \d of 8 mini-batches to go.*nothing of step {step} is kept", log.read_text())
    assert leftovers() == []


def stop_signal_waits(pid: int) -> bool:
    """Whether SIGTERM is pending for a process that is held still."""
    pending = re.search(r"^ShdPnd:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert pending
    return bool(int(pending[1], 16) & 1 << (signal.SIGTERM - 1))
