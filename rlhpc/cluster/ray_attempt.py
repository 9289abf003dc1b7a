"""The driver's way into the Ray of its attempt: the supervisors start the daemons, the driver waits and connects."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.placement import Placement, node_resource
from rlhpc.cluster.ray_node import RaySpec, listens
from rlhpc.cluster.slurm_env import SlurmEnv
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ClusterError

_LOOK_S = 0.1


@contextmanager
def attempt_ray(
    cfg: RunConfig,
    attempt: Attempt,
    *,
    waiting: Callable[[], None] = lambda: None,
) -> Iterator[Placement]:
    """Waits for head.json and for every node of the attempt, connects, and says where the ranks go. Stops nothing on
    the way out: Ray's daemons are their supervisors'.

    `waiting` is called several times a second and may raise. Raises ClusterError after cluster.start_timeout_s, naming
    the nodes that are missing.
    """
    deadline = time.monotonic() + cfg.cluster.start_timeout_s
    spec = RaySpec.read(attempt.run_dir)
    names = SlurmEnv.from_environ(os.environ).nodes
    while (head := attempt.read("head")) is None:
        if time.monotonic() > deadline:
            raise ClusterError(f"Ray's head on {names[0]} didn't come up in {cfg.cluster.start_timeout_s:g} s")
        waiting()
        time.sleep(_LOOK_S)
    try:
        connect(head["ip"], head["port"])
        while missing := _missing(spec.num_nodes):
            if time.monotonic() > deadline:
                raise ClusterError(_who_is_missing(missing, names, attempt, cfg.cluster.start_timeout_s))
            waiting()
            time.sleep(_LOOK_S)
        yield Placement((head["ip"], head["master_port"]), spec.ranks_per_node, spec.num_nodes)
    finally:
        ray.shutdown()


def connect(ip: str, port: int) -> None:
    """Connects this process to a Ray that somebody else has started, with the token that its environment names.

    Raises ClusterError. Ray itself says the same of a wrong token as of a dead head, and of that after two minutes.
    """
    where = f"{ip}:{port}"
    if not listens(ip, port):
        raise ClusterError(
            f"nobody listens at {where}, where Ray's head should: it has ended, or a firewall is between"
        )
    try:
        ray.init(address=where, _node_ip_address=ip, log_to_driver=False, logging_level="warning")
    except ConnectionError as error:
        if not listens(ip, port):
            raise ClusterError(f"Ray's head at {where} ended while this process connected: {error}") from error
        token = os.environ.get("RAY_AUTH_TOKEN_PATH", "which is not set")
        raise ClusterError(
            f"Ray's head at {where} refused this process: its token, from RAY_AUTH_TOKEN_PATH ({token}), belongs to "
            "another attempt or is missing; processes that rlhpc starts inherit the right one"
        ) from error


def _missing(num_nodes: int) -> list[int]:
    joined: set[str] = set()
    for node in ray.nodes():
        if node["Alive"]:
            joined.update(node["Resources"])
    return [node_id for node_id in range(num_nodes) if node_resource(node_id) not in joined]


def _who_is_missing(missing: list[int], names: list[str], attempt: Attempt, timeout_s: float) -> str:
    def progress(node_id: int) -> str:
        found: dict[str, Any] | None = attempt.read(f"node-{node_id}")
        if found is None:
            return "its supervisor never started"
        if "head" not in found["milestones"]:
            return f"its supervisor started on {found['host']} but never saw head.json: is the run directory shared?"
        log = attempt.directory / "ray" / f"node-{node_id}" / "start.log"
        return f"it tried to join from {found['ip']} over {found['interface']}; see {log}"

    lines = [f"  {names[k]} (SLURM_NODEID {k}): {progress(k)}" for k in missing]
    return "\n".join([f"{len(missing)} of {len(names)} nodes didn't join Ray in {timeout_s:g} s:", *lines])
