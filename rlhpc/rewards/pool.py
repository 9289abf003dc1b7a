"""Evaluates rewards in processes that can be killed, so that none can stall or crash a step."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import rlhpc
from rlhpc.errors import ConfigError, TrainingError
from rlhpc.rewards.rules import REWARDS, reward_of_source

_START_TIMEOUT_S = 180.0  # loading code from a busy shared file system
_CHUNK = 64  # items per message
_PATIENCE_S = 0.25  # between two calls of `waiting`
# A call gives up on what is unscored after this many time-outs per worker, if they are this share of results.
_HOPELESS_TIMEOUTS = 10
_HOPELESS_SHARE = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardResult:
    """`score` is 0 unless `status` is "ok"; `detail` says what went wrong."""

    score: float
    status: str  # ok | error | timeout
    detail: str = ""


@dataclass
class _Call:
    """One `score` in progress."""

    requests: Sequence[tuple[str, str, str]] = ()  # reward name, completion, ground truth
    results: dict[int, RewardResult] = field(default_factory=dict)
    queue: deque[int] = field(default_factory=deque)
    num_timeouts: int = 0

    def is_hopeless(self, num_workers: int) -> bool:
        enough = self.num_timeouts >= _HOPELESS_TIMEOUTS * num_workers
        return enough and self.num_timeouts > _HOPELESS_SHARE * len(self.results)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    deadline: float
    ready: bool = False
    pending: deque[int] = field(default_factory=deque)  # items sent and not answered; it works on the first

    def kill(self) -> int:
        """Ends the process and everything it started. Returns its exit code, negative for a signal."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


class RewardPool:
    """Worker processes that score completions: one that raises, hangs or crashes scores 0 and is reported.

    Workers are fresh interpreters without torch, each in its own process group. They end when the pool is
    closed or its process dies, however it dies. Methods may be called from any thread: no alarm is set here.
    """

    def __init__(
        self,
        name: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 10.0,
        num_workers: int = 2,
    ) -> None:
        """Starts the workers and returns at once; `wait_ready` or the first `score` waits for them.

        `name`: a key of REWARDS, `path/to/file.py:function`, or None for each item's data source. It is
        called as `function(completion, ground_truth, **kwargs)`; `timeout_s` bounds one such call.
        Raises ConfigError.
        """
        if kwargs and name is None:
            raise ConfigError(f"reward.kwargs={dict(kwargs)} needs reward.name: which reward are they for?")
        if num_workers < 1 or timeout_s <= 0:
            raise ConfigError(
                f"reward.num_workers={num_workers} must be at least 1, reward.timeout_s={timeout_s} above 0"
            )
        self._name = _resolve(name) if name is not None else None
        self._timeout_s = timeout_s
        try:
            self._setup = json.dumps(
                {
                    "name": self._name,
                    "kwargs": dict(kwargs or {}),
                    "timeout_s": timeout_s,
                    "start_timeout_s": _START_TIMEOUT_S,
                    "parent": os.getpid(),
                }
            )
        except TypeError as error:
            raise ConfigError(f"reward.kwargs must be plain values: {error}") from error
        self._lock = threading.Lock()
        self._workers = [self._start() for _ in range(num_workers)]
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())

    def check_sources(self, data_sources: Sequence[str]) -> None:
        """Raises ConfigError, listing the known ones, for a data source that has no reward."""
        if self._name is None:
            for data_source in data_sources:
                reward_of_source(data_source)

    def wait_ready(self) -> None:
        """Waits until every worker has loaded its code. Raises ConfigError when the reward can't be used."""
        with self._lock:
            while not all(worker.ready for worker in self._workers):
                self._receive(_Call())

    def score(
        self, items: Sequence[tuple[str, str, str]], *, waiting: Callable[[], None] = lambda: None
    ) -> list[RewardResult]:
        """Scores (completion, ground truth, data source) items; results are in the same order. `waiting` is called a
        few times a second meanwhile; what it raises ends the call, and whatever a reward is at.

        When more than a tenth time out, at least ten per worker, the rest is given up as timed out. Raises
        ConfigError for a data source without reward or a reward that can't be loaded, TrainingError when a
        worker doesn't start.
        """
        names = {source: self._name or reward_of_source(source) for source in {item[2] for item in items}}
        requests = [(names[source], completion, truth) for completion, truth, source in items]
        with self._lock:
            results = self._score(_Call(requests, queue=deque(range(len(requests)))), waiting)
        failed = [result for result in results if result.status != "ok"]
        if failed:
            log.warning("%d of %d rewards failed; the first: %s", len(failed), len(results), failed[0].detail)
        return results

    def close(self) -> None:
        """Ends the workers. May be called again."""
        with self._lock:
            self._finalizer()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        # A fresh interpreter rather than multiprocessing's spawn, which would import the main module again.
        root = str(Path(rlhpc.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-uP", "-m", "rlhpc.rewards.worker", str(theirs.fileno()), self._setup],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints mustn't mix with our output
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return _Worker(process, ours, deadline=time.monotonic() + _START_TIMEOUT_S)

    def _replace(self, worker: _Worker) -> int:
        code = worker.kill()
        self._workers[self._workers.index(worker)] = self._start()
        return code

    def _score(self, call: _Call, waiting: Callable[[], None]) -> list[RewardResult]:
        if not self._finalizer.alive:
            raise TrainingError("the reward pool is closed")
        try:
            while len(call.results) < len(call.requests):
                waiting()
                for worker in list(self._workers):
                    if call.queue and not worker.pending:
                        self._send(worker, call)
                self._receive(call)
                if call.is_hopeless(len(self._workers)):
                    detail = f"not evaluated: {call.num_timeouts} of {len(call.results)} before it timed out"
                    unscored = set(range(len(call.requests))) - call.results.keys()
                    call.results |= dict.fromkeys(unscored, RewardResult(0.0, "timeout", detail))
        finally:  # after an error or giving up: no answer to this call may reach the next one
            for worker in [worker for worker in self._workers if worker.pending]:
                self._replace(worker)
        return [call.results[index] for index in range(len(call.requests))]

    def _send(self, worker: _Worker, call: _Call) -> None:
        size = min(_CHUNK, -(-len(call.queue) // (2 * len(self._workers))))
        chunk = [call.queue.popleft() for _ in range(size)]
        try:
            worker.connection.send([call.requests[index] for index in chunk])
        except ConnectionError:  # it died while idle
            call.queue.extendleft(reversed(chunk))
            self._replace(worker)
            return
        worker.pending.extend(chunk)
        if worker.ready:
            worker.deadline = time.monotonic() + self._timeout_s

    def _receive(self, call: _Call) -> None:
        """Takes what the workers say, waiting for one word or time-out; replaces dead and hung ones."""
        busy = [worker for worker in self._workers if worker.pending or not worker.ready]
        if not busy:
            return
        patience = min(_PATIENCE_S, max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))
        speaking = wait([worker.connection for worker in busy], patience)
        for worker in busy:
            if worker.connection in speaking:
                try:
                    self._listen(worker, call)
                except (EOFError, ConnectionError):
                    self._bury(worker, call, "error", "the reward's process died with exit code {}")
            elif time.monotonic() >= worker.deadline:
                self._bury(worker, call, "timeout", _overdue(self._timeout_s))

    def _listen(self, worker: _Worker, call: _Call) -> None:
        while True:
            kind, *content = worker.connection.recv()
            if kind == "fatal":
                raise ConfigError(content[0])
            worker.ready = kind != "preparing"
            worker.deadline = time.monotonic() + (self._timeout_s if worker.ready else _START_TIMEOUT_S)
            if kind == "result":
                score, detail = content
                result = RewardResult(0.0, "error", detail) if score is None else RewardResult(score, "ok")
                call.results[worker.pending.popleft()] = result
            if not worker.connection.poll():
                return

    def _bury(self, worker: _Worker, call: _Call, status: str, reason: str) -> None:
        """Replaces a dead or hung worker, blames the item it was at and queues its other items again."""
        code = self._replace(worker)
        if code == -signal.SIGALRM:  # its own timer, as we came late
            status, reason = "timeout", _overdue(self._timeout_s)
        if not worker.ready:
            what = "didn't start" if status == "timeout" else f"died with exit code {code} while starting"
            raise TrainingError(
                f"a reward process {what} (limit {_START_TIMEOUT_S:g} s); its messages are on standard error"
            )
        if worker.pending:  # else it died right after its last answer
            call.results[worker.pending.popleft()] = RewardResult(0.0, status, reason.format(code))
            call.num_timeouts += status == "timeout"
            call.queue.extendleft(reversed(worker.pending))


def _overdue(timeout_s: float) -> str:
    return f"no result within {timeout_s:g} s"


def _resolve(name: str) -> str:
    """A reward's name, or `absolute/file.py:function`."""
    file, colon, function = name.rpartition(":")
    if not colon and not name.endswith(".py"):
        REWARDS[name]  # raises for an unknown one
        return name
    path = Path(file).expanduser().resolve()
    if path.suffix != ".py" or not function.isidentifier():
        raise ConfigError(f"reward.name={name!r} must be of the form path/to/file.py:function")
    if not path.is_file():
        raise ConfigError(f"reward.name={name!r}: {path} doesn't exist")
    return f"{path}:{function}"


def _kill_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of the owner
        for worker in workers:
            worker.kill()
