"""The mini Slurm is a Slurm: nodes, GPUs, memory limits, preemption with requeue, accounting; no remains at the end."""

import os
import re
import subprocess
import time
from pathlib import Path

from tests.slurm.cluster import KILL_WAIT_S, SCRIPT, Cluster, alive, own_cluster, wait_until

SHOW_NODE = "srun bash -c 'echo $SLURM_NODEID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"


def test_two_nodes_with_their_own_gpus(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(SHOW_NODE, "-N2", "--ntasks-per-node=1", "--gpus-per-node=2", directory=tmp_path)
    assert slurm.wait_end(job) == "COMPLETED"
    lines = sorted((tmp_path / f"{job}.log").read_text().splitlines())
    assert lines == [f"0 {slurm.node(1)} 0,1", f"1 {slurm.node(2)} 0,1"]
    wait_until(lambda: slurm.accounting(job, "State")[0]["State"] == "COMPLETED", 20, "sacct knows")
    assert "gres/gpu=4" in slurm.accounting(job, "AllocTRES")[0]["AllocTRES"]


def test_two_jobs_on_one_node_get_different_gpus(slurm: Cluster, tmp_path: Path) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES; until [[ $(cat *.log | wc -l) == 2 ]]; do sleep 0.2; done"
    jobs = [slurm.submit(show, f"-w{slurm.node(1)}", "--gpus-per-node=2", directory=tmp_path) for _ in range(2)]
    for job in jobs:
        slurm.wait_end(job)
    assert [(tmp_path / f"{job}.log").read_text() for job in jobs] == ["0,1\n", "2,3\n"]


def test_memory_beyond_the_request_is_killed(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit("python3 -c 'bytearray(300_000_000)'", "--mem=100M", directory=tmp_path)
    assert slurm.wait_end(job) == "OUT_OF_MEMORY"


def test_preempted_job_comes_back(slurm: Cluster, tmp_path: Path) -> None:
    script = """
        trap 'echo TERM' TERM
        echo attempt ${SLURM_RESTART_COUNT:-0}
        while [[ ! $SLURM_RESTART_COUNT ]]; do sleep 0.2; done
    """
    job = slurm.submit(script, "-plow", "-N2", "--requeue", directory=tmp_path)
    slurm.wait_for(job, "RUNNING")
    urgent = slurm.preempt(job)
    assert slurm.wait_end(urgent) == "COMPLETED"
    assert slurm.wait_end(job) == "COMPLETED"
    assert slurm.restarts(job) == 1
    wait_until(lambda: len(slurm.accounting(job, "State")) == 2, 20, "sacct knows both runs")
    assert [row["State"] for row in slurm.accounting(job, "State")] == ["PREEMPTED", "COMPLETED"]
    log = (tmp_path / f"{job}.log").read_text()
    assert re.match(r"attempt 0\n.* DUE TO PREEMPTION \*\*\*\nTERM\nattempt 1\n$", log)


def test_node_without_power_requeues_its_job(slurm: Cluster, tmp_path: Path) -> None:
    script = "srun sleep 60; sleep 60"  # srun may miss the node before Slurm does, and end
    job = slurm.submit(script, "-N2", "--requeue", "--no-kill=off", directory=tmp_path)
    slurm.wait_for(job, "RUNNING")
    slurm.power_off(slurm.node(2))
    slurm.wait_until(job, lambda fields: fields.get("Restarts") == "1", "requeued", timeout_s=60)
    slurm.up()
    slurm.wait_for(job, "RUNNING")


def test_controller_may_stop_and_die(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit("sleep 2", directory=tmp_path)
    slurm.wait_for(job, "RUNNING")
    with slurm.dead_controller():
        time.sleep(1)
    assert slurm.wait_end(job) == "COMPLETED"


def test_two_instances_and_no_remains(slurm: Cluster, tmp_path: Path) -> None:
    with own_cluster("o", nodes=3) as other:
        pid = other.controller()
        other.up()
        assert other.controller() == pid  # nothing to do the second time
        job = other.submit("setsid sleep 600 & srun sleep 600", "-N3", directory=tmp_path)
        other.wait_for(job, "RUNNING")
        wait_until(lambda: len(other.processes(job)) >= 5, 20, "all processes of the job run")
        left = other.processes(job)
        os.kill(pid, 9)  # a crash of a daemon
        other.down()
        assert [pid for pid in left if alive(pid)] == []
        listing = subprocess.run(["ps", "axeww", "-o", "pid,args"], capture_output=True, text=True, check=True).stdout
        assert [line for line in listing.splitlines() if f"{other.directory}/" in line] == []
        assert slurm.run("sinfo", "-h", "-p", "low", "-o", "%D").strip() == str(slurm.nodes)  # the neighbour lives


def test_prefix_in_use_is_refused(slurm: Cluster, tmp_path: Path) -> None:
    env = {**os.environ, "MINISLURM_DIR": f"{slurm.directory}/second", "MINISLURM_PREFIX": slurm.prefix}
    done = subprocess.run(["bash", SCRIPT, "up"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"has nodes {slurm.prefix}1 ...; choose another MINISLURM_PREFIX" in done.stderr


def test_user_without_root_is_told_the_choices(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    env = {"PATH": os.environ["PATH"], "MINISLURM_DIR": "/tmp/ms-nobody", "MINISLURM_PREFIX": "nobody"}
    done = subprocess.run(
        ["runuser", "-u", "nobody", "--", "bash", SCRIPT, "up"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "MINISLURM_PROCTRACK=cgroup needs root" in done.stderr
    assert "choose MINISLURM_PROCTRACK=linuxproc" in done.stderr


def test_kill_wait_is_what_tests_reckon_with(slurm: Cluster) -> None:
    assert f"KillWait                = {KILL_WAIT_S} sec" in slurm.run("scontrol", "show", "config")
