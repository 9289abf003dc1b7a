"""Ray's daemons on one node of an attempt, as the node's supervisor holds them. Standard library only.

Start-up is concurrent and nothing here blocks. Every node starts a child that loads Ray (ray_start.py). The head's goes
on at once; the others' wait until head.json is there. Node 0's supervisor starts the driver meanwhile, which loads its
libraries and then waits for the nodes itself (ray_attempt.py). The supervisor calls `poll()` in its loop.

    ray = RayNode.start_head(attempt, env, session, spec)        # node 0;  RayNode.join(...) elsewhere
    driver = Popen([...], env=ray.environment)                   # node 0
    while running:
        if (problem := ray.poll()) is not None: ...              # the node has to end, with this text
    ray.stop(keep_logs=failed)                                   # after the driver has gone
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.cluster.attempt import ATTEMPT_VARIABLE, Attempt, publish_text, read_json
from rlhpc.cluster.limits import Limits, limits, oom_kills
from rlhpc.cluster.network import Interface, choose, towards_peers
from rlhpc.cluster.placement import node_resource
from rlhpc.cluster.ports import PortBlock, claim_block
from rlhpc.cluster.ray_agent import children, proc_text
from rlhpc.cluster.session import TOKEN_VARIABLE, Session
from rlhpc.cluster.slurm_env import SlurmEnv
from rlhpc.errors import ConfigError

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # vLLM's peer-to-peer check needs to see its peers
    # Ray prints this on the driver at a rank's death, paragraphs before the driver's own error says whose.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^A worker died or was killed",
    # A node that stopped answering is dead after 3 * (1 + 5) s rather than about a minute.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
SHM_SHARE = 0.3  # of the memory limit and of what is free in /dev/shm, for the object store
MIN_OBJECT_STORE = 80 * 1024**2  # Ray refuses less than 75 MiB
_MAX_TRIES = 3  # to join: Ray gives a node half a minute, which a busy one or a slow file system may exceed
_LOG_LINES = 15
_LOG_BYTES = 4 * 1024**2  # kept of each of Ray's log files
_STACK = re.compile(r"\(\+0x[0-9a-f]+\)|^\*\*\* StackTrace")
_STARTED = "Ray runtime started."  # printed by `ray start` once the node is registered


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
        publish_text(run_dir / "cluster.json", json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> RaySpec:
        """Raises ConfigError when the file is missing or from another version."""
        path = run_dir / "cluster.json"
        if (content := read_json(path)) is None:
            raise ConfigError(f"{path} is missing; start the run with launch/run.py, which writes it")
        try:
            return cls(**content)
        except TypeError as error:
            raise ConfigError(
                f"{path} is from another version of rlhpc ({error}); submit the run again with launch/run.py"
            ) from error


class RayNode:
    """Constructed by `start_head` or `join`; both return within a fraction of a second.

    `environment` is what the driver runs with: os.environ with the session, Ray's token and the network's settings.
    """

    def __init__(self, attempt: Attempt, env: SlurmEnv, session: Session, spec: RaySpec) -> None:
        self._attempt, self._env, self._session, self._spec = attempt, env, session, spec
        self._begun = time.time()
        self._limits = limits(os.environ)
        self._object_store = object_store_bytes(spec, self._limits)
        if self._limits.cpus < (wanted := spec.ranks_per_node * spec.cpus_per_rank):
            self._print(
                f"{self._limits.cpus:g} CPUs for {spec.ranks_per_node} ranks of cluster.cpus_per_rank="
                f"{spec.cpus_per_rank}, which want {wanted}; they will share"
            )
        self._ports = claim_block(env.job_id, env.node_id)
        self.environment = os.environ | RAY_ENVIRONMENT | {
            TOKEN_VARIABLE: session.token,
            ATTEMPT_VARIABLE: str(attempt.directory),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(attempt.token_path),
        }  # fmt: skip
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):  # somebody's own Ray
            self.environment.pop(name, None)
        self._logs = attempt.directory / "ray" / f"node-{env.node_id}"
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._record: dict[str, Any] = {
            "node": env.node_id,
            "name": env.node_name,
            "host": socket.gethostname(),
            "supervisor": os.getpid(),
            "session": asdict(session) | {"directory": str(session.directory)},
            "ports": [self._ports.base, self._ports.workers.stop - 1],
            "limits": asdict(self._limits),
            "oom_kills": 0,
            "milestones": {"supervisor": self._begun},
        }
        self._write()
        self._tries = 0
        self._child = self._spawn()
        self._ready = self._up = False  # head.json was published or read; this node is registered

    @classmethod
    def start_head(cls, attempt: Attempt, env: SlurmEnv, session: Session, spec: RaySpec) -> RayNode:
        """Claims ports, chooses the interface, writes node-0.json and starts the head. `poll` publishes head.json.

        Raises ConfigError for a network interface or a size that can't be used here, ClusterError where no ports are
        free.
        """
        node = cls(attempt, env, session, spec)
        peers = env.nodes[1:] if spec.num_nodes > 1 else []
        launch_ip = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") if peers else None
        node._start(choose(spec.network_interface, towards_peers(peers, launch_ip)), head=None)
        return node

    @classmethod
    def join(cls, attempt: Attempt, env: SlurmEnv, session: Session, spec: RaySpec) -> RayNode:
        """The same for any other node: writes node-<id>.json and starts a child that joins once head.json is there."""
        return cls(attempt, env, session, spec)

    def poll(self) -> str | None:
        """None while all is well; otherwise what is wrong, with the end of the daemon's log. Cheap; call it at least
        twice a second: it also records when this node's daemons came up and publishes head.json.

        Raises ConfigError on the way to joining, as start_head does."""
        if (ended := self._ended()) is not None:
            if self._up or self._env.node_id == 0 or self._tries == _MAX_TRIES:
                return self._report(ended)
            self._print(f"{ended}; trying again")
            self._child.kill()
            self._child.wait()
            self._child = self._spawn()
            self._ready = False
        if (kills := oom_kills()) > self._record["oom_kills"]:
            self._record["oom_kills"] = kills
            self._write()
            self._print(
                f"the job's memory here, {self._limits.memory_bytes / 2**30:.1f} GiB, was used up, and the kernel has "
                f"ended {kills} of its processes; raise cluster.memory_gib_per_node, or lower "
                "actor.ppo_max_token_len_per_gpu, rollout.cpu_kv_cache_gib or trainer.n_gpus_per_node"
            )
        if not self._ready:
            self._go_on()
        if not self._up and _STARTED in self._started():
            self._up = True
            self._milestone("joined")
        if self._up or time.time() - self._begun < self._spec.start_timeout_s:
            return None
        timeout = f"within cluster.start_timeout_s={self._spec.start_timeout_s:g}"
        if not self._ready and self._env.node_id:
            return f"node {self._name} saw no head.json of node 0 ({self._env.nodes[0]}) {timeout}; see that node's log"
        return self._report(f"Ray didn't come up {timeout}")

    def alive(self) -> bool:
        """True while the daemons run."""
        return self._child.poll() is None

    def stop(self, *, keep_logs: bool) -> None:
        """Kills Ray's daemons on this node, after copying their logs to <attempt>/ray/node-<id>/ when asked to. What is
        left, the session's owner removes with it (Reaper.close)."""
        if keep_logs:
            for log in self._ray_logs():
                _copy_end(log, self._logs / log.name)
        self._child.kill()  # the kernel ends gcs_server and raylet with it, and these their workers
        self._child.wait()
        self._ports.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._tries += 1
        with (self._logs / "start.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "rlhpc.cluster.ray_start"],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _ended(self) -> str | None:
        if (code := self._child.poll()) is not None:
            return f"Ray ended by itself (exit code {code})"
        if not self._up and (dead := _dead_daemons(self._child.pid)):
            return f"{' and '.join(dead)} ended while Ray started"
        return None

    def _print(self, what: str) -> None:
        print(f"warning: node {self._name}: {what}", file=sys.stderr, flush=True)

    @property
    def _name(self) -> str:
        return f"{self._env.node_name or socket.gethostname()} (SLURM_NODEID {self._env.node_id})"

    def _go_on(self) -> None:
        """The next move of a start: node 0 says that its head listens, the others follow it."""
        if self._env.node_id == 0:
            head = {"ip": self._interface.ip, "port": self._ports["gcs"], "master_port": self._ports["master"]}
            if listens(head["ip"], head["port"]):
                self._ready = True
                self._attempt.write("head", head)
                self._milestone("head")
        elif (found := self._attempt.read("head")) is not None:
            self._ready = True
            self._milestone("head")
            self._start(choose(self._spec.network_interface, found["ip"]), f"{found['ip']}:{found['port']}")

    def _start(self, interface: Interface, head: str | None) -> None:
        self._interface = interface
        self.environment.update(interface.environment())
        self._record |= {"ip": interface.ip, "interface": interface.name}
        self._write()
        spec, memory = self._spec, self._limits.memory_bytes - self._object_store
        options = {
            "node-ip-address": interface.ip,
            "temp-dir": self._session.directory,
            "num-cpus": spec.ranks_per_node,  # Ray starts as many workers at once: one for each rank
            "num-gpus": spec.gpus_per_node,
            "memory": memory,
            "object-store-memory": self._object_store,
            "resources": json.dumps({node_resource(self._env.node_id): spec.ranks_per_node}),
            "include-log-monitor": "false",  # each rank writes a log file of its own
            **_port_options(self._ports, head=head is None),
        }
        if head is None:
            options |= {"include-dashboard": "false", "dashboard-host": "127.0.0.1"}
        arguments = ["--head", "--no-monitor"] if head is None else [f"--address={head}"]
        arguments += ["--block", *(f"--{name}={value}" for name, value in options.items())]
        order = json.dumps({"arguments": arguments, "environment": interface.environment()})
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(order.encode() + b"\n")
            self._child.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, and poll says why

    def _milestone(self, name: str) -> None:
        self._record["milestones"][name] = time.time()
        self._write()

    def _write(self) -> None:
        self._attempt.write(f"node-{self._env.node_id}", self._record)

    def _started(self) -> str:
        return (self._logs / "start.log").read_text(errors="replace")

    def _report(self, what: str) -> str:
        """What happened, with the ends of the logs that can say why."""
        kills = self._record["oom_kills"]
        memory = f"; the kernel ended {kills} processes of this job here for want of memory" if kills else ""
        lines = [f"node {self._name}: {what}{memory}"]
        wanted = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err")
        for log in (self._logs / "start.log", *(log for log in self._ray_logs() if log.name in wanted)):
            text = log.read_text(errors="replace").splitlines()
            if end := [line for line in text if line.strip() and not _STACK.search(line)][-_LOG_LINES:]:
                lines += [f"the end of {log.name}:", *(f"  {line}" for line in end)]
        return "\n".join(lines)

    def _ray_logs(self) -> Iterator[Path]:
        yield from sorted(path for path in self._session.directory.glob("session_2*/logs/*") if path.is_file())


def object_store_bytes(spec: RaySpec, found: Limits) -> int:
    """Bytes of Ray's shared memory on this node: what was asked for, where the node has as much. Raises ConfigError
    where there isn't as much as Ray needs."""
    most = int(SHM_SHARE * min(found.memory_bytes, found.shm_bytes))
    if most < MIN_OBJECT_STORE:
        raise ConfigError(
            f"this job may use {found.memory_bytes / 2**30:.1f} GiB of memory on node {socket.gethostname()}, where "
            f"/dev/shm has {found.shm_bytes / 2**30:.1f} GiB free; Ray's object store takes {SHM_SHARE:.0%} of the "
            f"lesser and needs {MIN_OBJECT_STORE / 2**20:.0f} MiB: raise cluster.memory_gib_per_node, or free /dev/shm"
        )
    return min(spec.object_store_bytes, most)


def _port_options(ports: PortBlock, *, head: bool) -> dict[str, int]:
    options = {
        "node-manager-port": ports["node_manager"],
        "object-manager-port": ports["object_manager"],
        "runtime-env-agent-port": ports["runtime_env_agent"],
        "dashboard-agent-listen-port": ports["dashboard_agent_http"],
        "dashboard-agent-grpc-port": ports["dashboard_agent_grpc"],
        "metrics-export-port": ports["metrics"],
        "min-worker-port": ports.workers.start,
        "max-worker-port": ports.workers.stop - 1,
    }
    return options | ({"port": ports["gcs"], "dashboard-port": ports["dashboard"]} if head else {})


def _dead_daemons(parent: int) -> list[str]:
    """Daemons of Ray that have ended and whose parent hasn't noticed: `ray start` waits half a minute for their answer
    before it looks."""
    dead = []
    for child in children(parent):
        name, _, rest = proc_text(child / "stat").partition("(")[2].rpartition(")")
        if name in ("gcs_server", "raylet") and rest.split()[0] == "Z":
            dead.append(name)
    return dead


def listens(ip: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    try:
        with socket.create_connection((ip, port), timeout=1.0):
            return True
    except OSError:
        return False


def _copy_end(source: Path, target: Path) -> None:
    """Copies the last bytes of a log that may still grow."""
    with source.open("rb") as log, target.open("wb") as copy:
        log.seek(max(0, source.stat().st_size - _LOG_BYTES))
        shutil.copyfileobj(log, copy)
