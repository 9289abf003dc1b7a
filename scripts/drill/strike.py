"""Carries an interruption out, and sees what it cost."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from typing import Any

from rlhpc.cluster.attempt import Attempt
from scripts.drill import plan
from scripts.drill.run import PATIENCE_S, SAVE_FREQ, STOP_LEAD_S, TIME_LIMIT_MIN, Run, signalled
from tests.slurm.cluster import wait_until

BEFORE_STEPS = ("start", "restore")
OF_THE_STEP = ("generate", "score", "logprobs", "advantages", "update")  # progress.json's step isn't finished in these


@dataclass(frozen=True)
class Outcome:
    """What an event did. Steps are counted, times are seconds; `commit_s` is from the signal to the committed
    checkpoint, None where nothing had to be saved."""

    event: plan.Event
    attempt: str
    step: int
    cause: str | None
    finished: int
    committed: int
    in_progress: bool
    commit_s: float | None
    save_s: float | None
    requeued: int

    @property
    def repeated(self) -> int:
        """Finished steps that have to be run again."""
        return max(0, self.finished - self.committed)

    @property
    def lost(self) -> int:
        """Steps in progress whose work is thrown away."""
        return int(self.in_progress and self.committed < self.step)

    @property
    def cut(self) -> bool:
        """Told in mid-update, and left because the rest did not fit before the deadline."""
        return self.event.kind.told and self.event.phase == "update" and self.committed < self.step

    def broken_rules(self) -> list[str]:
        kind, broken = self.event.kind, []
        allowed = 0 if kind.told and not self.cut else SAVE_FREQ
        if self.repeated > allowed:
            broken.append(f"{self.repeated} finished steps are repeated, {allowed} allowed")
        if self.requeued != 1:
            broken.append(f"requeued {self.requeued} times, not once")
        return [f"{kind.name} in {self.event.phase} of step {self.step} ({self.attempt}): {text}" for text in broken]


def prepare(run: Run, kind: plan.Kind) -> None:
    """Before an attempt begins: its partition and its time limit."""
    wait_until(lambda: run.cluster.state(run.job) in ("PENDING", "RUNNING"), PATIENCE_S, "the job waits again")
    run.cluster.run(
        "scontrol", "update", f"JobId={run.job}", f"Partition={kind.partition}", f"TimeLimit={TIME_LIMIT_MIN}"
    )  # fmt: skip


def strike(run: Run, event: plan.Event, expected_s: dict[str, float], rng: random.Random) -> Outcome:
    """One event from the moment it is caught to the next attempt."""
    with run.caught(event, expected_s) as (attempt, state):
        at = time.time()
        urgent = _interrupt(run, event.kind, attempt, state["pid"], rng)
        if event.kind.told:  # the driver goes on when the signal is there, so that the moment stays what it was
            wait_until(lambda: attempt.read("stop") is not None, 120, "stop.json appears", lambda: run.log()[-2000:])
    restarts = run.requeued_after(attempt)
    if event.kind is plan.NODE:
        run.cluster.up()
    if urgent:
        run.cluster.wait_end(urgent)
    committed, line, checkpoint = run.newest_step(), run.line(attempt), run.progress(attempt).get("checkpoint") or {}
    signal_at = line.get("signal_at") or at
    saved = checkpoint.get("at", 0) > signal_at
    step = committed if event.phase in BEFORE_STEPS else state["step"]
    return Outcome(
        event=event,
        attempt=attempt.name,
        step=step,
        cause=line.get("cause"),
        finished=step - 1 if event.phase in OF_THE_STEP else step,
        committed=committed,
        in_progress=event.phase in OF_THE_STEP,
        commit_s=round(checkpoint["at"] - signal_at, 2) if saved and event.kind.told else None,
        save_s=checkpoint.get("save_s") if saved and event.kind.told else None,
        requeued=restarts - attempt.restart,
    )


def _interrupt(run: Run, kind: plan.Kind, attempt: Attempt, driver: int, rng: random.Random) -> str | None:
    """The id of the job that took the nodes, where one did."""
    cluster, job = run.cluster, run.job
    if kind in (plan.PREEMPTED, plan.PREEMPTED_GRACE):
        return cluster.preempt(job)
    if kind is plan.SIGUSR2:
        cluster.run("scancel", "--signal=USR2", job)
    elif kind is plan.TIME_LIMIT:  # minutes are what Slurm takes; the warning comes when less than the lead is left
        elapsed_min = (time.time() - (attempt.read("start") or {})["at"]) / 60
        cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={int(elapsed_min) + STOP_LEAD_S // 60}")
    elif kind is plan.REQUEUED:
        cluster.run("scontrol", "requeue", job)
    elif kind is plan.DRIVER:
        signalled(driver, signal.SIGKILL)
    elif kind is plan.NODE:
        cluster.power_off(rng.choice(cluster.expand(cluster.show(job)["NodeList"])))
    else:
        pattern = r"ray::RankWorker" if kind is plan.RANK else r"\S*python\S* -m rlhpc\.cluster\.node"
        signalled(rng.choice(run.pids(pattern)), signal.SIGKILL)
    return None


def milestones(line: dict[str, Any]) -> dict[str, float]:
    """Seconds from the attempt's start to each milestone."""
    start = line.get("started") or 0.0
    return {name: at - start for name, at in line.get("milestones", {}).items()}
