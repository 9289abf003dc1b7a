"""The run that is drilled: a tiny task under launch=slurm, and what its files and processes tell."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.manifest import committed_steps
from rlhpc.cluster.attempt import Attempt, past_attempts, read_json
from rlhpc.train.progress import PHASES as TIMERS
from scripts.drill.plan import Event
from tests.e2e.runs import ROOT, command, rows, write_task
from tests.slurm.cluster import Cluster

SAVE_FREQ = 2
STOP_LEAD_S = 120
TIME_LIMIT_MIN = 60
SHORT_S = 0.3  # a phase that may be over before it is noticed and the driver held still in it
SLICE_S = 0.0005
PATIENCE_S = 600.0
BEFORE = {
    "publish": ("restore", "update"),
    "validate": ("publish",),
    "save": ("validate",),
    "logprobs": ("score",),
    "advantages": ("logprobs",),
    "update": ("advantages",),
}

# Rewards that take a while, as real ones do, so that scoring can be hit.
REWARD = '''
import time


def digits(text, ground_truth):
    """The share of characters that are digits, slowly."""
    time.sleep(0.05)
    return sum(c.isdigit() for c in text) / max(len(text), 1)
'''


@dataclass(frozen=True)
class Shape:
    nodes: int
    ranks: int  # per node
    steps: int


def prepare(directory: Path) -> Path:
    """The task's files."""
    task = write_task(directory)
    (task / "reward.py").write_text(REWARD)
    return task


class Run:
    """One submitted run."""

    def __init__(self, cluster: Cluster, task: Path, directory: Path, shape: Shape, partition: str) -> None:
        self.cluster, self.directory = cluster, directory
        tensor = 2 if shape.ranks % 2 == 0 else 1
        arguments = command(
            task, directory, "launch=slurm", f"cluster.nodes={shape.nodes}", f"trainer.n_gpus_per_node={shape.ranks}",
            f"cluster.partition={partition}", f"launch.time_min={TIME_LIMIT_MIN}", f"launch.stop_lead_s={STOP_LEAD_S}",
            "launch.max_attempts_without_progress=1000", "cluster.memory_gib_per_node=12",
            f"trainer.total_training_steps={shape.steps}", f"trainer.save_freq={SAVE_FREQ}", "trainer.test_freq=2",
            f"data.train_batch_size={4 * shape.nodes}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={2 * shape.nodes}",
            f"actor_rollout_ref.actor.megatron.expert_model_parallel_size={tensor}",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor}", "checkpoint.keep=3",
        )  # fmt: skip
        done = subprocess.run(arguments, cwd=ROOT, env=cluster.environ(), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}")
        self.requeued_by_us = 0
        self.job: str = json.loads((directory / "job.json").read_text())["job_id"]

    # --- what it tells

    def progress(self, attempt: Attempt) -> dict[str, Any]:
        """progress.json of this attempt, {} until its driver is there."""
        found = read_json(self.directory / "progress.json") or {}
        return found if found.get("attempt") == attempt.name else {}

    def line(self, attempt: Attempt) -> dict[str, Any]:
        """The attempt's line in attempts.jsonl, {} while it has none."""
        return next((line for line in past_attempts(self.directory) if line["attempt"] == attempt.name), {})

    def newest_step(self) -> int:
        return max(committed_steps(self.directory / "checkpoints"), default=0)

    def pids(self, pattern: str) -> list[int]:
        """The job's processes whose command line begins like that."""
        found = []
        for pid in self.cluster.processes(self.job):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if re.match(pattern, words):
                    found.append(pid)
        return found

    def log(self) -> str:
        path = self.directory / "slurm" / f"{self.job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def expected_s(self) -> dict[str, float]:
        """Median seconds of every phase, from what an undisturbed run left."""
        seconds: dict[str, list[float]] = {}
        for row in rows(self.directory):
            for timer, phase in TIMERS.items():
                if (taken := row.get(f"timing_s/{timer}")) is not None and timer != "ref":
                    seconds.setdefault(phase, []).append(taken)
        state = read_json(self.directory / "progress.json") or {}
        ready, restored = state["milestones"]["ranks_ready"], state["milestones"]["restored"]
        seconds |= {"start": [ready - state["started"]], "restore": [restored - ready]}
        # Where nothing was due, as in most steps' validation, the phase was entered all the same.
        return {phase: statistics.median([s for s in taken if s > max(taken) / 10]) for phase, taken in seconds.items()}

    # --- catching it

    def running_attempt(self) -> Attempt:
        """Waits until an attempt has its driver."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            fields = self.cluster.show(self.job)
            self.must_live(fields)
            attempt = Attempt(self.directory, self.job, int(fields["Restarts"]))
            if fields["JobState"] == "RUNNING" and self.progress(attempt):
                return attempt
            time.sleep(0.1)
        raise SystemExit(
            f"no attempt of job {self.job} began within {PATIENCE_S:.0f} s: {fields}\n{self.log()[-3000:]}"
        )

    def must_live(self, fields: dict[str, str]) -> None:
        if fields.get("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
            raise SystemExit(f"job {self.job} ended before all events had struck: {fields}\n{self.log()[-3000:]}")

    def requeued_after(self, attempt: Attempt) -> int:
        """Waits until Slurm has taken the job back and nothing of the attempt runs any more; the restart count."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self.must_live(fields := self.cluster.show(self.job))
            if (restarts := int(fields["Restarts"])) > attempt.restart and fields["JobState"] != "COMPLETING":
                return restarts
            time.sleep(0.1)
        raise SystemExit(f"attempt {attempt.name} was not requeued within {PATIENCE_S:.0f} s\n{self.log()[-3000:]}")

    @contextmanager
    def caught(self, event: Event, expected_s: dict[str, float]) -> Iterator[tuple[Attempt, dict[str, Any]]]:
        """Waits for the event's phase, holds the driver still in it, and gives the attempt and its progress. The
        driver goes on at the end of the block. It may be the next attempt's when one ends by itself."""
        while True:
            attempt = self.running_attempt()
            first_step = self.newest_step() + event.steps
            if (state := self._catch(attempt, event, first_step, expected_s.get(event.phase, 0.5))) is not None:
                break
        try:
            yield attempt, state
        finally:
            signalled(state["pid"], signal.SIGCONT)

    def _catch(self, attempt: Attempt, event: Event, first_step: int, expected_s: float) -> dict[str, Any] | None:
        """None when the attempt ended before. After every miss it strikes earlier in the phase."""
        short, before = expected_s < SHORT_S, BEFORE.get(event.phase, ())
        until, into_s = time.monotonic() + PATIENCE_S, event.fraction * expected_s
        while time.monotonic() < until:
            state = self.progress(attempt)
            if not state or state["outcome"] != "running":
                return None
            due = event.phase in ("start", "restore") or state["step"] >= first_step
            if due and (state["phase"] == event.phase or short and state["phase"] in before):
                held = self._slowly(attempt, event.phase, into_s) if short else self._held(attempt, event.phase, into_s)
                if held:
                    return held
                into_s /= 2
            elif state["phase"] not in ("start", "restore") and event.phase in ("start", "restore"):
                return self._missed(attempt)
            if not Path(f"/proc/{state['pid']}").exists() and self.progress(attempt).get("outcome") == "running":
                return None
            time.sleep(0.001)
        raise SystemExit(f"phase {event.phase} did not come within {PATIENCE_S:.0f} s: {state}\n{self.log()[-3000:]}")

    def _held(self, attempt: Attempt, phase: str, into_s: float) -> dict[str, Any] | None:
        """Stops the driver, which has just entered the phase, after a while; None when that was too late."""
        time.sleep(into_s)
        pid = self.progress(attempt)["pid"]
        if not signalled(pid, signal.SIGSTOP):
            return None
        time.sleep(0.005)  # all its threads have stopped
        if (state := self.progress(attempt))["phase"] == phase:
            return state
        signalled(pid, signal.SIGCONT)
        return None

    def _slowly(self, attempt: Attempt, phase: str, into_s: float) -> dict[str, Any] | None:
        """Lets the driver run in slices from the phase before a short one into it; None when that slipped through."""
        state, entered = self.progress(attempt), None
        before = {state["phase"]} - {phase}
        while state["phase"] in before or state["phase"] == phase:
            if state["phase"] == phase:
                entered = entered or time.monotonic()
                if time.monotonic() >= entered + into_s:
                    break
            if not signalled(state["pid"], signal.SIGCONT):
                return None
            time.sleep(SLICE_S)
            signalled(state["pid"], signal.SIGSTOP)
            time.sleep(SLICE_S)
            state = self.progress(attempt)
        if state["phase"] == phase and signalled(state["pid"], signal.SIGSTOP):
            return state
        signalled(state["pid"], signal.SIGCONT)
        return None

    def _missed(self, attempt: Attempt) -> None:
        """The attempt is past its beginning: one more requeue brings the next beginning."""
        self.requeued_by_us += 1
        self.cluster.run("scontrol", "requeue", self.job)
        self.requeued_after(attempt)


def signalled(pid: int, number: signal.Signals) -> bool:
    """Whether there was such a process to signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
