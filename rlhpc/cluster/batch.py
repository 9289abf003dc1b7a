"""One attempt at a run, as a Slurm job's batch script becomes it: starts the nodes, and decides what comes after.

    exec python -m rlhpc.cluster.batch RUN_DIR [-- PROGRAM ...]      exec: slurmstepd signals its direct child alone
    exec python -m rlhpc.cluster.batch --array-list FILE [-- ...]    an array's task: its run_dir is a line of FILE

It absorbs signals; the supervisor of node 0 (node.py) hears them too and stops the driver. When the nodes have ended it
writes the attempt's line to attempts.jsonl and, alone and once, requeues the job or holds it, by what Slurm says then:

    finished                                      leave, exit code 0
    STOP is there, or the job was cancelled       leave; never requeue
    Slurm has requeued it already                 leave
    a failure that would come again               leave with the driver's exit code: the job is FAILED
    stopped, or lost a process or a node          requeue; hold when that keeps happening without a newer checkpoint

Standard library only.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.cluster import ledger, slurm
from rlhpc.cluster.attempt import (
    ATTEMPT_VARIABLE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    STOP_NAME,
    Attempt,
    Ending,
    past_attempts,
    read_json,
    refuse_full,
)
from rlhpc.cluster.node import ABSORBED, ANSWER_S, LEFT, TICK_S, Relay, hear, hearing, parse
from rlhpc.cluster.slurm import JobRecord, SlurmEnv
from rlhpc.errors import ConfigError, RlhpcError, SlurmError, print_error

RELAY_AFTER_S = 1.0  # then a signal that node 0 has not answered reached this script alone
LAST_CALL_S = 1.5  # before Slurm kills this script: what has to be written, is
LEAVE_S = 60.0  # after end.json the nodes clean up and leave
STRAGGLE_S = 5.0  # for the last of several, which may be dead; srun would miss it for minutes
SWEEP_S = 20.0
REQUEUE_EVERY_S = 2.0
REQUEUE_PATIENCE_S = 600.0  # how long a controller that does not answer is asked again


@dataclass(frozen=True)
class Verdict:
    """What an attempt came to and what follows: leave, requeue or hold."""

    outcome: str
    act: str
    why: str


def judge(
    ending: Ending | None, record: JobRecord | None, restart: int, *, stop_asked: bool, stuck: str | None = None
) -> Verdict:
    """The table above. `ending` is None when the nodes were killed; `record` what Slurm says now, None without an
    answer; `stuck` why another attempt would not get further, None while it may."""
    outcome = ending.outcome if ending else "lost"
    if outcome == "finished":
        return Verdict(outcome, "leave", "the run is complete")
    if stop_asked:
        return Verdict("cancelled", "leave", "cancelled by rlhpc cancel")
    if record is not None:
        if record.restarts > restart:
            return Verdict(outcome, "leave", "Slurm has requeued the job")
        if _cancelled(record):
            return Verdict("cancelled", "leave", "the job was cancelled")
    if outcome == "failed":
        return Verdict(outcome, "leave", "another attempt would fail too")
    if record is not None and not record.batch:
        return Verdict(outcome, "leave", "the same command goes on from the newest checkpoint, if any")
    if record is not None and not record.requeue:
        return Verdict(outcome, "leave", "the job was submitted with --no-requeue; submit it again to go on")
    if stuck:
        return Verdict(outcome, "hold", stuck)
    return Verdict(outcome, "requeue", "another attempt goes on from the newest checkpoint, if any")


def _cancelled(record: JobRecord) -> bool:
    return "CANCELLED" in record.states or (record.completing and record.reason != "TimeLimit")


class Batch:
    """One attempt from its start to what follows it."""

    def __init__(self, attempt: Attempt, env: SlurmEnv, program: list[str]) -> None:
        self.attempt, self.env, self.program = attempt, env, program
        settings = read_json(attempt.run_dir / "cluster.json") or {}
        self._max_without_progress = int(settings.get("max_attempts_without_progress", 2))
        self._stop_lead_s = float(settings.get("stop_lead_s", 0))
        self._temp_root = settings.get("temp_root", "/tmp")
        self._kill_wait_s = slurm.DEFAULT_KILL_WAIT_S
        self._requeued = False

    def run(self) -> int:
        """The exit code of the job."""
        self._begin()
        if stuck := self._stuck([]):
            return self._conclude(self.attempt.end(Ending("lost", EXIT_FAILED, "not started")), stuck)
        with suppress(SlurmError):
            self._kill_wait_s = slurm.kill_wait_s(timeout_s=ANSWER_S)
        # Not --unbuffered: it gives the tasks a terminal, on which the driver draws. PYTHONUNBUFFERED does as well.
        command = [*step(self.env, self.env.nodes), "--label", sys.executable, "-m", "rlhpc.cluster.node"]
        command += [str(self.attempt.run_dir), *(["--", *self.program] if self.program else [])]
        srun = subprocess.Popen(
            command,
            env={**os.environ, ATTEMPT_VARIABLE: str(self.attempt.directory)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=hearing,
            start_new_session=True,  # Ctrl-C in an salloc shell is for this script; srun would kill the tasks
        )
        assert srun.stderr
        relay = Relay(srun.stderr, "srun: error: ")
        self._wait(srun)
        ending = self.attempt.ending()
        if srun.poll():  # a supervisor died, and srun ended the others
            ending = ending or self.attempt.end(lost(relay.reason(), self.env.nodes))
            self._sweep(without=ending.node)
        notice = self.attempt.stop_notice()
        if notice and notice.cause == "requeued":  # slurmstepd may know more than scontrol could tell by then
            for words, cause in (("DUE TO PREEMPTION", "preempted"), ("DUE TO TIME LIMIT", "time_limit")):
                if any(words in line for line in relay.last):
                    self.attempt.write("stop", asdict(replace(notice, cause=cause)))
        return self._conclude(ending)

    def _begin(self) -> None:
        """The attempt's directory, its first file, and the lines that killed attempts could not write."""
        attempt = self.attempt
        checkpoint = (read_json(attempt.run_dir / "progress.json") or {}).get("checkpoint") or {}
        attempt.create(secrets.token_hex(32))
        nodes, now = self.env.nodes, time.time()
        for earlier in ledger.unrecorded(attempt):
            if not self._lives(earlier):
                ending = earlier.ending()
                outcome = ending.outcome if ending else "lost"
                requeued = earlier.job_id == attempt.job_id
                ledger.append(earlier, ledger.summary(earlier, ending, outcome=outcome, requeued=requeued, held=False))
        attempt.write("start", {"at": now, "nodes": nodes, "checkpoint_step": checkpoint.get("step")})
        say(f"== rlhpc attempt {attempt.name} on {self.env.nodelist}, {time.strftime('%H:%M:%S', time.localtime(now))}")

    def _lives(self, other: Attempt) -> bool:
        """Whether another job is at this run right now; its line is its own to write."""
        if other.job_id == self.attempt.job_id:
            return False
        try:
            record = slurm.show_job(other.job_id)
        except SlurmError:
            return False
        return record is not None and record.live

    def _wait(self, srun: subprocess.Popen[bytes]) -> None:
        """Until srun has ended, or Slurm is about to kill this script."""
        heard: tuple[float, str] | None = None
        last_call = leave_by = float("inf")
        while srun.poll() is None and time.time() < last_call:
            if name := hear(TICK_S):
                if heard and name == "SIGINT":
                    leave_by = 0.0  # a second Ctrl-C
                heard = heard or (time.time(), name)
                last_call = min(last_call, self._on_signal())
            if heard and time.time() > heard[0] + RELAY_AFTER_S and self.attempt.stop_notice() is None:
                args = (self.env.restart, heard[1], heard[0], self._kill_wait_s, self._stop_lead_s)
                self.attempt.notify(slurm.classify(self._record(), *args))
            leave_by = min(leave_by, self._leave_by())
            if time.time() > leave_by:
                srun.terminate()
                with suppress(subprocess.TimeoutExpired):
                    srun.wait(timeout=3)
                srun.kill()
                srun.wait()

    def _leave_by(self) -> float:
        """Until when the nodes may take to leave, once the attempt has ended."""
        files = os.listdir(self.attempt.directory)
        if "end.json" not in files:
            return float("inf")
        missing = self.env.num_nodes - sum(name.startswith(LEFT) for name in files)
        return time.time() + (STRAGGLE_S if missing == 1 < self.env.num_nodes else LEAVE_S)

    def _on_signal(self) -> float:
        """When this script has to be done by, seconds since the epoch; a job whose time is up is requeued at once."""
        record = self._record()
        if record is None or not record.completing:
            return float("inf")
        last_call = time.time() + self._kill_wait_s - LAST_CALL_S
        if judge(None, record, self.env.restart, stop_asked=self._stop_asked()).act == "requeue":
            # The job ends for good when the driver saves for longer than KillWait. So it is requeued first, and the
            # next attempt decides whether it is worth its nodes.
            self._requeue()
        return last_call

    def _conclude(self, ending: Ending | None, stuck: str | None = None) -> int:
        """Requeues or holds the job, writes the attempt's line, and returns the exit code. No `ending`: the nodes are
        still at work, and there is no more time to wait for them."""
        settled = ending is not None and ending.outcome in ("finished", "failed")  # whatever Slurm says
        record = self._record() if settled else self._record_patiently()
        if not stuck and record is not None:
            outcome = ending.outcome if ending else "lost"
            own = ledger.summary(self.attempt, ending, outcome=outcome, requeued=False, held=False)
            stuck = self._stuck([own])
        verdict = judge(ending, record, self.env.restart, stop_asked=self._stop_asked(), stuck=stuck)
        if verdict.act == "requeue":
            self._requeue()
        elif verdict.act == "hold":
            self._requeue(hold=verdict.why)
        held = verdict.act == "hold" and self._requeued
        requeued = self._requeued or (record is not None and record.restarts > self.env.restart)
        line = ledger.summary(self.attempt, ending, outcome=verdict.outcome, requeued=requeued, held=held)
        ledger.append(self.attempt, line)
        if ending and ending.reason:
            say(f"{ending.outcome} on {ending.node or self.env.node_name}: {ending.headline}")
        say(f"== rlhpc attempt {self.attempt.name} {verdict.outcome}; {'held: ' if held else ''}{verdict.why}")
        return ending.exit_code if ending else EXIT_STOPPED

    def _stuck(self, own: list[dict[str, Any]]) -> str | None:
        """Why another attempt would get no further, None while it may."""
        lines = [*past_attempts(self.attempt.run_dir), *own]
        return ledger.loop_reason(lines, self.env.job_id, self._max_without_progress)

    def _requeue(self, hold: str | None = None) -> None:
        """Asks until Slurm has done it: an exit before that would end the job for good."""
        until = time.monotonic() + REQUEUE_PATIENCE_S
        while time.monotonic() < until and not self._requeued:
            try:
                if hold is None:
                    slurm.requeue(self.env.job_id)
                else:
                    slurm.requeue_hold(self.env.job_id, hold)
            except SlurmError as error:
                say(f"the job is not requeued yet: {error}")
                time.sleep(REQUEUE_EVERY_S)
            for _ in range(20):
                record = self._record()
                if record is not None and (record.restarts > self.env.restart or record.pending):
                    self._requeued = True
                    return
                time.sleep(0.25)

    def _record(self) -> JobRecord | None:
        try:
            return slurm.show_job(self.env.job_id, timeout_s=ANSWER_S)
        except SlurmError as error:
            say(f"Slurm doesn't say how the job stands: {error}")
            return None

    def _record_patiently(self) -> JobRecord | None:
        """What follows hangs on Slurm's answer, so that a controller which restarts is waited for."""
        until = time.monotonic() + REQUEUE_PATIENCE_S
        while (record := self._record()) is None and time.monotonic() < until:
            time.sleep(REQUEUE_EVERY_S)
        return record

    def _stop_asked(self) -> bool:
        return STOP_NAME in os.listdir(self.attempt.run_dir)

    def _sweep(self, without: str | None) -> None:
        """Removes what killed supervisors left on the nodes, but for one that may be dead. On this one without a step,
        which Slurm may no longer start."""
        sweep = [sys.executable, "-m", "rlhpc.cluster.session", "sweep", f"--temp-root={self._temp_root}"]
        others = [node for node in self.env.nodes if node not in (self.env.node_name, without)]
        for command in (sweep, [*step(self.env, others), *sweep]) if others else (sweep,):
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(command, stdin=subprocess.DEVNULL, timeout=SWEEP_S, preexec_fn=hearing, check=False)


def lost(reason: str | None, nodes: Sequence[str]) -> Ending:
    """The nodes ended without a word, of which srun says: n2: task 1: Killed, or: Node failure on n2."""
    words = re.findall(r"[\w.-]+", reason or "")
    return Ending("lost", EXIT_FAILED, reason, next((node for node in nodes if node in words), None))


def step(env: SlurmEnv, on: Sequence[str]) -> list[str]:
    """srun for one task on each of the nodes with all of its CPUs and GPUs, which other steps may use too."""
    cpus = [f"--cpus-per-task={env.cpus_per_task}"] if env.cpus_per_task else []
    nodes = [f"--nodes={len(on)}", f"--ntasks={len(on)}", "--ntasks-per-node=1", f"--nodelist={','.join(on)}"]
    return ["srun", *nodes, *cpus, "--overlap", "--kill-on-bad-exit=1", "--gpu-bind=none", "--mpi=none", "--export=ALL"]


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def run_dir_of(array_list: Path, env: SlurmEnv) -> Path:
    """The line of an array's task, counted from 0."""
    lines = array_list.read_text().splitlines()
    if env.array_task is None or env.array_task >= len(lines):
        raise ConfigError(
            f"SLURM_ARRAY_TASK_ID={env.array_task} has no line in {array_list}, which has {len(lines)}; "
            f"submit the array with --array=0-{len(lines) - 1}"
        )
    return Path(lines[env.array_task])


def next_attempt(run_dir: Path, env: SlurmEnv) -> Attempt:
    """Named by the job's restart count; where that one is taken, as inside salloc, by the next number."""
    numbers = itertools.count(env.restart)
    return next(new for new in (Attempt(run_dir, env.job_id, n) for n in numbers) if not new.directory.exists())


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, ABSORBED)
    parser = argparse.ArgumentParser(prog="python -m rlhpc.cluster.batch", description="Runs one attempt of a job.")
    parser.add_argument("run_dir", type=Path, nargs="?", help="a run directory with config.yaml and cluster.json")
    parser.add_argument("--array-list", type=Path, help="a file of run directories, one for each task of the array")
    arguments, program = parse(parser)
    run_dir: Path | None = arguments.run_dir
    try:
        env = SlurmEnv.from_environ(os.environ)
        if arguments.array_list:
            run_dir = run_dir_of(arguments.array_list, env)
        if run_dir is None:
            parser.error("a run directory or --array-list is needed")
        return Batch(next_attempt(run_dir.absolute(), env), env, program).run()
    except RlhpcError as error:
        print_error(error)
        return EXIT_USAGE
    except OSError as error:
        return refuse_full(run_dir, error)


if __name__ == "__main__":
    sys.exit(main())
