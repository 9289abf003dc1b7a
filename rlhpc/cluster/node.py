"""One node of an attempt: starts what runs here, stands between it and Slurm's signals, and leaves nothing behind.

    python -m rlhpc.cluster.node RUN_DIR [-- PROGRAM ...]

Runs as the one task of its node, so that slurmstepd signals it and no other process. It absorbs the signals. On node 0
it asks Slurm why they came and until when there is time, writes stop.json, and sends the driver SIGTERM; everything
else keeps running until the driver has ended. Its exit code is 0 whenever end.json says how the attempt ended: srun
takes any other code for the node's death and kills the other nodes' tasks. PROGRAM, when given, runs in the driver's
place, without Ray. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import IO

from rlhpc.cluster import slurm
from rlhpc.cluster.attempt import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    EXIT_USAGE,
    Attempt,
    Ending,
    StopNotice,
    read_json,
    refuse_full,
)
from rlhpc.cluster.link import Link, Links
from rlhpc.cluster.ray_node import RayNode, RaySpec
from rlhpc.cluster.session import TOKEN_VARIABLE, Reaper, open_session
from rlhpc.errors import ClusterError, RlhpcError, SlurmError

ABSORBED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
TICK_S = 0.2
SHARED_EVERY_S = 0.5  # between looks at files that other nodes write
ASK_EVERY_S = 10.0  # between questions to Slurm after a stop: administrators move a job's end
ANSWER_S = 2.0  # how long the driver may wait to hear of a stop because Slurm doesn't answer


LEFT = "left-"  # left-<id>.json: a node's supervisor has taken everything away


def hear(timeout_s: float) -> str | None:
    """The next signal's name, None after the timeout. The signals stay blocked, so none interrupts anything else."""
    heard = signal.sigtimedwait(ABSORBED, timeout_s)
    return None if heard is None else signal.Signals(heard.si_signo).name


def hearing() -> None:
    """In a child, before its program: signals act again."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


class Relay:
    """Passes on what a child writes to standard error, and keeps its errors and its last lines."""

    def __init__(self, source: IO[bytes], error: str) -> None:
        """`error` begins a line that tells of one."""
        self._begin = error
        self.errors: list[str] = []
        self.last: deque[str] = deque(maxlen=200)
        self._thread = threading.Thread(target=self._copy, args=(source,), daemon=True)
        self._thread.start()

    def _copy(self, source: IO[bytes]) -> None:
        for line in source:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            text = line.decode(errors="replace").rstrip()
            if text.startswith(self._begin) and len(self.errors) < 50:
                self.errors.append(text.removeprefix(self._begin))
            self.last.append(text)

    def reason(self) -> str | None:
        """The first error, else the last line: a traceback ends with what was raised."""
        self._thread.join(timeout=1)  # the child has ended, but processes of its own may hold the pipe
        return next(iter(self.errors), None) or next((line for line in reversed(self.last) if line), None)


class Supervisor:
    """The loop of one node. `driver` is node 0's, `ray` is None where a program takes Ray's place."""

    def __init__(
        self,
        attempt: Attempt,
        env: slurm.SlurmEnv,
        ray: RayNode | None,
        link: Links | Link,
        driver: subprocess.Popen[bytes] | None,
    ) -> None:
        self.attempt, self.env, self.ray, self.link, self.driver = attempt, env, ray, link, driver
        self._relay = Relay(driver.stderr, "error: ") if driver and driver.stderr else None
        self._settings = read_json(attempt.run_dir / "cluster.json") or {}
        self._stop_lead_s = float(self._settings.get("stop_lead_s", 0))
        self._told: StopNotice | None = None
        self._kill_wait_s = slurm.DEFAULT_KILL_WAIT_S
        self._ask_at = self._look_at = 0.0

    def run(self) -> Ending:
        """Until the attempt ends, here or elsewhere."""
        if self.driver:
            self._learn_kill_wait()
        while True:
            if (name := hear(TICK_S)) and self.driver:
                self._on_signal(name)
            if self.driver and (code := self.driver.poll()) is not None:
                return self.attempt.end(self._ending(code))
            if self.ray and (problem := self.ray.poll()):
                return self.attempt.end(Ending("lost", EXIT_FAILED, problem, self.env.node_name))
            if gone := self.link.broken():
                return self.attempt.end(Ending("lost", EXIT_FAILED, f"node {gone} is gone", gone))
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + SHARED_EVERY_S
                if ending := self.attempt.ending():
                    return ending
                if self.driver:
                    self._follow_notice()

    def _on_signal(self, name: str) -> None:
        """Classifies a signal. The first one stops the driver; a further one may bring another cause and deadline."""
        at = time.time()
        record = self._record()
        notice = slurm.classify(record, self.env.restart, name, at, self._kill_wait_s, self._stop_lead_s)
        if self._told is None:
            self._tell(self.attempt.notify(notice))
            if record is None:
                self._ask_at = time.monotonic() + TICK_S
        elif record is not None and notice.cause != "requeued":  # which only tells how preemption or the limit went on
            self._revise(notice)

    def _follow_notice(self) -> None:
        """A notice that another process wrote stops the driver too; of its own, the deadline is kept up to date."""
        if self._told is None:
            if notice := self.attempt.stop_notice():
                self._tell(notice)
        elif time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + ASK_EVERY_S
            record, told = self._record(), self._told
            if record is not None and (record.running or told.cause == "signal"):
                args = (self.env.restart, told.signal, told.at, self._kill_wait_s, self._stop_lead_s)
                self._revise(slurm.classify(record, *args))

    def _revise(self, notice: StopNotice) -> None:
        """The signal that came first stays the one that counts."""
        told = self._told
        assert told
        notice = StopNotice(notice.cause, told.signal, told.at, notice.deadline)
        if notice != told:
            self.attempt.write("stop", asdict(notice))
            self._told = notice

    def _tell(self, notice: StopNotice) -> None:
        assert self.driver
        self._told = notice
        self._ask_at = time.monotonic() + ASK_EVERY_S
        left = "" if notice.deadline is None else f", {notice.deadline - time.time():.0f} s left"
        say(f"stopping: {notice.cause} ({notice.signal}){left}")
        self.driver.send_signal(signal.SIGTERM)

    def _record(self) -> slurm.JobRecord | None:
        try:
            return slurm.show_job(self.env.job_id, timeout_s=ANSWER_S)
        except SlurmError as error:
            say(f"why a signal came is not known: {error}")
            return None

    def _learn_kill_wait(self) -> None:
        try:
            self._kill_wait_s = slurm.kill_wait_s(timeout_s=ANSWER_S)
        except SlurmError as error:
            say(f"KillWait is taken for {self._kill_wait_s:g} s: {error}")

    def _ending(self, code: int) -> Ending:
        """What the driver's exit means, in its own words where it left some."""
        assert self.driver
        progress = read_json(self.attempt.run_dir / "progress.json") or {}
        own = progress if progress.get("pid") == self.driver.pid else {}
        reason = own.get("reason") or (self._relay.reason() if self._relay and code != EXIT_FINISHED else None)
        if code == EXIT_FINISHED:
            return Ending("finished", code)
        if code == EXIT_STOPPED:
            return Ending("stopped", code)
        if code < 0:
            name = signal.Signals(-code).name
            if self._told and -code in ABSORBED:
                return Ending("stopped", EXIT_STOPPED, f"{name} came before the driver listened; nothing was lost")
            hint = "; was the node's memory full?" if name == "SIGKILL" else ""
            return Ending("lost", EXIT_FAILED, f"the driver was killed by {name}{hint}", self.env.node_name)
        outcome = "lost" if own.get("outcome") == "lost" else "failed"
        reason = reason or f"the driver ended with exit code {code}"
        return Ending(outcome, code, reason, self._node_of(reason))

    def _node_of(self, reason: str) -> str | None:
        """Where a failure was: on the node of the rank that it begins with, else here."""
        ranks_per_node = int(self._settings.get("ranks_per_node", 0))
        if ranks_per_node and (rank := re.match(r"rank (\d+) ", reason)):
            nodes = self.env.nodes
            return nodes[min(int(rank[1]) // ranks_per_node, len(nodes) - 1)]
        return self.env.node_name


def say(text: str) -> None:
    """To the job's log, where srun puts the node's number before it."""
    sys.stderr.write(f"supervisor: {text}\n")  # in one piece, which print() isn't


def supervise(attempt: Attempt, env: slurm.SlurmEnv, program: list[str]) -> Ending:
    """Starts what runs on this node, watches it, and takes all of it away again."""
    spec = None if program else RaySpec.read(attempt.run_dir)
    session = open_session(spec.temp_root if spec else "/tmp")
    reaper = Reaper(session)
    ray: RayNode | None = None
    link: Links | Link | None = None
    driver: subprocess.Popen[bytes] | None = None
    ending: Ending | None = None
    try:
        if spec:
            ray = (RayNode.join if env.node_id else RayNode.start_head)(attempt, env, session, spec)
        link = Link(attempt, env) if env.node_id else Links(attempt, env, spec.network_interface if spec else None)
        if env.node_id == 0:
            command = program or [sys.executable, "-u", "-m", "rlhpc.train.run", str(attempt.run_dir)]
            environ = ray.environment if ray else {**os.environ, TOKEN_VARIABLE: session.token}
            driver = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, preexec_fn=hearing)
        ending = Supervisor(attempt, env, ray, link, driver).run()
        return ending
    finally:
        if driver:
            driver.kill()
            driver.wait()
        if ray:
            ray.stop(keep_logs=ending is None or ending.outcome in ("failed", "lost"))
        reaper.close()
        attempt.write(f"{LEFT}{env.node_id}", {"at": time.time()})
        if link:
            link.close()


def ended(attempt: Attempt, env: slurm.SlurmEnv, program: list[str]) -> Ending:
    """How the attempt ended, on this node or before on another."""
    try:
        return supervise(attempt, env, program)
    except ClusterError as error:
        return attempt.end(Ending("lost", error.exit_code, str(error), env.node_name))
    except (RlhpcError, ValueError) as error:
        return attempt.end(Ending("failed", EXIT_USAGE, str(error), env.node_name))


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """The command line up to -- and the program after it."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser.epilog = "-- PROGRAM ...: runs that in place of Ray and the trainer"
    return parser.parse_args(words[:cut]), words[cut + 1 :]


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, ABSORBED)
    parser = argparse.ArgumentParser(
        prog="python -m rlhpc.cluster.node", description="Supervises one node of an attempt."
    )
    parser.add_argument("run_dir", type=Path)
    arguments, program = parse(parser)
    env = slurm.SlurmEnv.from_environ(os.environ)
    attempt = Attempt.current(os.environ) or Attempt(arguments.run_dir.absolute(), env.job_id, env.restart)
    try:
        ending = ended(attempt, env, program)
    except OSError as error:
        return refuse_full(attempt.run_dir, error)
    if ending.node == env.node_name and ending.reason:
        say(f"{ending.outcome}: {ending.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
