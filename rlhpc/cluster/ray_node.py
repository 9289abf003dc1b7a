"""Ray's daemons on one node of an attempt, as the node's supervisor holds them. Standard library only.

Start-up is concurrent: nobody blocks. Every node starts a child that loads Ray and, on all nodes but the first, waits for
head.json; node 0's supervisor starts the driver at once, which loads its libraries meanwhile and waits for the nodes
itself (ray_attempt.py). The supervisor calls `poll()` in its loop.

    ray = RayNode.start_head(attempt, env, session, spec)        # node 0;  RayNode.join(...) elsewhere
    driver = Popen([...], env=ray.environment)                   # node 0
    while running:
        if (problem := ray.poll()) is not None: ...               # the node has to end, with this text
    ray.stop(keep_logs=failed)                                    # after the driver has gone
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.session import Session

if TYPE_CHECKING:
    from rlhpc.cluster.slurm import SlurmEnv


@dataclass(frozen=True)
class RaySpec:
    """What a node needs to know of the configuration, from <run_dir>/cluster.json. Sizes in bytes."""

    num_nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    gpus_per_node: int  # 0: the ranks run on CPUs
    object_store_bytes: int
    start_timeout_s: float
    network_interface: str | None
    temp_root: str
    stop_lead_s: float = 0.0  # launch.stop_lead_s: tells a warning of the time limit from another signal
    max_attempts_without_progress: int = 2  # launch's; batch.py reads it

    def write(self, run_dir: Path) -> None:
        """Publishes <run_dir>/cluster.json."""
        raise NotImplementedError

    @classmethod
    def read(cls, run_dir: Path) -> RaySpec:
        """Raises ConfigError when the file is missing or from another version."""
        raise NotImplementedError


class RayNode:
    """Constructed by `start_head` or `join`; both return within a fraction of a second."""

    environment: dict[str, str]  # for the driver: os.environ with the session, Ray's token and the network's settings

    @classmethod
    def start_head(cls, attempt: Attempt, env: SlurmEnv, session: Session, spec: RaySpec) -> RayNode:
        """Claims ports, chooses the interface, writes node-0.json and starts the head. `poll` publishes head.json.

        Raises ConfigError for a network interface, a temp root or a size that can't be used here.
        """
        raise NotImplementedError

    @classmethod
    def join(cls, attempt: Attempt, env: SlurmEnv, session: Session, spec: RaySpec) -> RayNode:
        """The same for any other node: writes node-<id>.json and starts a child that joins once head.json is there."""
        raise NotImplementedError

    def poll(self) -> str | None:
        """None while all is well; otherwise what is wrong, with the end of the daemon's log. Cheap; call it at least
        twice a second: it also records when this node's daemons came up and publishes head.json."""
        raise NotImplementedError

    def alive(self) -> bool:
        """True while the daemons run."""
        raise NotImplementedError

    def stop(self, *, keep_logs: bool) -> None:
        """Kills Ray's processes on this node, after copying their logs to <attempt>/ray/node-<id>/ when asked to. The
        session's directory and shared memory are the session's to remove (Reaper.close)."""
        raise NotImplementedError
