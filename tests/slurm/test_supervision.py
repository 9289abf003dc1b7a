"""What becomes of a job under every signal and death that Slurm and the world have for it: saved or not, requeued or
not, once, and nothing left behind. The driver is tests/slurm/driver.py, so that each takes seconds; the rest is the
product."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cluster.attempt import past_attempts, read_json
from rlhpc.cluster.slurm import LIMIT_WARNING_SLACK_S
from tests.slurm.cluster import GRACE_S, KILL_WAIT_S, ROOT, Cluster, wait_until

FOREVER = 10**6
pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True)
class Job:
    """A run directory and the job that works at it."""

    slurm: Cluster
    run_dir: Path
    id: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return list(past_attempts(self.run_dir))

    @property
    def log(self) -> str:
        path = self.run_dir / f"{self.id.partition('_')[0]}.log"
        return path.read_text() if path.exists() else ""

    @property
    def progress(self) -> dict[str, Any]:
        return read_json(self.run_dir / "progress.json") or {}

    def wait_step(self, step: int, attempt: str = "") -> None:
        """Until the driver has done a step, in an attempt whose name ends so."""
        wait_until(
            lambda: self.progress.get("step", -1) >= step and self.progress["attempt"].endswith(attempt),
            120,
            f"job {self.id} does step {step}",
            lambda: f"{self.slurm.show(self.id)}\n{self.log}",
        )

    def wait_lines(self, count: int) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.lines) >= count, 120, f"{self.id} leaves {count} lines", lambda: str(self.lines))
        return self.lines

    def supervisor(self, node: str) -> int:
        """The pid of a node's supervisor."""
        for process in self.slurm.processes(self.id):
            command = command_of(process)
            environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if (
                b"rlhpc.cluster.node" in command
                and f"SLURMD_NODENAME={node}".encode() in environ
                and b"srun" not in command
            ):
                return process
        raise AssertionError(f"no supervisor on {node}")


def submit(slurm: Cluster, directory: Path, driver: str, *options: str, stay: bool = False, **settings: float) -> Job:
    """A job in the shape that launch=slurm gives it, with another driver, whose first attempt may `stay` until it is
    told to stop. `settings` go into cluster.json."""
    directory.mkdir(exist_ok=True)
    if stay:
        (directory / "stay").touch()
    (directory / "cluster.json").write_text(json.dumps({"max_attempts_without_progress": 2, **settings}))
    python = shlex.quote(sys.executable)
    command = f"{python} -m rlhpc.cluster.batch {directory} -- {python} {ROOT}/tests/slurm/driver.py {driver}"
    script = f"#!/bin/bash\nexport PYTHONPATH={ROOT}\nexec {command}\n"
    fixed = ("--requeue", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=500M", "--signal=USR2@5")
    return Job(slurm, directory, slurm.submit(script, *fixed, *options, directory=directory))


def submit_array(slurm: Cluster, directory: Path, tasks: int, driver: str, *options: str) -> list[Job]:
    """An array of such jobs, of which the last stays until it is told to stop."""
    runs = [directory / f"run{number}" for number in range(tasks)]
    for run in runs:
        run.mkdir()
    (runs[-1] / "stay").touch()
    (directory / "list").write_text("".join(f"{run}\n" for run in runs))
    python = shlex.quote(sys.executable)
    batch = f"{python} -m rlhpc.cluster.batch --array-list {directory}/list"
    script = f"#!/bin/bash\nexport PYTHONPATH={ROOT}\nexec {batch} -- {python} {ROOT}/tests/slurm/driver.py {driver}\n"
    fixed = ("-plow", f"--array=0-{tasks - 1}", "--requeue", "--ntasks-per-node=1", "--mem=500M")
    array = slurm.submit(script, *fixed, *options, directory=directory)
    return [Job(slurm, run, f"{array}_{number}") for number, run in enumerate(runs)]


def command_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def only(line: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(line[name] for name in names)


@pytest.fixture(scope="module")
def slurm(running_slurm: Cluster) -> Iterator[Cluster]:
    """One Slurm whose jobs may outlive a test: those that wait for their time limit run beside all others."""
    yield running_slurm
    running_slurm.up()
    running_slurm.free()


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Job, Job]:
    """Jobs whose limit comes long before they are done: one is warned, one saves in time, one saves for too long. Slurm
    may warn half a minute early, which in a job of a minute would be before its supervisor is up."""
    here = tmp_path_factory.mktemp("limited")
    node = f"-w{slurm.node(4)}"
    return (
        submit(slurm, here / "warned", str(FOREVER), "-plow", node, "-t2", "--signal=USR2@40", stop_lead_s=40),
        submit(slurm, here / "quick", str(FOREVER), "-plow", node, "-t1", "--signal=CONT@1"),
        submit(slurm, here / "slow", f"{FOREVER} --save-s 100", "-plow", node, "-t1", "--signal=CONT@1"),
    )


def test_slurm_requeues_by_itself(slurm: Cluster, tmp_path: Path) -> None:
    """Preemption without grace, and an administrator's requeue: a second one would be wrong."""
    preempted = submit(
        slurm, tmp_path / "preempted", "10", "-plow", "-N2", f"-w{slurm.node(1)},{slurm.node(2)}", stay=True
    )
    moved = submit(slurm, tmp_path / "moved", "10", "-plow", "-N2", f"-w{slurm.node(3)},{slurm.node(4)}", stay=True)
    for job in (preempted, moved):
        job.wait_step(3)
    slurm.preempt(preempted.id)
    slurm.run("scontrol", "requeue", moved.id)
    for job in (preempted, moved):
        assert slurm.wait_end(job.id) == "COMPLETED"
        first, second = job.lines
        assert only(first, "outcome", "signal", "exit_code", "requeued") == ("stopped", "SIGTERM", 75, True)
        assert first["deadline"] - first["signal_at"] == pytest.approx(KILL_WAIT_S)
        assert first["checkpoint_step"] == second["resumed_from_step"] >= 3
        assert only(first, "phase_at_stop", "save_s") == ("generate", 0.5)
        assert only(second, "outcome", "exit_code", "restart") == ("finished", 0, 1) and second["last_step"] >= 10
        assert slurm.restarts(job.id) == 1
        assert job.log.count("== rlhpc attempt") == 4
    assert preempted.lines[0]["cause"] == "preempted"
    assert moved.lines[0]["cause"] == "requeued"


def test_slurm_only_asks(slurm: Cluster, tmp_path: Path) -> None:
    """The attempt requeues its job itself, its own task of an array alone; an exit before that would end it."""
    one, two, three = slurm.node(1), slurm.node(2), slurm.node(3)
    grace = submit(slurm, tmp_path / "grace", "10", "-pgrace", "-N2", f"-w{one},{two}", stay=True)
    asked = submit(slurm, tmp_path / "asked", "10 --save-s 12", "-plow", f"-w{three}", stay=True)
    batch_only = submit(slurm, tmp_path / "batch_only", "10", "-plow", "-N2", f"-w{three},{slurm.node(4)}", stay=True)
    tasks = submit_array(slurm, tmp_path, 3, "10", f"-w{three}")
    jobs = (grace, asked, batch_only, tasks[2])
    for job in (*jobs, *tasks):
        job.wait_step(3)
    slurm.preempt(grace.id)
    slurm.run("scancel", "--signal=TERM", asked.id)
    slurm.run("scontrol", "update", f"JobId={asked.id}", "TimeLimit=10")  # while it saves: its end is asked for again
    slurm.run("scancel", "--signal=TERM", "--batch", batch_only.id)
    slurm.run("scancel", "--signal=USR2", tasks[2].id)
    for job, cause in zip(jobs, ("preempted", "signal", "signal", "signal"), strict=True):
        assert slurm.wait_end(job.id) == "COMPLETED", job.log
        first, second = job.lines
        assert only(first, "outcome", "cause", "exit_code", "requeued") == ("stopped", cause, 75, True), job.log
        assert first["checkpoint_step"] == second["resumed_from_step"] >= 3
        assert second["outcome"] == "finished" and second["last_step"] >= 10
        assert slurm.restarts(job.id) == 1
    assert GRACE_S / 2 < grace.lines[0]["deadline"] - grace.lines[0]["signal_at"] <= GRACE_S + 1
    assert asked.lines[0]["deadline"] - asked.lines[0]["started"] == pytest.approx(600, abs=30)
    assert tasks[2].lines[0]["attempt"] == f"{tasks[2].id}-0"  # whose SLURM_JOB_ID is the array's own
    for task in tasks[:2]:
        assert slurm.wait_end(task.id) == "COMPLETED"
        assert slurm.restarts(task.id) == 0
        assert [line["outcome"] for line in task.lines] == ["finished"]


def test_cancelled_stays_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    saved = submit(slurm, tmp_path / "saved", str(FOREVER), "-plow", "-N2")
    slow = submit(slurm, tmp_path / "slow", f"{FOREVER} --save-s 100", "-plow")
    killed = submit(slurm, tmp_path / "killed", str(FOREVER), "-plow", "-N2")
    stopped = submit(slurm, tmp_path / "stopped", str(FOREVER), "-plow")
    jobs = (saved, slow, killed, stopped)
    for job in jobs:
        job.wait_step(2)
    (stopped.run_dir / "STOP").touch()
    slurm.run("scancel", "--signal=USR2", stopped.id)
    slurm.run("scancel", saved.id, slow.id)
    slurm.run("scancel", "--signal=KILL", killed.id)
    assert [slurm.wait_end(job.id) for job in jobs] == ["CANCELLED", "CANCELLED", "CANCELLED", "FAILED"]
    assert [slurm.restarts(job.id) for job in jobs] == [0, 0, 0, 0]
    line = saved.lines[0]
    assert only(line, "outcome", "cause", "exit_code", "requeued") == ("cancelled", "cancelled", 75, False)
    assert line["checkpoint_step"] >= 2
    assert only(slow.lines[0], "outcome", "checkpoint_step", "requeued") == ("cancelled", None, False)
    assert only(stopped.lines[0], "outcome", "exit_code", "requeued") == ("cancelled", 75, False)
    assert slurm.show(stopped.id)["ExitCode"] == "75:0"
    assert only(killed.lines[0], "outcome", "cause", "exit_code") == ("cancelled", "cancelled", 75)  # not before TERM
    assert [pid for job in jobs for pid in slurm.processes(job.id)] == []


def test_exit_codes_are_slurms_states(slurm: Cluster, tmp_path: Path) -> None:
    mistake = submit(slurm, tmp_path / "mistake", "9 --fail 2 'trainer.nnodes=3 must be 2'", "-plow", "-N2")
    bug = submit(slurm, tmp_path / "bug", "9 --fail 1 'the loss is nan at step 4'", "-plow", "-N2")
    good = submit(slurm, tmp_path / "good", "2", "-plow", "-N2")
    jobs = (mistake, bug, good)
    assert [slurm.wait_end(job.id) for job in jobs] == ["FAILED", "FAILED", "COMPLETED"]
    assert [slurm.show(job.id)["ExitCode"] for job in jobs] == ["2:0", "1:0", "0:0"]
    assert [slurm.restarts(job.id) for job in jobs] == [0, 0, 0]
    for job, reason in ((mistake, "trainer.nnodes=3 must be 2"), (bug, "the loss is nan at step 4")):
        line = job.lines[0]
        assert only(line, "outcome", "reason", "requeued", "held") == ("failed", reason, False, False)
        assert line["first_failing"] == {"node": line["nodes"][0], "what": reason}


def test_deaths_end_the_attempt_and_the_next_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    """Of a driver, of a supervisor, of the batch script, and of every attempt's rank: a crash loop, which is held."""
    one, two, three, four = (slurm.node(number) for number in range(1, 5))
    loop = submit(
        slurm,
        tmp_path / "loop",
        "9 --lose 'rank 3 died in generate'",
        "-plow",
        "-N2",
        f"-w{one},{two}",
        ranks_per_node=2,
    )
    driver = submit(slurm, tmp_path / "driver", "10", "-plow", "-N2", f"-w{one},{two}", stay=True)
    node = submit(slurm, tmp_path / "node", "10", "-plow", "-N2", f"-w{three},{four}", stay=True)
    batch = submit(slurm, tmp_path / "batch", "10", "-plow", "-N2", f"-w{one},{two}", stay=True)

    def batch_script() -> int:
        return next(pid for pid in slurm.processes(batch.id) if b"rlhpc.cluster.batch" in command_of(pid))

    def kill_in_step_2(job: Job, pid: Callable[[], int]) -> None:
        job.wait_step(2)
        os.kill(pid(), signal.SIGKILL)

    victims = ((driver, lambda: driver.progress["pid"]), (node, lambda: node.supervisor(four)), (batch, batch_script))
    with ThreadPoolExecutor() as pool:
        for death in [pool.submit(kill_in_step_2, *victim) for victim in victims]:
            death.result()
    for job in (driver, node):
        assert slurm.wait_end(job.id) == "COMPLETED", job.log
        assert [line["outcome"] for line in job.lines] == ["lost", "finished"]
        assert job.lines[0]["requeued"] and slurm.restarts(job.id) == 1
    killed = "the driver was killed by SIGKILL; was the node's memory full?"
    assert driver.lines[0]["first_failing"] == {"node": one, "what": killed}
    assert node.lines[0]["first_failing"]["node"] == four

    assert slurm.wait_end(batch.id) == "FAILED"  # nobody is left to requeue it
    assert [pid for job in (driver, node, batch) for pid in slurm.processes(job.id)] == []
    again = submit(slurm, batch.run_dir, "10", "-plow", "-N2")
    assert slurm.wait_end(again.id) == "COMPLETED"
    first, second = again.lines  # the dead script left its line to the next one; its driver was still told, and saved
    assert only(first, "job_id", "outcome", "cause", "requeued") == (batch.id, "stopped", "signal", False)
    assert only(second, "job_id", "outcome") == (again.id, "finished")
    assert second["resumed_from_step"] == first["checkpoint_step"] >= 2

    held = slurm.wait_until(loop.id, lambda job: job["JobState"] == "PENDING" and job["Priority"] == "0", "held")
    first, second = loop.lines
    assert only(first, "outcome", "reason", "requeued", "held") == ("lost", "rank 3 died in generate", True, False)
    assert first["first_failing"]["node"] == two
    assert only(second, "outcome", "requeued", "held") == ("lost", True, True)
    why = "2 attempts in a row ended without a newer checkpoint than step 0, the last: rank 3 died in generate"
    assert why in loop.log and held["Comment"] == why
    slurm.run("scontrol", "release", loop.id)  # somebody has looked: it may try again, as often as before
    third = loop.wait_lines(3)[2]
    assert only(third, "restart", "outcome", "held") == (2, "lost", False)
    slurm.cancel(loop.id)


def test_a_full_disk_is_told_where_nothing_can_be_written_down(slurm: Cluster, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    attempts = tmp_path / "run/attempts"
    attempts.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "rlhpc-test", attempts], check=True)
    try:
        job = submit(slurm, tmp_path / "run", str(FOREVER), "-plow", "-N2")
        job.wait_step(1)
        with suppress(OSError):
            (attempts / "fill").write_bytes(bytes(2**20))
        os.kill(job.progress["pid"], signal.SIGKILL)
        assert slurm.wait_end(job.id) == "FAILED" and slurm.show(job.id)["ExitCode"] == "2:0", job.log
    finally:
        subprocess.run(["umount", "--lazy", attempts], check=True)
    told = f"error: {job.run_dir}: No space left on device; make room there, then: rlhpc resume {job.run_dir}"
    assert told in job.log.splitlines() and "Traceback" not in job.log
    assert slurm.processes(job.id) == []


def test_lost_node(slurm: Cluster, tmp_path: Path) -> None:
    """The connection to its supervisor breaks long before Slurm misses the node."""
    job = submit(slurm, tmp_path / "run", "10", "-plow", "-N3", f"-x{slurm.node(4)}", stay=True)
    job.wait_step(2)
    slurm.power_off(slurm.node(2))
    first = job.wait_lines(1)[0]
    assert only(first, "outcome", "requeued") == ("lost", True), job.log
    assert first["first_failing"] == {"node": slurm.node(2), "what": f"node {slurm.node(2)} is gone"}
    slurm.run("scontrol", "update", f"JobId={job.id}", "ExcNodeList=")
    assert slurm.wait_end(job.id) == "COMPLETED"
    assert slurm.restarts(job.id) == 1
    slurm.up()


def test_silent_controller_does_not_keep_the_driver_waiting(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path / "run", "10", "-plow", "-N2", stay=True)
    job.wait_step(2)
    supervisor = job.supervisor(slurm.expand(slurm.show(job.id)["NodeList"])[0])
    with slurm.frozen_controller():
        os.kill(supervisor, signal.SIGTERM)
        wait_until(lambda: job.progress["outcome"] == "stopped", 60, "the driver saves")
        notice = read_json(job.run_dir / "attempts" / f"{job.id}-0" / "stop.json")
        assert notice is not None and notice["cause"] == "signal"
        time.sleep(3)
        assert job.lines == []  # what comes after is Slurm's word, which is waited for
    assert slurm.wait_end(job.id) == "COMPLETED"
    assert only(job.lines[0], "outcome", "requeued") == ("stopped", True)
    assert slurm.restarts(job.id) == 1


def test_inside_salloc_the_same_command_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    """There is no script to requeue; Ctrl-C saves and leaves, and leaves srun alone."""
    python = shlex.quote(sys.executable)
    batch = f"{python} -m rlhpc.cluster.batch {tmp_path} -- {python} {ROOT}/tests/slurm/driver.py 10"
    (tmp_path / "stay").touch()
    status = f"{python} -m rlhpc.cli.main status --json {tmp_path} >{tmp_path}/between"
    script = f"{batch} & echo $! >{tmp_path}/pid; wait $!; echo code $?; {status}; {batch}; echo code $?"
    shell = subprocess.Popen(
        ["salloc", "-plow", "-N2", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=500M", "bash", "-c", script],
        env=slurm.environ(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    progress = tmp_path / "progress.json"
    wait_until(lambda: (read_json(progress) or {}).get("step", 0) >= 2, 120, "the driver does two steps")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)
    output, _ = shell.communicate(timeout=120)
    assert [line for line in output.splitlines() if line.startswith("code")] == ["code 75", "code 0"], output
    (between,) = json.loads((tmp_path / "between").read_text())  # the job goes on without an attempt
    assert only(between, "state", "slurm_state", "attempt") == ("stopped", "RUNNING", 1)
    first, second = past_attempts(tmp_path)
    assert only(first, "restart", "outcome", "cause", "signal", "requeued") == (0, "stopped", "signal", "SIGINT", False)
    assert only(second, "restart", "outcome", "job_id") == (1, "finished", first["job_id"])
    assert second["resumed_from_step"] == first["checkpoint_step"] >= 2
    assert slurm.show(first["job_id"])["Restarts"] == "0"


def test_time_limit(slurm: Cluster, limited: tuple[Job, Job, Job]) -> None:
    """Without a warning a job dies for good KillWait after its limit: it is requeued before its driver has saved."""
    warned, quick, slow = limited
    for job in (quick, slow):
        slurm.wait_until(job.id, lambda fields: fields["Restarts"] != "0", "requeued", timeout_s=200)
        assert "DUE TO TIME LIMIT" in job.log
    first = warned.wait_lines(1)[0]
    assert only(first, "outcome", "cause", "signal", "requeued") == ("stopped", "time_limit", "SIGUSR2", True)
    assert 0 < first["deadline"] - first["signal_at"] < 40 + LIMIT_WARNING_SLACK_S
    first = quick.wait_lines(1)[0]
    assert only(first, "outcome", "cause", "signal", "requeued") == ("stopped", "time_limit", "SIGTERM", True)
    first = slow.wait_lines(1)[0]
    assert only(first, "outcome", "cause", "checkpoint_step", "requeued") == ("lost", "time_limit", None, True)
