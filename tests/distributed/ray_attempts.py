"""Attempts of several nodes on this machine: each node a real supervisor process that holds a RayNode.

python -m tests.distributed.ray_attempts RUN_DIR    one node, as SLURM_NODEID says; until standard input closes
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.ray_node import RayNode, RaySpec
from rlhpc.cluster.session import Reaper, open_session
from rlhpc.cluster.slurm_env import SlurmEnv

ROOT = Path(__file__).resolve().parents[2]
# Takes the address and port of somebody's Ray.
CONNECT = """
import sys
from rlhpc.cluster.ray_attempt import connect
from rlhpc.errors import ClusterError
try:
    connect(sys.argv[1], int(sys.argv[2]))
except ClusterError as error:
    print("refused:", error)
else:
    print("connected")
"""


def spec(**changes: Any) -> RaySpec:
    values: dict[str, Any] = {
        "num_nodes": 2,
        "ranks_per_node": 2,
        "cpus_per_rank": 1,
        "gpus_per_node": 0,
        "object_store_bytes": 128 * 1024**2,
        "start_timeout_s": 120.0,
        "network_interface": None,
        "temp_root": "/tmp",
    }
    return RaySpec(**values | changes)


@dataclass
class Nodes:
    """The supervisors of an attempt. `variables` is what Slurm would set; `become` begins their commands."""

    attempt: Attempt
    variables: dict[str, str]
    become: Sequence[str] = ()
    supervisors: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, count: int, **environ: str) -> None:
        for node_id in range(len(self.supervisors), len(self.supervisors) + count):
            self.supervisors.append(
                subprocess.Popen(
                    [*self.become, sys.executable, "-m", "tests.distributed.ray_attempts", str(self.attempt.run_dir)],
                    env={**os.environ, **self.variables, **environ, "SLURM_NODEID": str(node_id),
                         "SLURMD_NODENAME": f"n{node_id}"},
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )  # fmt: skip

    def record(self, node_id: int) -> dict[str, Any]:
        found = self.attempt.read(f"node-{node_id}")
        assert found is not None
        return found

    def wait_joined(self, timeout_s: float = 150) -> None:
        deadline = time.monotonic() + timeout_s
        for node_id, supervisor in enumerate(self.supervisors):
            while "joined" not in (self.attempt.read(f"node-{node_id}") or {"milestones": {}})["milestones"]:
                assert supervisor.poll() is None, supervisor.stdout.read() if supervisor.stdout else ""
                assert time.monotonic() < deadline, f"node {node_id} didn't join in {timeout_s} s"
                time.sleep(0.1)

    def problem(self, node_id: int, timeout_s: float = 60) -> str:
        """What a supervisor says when it ends by itself."""
        supervisor = self.supervisors[node_id]
        assert supervisor.stdout
        ready, _, _ = select.select([supervisor.stdout], [], [], timeout_s)
        assert ready, f"node {node_id} is still well after {timeout_s} s"
        supervisor.wait(timeout=60)
        return supervisor.stdout.read()

    def driver(self, code: str, **environ: str) -> subprocess.Popen[str]:
        """Python code in a process that stands where the driver does."""
        shared = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.attempt.token_path)}
        shared |= {"RLHPC_ATTEMPT": str(self.attempt.directory), "SLURM_NODEID": "0"}
        return subprocess.Popen(
            [*self.become, sys.executable, "-c", code],
            env={**os.environ, **self.variables, **shared, **environ},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def close(self) -> None:
        for supervisor in self.supervisors:
            if supervisor.stdin and not supervisor.stdin.closed:
                supervisor.stdin.close()
        for supervisor in self.supervisors:
            supervisor.wait(timeout=60)


@contextlib.contextmanager
def nodes(
    run_dir: Path, job: int, settings: RaySpec, *, become: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Iterator[Nodes]:
    """An attempt whose files are there and whose supervisors end with it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    settings.write(run_dir)
    attempt = Attempt(run_dir, str(job), 0)
    attempt.create(os.urandom(16).hex())
    count = settings.num_nodes
    variables = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": f"n[0-{count - 1}]", "SLURM_JOB_NUM_NODES": str(count)}
    started = Nodes(attempt, variables | dict(environ or {}), become)
    try:
        yield started
    finally:
        started.close()


def main() -> int:
    env = SlurmEnv.from_environ(os.environ)
    attempt = Attempt(Path(sys.argv[1]), env.job_id, env.restart)
    settings = RaySpec.read(attempt.run_dir)
    session = open_session(settings.temp_root)
    reaper = Reaper(session)
    ray = (RayNode.join if env.node_id else RayNode.start_head)(attempt, env, session, settings)
    problem = None
    while (problem := ray.poll()) is None and not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
    ray.stop(keep_logs=problem is not None)
    reaper.close()
    if problem:
        print(problem)
    return 1 if problem else 0


def shown(driver: subprocess.Popen[str], timeout_s: float = 180) -> Any:
    """The JSON that a driver prints in its last line."""
    output, _ = driver.communicate(timeout=timeout_s)
    assert driver.returncode == 0, output
    return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
