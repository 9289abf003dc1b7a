"""A real Slurm for tests, from scripts/minislurm.sh: submit, wait, preempt, switch a node off, see what is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhpc.cluster.ports import claim_block

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/minislurm.sh"
KILL_WAIT_S, GRACE_S = 10, 40  # scripts/minislurm.sh
STARTED = frozenset({"RUNNING", "COMPLETING", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"})
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"})


@dataclass(frozen=True)
class Cluster:
    """One mini Slurm; its nodes are `<prefix>1` to `<prefix><nodes>`, with 8 CPUs, 4 GPUs and 20000 MB each."""

    directory: Path
    port: int
    prefix: str
    nodes: int = 4
    extra: str = ""  # further lines of slurm.conf
    proctrack: str = "cgroup"

    @property
    def conf(self) -> Path:
        return self.directory / "slurm.conf"

    def node(self, number: int) -> str:
        return f"{self.prefix}{number}"

    def environ(self, **more: str) -> dict[str, str]:
        """This process's environment, pointed at this cluster and free of Slurm's variables of another."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN", "PMI"))}
        return {**kept, "SLURM_CONF": str(self.conf), **more}

    # --- the cluster itself

    def script(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs scripts/minislurm.sh on this instance; raises with its output when it refuses."""
        return run(["bash", str(SCRIPT), verb, *arguments], self._script_environ(), timeout_s=600)

    def _script_environ(self) -> dict[str, str]:
        variables = {
            "MINISLURM_DIR": str(self.directory),
            "MINISLURM_PORT": str(self.port),
            "MINISLURM_NODES": str(self.nodes),
            "MINISLURM_PREFIX": self.prefix,
            "MINISLURM_PROCTRACK": self.proctrack,
        }
        if self.extra:
            path = self.directory.with_suffix(".conf")
            path.write_text(self.extra)
            variables["MINISLURM_EXTRA"] = str(path)
        environ = self.environ(**variables)
        del environ["SLURM_CONF"]  # the script's own to set
        return environ

    def up(self) -> None:
        """Starts what isn't running: all of it, or nodes that were switched off."""
        self.script("up")

    def down(self) -> None:
        self.script("down")

    def guard(self) -> subprocess.Popen[str]:
        """A process that takes the instance away when its standard input closes: when this process wants it, or ends
        in whatever way."""
        remove = f"read -r; bash {SCRIPT} down && rm -rf {self.directory} {self.directory.with_suffix('.conf')}"
        return subprocess.Popen(
            ["bash", "-c", remove],
            env=self._script_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # out of reach of a terminal's Ctrl-C
        )

    def power_off(self, node: str) -> None:
        """Kills the node's daemon and the processes of its jobs at once. `up()` brings it back."""
        self.script("off", node)

    def controller(self) -> int:
        """slurmctld's pid."""
        return int((self.directory / "run/slurmctld.pid").read_text())

    @contextmanager
    def frozen_controller(self) -> Iterator[None]:
        """A slurmctld that accepts connections and answers nothing, as an overloaded one."""
        pid = self.controller()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def dead_controller(self) -> Iterator[None]:
        """No slurmctld at all; it saves its state before, and a new one goes on from there."""
        pid = self.controller()
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not alive(pid), 30, "slurmctld ends")
        try:
            yield
        finally:
            self.up()

    # --- jobs

    def run(self, *command: str, timeout_s: float = 60, check: bool = True) -> str:
        """Standard output of one of Slurm's commands, outside every job."""
        return run(list(command), self.environ(), timeout_s, check).stdout

    def submit(self, script: str, *options: str, directory: Path, **variables: str) -> str:
        """Submits a batch script's text from `directory`, its output in `directory`/<job>.log; the job's id."""
        if not script.startswith("#!"):
            script = f"#!/bin/bash\n{script}\n"
        options = ("--parsable", "--open-mode=append", f"--output={directory}/%A.log", f"--chdir={directory}", *options)
        done = run(["sbatch", *options], self.environ(**variables), input_text=script)
        return done.stdout.strip().split(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job -o`, {} when the controller doesn't know the job."""
        text = run(["scontrol", "show", "job", "-o", job], self.environ(), check=False).stdout
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s+\S+=|\s*$)", text.splitlines()[0])) if text.strip() else {}

    def state(self, job: str) -> str:
        return self.show(job).get("JobState", "")

    def wait_for(self, job: str, *states: str, timeout_s: float = 60) -> dict[str, str]:
        """Waits until the job is in one of `states`; its fields then."""
        return self.wait_until(job, lambda fields: fields.get("JobState") in states, " or ".join(states), timeout_s)

    def wait_end(self, job: str, timeout_s: float = 120) -> str:
        """Waits until the job is over for good; its state."""
        return self.wait_for(job, *ENDED, timeout_s=timeout_s)["JobState"]

    def wait_until(
        self, job: str, condition: Callable[[dict[str, str]], bool], what: str, timeout_s: float = 60
    ) -> dict[str, str]:
        fields: dict[str, str] = {}

        def holds() -> bool:
            nonlocal fields
            fields = self.show(job)
            return condition(fields)

        wait_until(holds, timeout_s, f"job {job} becomes {what}", lambda: str(fields))
        return fields

    def restarts(self, job: str) -> int:
        return int(self.show(job)["Restarts"])

    def preempt(self, job: str, seconds: float = 1) -> str:
        """A job in `high` that wants the nodes of `job` whole; it runs `seconds` once it has them. Its id."""
        nodes = self.show(job)["NodeList"]
        count = len(self.expand(nodes))
        return self.submit(
            f"sleep {seconds}", "-phigh", f"-N{count}", f"-w{nodes}", "--exclusive", directory=self.directory
        )

    def expand(self, nodelist: str) -> list[str]:
        return self.run("scontrol", "show", "hostnames", nodelist).split()

    def accounting(self, job: str, *fields: str) -> list[dict[str, str]]:
        """What sacct knows of the job's runs, oldest first, without its steps."""
        lines = self.run("sacct", "-D", "-X", "-n", "-P", "-j", job, f"--format={','.join(fields)}").splitlines()
        return [dict(zip(fields, line.split("|"), strict=True)) for line in lines]

    def cancel(self, *jobs: str) -> None:
        self.run("scancel", *jobs)

    def free(self) -> None:
        """Cancels every job and waits until all nodes are idle, so that the next test has the whole cluster."""
        for partition in ("low", "grace", "high"):
            self.run("scancel", "--full", f"--partition={partition}", check=False)
        if self.run("sinfo", "-h", "-p", "low", "-t", "down,drain,fail,no_respond", "-o", "%N").strip():
            self.run("scontrol", "update", f"nodename={self.prefix}[1-{self.nodes}]", "state=resume", check=False)
            self.up()
        wait_until(lambda: not self.run("squeue", "-h").strip(), KILL_WAIT_S + 20, "the queue is empty")

    # --- what is left

    def processes(self, job: str) -> list[int]:
        """Pids in the job's control groups on all nodes, Slurm's own step daemons excepted."""
        groups = Path("/sys/fs/cgroup").glob(f"*/slurm_{self.prefix}*/uid_*/job_{job}/**/cgroup.procs")
        pids = {int(pid) for group in groups for pid in _read(group).split()}
        return sorted(pid for pid in pids if _read(Path(f"/proc/{pid}/comm")).strip() not in ("slurmstepd", ""))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError, OSError):
        return ""


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet waited for doesn't."""
    stat = _read(Path(f"/proc/{pid}/stat"))
    return bool(stat) and stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def run(
    command: Sequence[str],
    environ: dict[str, str],
    timeout_s: float = 60,
    check: bool = True,
    input_text: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command; with `check` a nonzero exit raises AssertionError with what it said."""
    done = subprocess.run(command, env=environ, timeout=timeout_s, input=input_text, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str, state: Callable[[], str] = lambda: ""
) -> None:
    """Waits for something that has to happen; `timeout_s` stands for "hangs"."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s. {state()}"
        time.sleep(0.1)


@contextmanager
def own_cluster(tag: str, nodes: int = 4, extra: str = "", proctrack: str = "cgroup") -> Iterator[Cluster]:
    """An instance that meets no other on this machine, and is gone afterwards. `tag` is a small letter or a few."""
    letters = "".join(chr(ord("a") + int(digit)) for digit in str(os.getpid()))
    with closing(claim_block("minislurm", os.getpid())) as ports:
        port = ports.base + 1
        cluster = Cluster(Path(f"/tmp/ms-{tag}{letters}"), port, f"{tag}{letters}", nodes, extra, proctrack)
        guard = cluster.guard()
        try:
            cluster.up()
            yield cluster
        finally:
            said, _ = guard.communicate(timeout=120)
        assert guard.returncode == 0, said


@contextmanager
def named_cluster(tag: str, nodes: int) -> Iterator[Cluster]:
    """The instance that MINISLURM_DIR (PORT, PREFIX, NODES) names, which stays, else one of its own."""
    if directory := os.environ.get("MINISLURM_DIR"):
        port, prefix = int(os.environ.get("MINISLURM_PORT", "27800")), os.environ.get("MINISLURM_PREFIX", "n")
        cluster = Cluster(Path(directory), port, prefix, int(os.environ.get("MINISLURM_NODES", "4")))
        cluster.up()
        yield cluster
    else:
        with own_cluster(tag, nodes) as cluster:
            yield cluster
