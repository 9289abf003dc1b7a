"""The files of an attempt, its line in attempts.jsonl, and what follows from them."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cluster import ledger
from rlhpc.cluster.attempt import Attempt, Ending, StopNotice, past_attempts, publish_text
from rlhpc.cluster.batch import judge, lost, run_dir_of
from rlhpc.cluster.link import Link, Links
from rlhpc.cluster.slurm import JobRecord, SlurmEnv
from rlhpc.errors import ConfigError

ENV = SlurmEnv(
    job_id="7",
    raw_job_id="7",
    restart=0,
    node_id=0,
    node_name="n1",
    num_nodes=3,
    nodelist="n[1-3]",
    cpus_per_task=1,
    array_task=None,
)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = Attempt(tmp_path, "7_2", 1)
    made.create("secret")
    return made


def test_files_are_private_and_the_first_word_stands(attempt: Attempt) -> None:
    assert attempt.directory.stat().st_mode & 0o777 == 0o700
    assert attempt.token_path.stat().st_mode & 0o777 == 0o600
    assert Attempt.current({"RLHPC_ATTEMPT": str(attempt.directory)}) == attempt
    assert attempt.stop_notice() is None and attempt.ending() is None
    first = attempt.notify(StopNotice("preempted", "SIGTERM", 5.0, 9.0))
    assert attempt.notify(StopNotice("signal", "SIGUSR2", 6.0, None)) == first == attempt.stop_notice()
    assert attempt.end(Ending("lost", 1, "rank 3 died\nin detail", "n2")).node == "n2"
    stands = attempt.end(Ending("finished", 0))
    assert (stands.outcome, stands.headline) == ("lost", "rank 3 died")
    assert abs(stands.at - time.time()) < 60
    assert sorted(path.name for path in attempt.directory.iterdir()) == ["end.json", "ray_token", "stop.json"]


def line(**changes: Any) -> dict[str, Any]:
    base = {
        "job_id": "7",
        "outcome": "lost",
        "cause": None,
        "reason": "x",
        "held": False,
        "resumed_from_step": 4,
        "checkpoint_step": 4,
    }
    return base | changes


def test_attempts_without_progress_are_counted() -> None:
    def count(*lines: dict[str, Any]) -> int:
        return ledger.without_progress(lines, "7")

    progress = line(checkpoint_step=6)
    assert count() == 0
    assert count(progress, line(), line()) == 2
    assert count(line(), progress) == 0
    # ended by others: counts neither way; a time that is too short for a step counts
    asked = line(outcome="stopped", cause="preempted")
    assert count(line(), asked, line(outcome="stopped", cause="time_limit")) == 2
    # somebody has looked: after a hold, and when another job goes on
    assert count(line(), line(held=True), line()) == 1
    assert count(line(job_id="6"), line()) == 1
    assert count(line(), line(outcome="finished")) == 0
    assert count(line(resumed_from_step=None, checkpoint_step=None)) == 1
    assert count(line(resumed_from_step=None, checkpoint_step=2)) == 0
    assert ledger.loop_reason([line(), line()], "7", 3) is None
    assert ledger.loop_reason([line(), line(reason="rank 1 died")], "7", 2) == (
        "2 attempts in a row ended without a newer checkpoint than step 4, the last: rank 1 died"
    )
    late = line(outcome="stopped", cause="time_limit", reason=None)
    assert (ledger.loop_reason([late, late], "7", 2) or "").endswith("the last: stopped at its time limit")


def test_a_killed_attempt_gets_its_line_from_its_files(attempt: Attempt, tmp_path: Path) -> None:
    attempt.write("start", {"at": 100.0, "nodes": ["n1", "n2"], "checkpoint_step": 4})
    attempt.notify(StopNotice("preempted", "SIGTERM", 150.0, 160.0))
    progress = {
        "attempt": attempt.name,
        "step": 7,
        "checkpoint": {"step": 6, "at": 155.0, "save_s": 1.5},
        "stop": {"phase": "update"},
        "milestones": {"ranks_ready": 120.0},
    }
    publish_text(tmp_path / "progress.json", json.dumps(progress))
    (tmp_path / "attempts.jsonl").write_text('{"attempt": "7_2-0"}\n{"attempt": "7_2-')  # torn by a crash
    own = Attempt(tmp_path, "7_2", 2)
    own.create("secret")
    Attempt(tmp_path, "7_2", 0).create("secret")
    assert ledger.unrecorded(own) == [attempt]
    ledger.append(attempt, ledger.summary(attempt, None, outcome="lost", requeued=True, held=False))
    assert [found["attempt"] for found in past_attempts(tmp_path)] == ["7_2-0", "7_2-1"]
    last = list(past_attempts(tmp_path))[-1]
    assert (last["cause"], last["signal_at"], last["deadline"], last["phase_at_stop"]) == (
        "preempted",
        150,
        160,
        "update",
    )
    assert (last["resumed_from_step"], last["last_step"], last["checkpoint_step"], last["save_s"]) == (4, 7, 6, 1.5)
    assert (last["started"], last["nodes"], last["exit_code"], last["requeued"]) == (100, ["n1", "n2"], None, True)
    publish_text(tmp_path / "progress.json", json.dumps(progress | {"step": 0}))  # killed before it had restored step 4
    assert ledger.summary(attempt, None, outcome="lost", requeued=True, held=False)["last_step"] == 4
    # the same files, read by the attempt after it, whose driver has not written yet
    fresh = ledger.summary(own, Ending("lost", 1, "x", "n1", 200.0), outcome="lost", requeued=False, held=False)
    assert (fresh["checkpoint_step"], fresh["phase_at_stop"], fresh["save_s"]) == (None, None, None)


def record(state: str, restarts: int, reason: str = "None", requeue: str = "1", batch: str = "1") -> JobRecord:
    fields = {"JobState": state, "Restarts": str(restarts), "Reason": reason, "Requeue": requeue, "BatchFlag": batch}
    return JobRecord(fields)


STOPPED, LOST, FAILED = Ending("stopped", 75), Ending("lost", 1), Ending("failed", 2)


@pytest.mark.parametrize(
    ("ending", "job", "more", "outcome", "act"),
    [
        (Ending("finished", 0), None, {}, "finished", "leave"),
        (STOPPED, record("RUNNING", 0), {}, "stopped", "requeue"),
        (STOPPED, record("COMPLETING", 0, "TimeLimit"), {}, "stopped", "requeue"),
        (STOPPED, record("COMPLETING", 1), {}, "stopped", "leave"),  # Slurm has requeued it
        (STOPPED, record("PENDING", 1, "BeginTime"), {}, "stopped", "leave"),
        (STOPPED, record("COMPLETING", 0), {}, "cancelled", "leave"),
        (STOPPED, record("CANCELLED", 0), {}, "cancelled", "leave"),
        (STOPPED, record("RUNNING", 0), {"stop_asked": True}, "cancelled", "leave"),
        (STOPPED, record("RUNNING", 0, requeue="0"), {}, "stopped", "leave"),
        (STOPPED, record("RUNNING", 0, batch="0"), {}, "stopped", "leave"),  # salloc
        (LOST, record("RUNNING", 0), {}, "lost", "requeue"),
        (None, record("RUNNING", 0), {}, "lost", "requeue"),
        (LOST, record("RUNNING", 0), {"stuck": "twice"}, "lost", "hold"),
        (LOST, record("COMPLETING", 1), {"stuck": "twice"}, "lost", "leave"),  # held when it starts again
        (FAILED, record("RUNNING", 0), {}, "failed", "leave"),
        (FAILED, record("COMPLETING", 1), {}, "failed", "leave"),
    ],
)  # fmt: skip
def test_what_follows_an_attempt(
    ending: Ending | None, job: JobRecord | None, more: dict[str, Any], outcome: str, act: str
) -> None:
    verdict = judge(ending, job, 0, **{"stop_asked": False, **more})
    assert (verdict.outcome, verdict.act) == (outcome, act)


def test_srun_names_the_node() -> None:
    nodes = ["n1", "n2", "n20", "gpu-07.site"]
    assert lost("n2: task 1: Killed", nodes).node == "n2"
    assert lost("n20: tasks 2-3: Killed", nodes).node == "n20"
    assert lost("Node failure on gpu-07.site", nodes).node == "gpu-07.site"
    assert lost("Unable to create step for job 7: Requested nodes are busy", nodes).node is None
    assert lost(None, nodes).node is None


def test_a_task_finds_its_run_or_hears_how_the_array_should_be(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("/runs/a\n/runs/b\n")
    assert run_dir_of(tmp_path / "list", replace(ENV, array_task=1)) == Path("/runs/b")
    with pytest.raises(ConfigError, match=r"SLURM_ARRAY_TASK_ID=2 has no line .* which has 2; .* --array=0-1"):
        run_dir_of(tmp_path / "list", replace(ENV, array_task=2))


def broken_within(link: Links | Link, seconds: float) -> str | None:
    deadline = time.monotonic() + seconds
    while (name := link.broken()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return name


def test_links_tell_who_is_gone(attempt: Attempt) -> None:
    """Another node's end lives in a process of its own, which is killed."""
    links = Links(attempt, ENV, "lo")
    peer = (
        "import os, sys, time; from pathlib import Path\n"
        "from rlhpc.cluster.attempt import Attempt; from rlhpc.cluster.link import Link\n"
        "from rlhpc.cluster.slurm import SlurmEnv\n"
        "link = Link(Attempt(Path(sys.argv[1]), '7_2', 1), SlurmEnv.from_environ(os.environ))\n"
        "assert link.broken() is None; print('connected', flush=True); time.sleep(600)\n"
    )
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "2",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "PYTHONPATH": ":".join(sys.path),
    }
    child = subprocess.Popen(
        [sys.executable, "-c", peer, str(attempt.run_dir)], env=environ, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stdout.readline() == "connected\n"
    assert broken_within(links, 0.5) is None
    child.kill()
    child.wait()
    assert broken_within(links, 30) == "n3"
    here = Link(attempt, replace(ENV, node_id=1))
    assert here.broken() is None
    assert broken_within(links, 0.2) is None  # greets
    links.close()
    assert broken_within(here, 30) == "n1"
    here.close()


def test_a_stranger_is_no_node(attempt: Attempt) -> None:
    links = Links(attempt, ENV, "lo")
    stranger = Link(attempt, replace(ENV, node_id=1))
    publish_text(attempt.token_path, "another secret", mode=0o600)
    stranger.broken()
    stranger.close()
    assert broken_within(links, 0.5) is None
    links.close()
