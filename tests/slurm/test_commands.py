"""rlhpc status, logs and cancel on a real Slurm, with runs that only take steps (tests/slurm/stepper.py)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cluster.attempt import past_attempts, publish_text, read_json
from tests.e2e.runs import command, write_task
from tests.slurm.cluster import GRACE_S, KILL_WAIT_S, ROOT, Cluster, wait_until

BATCH = f"cd {ROOT}\nexec {sys.executable} -m rlhpc.cluster.batch"
STEPPER = f"{sys.executable} -m tests.slurm.stepper"


@dataclass(frozen=True)
class Workplace:
    """A user's directory with outputs/, and the shell in it."""

    slurm: Cluster
    directory: Path

    def rlhpc(self, *arguments: str, code: int = 0) -> str:
        """Standard output of the command; its standard error where it is to fail."""
        done = subprocess.run(**self._call(arguments), capture_output=True, text=True, timeout=120)
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stderr if code else done.stdout

    def status(self, argument: str | Path) -> dict[str, Any]:
        (found,) = json.loads(self.rlhpc("status", "--json", str(argument)))
        return dict(found)

    def following(self, run: Path, output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(**self._call(["logs", "-f", str(run)]), stdout=file, stderr=subprocess.STDOUT)

    def in_job(self, script: str, *options: str) -> str:
        """What a command says as a job's only step; a doctor's failures are no failure of the job."""
        command = ["srun", "--quiet", *options, "bash", "-c", script]
        done = subprocess.run(
            command, cwd=self.directory, env=self.slurm.environ(PYTHONPATH=str(ROOT)), capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.stdout

    def _call(self, arguments: Any) -> dict[str, Any]:
        command = [sys.executable, "-m", "rlhpc.cli.main", *arguments]
        return {"args": command, "cwd": self.directory, "env": self.slurm.environ(PYTHONPATH=str(ROOT))}

    def run_dir(self, name: str, num_steps: int) -> Path:
        run = self.directory / "outputs" / name
        (run / "slurm").mkdir(parents=True)
        (run / "config.yaml").write_text(f"trainer: {{total_training_steps: {num_steps}}}\n")
        return run

    def submit(
        self, name: str, *options: str, num_steps: int = 100, seconds: float = 0.3, stay: bool = False
    ) -> tuple[Path, str]:
        """A run of that many steps as a job of two nodes, whose first attempt may `stay` until it is told to stop."""
        run = self.run_dir(name, num_steps)
        if stay:
            (run / "stay").touch()
        options = ("-N2", "--requeue", "--ntasks-per-node=1", f"--output={run}/slurm/%j.log", *options)
        script = f"{BATCH} {run} -- {STEPPER} {run} {num_steps} {seconds}"
        job = self.slurm.submit(script, *options, directory=self.directory)
        record(run, job)
        return run, job

    def wait_for_step(self, run: Path, step: int) -> None:
        wait_until(lambda: self._step(run) >= step, 60, f"{run.name} reaches step {step}", lambda: log_of(run))

    def _step(self, run: Path) -> int:
        return int((read_json(run / "progress.json") or {}).get("step", 0))


def record(run: Path, job: str) -> None:
    """What a submission leaves."""
    log = run / "slurm" / f"{job}.log"
    publish_text(run / "job.json", json.dumps({"job_id": job, "log": str(log), "submitted": time.time()}))


def log_of(run: Path) -> str:
    return "".join(path.read_text()[-2000:] for path in (run / "slurm").glob("*.log"))


@pytest.fixture
def workplace(slurm: Cluster, tmp_path: Path) -> Workplace:
    return Workplace(slurm, tmp_path)


def test_followed_over_a_requeue_to_the_end(workplace: Workplace) -> None:
    run, job = workplace.submit("requeued", num_steps=20, stay=True)
    follower = workplace.following(run, workplace.directory / "followed.txt")
    workplace.wait_for_step(run, 6)
    status = workplace.status(run)
    assert (status["state"], status["attempt"], status["phase"]) == ("running", 1, "generate")
    assert status["nodes"] == workplace.slurm.expand(workplace.slurm.show(job)["NodeList"])
    assert status["total_steps"] == 20 and 5 <= status["step"] <= 20
    assert status["eta_s"] == pytest.approx(0.3 * (20 - status["step"]))

    workplace.slurm.run("scontrol", "requeue", job)
    fields = workplace.slurm.wait_until(job, lambda f: f.get("Reason") == "BeginTime", "requeued")
    status = workplace.status(job)
    assert (status["state"], status["attempt"]) == ("pending", 2)
    assert status["why"] == f"requeued, earliest start {fields['StartTime'].partition('T')[2]}"
    (first,) = past_attempts(run)
    assert status["checkpoint_step"] == first["last_step"] > 0

    assert workplace.slurm.wait_end(job) == "COMPLETED"
    assert follower.wait(timeout=60) == 0
    followed = (workplace.directory / "followed.txt").read_text()
    marks = [
        f"== rlhpc attempt {job}-0 on",
        f"0: step {first['last_step']}\n",
        f"== attempt {job}-0 ended: stopped by scontrol requeue",
        "== pending: requeued, earliest start",
        f"== rlhpc attempt {job}-1 on",
        f"0: going on after step {first['last_step']}\n",
        f"0: step {first['last_step'] + 1}\n",
        "0: step 20\n",
    ]
    assert [mark for mark in marks if mark not in followed] == []
    assert sorted(marks, key=followed.index) == marks
    assert followed.endswith("== finished\n")
    assert followed.count("step 20\n") == 1

    status = workplace.status(run)
    assert (status["state"], status["step"], status["attempt"]) == ("finished", 20, 2)
    assert status["next"] == f"rlhpc report {run}"
    text = workplace.rlhpc("status", str(run))
    assert "stopped by scontrol requeue; SIGTERM at" in text and "; in generate; steps 0 to" in text
    assert workplace.rlhpc("status").splitlines()[1].startswith("outputs/requeued")
    of_node_1 = workplace.rlhpc("logs", "--node", first["nodes"][1], str(run))
    assert all(line.startswith("1: ") for line in of_node_1.splitlines())
    assert workplace.rlhpc("logs", "-n", "1", job) == log_of(run).splitlines()[-1] + "\n"


def test_a_cancelled_run_stays_cancelled(workplace: Workplace) -> None:
    run, job = workplace.submit("cancelled")
    workplace.wait_for_step(run, 3)
    said = workplace.rlhpc("cancel", str(run))
    step = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert said == f"{run}: cancelled; checkpoint of step {step}; rlhpc resume {run} goes on with it\n"
    assert workplace.slurm.state(job) == "CANCELLED" and workplace.slurm.restarts(job) == 0
    assert (run / "STOP").exists()
    status = workplace.status(run)
    assert (status["state"], status["checkpoint_step"]) == ("cancelled", step)
    assert workplace.rlhpc("cancel", str(run)) == f"{run}: cancelled already; nothing to cancel\n"


def test_cancelled_at_once(workplace: Workplace) -> None:
    run, job = workplace.submit("killed", seconds=300)
    workplace.wait_for_step(run, 1)
    assert workplace.rlhpc("cancel", "--now", job) == (
        f"{run}: cancelled; no checkpoint yet; rlhpc resume {run} goes on with it\n"
    )
    assert workplace.slurm.state(job) in ("CANCELLED", "FAILED")  # its batch script may leave before Slurm ends it
    assert workplace.slurm.processes(job) == []


def test_one_task_of_an_array_and_then_all(workplace: Workplace) -> None:
    runs = [workplace.run_dir(f"sweep/{index}", 1000) for index in range(3)]
    listed = workplace.directory / "runs.txt"
    listed.write_text("".join(f"{run}\n" for run in runs))
    script = f"{BATCH} --array-list {listed} -- {sys.executable} -m tests.slurm.stepper . 1000 0.3"
    script = script.replace(" . ", " $(sed -n $((SLURM_ARRAY_TASK_ID + 1))p " + str(listed) + ") ")
    options = ("--array=0-2%2", "-N1", "--requeue", "--ntasks-per-node=1")
    array = workplace.slurm.submit(script, *options, directory=workplace.directory)
    for index, run in enumerate(runs):
        record(run, f"{array}_{index}")
    workplace.wait_for_step(runs[0], 2)
    workplace.wait_for_step(runs[1], 2)
    waiting = workplace.status(f"{array}_2")
    assert waiting["run_dir"] == "outputs/sweep/2" and waiting["state"] == "pending"
    assert waiting["why"].startswith("as many tasks of its array run as may at the same time")

    assert workplace.rlhpc("cancel", f"{array}_1").startswith("outputs/sweep/1: cancelled; checkpoint of step")
    workplace.wait_for_step(runs[2], 2)  # takes its place
    states = {run["run_dir"]: run["state"] for run in json.loads(workplace.rlhpc("status", "--json", array))}
    assert states == {"outputs/sweep/0": "running", "outputs/sweep/1": "cancelled", "outputs/sweep/2": "running"}

    said = workplace.rlhpc("cancel", array).splitlines()
    assert said[0] == "outputs/sweep/1: cancelled already; nothing to cancel"
    assert all(": cancelled; checkpoint of step" in line for line in said[1:]) and len(said) == 3
    assert [workplace.slurm.state(f"{array}_{index}") for index in range(3)] == ["CANCELLED"] * 3


def test_what_failed_first_comes_first(workplace: Workplace) -> None:
    run, job = workplace.submit("failing")
    (run / "fail").write_text("loss is nan")
    assert workplace.slurm.wait_end(job) == "FAILED"
    status = workplace.status(run)
    assert (status["state"], status["why"]) == ("failed", "loss is nan")
    node = workplace.slurm.expand(workplace.slurm.show(job)["NodeList"])[0]
    assert workplace.rlhpc("logs", str(run)).splitlines()[0] == (
        f"== attempt {job}-0 failed first on {node}: loss is nan"
    )
    assert workplace.rlhpc("logs", "--rank", "0", str(run), code=2) == (
        f"error: {run} has no log of rank 0; no rank has started yet\n"
    )


def test_why_a_run_waits(workplace: Workplace) -> None:
    held, _ = workplace.submit("held", "--hold")
    submit: dict[str, tuple[str, ...]] = {
        "too_long": ("--time=1000",),
        "too_wide": ("-N9",),
        "later": ("--begin=now+3600",),
        "after": (f"--dependency=afterok:{workplace.status(held)['job_id']}",),
    }
    runs = {"held": held} | {name: workplace.submit(name, *options)[0] for name, options in submit.items()}
    job = {name: workplace.status(run)["job_id"] for name, run in runs.items()}
    never = "so it will never start; rlhpc cancel it, then rlhpc resume it with"
    expected = {
        "held": f"held by its owner; scontrol release {job['held']} lets it run",
        "too_long": f"asks for more time than the partition allows, {never} a smaller launch.time_min",
        "too_wide": f"asks for more nodes than the partition allows, {never} fewer cluster.nodes",
        "later": "deferred, earliest start ",
        "after": "waits for the job that it depends on",
    }
    said: dict[str, str] = {}

    def told() -> bool:
        said.update({name: workplace.status(run)["why"] for name, run in runs.items()})
        return all(said[name].startswith(why) for name, why in expected.items())

    wait_until(told, 60, "Slurm has looked at all jobs", lambda: str(said))
    assert workplace.status(held)["state"] == "held"
    assert workplace.status(held)["next"] == f"scontrol release {job['held']}"

    assert workplace.rlhpc("cancel", "outputs").count(": cancelled; no checkpoint yet") == len(runs)


def test_without_a_controller_the_run_directory_speaks(workplace: Workplace) -> None:
    run, job = workplace.submit("alone", num_steps=1000)
    workplace.wait_for_step(run, 3)
    with workplace.slurm.dead_controller():
        text = workplace.rlhpc("status", str(run))
        assert text.startswith("Slurm does not answer (scontrol show job")
        assert "state       unknown: its driver last wrote" in text
    assert workplace.status(run)["state"] == "running"


def test_the_doctor_sees_the_cluster_and_the_job(workplace: Workplace) -> None:
    """From inside a job of two nodes whose memory is limited, with one partition drained and one node away."""
    slurm = workplace.slurm
    away = slurm.node(slurm.nodes)
    command = f"[ $SLURM_PROCID = 1 ] || exec {sys.executable} -m rlhpc.cli.main doctor --json"
    slurm.run("scontrol", "update", "partitionname=grace", "state=drain")
    slurm.run("scontrol", "update", f"nodename={away}", "state=drain", "reason=test")
    try:
        answer = workplace.in_job(command, "-plow", "-N2", f"-x{away}", "--mem=3G", "--gpus-per-node=1", "--time=7")
    finally:
        slurm.run("scontrol", "update", "partitionname=grace", "state=up")
        slurm.run("scontrol", "update", f"nodename={away}", "state=resume")
    found = {(one["part"], one["check"]): one for one in json.loads(answer)}
    seen = {check: (one["level"], one["found"]) for (part, check), one in found.items() if part == "Slurm"}
    up, of = slurm.nodes - 1, slurm.nodes
    assert seen["partition low (default)"] == (
        "ok", f"{up} of {of} nodes up, MaxTime 01:00:00, PreemptMode REQUEUE, GraceTime 0 s"
    )  # fmt: skip
    assert seen["partition grace"][0] == "warning" and seen["partition grace"][1].endswith(f"GraceTime {GRACE_S} s")
    assert seen["partition high"] == ("ok", f"{up} of {of} nodes up, MaxTime 01:00:00")
    assert seen["time to save"] == (
        "warning", f"KillWait {KILL_WAIT_S} s from SIGTERM to SIGKILL, where a partition gives no grace"
    )  # fmt: skip
    assert seen["GPUs"] == ("ok", f"gpu:4 on {of} nodes")
    assert seen["what is left"] == ("ok", "ProctrackType=proctrack/cgroup")
    assert seen["controller's clock"] == ("ok", "0 s from this machine's")
    assert seen["this job"][0] == "ok" and re.search(r" on \S+, \S+, [67] min left$", seen["this job"][1])
    assert found["machine", "memory"]["found"].endswith("GiB free of 3.0 that a process may have")
    assert "for Ray, VLLM_HOST_IP=" in found["network", "interface"]["found"]


def test_resumed_as_it_was_submitted(workplace: Workplace, tmp_path: Path) -> None:
    """With the real launcher; the jobs are held, since what they do is not the point."""
    run = tmp_path / "run"
    arguments = command(write_task(tmp_path), run, "launch=slurm", "launch.time_min=20", "cluster.sbatch.hold=true")
    subprocess.run(arguments, cwd=ROOT, env=workplace.slurm.environ(), check=True, capture_output=True)
    first = workplace.status(run)
    assert first["state"] == "held" and first["slurm_state"] == "PENDING"
    assert workplace.rlhpc("resume", str(run), code=2).startswith(
        f"error: run_dir=run belongs to job {first['job_id']}"
    )

    workplace.rlhpc("cancel", str(run))
    dry = workplace.rlhpc("resume", str(run), "launch.dry_run=true", "launch.time_min=30")
    assert "  launch.time_min: 20 -> 30\n" in dry and "#SBATCH --time=30" in dry and (run / "STOP").exists()
    said = workplace.rlhpc("resume", str(run), "launch.time_min=30", "cluster.nodes=2", "cluster.sbatch.comment=again")
    second = workplace.status(run)
    assert said.startswith(
        f"resuming {run}, changed:\n"
        "  cluster.nodes: null -> 2\n"
        '  cluster.sbatch.comment: not set -> "again"\n'
        "  launch.time_min: 20 -> 30\n"
        "  trainer.nnodes: 1 -> 2\n"
        f"removed {run / 'STOP'}, left by rlhpc cancel\n"
        f"submitted job {second['job_id']}: 2 nodes, 30 min\n"
    )
    assert not (run / "STOP").exists() and second["job_id"] != first["job_id"]
    fields = workplace.slurm.show(second["job_id"])
    assert (fields["TimeLimit"], fields["NumNodes"], fields["Comment"]) == ("00:30:00", "2-2", "again")
    assert workplace.slurm.state(first["job_id"]) == "CANCELLED"
