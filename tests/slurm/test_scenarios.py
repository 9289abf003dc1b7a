"""The scenarios of docs/slurm-scenarios.md that belong to no part alone."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.cluster.attempt import past_attempts, read_json
from rlhpc.cluster.ray_node import RaySpec
from tests.slurm.cluster import ROOT, Cluster, alive, own_cluster, wait_until

PYTHON = shlex.quote(sys.executable)
DRIVER = f"{PYTHON} {ROOT}/tests/slurm/driver.py"
OPTIONS = ("--requeue", "--ntasks-per-node=1", "--mem=500M")


def submit(slurm: Cluster, run_dir: Path, program: str, *options: str) -> str:
    """A job of the shape that launch=slurm gives it; without a program it starts Ray and the trainer."""
    run_dir.mkdir(exist_ok=True)
    if program:
        (run_dir / "cluster.json").write_text("{}")
    command = f"exec {PYTHON} -m rlhpc.cluster.batch {run_dir}" + (f" -- {program}" if program else "")
    return slurm.submit(f"export PYTHONPATH={ROOT}\n{command}", *OPTIONS, *options, directory=run_dir)


def step_of(run_dir: Path) -> int:
    return int((read_json(run_dir / "progress.json") or {}).get("step", -1))


def test_ray_that_can_not_start_fails_the_job(slurm: Cluster, tmp_path: Path) -> None:
    """10: `ray symmetric-run` exits with 0 when `ray start` fails, and the job is COMPLETED with nothing run."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    RaySpec(2, 1, 1, 0, 2**27, 60.0, network_interface="nope0", temp_root="/tmp").write(run_dir)
    job = submit(slurm, run_dir, "", "-N2")
    assert slurm.wait_end(job) == "FAILED"
    assert slurm.show(job)["ExitCode"] == "2:0" and slurm.restarts(job) == 0
    (line,) = past_attempts(run_dir)
    assert line["outcome"] == "failed" and "nope0" in line["reason"]
    assert "nope0" in (run_dir / f"{job}.log").read_text()


def test_the_step_has_all_cpus_and_lets_others_in(slurm: Cluster, tmp_path: Path) -> None:
    """23, 24: without --overlap a second step waits for the first to end, and --exact without -c gives it one CPU."""
    run_dir = tmp_path / "run"
    job = submit(slurm, run_dir, f"{DRIVER} 1000", "-N2", "--cpus-per-task=3", "--gpus-per-node=2")
    wait_until(lambda: step_of(run_dir) >= 1, 60, "the driver works")
    assert "CPUs=6 " in slurm.run("scontrol", "show", "step", f"{job}.0").replace("\n", " ")
    show = "echo $SLURM_NODEID $CUDA_VISIBLE_DEVICES"
    beside = ["srun", f"--jobid={job}", "--overlap", "-N2", "-c3", "--gpu-bind=none", "--mpi=none", "bash", "-c", show]
    assert sorted(slurm.run(*beside).splitlines()) == ["0 0,1", "1 0,1"]
    slurm.cancel(job)


def test_one_empty_answer_is_not_the_end_of_a_job(slurm: Cluster, tmp_path: Path) -> None:
    """36: a controller that has just started may answer before it knows its jobs. Here it knows none of the sort at
    first: the job that is asked for is submitted while the question is open."""
    last = slurm.submit("true", "--hold", directory=tmp_path)
    ask = (
        "import json, sys; from rlhpc.cluster.slurm import queue\n"
        "jobs = queue([sys.argv[1]], ask_again_after_s=float(sys.argv[2]))\n"
        "print(json.dumps({job: record.state for job, record in jobs.items()}))"
    )
    coming = str(int(last) + 1)
    environ = slurm.environ(PYTHONPATH=str(ROOT))
    command = [sys.executable, "-c", ask]
    asking = subprocess.Popen([*command, coming, "10"], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        time.sleep(4)  # the first answer has come
        assert slurm.submit("true", "--hold", directory=tmp_path) == coming
        assert json.loads(asking.communicate(timeout=60)[0]) == {coming: "PENDING"}
    finally:
        asking.kill()
    gone = subprocess.run([*command, "999999", "0.1"], env=environ, capture_output=True, text=True, check=True)
    assert json.loads(gone.stdout) == {}


@pytest.fixture(scope="module")
def linuxproc() -> Iterator[Cluster]:
    """A Slurm that signals a job's whole process tree and loses sight of what leaves it."""
    with own_cluster("l", nodes=2, proctrack="linuxproc") as cluster:
        yield cluster


def test_signals_to_every_process_are_one_stop(linuxproc: Cluster, tmp_path: Path) -> None:
    """2, 12 as proctrack/linuxproc (and SignalChildrenProcesses=yes) make it: the driver, its supervisor and what runs
    between them are all signalled, and the driver again by its supervisor."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "stay").touch()
    job = submit(linuxproc, run_dir, f"{DRIVER} 10", "-plow", "-N2")
    wait_until(lambda: step_of(run_dir) >= 2, 60, "the driver works")
    linuxproc.preempt(job)
    assert linuxproc.wait_end(job) == "COMPLETED"
    first, second = past_attempts(run_dir)
    assert (first["outcome"], first["requeued"], second["outcome"]) == ("stopped", True, "finished")
    assert first["checkpoint_step"] == second["resumed_from_step"] >= 2
    assert linuxproc.restarts(job) == 1


def test_daemons_that_slurm_lost_are_swept(linuxproc: Cluster, tmp_path: Path) -> None:
    """14: a process that daemonised outlives its job. With the node's supervisor killed as well, its reaper ends it."""

    def daemon(name: str) -> str:
        return f"bash -c 'setsid -f bash -c \"echo \\$\\$ >{tmp_path}/{name}.pid; exec sleep 1000\"; sleep 1000'"

    def pid(name: str) -> int:
        path = tmp_path / f"{name}.pid"
        wait_until(lambda: path.exists() and path.read_text().strip() != "", 60, f"the {name} daemon runs")
        return int(path.read_text())

    plain = linuxproc.submit(daemon("plain"), "-plow", "--mem=500M", directory=tmp_path)
    ours = submit(linuxproc, tmp_path / "run", daemon("own"), "-plow", "-N1")
    pids = pid("plain"), pid("own")
    linuxproc.run("scancel", "--signal=KILL", "--full", plain, ours)
    for job in (plain, ours):
        linuxproc.wait_for(job, "CANCELLED", "FAILED")
    wait_until(lambda: not alive(pids[1]), 20, "the reaper ends what the job left")
    assert alive(pids[0])
    os.kill(pids[0], signal.SIGKILL)
