"""The administrators' scripts (slurm/prolog.sh, epilog.sh, admin/) on a real Slurm that calls them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.cluster.attempt import publish_text
from tests.slurm.cluster import ROOT, Cluster, own_cluster, run, wait_until

ADMIN = ROOT / "slurm/admin"
# Opens a session as a node's supervisor does, leaves a segment in shared memory, and is killed or stays.
SESSION = """
import os, signal, sys, time
from rlhpc.cluster.session import open_session
session = open_session("/tmp")
open(f"/dev/shm/{session.ident}_segment", "w").close()
print(session.token, flush=True)
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "die" else time.sleep(300)
"""


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a site puts in front of the prolog, with a file of further options that a test may change."""
    directory = tmp_path_factory.mktemp("site")
    (directory / "options").write_text("--gpus 0")
    prolog = directory / "prolog.sh"
    prolog.write_text(f"#!/bin/bash\nRLHPC_CHECK=$(<{directory}/options) exec {ROOT}/slurm/prolog.sh\n")
    prolog.chmod(0o755)
    return directory


@pytest.fixture(scope="module")
def slurm(checks: Path) -> Iterator[Cluster]:
    extra = f"Prolog={checks}/prolog.sh\nEpilog={ROOT}/slurm/epilog.sh\n"
    with own_cluster("a", nodes=2, extra=extra) as cluster:
        yield cluster


def admin(script: str, *arguments: str, cluster: Cluster | None = None, code: int = 0) -> str:
    environ = cluster.environ() if cluster else dict(os.environ)
    done = run(["bash", str(ADMIN / script), *arguments], environ, check=False)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def drained(slurm: Cluster) -> list[str]:
    nodes = slurm.run("scontrol", "show", "node", "-o").splitlines()
    return [line.split()[0] for line in nodes if re.search(r" State=\S*DRAIN", line)]


def left(token: str) -> list[Path]:
    paths = [Path(f"/tmp/rlhpc-{uid}/{token}") for uid in (0, 65534)] + [Path(f"/dev/shm/rlhpc{token}_segment")]
    return [path for path in paths if path.exists()]


def session_job(slurm: Cluster, directory: Path, fate: str, *options: str) -> tuple[str, str]:
    """A job on the first node with a session; its id and the session's token."""
    python = "/usr/bin/python3"  # the environment's may lie where another user can't go
    script = f"cd {ROOT}\nexec {python} - {fate} <<'END'\n{SESSION}\nEND"
    job = slurm.submit(script, f"-w{slurm.node(1)}", *options, directory=directory)
    log = directory / f"{job}.log"
    wait_until(lambda: log.exists() and len(log.read_text()) >= 9, 30, "the session is open")
    token = log.read_text().split()[0]
    assert re.fullmatch("[0-9a-f]{8}", token), log.read_text()
    return job, token


def test_the_epilog_removes_what_its_own_job_left(slurm: Cluster, tmp_path: Path) -> None:
    everybodys = slurm.directory / "everybody"
    everybodys.mkdir(exist_ok=True)
    everybodys.chmod(0o777)
    living, living_token = session_job(slurm, tmp_path, "stay")
    assert len(left(living_token)) == 2
    dead, dead_token = session_job(slurm, tmp_path, "die")
    other, other_token = session_job(slurm, everybodys, "die", "--uid=65534", "--gid=65534")
    assert slurm.wait_end(dead) == slurm.wait_end(other) == "FAILED"
    wait_until(lambda: not left(dead_token) + left(other_token), 20, "the epilog cleans")
    assert len(left(living_token)) == 2 and slurm.state(living) == "RUNNING"
    slurm.run("scancel", "--signal=KILL", "--full", living)
    wait_until(lambda: not left(living_token), 30, "the epilog cleans after a kill")
    assert drained(slurm) == []


def test_cleanup_knows_jobs_and_owners_apart(tmp_path: Path) -> None:
    root = tmp_path / f"rlhpc-{os.getuid()}"
    sessions = {"aaaaaaaa": "501", "bbbbbbbb": "502"}
    processes = {}
    try:
        for token, job in sessions.items():
            (root / token).mkdir(parents=True)
            (root / token / "owner.json").write_text(json.dumps({"pid": 1, "job": job, "node": "n1"}))
            environ = {**os.environ, "RLHPC_SESSION": token, "SLURM_JOB_ID": job, "SLURMD_NODENAME": "n1"}
            processes[token] = subprocess.Popen(["sleep", "300"], env=environ, start_new_session=True)
            Path(f"/dev/shm/rlhpc{token}_segment").touch()
        where = ["--user", str(os.getuid()), "--temp-root", str(tmp_path)]
        os.environ["SLURMD_NODENAME"] = "n2"  # another node of the same host
        assert admin("cleanup.sh", "--job", "501", *where) == ""
        os.environ["SLURMD_NODENAME"] = "n1"
        assert "would kill" in admin("cleanup.sh", "--job", "501", "--dry-run", *where)
        assert processes["aaaaaaaa"].poll() is None
        admin("cleanup.sh", "--job", "501", *where)
        assert processes["aaaaaaaa"].wait(timeout=10) == -9
        assert processes["bbbbbbbb"].poll() is None
        assert [path.name for path in root.iterdir()] == ["bbbbbbbb"] and len(left("bbbbbbbb")) == 1

        holder = subprocess.Popen(["flock", "--exclusive", str(root / "bbbbbbbb/owner.json"), "sleep", "300"])
        wait_until(lambda: bool(_children(holder.pid)), 10, "the owner holds its lock")
        assert admin("cleanup.sh", *where) == ""  # its owner lives
        os.kill(_children(holder.pid)[0], signal.SIGKILL)
        holder.wait(timeout=10)
        admin("cleanup.sh", *where)
        assert processes["bbbbbbbb"].wait(timeout=10) == -9 and not any(root.iterdir()) and not left("bbbbbbbb")
    finally:
        os.environ.pop("SLURMD_NODENAME", None)
        for process in processes.values():
            process.kill()


def test_a_bad_node_is_drained_with_the_reason_and_status_tells_the_way_out(
    slurm: Cluster, checks: Path, tmp_path: Path
) -> None:
    node = slurm.node(2)
    run_dir = tmp_path / "outputs/unlucky"
    (run_dir / "slurm").mkdir(parents=True)
    (run_dir / "config.yaml").write_text("{}\n")
    (checks / "options").write_text("--gpus 0 --mount /mnt/absent")
    try:
        job = slurm.submit("true", f"-w{node}", "--requeue", f"--output={run_dir}/slurm/%j.log", directory=tmp_path)
        publish_text(run_dir / "job.json", json.dumps({"job_id": job, "log": f"{run_dir}/slurm/{job}.log"}))
        slurm.wait_until(job, lambda f: "held" in f.get("Reason", ""), "held")
    finally:
        (checks / "options").write_text("--gpus 0")
    assert drained(slurm) == [f"NodeName={node}"]
    listed = " ".join(slurm.run("scontrol", "show", "node", node).split())
    assert "Reason=rlhpc prolog: CRITICAL mount /mnt/absent is not mounted, or hangs" in listed
    environ = slurm.environ(PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "rlhpc.cli.main", "status", "--json", job]
    (status,) = json.loads(subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True).stdout)
    assert status["state"] == "held"
    assert status["why"] == (
        "held: a node's prolog failed before the job began, and Slurm drained the node; "
        f"scontrol release {job} lets it run"
    )
    assert status["next"] == f"scontrol release {job}"
    admin("drain.sh", "--undo", node, cluster=slurm)
    slurm.run("scontrol", "release", job)
    assert slurm.wait_end(job) == "COMPLETED"

    admin("drain.sh", node, "a fan", "is loud", cluster=slurm)
    assert "a fan is loud" in admin("drain.sh", "--list", cluster=slurm)
    assert "not by rlhpc" in admin("drain.sh", "--undo", node, cluster=slurm, code=1)
    admin("drain.sh", "--undo", "--force", node, cluster=slurm)
    wait_until(lambda: not drained(slurm), 20, "no node is drained")


def test_gpu_hours_count_every_attempt(slurm: Cluster, tmp_path: Path) -> None:
    begin = time.strftime("%Y-%m-%dT%H:%M:%S")
    job = slurm.submit("sleep 3", "-N2", "--gpus-per-node=2", "--requeue", directory=tmp_path)
    slurm.wait_for(job, "RUNNING")
    time.sleep(3)  # whole seconds are counted
    slurm.run("scontrol", "requeue", job)
    assert slurm.wait_end(job) == "COMPLETED"

    def settled() -> bool:
        return [row["State"] for row in slurm.accounting(job, "State")] == ["REQUEUED", "COMPLETED"]

    wait_until(settled, 30, "sacct has both attempts")
    seconds = [int(row["ElapsedRaw"]) for row in slurm.accounting(job, "ElapsedRaw")]
    assert min(seconds) >= 2
    header, line, total = admin("gpu_hours.sh", "--by", "job", "--start", begin, "-j", job, cluster=slurm).splitlines()
    assert header.split()[:4] == ["job", "jobs", "attempts", "GPU-hours"]
    cells = line.split()
    assert cells[:4] == [job, "1", "2", f"{4 * sum(seconds) / 3600:.2f}"]
    assert cells[5] == f"{4 * seconds[0] / 3600:.2f}"
    assert total.split()[1] == cells[3]


def test_the_health_check_says_plainly_that_there_is_no_gpu(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.fail("this test belongs on a machine without GPUs")
    lines = admin("health_check.sh", "--gpus", "0").splitlines()
    assert lines[0].split(maxsplit=2) == ["OK", "gpu", "no GPU, and none is expected"]
    found = json.loads(admin("health_check.sh", "--gpus", "8", "--mount", str(tmp_path), "--json", code=2))
    assert found[0] == {
        "check": "gpu",
        "level": "CRITICAL",
        "text": "no GPU: nvidia-smi is not installed, and 8 are expected (--gpus 0 where that is right)",
    }
    assert {"check": "mount", "level": "CRITICAL", "text": f"{tmp_path} is not mounted, or hangs"} in found
    assert "usage" in admin("health_check.sh", "--gpu", "8", code=3)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
