"""progress.json: what the driver of a run does now, for `rlhpc status` and for the supervisor of its attempt.

    {attempt, pid, host, phase, fraction, step, total_steps, since, started,
     milestones: {ray_ready, ranks_ready, restored, first_publish, first_rollout},
     checkpoint: {step, at, save_s}, stop: {phase, at, seen_after_s} (once a stop was seen), outcome, reason}

Times are seconds since the epoch. `fraction` is how much of the phase is done, where it has parts. A milestone is when
the first phase of its kind was done: `first_rollout` says when the first step's completions were there. `checkpoint` is
the newest save of the run and outlives its attempt. `outcome` is running, finished, stopped, failed or lost (a rank or
a node died: another attempt may get further); `reason` is the first line of what went wrong. Standard library only.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhpc.cluster.attempt import Attempt, publish_text, read_json
from rlhpc.cluster.stop import StopFlag, StopRequested, UpdateCut
from rlhpc.errors import ClusterError

PROGRESS_NAME = "progress.json"

# The loop's timers carry verl's names; these are the phases that progress.json speaks of.
PHASES = {
    "update_weights": "publish",
    "testing": "validate",
    "save_checkpoint": "save",
    "gen": "generate",
    "reward": "score",
    "old_log_prob": "logprobs",
    "ref": "logprobs",
    "values": "logprobs",
    "adv": "advantages",
    "update_critic": "update",
    "update_actor": "update",
}
_MILESTONES = {"restore": "restored", "publish": "first_publish", "generate": "first_rollout"}

log = logging.getLogger(__name__)


class Progress:
    """Rewrites <run_dir>/progress.json at every change, by renaming: about 0.1 ms on a local disk. A disk that is full
    costs the file its freshness, never the run. Use as a context manager: leaving it records the outcome. What is
    `committed` may come from another thread."""

    def __init__(self, directory: Path, attempt: Attempt | None, stop: StopFlag) -> None:
        self._path, self._stop = directory / PROGRESS_NAME, stop
        self._trouble, self._lock = "", threading.Lock()
        known = read_json(self._path) or {}
        now = time.time()
        self._state: dict[str, Any] = {
            "attempt": attempt.name if attempt else None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "phase": "start",
            "fraction": 0.0,
            "step": 0,
            "total_steps": None,
            "since": now,
            "started": now,
            "milestones": {},
            "checkpoint": known.get("checkpoint"),
            "outcome": "running",
        }
        self._history: deque[tuple[float, str]] = deque([(now, "start")], maxlen=16)
        self._write()

    @property
    def save_s(self) -> float:
        """What the run's last save took, also one of an earlier attempt; 0 before there was one."""
        return float((self._state["checkpoint"] or {}).get("save_s", 0.0))

    def plan(self, total_steps: int) -> None:
        """How far the run is to go; written with the next phase."""
        with self._lock:
            self._state["total_steps"] = total_steps

    def enter(self, step: int, phase: str) -> None:
        """A phase begins, and with it the one before has ended; the same phase again goes on."""
        ended, now = self._state["phase"], time.time()
        if (ended, self._state["step"]) == (phase, step):
            return
        with self._lock:
            if ended in _MILESTONES and "stop" not in self._state:
                self._state["milestones"].setdefault(_MILESTONES[ended], now)
            self._state |= {"phase": phase, "fraction": 0.0, "step": step, "since": now}
            self._history.append((now, phase))
            self._write()

    def part(self, fraction: float) -> None:
        """So much of the phase is done, 0 to 1."""
        if 0 < fraction < 1:
            with self._lock:
                self._state["fraction"] = round(fraction, 4)
                self._write()

    def milestone(self, name: str) -> None:
        with self._lock:
            self._state["milestones"].setdefault(name, time.time())
            self._write()

    def committed(self, step: int, save_s: float) -> None:
        """A checkpoint is on the disk; it took `save_s` seconds from asking the ranks to the rename."""
        with self._lock:
            self._state["checkpoint"] = {"step": step, "at": time.time(), "save_s": round(save_s, 3)}
            self._write()

    def stopping(self) -> None:
        """The driver has turned to a stop that was asked for."""
        stop = self._stop
        if stop.requested() and "stop" not in self._state:
            phase = next((phase for since, phase in reversed(self._history) if since <= stop.at), "start")
            seen = {"phase": phase, "at": stop.at, "seen_after_s": round(stop.seen_at - stop.at, 3)}
            with self._lock:
                self._state["stop"] = seen
                self._write()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stopping()
        with self._lock:
            self._state |= {"phase": "end", "since": time.time(), "outcome": _outcome(error)}
            if self._state["outcome"] in ("failed", "lost"):
                self._state["reason"] = str(error).partition("\n")[0] or type(error).__name__
            self._write()

    def _write(self) -> None:
        try:
            publish_text(self._path, json.dumps(self._state, indent=1) + "\n")
            self._trouble = ""
        except OSError as error:
            if self._trouble != (trouble := str(error.strerror)):  # on a full disk at every phase of every step
                log.warning("%s can't be written: %s", self._path, trouble)
            self._trouble = trouble


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    if isinstance(error, StopRequested | UpdateCut):
        return "stopped"
    return "lost" if isinstance(error, ClusterError) else "failed"
