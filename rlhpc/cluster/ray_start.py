"""The child in which a node's `ray start` runs: it loads Ray while the supervisor still waits for the head.

The supervisor writes one line to its standard input: a JSON object with the `arguments` of `ray start` and further
variables of the `environment`. The process ends when one of Ray's daemons does, or with its supervisor.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

from rlhpc.cluster.ray_agent import without_its_agent

_PR_SET_PDEATHSIG = 1


def without_client_server(ray_params: Any, head: bool) -> None:
    """Ray's start hook. The server for remote clients would be one more process and open port on the head, on 10001
    unless another is named, and naming one is an error where its libraries are missing."""
    ray_params.ray_client_server_port = None


def main() -> None:
    # Ray binds its daemons' lives to this process in the same way.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from ray.scripts.scripts import cli

    if not (order := sys.stdin.readline()):
        return  # the supervisor has given up
    start = json.loads(order)
    os.environ.update(start["environment"], RAY_START_HOOK=f"{__package__}.ray_start.{without_client_server.__name__}")
    with without_its_agent():
        cli(["start", *start["arguments"]], prog_name="ray")


if __name__ == "__main__":
    main()
