"""A node comes up without its dashboard's agent. Standard library only.

Ray's raylet waits for files in which that agent, a Python program that loads much, names its ports, and aborts when
they aren't there after 15 s (a constant in Ray 2.60, https://github.com/ray-project/ray/issues/65983): on a busy node,
or from a slow file system, they often aren't. Nothing here asks the agent anything. So the files are written for it,
and say what the agent says where it does without a port; it replaces them once it is there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhpc.cluster.attempt import publish_text

_PORTS = ("dashboard_agent_listen_port", "metrics_agent_port")
_NOT_IN_USE = "-1"
_POLL_S = 0.02


@contextmanager
def without_its_agent() -> Iterator[None]:
    """The raylet that this process starts within it doesn't wait for its dashboard's agent."""
    done = threading.Event()
    thread = threading.Thread(target=_answer, args=(done,), daemon=True, name="answer for Ray's agent")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _answer(done: threading.Event) -> None:
    while not done.wait(_POLL_S):
        if raylet := _raylet():
            session, node = Path(raylet["--session_dir"]), raylet["--node_id"]
            for port in _PORTS:
                publish_text(session / f"{port}_{node}", _NOT_IN_USE, replace=False)
            return


def _raylet() -> dict[str, str] | None:
    """The arguments of this process's raylet, None while there is none."""
    for child in children(os.getpid()):
        program, *arguments = proc_text(child / "cmdline").split("\0")
        if Path(program).name == "raylet":
            return dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    return None


def children(parent: int) -> Iterator[Path]:
    """The places in /proc of the processes that one has started."""
    for started in Path(f"/proc/{parent}/task").glob("*/children"):
        yield from (Path("/proc", child) for child in proc_text(started).split())


def proc_text(path: Path) -> str:
    """What a file in /proc says, nothing once its process is gone."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
