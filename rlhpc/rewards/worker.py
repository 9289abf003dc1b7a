"""One reward process: `python -m rlhpc.rewards.worker <fd> <setup as JSON>`, started by RewardPool.

Reads lists of (reward name, completion, ground truth) from the socket `fd` and answers each item, in order,
with ("result", score, "") or ("result", None, what went wrong). Says ("preparing",) before it loads code,
time that is not the reward's, ("ready",) after, or ("fatal", message) when the reward can't be used.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import math
import os
import resource
import signal
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

from rlhpc.errors import ConfigError
from rlhpc.rewards.rules import REWARDS, Reward

_MEMORY_LIMIT_BYTES = 4 * 1024**3  # a completion such as 9**9**9 mustn't take the node's memory
_PARENT_CHECK_S = 5.0


def main() -> NoReturn:
    fd, setup = int(sys.argv[1]), json.loads(sys.argv[2])
    os.set_inheritable(fd, False)
    _isolate()
    connection = Connection(fd)
    try:
        _Evaluator(connection, setup).serve()
    except (EOFError, ConnectionError):
        pass  # the pool closed, or died
    except ConfigError as error:
        connection.send(("fatal", str(error)))
    sys.stderr.flush()
    os.killpg(os.getpgrp(), signal.SIGKILL)  # with whatever a reward started: this group is ours alone
    raise AssertionError("unreachable")


def load_reward(file: Path, function: str) -> Reward:
    """The function of a user's file; its directory comes first on sys.path. Raises ConfigError."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    reward = getattr(module, function, None)
    if not callable(reward):
        found = sorted(name for name, _ in inspect.getmembers(module, inspect.isfunction) if not name.startswith("_"))
        raise ConfigError(f"reward.name: {file} has no function {function!r}, only {', '.join(found) or 'none'}")
    loaded: Reward = reward
    return loaded


class _Evaluator:
    def __init__(self, connection: Connection, setup: dict[str, Any]) -> None:
        self.connection = connection
        self.kwargs = setup["kwargs"]
        self.parent = setup["parent"]
        self.start_timeout_s = setup["start_timeout_s"]
        # The pool kills us at the time-out; this is for a reward that hangs when the pool's process is dead.
        self.orphan_timeout_s = setup["timeout_s"] + 1
        self.loaded: dict[str, Reward] = {}
        if setup["name"] is not None:
            self.prepare(setup["name"])

    def serve(self) -> None:
        self.connection.send(("ready",))
        while True:
            signal.setitimer(signal.ITIMER_REAL, 0)
            while not self.connection.poll(_PARENT_CHECK_S):
                if os.getppid() != self.parent:  # a fork of the pool's process may hold the socket open
                    return
            for name, completion, ground_truth in self.connection.recv():
                if name not in self.loaded:
                    self.connection.send(("preparing",))
                    self.prepare(name)
                    self.connection.send(("ready",))
                signal.setitimer(signal.ITIMER_REAL, self.orphan_timeout_s)
                self.connection.send(("result", *self.evaluate(name, completion, ground_truth)))

    def prepare(self, name: str) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.start_timeout_s + 10)
        file, _, function = name.rpartition(":")
        try:
            reward = load_reward(Path(file), function) if file else REWARDS[name]
            _fit(reward, self.kwargs)
            self.loaded[name] = partial(reward, **self.kwargs)
            if not file:
                self.loaded[name]("1", "1")  # loads what the rule needs and checks the values of its kwargs
        except Exception as error:  # a user's file may raise anything while it loads
            raise ConfigError(f"reward {name} with kwargs {self.kwargs} can't be used: {_describe(error)}") from error

    def evaluate(self, name: str, completion: str, ground_truth: str) -> tuple[float | None, str]:
        try:
            score: Any = self.loaded[name](completion, ground_truth)
        except Exception as error:  # a user's reward may raise anything
            return None, _describe(error)
        if not isinstance(score, Real) or not math.isfinite(score):
            return None, f"reward {name} returned {score!r:.100}, must be a finite number"
        return float(score), ""


def _fit(reward: Reward, kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError where a reward can't be called as all are."""
    signature = inspect.signature(reward)
    try:
        signature.bind("", "", **kwargs)
    except TypeError as error:
        given = "".join(f", {name}={value!r}" for name, value in kwargs.items())
        raise ConfigError(
            f"it is called with (completion, ground_truth{given}), and takes {signature}: {error}; "
            "mend reward.kwargs, or write a function that takes these and calls it, as for a compute_score of verl's"
        ) from error


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error!s:.500}"


def _isolate() -> None:
    """Bounds memory, leaves signals to the pool's process, and lets SIGALRM kill: no code can hold it off."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    memory = _MEMORY_LIMIT_BYTES if limit == resource.RLIM_INFINITY else min(_MEMORY_LIMIT_BYTES, limit)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, limit))
    # Slurm signals every process of a step; scoring goes on until the driver decides to stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarm is off


if __name__ == "__main__":
    main()
