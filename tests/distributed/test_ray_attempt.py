"""Ray over the nodes of an attempt: who gets in, what it listens on, what it says when something is wrong."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.session import processes
from tests.distributed.ray_attempts import CONNECT, Nodes, nodes, shown, spec

WHERE = """
import json, os, ray
from pathlib import Path
from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.ray_attempt import attempt_ray
from rlhpc.config.schema import RunConfig

@ray.remote
class Rank:
    def where(self):
        names = ("RLHPC_SESSION", "CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        return {name: os.environ.get(name) for name in names} | {"gpus": ray.get_gpu_ids(), "cwd": os.getcwd()}

with attempt_ray(RunConfig(), Attempt.current(os.environ)) as placement:
    count = placement.num_nodes * placement.ranks_per_node
    ranks = [Rank.options(num_cpus=1, num_gpus=1, resources=placement.resources(r)).remote() for r in range(count)]
    print(json.dumps({"ranks": ray.get([rank.where.remote() for rank in ranks]), "master": placement.master}))
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes of two ranks. Their TMPDIR is far too long for a socket's path; Slurm has given them GPUs 2 and 3."""
    folder = tmp_path_factory.mktemp("pair")
    long = folder / ("d" * 100)
    long.mkdir()
    environ = {"TMPDIR": str(long), "CUDA_VISIBLE_DEVICES": "2,3"}
    with nodes(folder / "run", 4001, spec(gpus_per_node=2), environ=environ) as started:
        started.start(2)
        started.wait_joined()
        yield started


def client(cluster: Nodes, port: int | None = None, **environ: str) -> subprocess.Popen[str]:
    head = cluster.attempt.read("head")
    assert head is not None
    code = f"import sys; sys.argv[1:] = ['{head['ip']}', '{port or head['port']}']\n{CONNECT}"
    return cluster.driver(code, **environ)


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=180)[0].splitlines()[-1]


def test_ranks_go_to_their_nodes_in_order_and_see_what_slurm_gave_them(pair: Nodes) -> None:
    found = shown(pair.driver(WHERE))
    sessions = [pair.record(node_id)["session"]["token"] for node_id in (0, 1)]
    assert [rank["RLHPC_SESSION"] for rank in found["ranks"]] == [sessions[0], sessions[0], sessions[1], sessions[1]]
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in found["ranks"]} == {"2,3"}
    assert all(len(rank["gpus"]) == 1 for rank in found["ranks"])
    assert {rank["cwd"] for rank in found["ranks"]} == {os.getcwd()}
    head, record = pair.attempt.read("head"), pair.record(1)
    assert head is not None
    assert found["master"] == [head["ip"], head["master_port"]]
    for rank in found["ranks"]:
        assert rank["VLLM_HOST_IP"] == record["ip"]
        assert (rank["GLOO_SOCKET_IFNAME"], rank["NCCL_SOCKET_IFNAME"]) == (
            record["interface"],
            f"={record['interface']}",
        )


def test_only_the_attempts_own_token_opens_its_ray(pair: Nodes, tmp_path: Path) -> None:
    other = Attempt(tmp_path, "4002", 0)
    other.create(os.urandom(16).hex())
    assert said(client(pair)) == "connected"
    wrong = client(pair, RAY_AUTH_TOKEN_PATH=str(other.token_path))
    without = client(pair, RAY_AUTH_MODE="disabled")
    for process in (wrong, without):
        assert "refused this process: its token" in said(process)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert "nobody listens at" in said(client(pair, port=unused.getsockname()[1]))
    assert said(client(pair)) == "connected"


def test_what_others_could_read_is_private(pair: Nodes) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(pair.attempt.token_path) == 0o600
    assert mode(pair.attempt.directory) == 0o700
    assert mode(pair.attempt.directory / "ray" / "node-0") == 0o700
    assert mode(Path(pair.record(0)["session"]["directory"]).parent) == 0o700  # Ray opens its own to everybody


def listening(token: str) -> set[tuple[str, int]]:
    """Address (of /proc/net, hexadecimal) and port of every socket on which the session's processes listen."""
    inodes: dict[str, tuple[str, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A":
                inodes[f"socket:[{fields[9]}]"] = address, int(port, 16)
    found = set()
    for pid in processes(token):
        try:
            links = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        except FileNotFoundError:
            continue
        found |= {inodes[link] for link in links if link in inodes}
    return found


def test_everything_listens_within_the_nodes_block_and_no_dashboard_beyond_localhost(pair: Nodes) -> None:
    blocks = []
    for node_id in (0, 1):
        record = pair.record(node_id)
        first, last = record["ports"]
        sockets = listening(record["session"]["token"])
        assert {first + 2, first + 3} <= {port for _, port in sockets}  # the raylet's node and object managers
        assert all(first <= port <= last for _, port in sockets), (record["ports"], sockets)
        assert {address for address, port in sockets if port == first + 5} <= {"0100007F"}  # the dashboard's
        blocks.append(range(first, last + 1))
    assert not set(blocks[0]) & set(blocks[1])


def test_a_missing_node_is_named_after_the_deadline(pair: Nodes, tmp_path: Path) -> None:
    """The same Ray, seen as two nodes of three."""
    run_dir = tmp_path / "run"
    spec(num_nodes=3).write(run_dir := (run_dir.mkdir() or run_dir))
    attempt = dataclasses.replace(pair.attempt, run_dir=run_dir)
    shutil.copytree(pair.attempt.directory, attempt.directory)
    code = WHERE.replace("RunConfig()", "config").replace(
        "with attempt_ray", "config = RunConfig()\nconfig.cluster.start_timeout_s = 3\nwith attempt_ray"
    )
    driver = pair.driver(code, RLHPC_ATTEMPT=str(attempt.directory), SLURM_JOB_NODELIST="n[0-2]")
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 1
    assert "ClusterError: 1 of 3 nodes didn't join Ray in 3 s:" in output
    assert "n2 (SLURM_NODEID 2): its supervisor never started" in output


def daemon(token: str, program: str) -> int | None:
    """A session's process whose command line has `program` in it."""
    for pid in processes(token):
        try:
            if program in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        except FileNotFoundError:
            continue
    return None


def raylet(token: str) -> int | None:
    return daemon(token, "raylet/raylet\0")


def test_a_raylet_that_dies_while_it_joins_is_started_again_and_a_later_death_ends_the_node(tmp_path: Path) -> None:
    with nodes(tmp_path / "run", 4003, spec()) as two:
        two.start(2)
        while (record := two.attempt.read("node-1")) is None or (pid := raylet(record["session"]["token"])) is None:
            time.sleep(0.005)
        assert "joined" not in record["milestones"]
        os.kill(pid, signal.SIGKILL)
        two.wait_joined()
        token = two.record(1)["session"]["token"]
        assert (second := raylet(token)) is not None and second != pid
        os.kill(second, signal.SIGKILL)
        problem = two.problem(1)
        assert "node n1 (SLURM_NODEID 1): Ray ended by itself (exit code 1)" in problem
        assert "the end of start.log:" in problem and "raylet" in problem
        assert (two.attempt.directory / "ray" / "node-1" / "raylet.out").stat().st_size > 0
        assert processes(token) == []
        assert two.supervisors[0].poll() is None


def test_a_port_taken_after_the_claim_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    """A foreign listener on the port of Ray's control store, there before Ray binds it."""
    with nodes(tmp_path / "run", 4004, spec(num_nodes=1)) as single:
        single.start(1)
        while (record := single.attempt.read("node-0")) is None:
            time.sleep(0.005)
        with socket.socket() as foreign:
            foreign.bind(("", record["ports"][0] + 1))
            foreign.listen()
            problem = single.problem(0, timeout_s=120)
        assert "node n0 (SLURM_NODEID 0): gcs_server ended while Ray started" in problem
        assert f"0.0.0.0:{record['ports'][0] + 1}" in problem or "ddress already in use" in problem


def test_a_node_comes_up_without_its_agent_and_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    """Python takes a minute to start there where it is to run Ray's agent, as a slow file system may make it."""
    slow = "import sys, time\ntime.sleep(60 * any(part.endswith('dashboard/agent.py') for part in sys.orig_argv))\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    with nodes(tmp_path / "run", 4005, spec(num_nodes=1)) as single:
        single.start(1, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        single.wait_joined()
        session = single.record(0)["session"]
        assert daemon(session["token"], "dashboard/agent.py\0")
        assert not list(Path(session["directory"]).glob("session_2*/logs/dashboard_agent.log"))
        assert len(processes(session["token"])) > 2
        single.supervisors[0].kill()
        deadline = time.monotonic() + 30
        while (processes(session["token"]) or Path(session["directory"]).exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes(session["token"]) == []
        assert not Path(session["directory"]).exists()


HUNGRY = """
import os, ray
from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.ray_attempt import attempt_ray
from rlhpc.config.schema import RunConfig

@ray.remote
class Rank:
    def take(self):
        return len(bytearray(4 << 30))

with attempt_ray(RunConfig(), Attempt.current(os.environ)):
    try:
        ray.get(Rank.remote().take.remote())
    except ray.exceptions.RayError as error:
        print(type(error).__name__)
"""


def test_a_process_that_the_kernel_ended_for_memory_is_told_of_with_the_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A node in a cgroup of 2 GiB, as Slurm makes one for a job."""
    group = Path("/sys/fs/cgroup/memory") / f"rlhpc-test-{os.getpid()}"
    if not os.access(group.parent, os.W_OK):
        pytest.skip("needs root and a memory cgroup of version 1; run the tests as root to cover this")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(2 * 1024**3))
    inside = ["bash", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "bash"]
    try:
        with nodes(tmp_path / "run", 4006, spec(num_nodes=1), become=inside) as single:
            single.start(1)
            single.wait_joined()
            assert single.record(0)["limits"]["memory_bytes"] == 2 * 1024**3
            assert said(single.driver(HUNGRY)) in ("ActorDiedError", "OutOfMemoryError")
            deadline = time.monotonic() + 30
            while not single.record(0)["oom_kills"] and time.monotonic() < deadline:
                time.sleep(0.1)
        assert "n0 (SLURM_NODEID 0): the job's memory here, 2.0 GiB, was used up" in capfd.readouterr().err
    finally:
        remove_group(group)


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") or Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return f"{pid}, gone"


def remove_group(group: Path) -> None:
    """The kernel refuses while it still clears up after the last process."""
    deadline = time.monotonic() + 120  # on a busy machine whoever cleans up takes its time
    while group.exists():
        left = (group / "cgroup.procs").read_text().split()
        assert not left or time.monotonic() < deadline, f"left: {[command_of(pid) for pid in left]}"
        try:
            group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def as_nobody(folder: Path) -> list[str]:
    """The beginning of a command that runs it as the user nobody, in whose view root's home holds the interpreter."""
    python = Path(sys.base_prefix)
    mounts = ""
    if python.is_relative_to("/root"):
        kept = folder / "python"
        kept.mkdir()
        mounts = (
            f"mount --bind {python} {kept}; mount -t tmpfs -o mode=755 none /root; "
            f"mkdir -p {python}; mount --bind {kept} {python}; "
        )
    become = 'exec setpriv --reuid=65534 --regid=65534 --clear-groups -- "$@"'
    return ["unshare", "--mount", "bash", "-ec", mounts + become, "bash"]


def test_two_users_on_one_node_dont_meet(pair: Nodes, short_tmp: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become a second user; run the tests as root to cover this")
    short_tmp.chmod(0o755)
    run_dir = short_tmp / "run"
    settings = spec(num_nodes=1, ranks_per_node=1)
    with nodes(run_dir, 4001, settings, become=as_nobody(short_tmp), environ={"HOME": str(run_dir)}) as theirs:
        subprocess.run(["chown", "-R", "nobody", run_dir], check=True)
        theirs.start(1)
        theirs.wait_joined()
        first, last = theirs.record(0)["ports"]
        ours = [port for node_id in (0, 1) for port in range(*pair.record(node_id)["ports"])]
        assert not set(range(first, last + 1)) & set(ours)
        assert said(client(theirs)) == "connected"
        head = pair.attempt.read("head")
        assert head is not None
        trespasser = theirs.driver(f"import sys; sys.argv[1:] = ['{head['ip']}', '{head['port']}']\n{CONNECT}")
        assert "refused this process: its token" in said(trespasser)
        stolen = theirs.driver(f"print(open('{pair.attempt.token_path}').read())")
        assert "PermissionError" in said(stolen)
    assert said(client(pair)) == "connected"
