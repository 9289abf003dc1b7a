"""What status says, on run directories and records that a real Slurm 22.05 and real attempts left (recorded/)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli.jobs import Jobs
from rlhpc.cli.runs import Run, chosen, find_runs, tail_rows
from rlhpc.cli.status import details, judge, status, status_of
from rlhpc.cli.wording import attempt_details, attempt_end, clock, spaced, why_pending
from rlhpc.cluster.slurm import JobRecord, records
from rlhpc.errors import ConfigError

RECORDED = Path(__file__).parent / "recorded"
NEVER = "so it will never start; rlhpc cancel it, then rlhpc resume it with"


def job_records() -> dict[str, JobRecord]:
    found = map(JobRecord, records((RECORDED / "jobs.txt").read_text()))
    return {record.job_id: record for record in found}


def recorded(name: str, directory: Path) -> Run:
    """A copy, whose files may be changed."""
    shutil.copytree(RECORDED / "runs" / name, directory / name)
    return Run(directory / name)


def queued(run: Run, **fields: str) -> Jobs:
    """The recorded job of a requeued run, as that of `run` and with some fields changed."""
    record = JobRecord({**job_records()["88044"].fields, **fields})
    return Jobs({str(run.job_id): record})


def test_reasons_in_words() -> None:
    jobs = job_records()
    del jobs["88037"]  # see test_an_expected_start_is_told
    said = {job_id: why_pending(record, job_id) for job_id, record in jobs.items()}
    assert said == {
        "88038": f"asks for more time than the partition allows, {NEVER} a smaller launch.time_min",
        "88039": "held by its owner; scontrol release 88039 lets it run",
        "88040": f"deferred, earliest start {clock(1796041674)}",
        "88042": "requeued and held: 2 attempts in a row ended without a newer checkpoint than step 12; "
        "scontrol release 88042 lets it run",
        "88043": "held: a node's prolog failed before the job began, and Slurm drained the node; "
        "scontrol release 88043 lets it run",
        "88044": f"requeued, earliest start {clock(float(jobs['88044'].fields['StartTime']))}",
    }


@pytest.mark.parametrize(
    "reason, words",
    [
        ("QOSMaxJobsPerUserLimit", "a limit of its QOS is used up: QOS Max Jobs Per User Limit"),
        ("AssocGrpGRES", "a limit of its account is used up: Assoc Grp GRES"),
        ("ReqNodeNotAvail,_UnavailableNodes:n[1-3]", "nodes that it needs are down, drained or reserved "
         "(UnavailableNodes:n[1-3])"),
        ("FedJobLock", "Slurm's reason is FedJobLock"),
    ],
)  # fmt: skip
def test_families_and_unknown_reasons(reason: str, words: str) -> None:
    record = JobRecord({"JobId": "7", "JobState": "PENDING", "Reason": reason, "Priority": "5"})
    assert why_pending(record, "7") == words


def test_an_expected_start_is_told() -> None:
    start = int(time.time()) + 3600
    record = JobRecord({**job_records()["88037"].fields, "StartTime": str(start)})
    soon = "next in line, as soon as enough nodes are free"
    assert why_pending(record, "88037") == f"{soon}; Slurm expects to start it at {clock(start)}"
    passed = JobRecord({**record.fields, "StartTime": str(start - 7200)})
    assert why_pending(passed, "88037") == soon


def test_clock_tells_another_day() -> None:
    assert clock(0) == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))
    assert clock(time.time()).count(":") == 2 and "-" not in clock(time.time())


def test_words_of_codes() -> None:
    assert spaced("MaxGRESPerAccount") == "Max GRES Per Account"


def test_a_run_that_was_requeued_twice_and_finished(tmp_path: Path) -> None:
    run = recorded("requeued", tmp_path)
    found = status_of(run, Jobs())
    assert (found.state, found.job_id, found.attempt, found.nodes) == ("finished", "88034", 3, ["f1", "f2"])
    assert (found.step, found.total_steps, found.reward, found.checkpoint_step) == (30, 30, 1.0, 30)
    assert found.phase is None and found.eta_s is None
    assert found.next == f"rlhpc report {run.directory}"
    first, second, third = run.attempts
    assert attempt_end(first) == (
        "stopped by scontrol requeue: SIGTERM came before the driver listened; nothing was lost"
    )
    assert attempt_details(first) == [f"SIGTERM at {clock(first['signal_at'])}", "requeued"]
    assert attempt_end(second) == "stopped by scontrol requeue"
    assert attempt_details(second) == [
        f"SIGTERM at {clock(second['signal_at'])}",
        "in generate",
        "steps 0 to 25",
        "checkpoint of step 25, saved in 0.024 s",
        "requeued",
    ]
    assert (attempt_end(third), attempt_details(third)[0]) == ("finished", "steps 25 to 30")


def test_the_same_run_while_it_waited(tmp_path: Path) -> None:
    """As it was after its second attempt: one metrics line is known to take 0.3 s."""
    run = recorded("requeued", tmp_path)
    for name, num_lines in (("attempts.jsonl", 2), ("metrics.jsonl", 25)):
        path = run.directory / name
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:num_lines]))
    progress = json.loads((run.directory / "progress.json").read_text())
    progress |= {"attempt": "88034-1", "outcome": "stopped", "step": 25}
    (run.directory / "progress.json").write_text(json.dumps(progress))
    shutil.rmtree(run.directory / "checkpoints/step-000030")
    os.utime(run.directory / "checkpoints/step-000025", times=(time.time() - 90, time.time() - 90))
    found = status_of(Run(run.directory), queued(run))
    assert (found.state, found.attempt, found.step, found.checkpoint_step) == ("pending", 3, 25, 25)
    assert found.why.startswith("requeued, earliest start ")
    assert found.eta_s == pytest.approx(5 * 0.3)
    assert found.checkpoint_age_s == pytest.approx(90, abs=30)
    assert "  checkpoint  step 25, 1m3" in "\n".join(details(found))

    starting = status_of(Run(run.directory), queued(run, JobState="RUNNING", Reason="None", Restarts="2"))
    assert (starting.state, starting.why, starting.phase) == ("running", "starting Ray on its nodes", None)
    progress |= {"attempt": "88034-2", "outcome": "running", "phase": "generate", "since": time.time() - 12}
    progress |= {"fraction": 0.4, "step": 26}
    (run.directory / "progress.json").write_text(json.dumps(progress))
    working = status_of(
        Run(run.directory), queued(run, JobState="RUNNING", Reason="None", Restarts="2", NodeList="f[2-3]")
    )
    assert (working.state, working.why, working.phase, working.nodes) == ("running", "", "generate", ["f2", "f3"])
    assert "  progress    25/30 steps; in generate (40%) for 12s; reward 0.833" in list(details(working))
    stopping = Run(run.directory)
    (run.directory / "progress.json").write_text(
        json.dumps(progress | {"stop": {"phase": "generate", "at": 1796038117.0, "seen_after_s": 0.1}})
    )
    said = judge(stopping, queued(run, JobState="RUNNING", Reason="None", Restarts="2"))
    assert said == ("ending", f"asked to stop at {clock(1796038117)}")


def test_attempts_inside_salloc(tmp_path: Path) -> None:
    """They are counted on while the job never restarts, and the job outlives each."""
    run = recorded("requeued", tmp_path)
    shell = queued(run, JobState="RUNNING", BatchFlag="0", Restarts="0", Reason="None")
    assert judge(Run(run.directory), shell) == ("finished", "")
    attempts = run.directory / "attempts.jsonl"
    attempts.write_text("".join(attempts.read_text().splitlines(keepends=True)[:2]))
    progress = json.loads((run.directory / "progress.json").read_text()) | {"outcome": "running"}
    for name, why in (("88034-1", "starting Ray on its nodes"), ("88034-2", "")):
        (run.directory / "progress.json").write_text(json.dumps(progress | {"attempt": name}))
        assert judge(Run(run.directory), shell) == ("running", why)


def test_what_became_of_a_job_that_the_run_does_not_tell(tmp_path: Path) -> None:
    """Slurm's word counts where the last line says that the run goes on, or where an attempt left none."""
    run = recorded("requeued", tmp_path)
    lines = (run.directory / "attempts.jsonl").read_text().splitlines(keepends=True)
    (run.directory / "attempts.jsonl").write_text("".join(lines[:2]))
    (run.directory / "progress.json").write_text(json.dumps({**run.progress, "outcome": "stopped"}))

    def after(state: str) -> tuple[str, str]:
        return judge(Run(run.directory), queued(run, JobState=state))

    assert after("CANCELLED") == ("cancelled", "")
    assert after("TIMEOUT") == ("failed", "killed at the time limit")
    assert after("OUT_OF_MEMORY")[1].startswith("killed for using more memory")
    assert after("NODE_FAIL")[0] == "failed"
    assert after("COMPLETED") == ("failed", "Slurm says COMPLETED, but the run has not written that it finished")
    silent = judge(Run(run.directory), Jobs(problem="Slurm does not answer"))
    assert silent[0] == "unknown" and silent[1].startswith("its driver last wrote ")
    assert status_of(Run(run.directory), Jobs(problem="Slurm does not answer")).next == "scontrol ping"


def test_a_run_that_failed(tmp_path: Path) -> None:
    run = recorded("failing", tmp_path)
    found = status_of(run, Jobs())
    assert (found.state, found.why) == ("failed", "loss is nan")
    assert "failed: loss is nan; first on f1" in "\n".join(details(found))
    finished = recorded("requeued", tmp_path)
    (finished.directory / "job.json").write_text(json.dumps({"job_id": "88050", "submitted": time.time(), "log": ""}))
    assert Run(finished.directory).settled is None  # it was submitted once more, to train for longer
    resubmitted = run.directory / "job.json"
    resubmitted.write_text(json.dumps({"job_id": "88044", "submitted": time.time(), "log": ""}))
    assert status_of(Run(run.directory), queued(Run(run.directory))).state == "pending"


def local_run(directory: Path, **progress: Any) -> Run:
    directory.mkdir(parents=True)
    known = {"attempt": None, "host": socket.gethostname(), "outcome": "running", "phase": "update", "step": 3}
    known |= {"started": time.time(), "since": time.time(), "total_steps": 10}
    (directory / "progress.json").write_text(json.dumps(known | progress))
    return Run(directory)


def test_local_runs(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "300"])
    try:
        alive = local_run(tmp_path / "alive", pid=process.pid)
        assert judge(alive, Jobs()) == ("running", f"process {process.pid} on {socket.gethostname()}")
        # The same pid, but given to another process after that run had begun long ago.
        reused = local_run(tmp_path / "reused", pid=process.pid, started=time.time() - 7200)
        assert judge(reused, Jobs())[0] == "killed"
        away = local_run(tmp_path / "away", pid=process.pid, host="elsewhere")
        assert judge(away, Jobs())[0] == "running" and "as far as can be seen from here" in judge(away, Jobs())[1]
    finally:
        process.kill()
        process.wait()
    assert judge(Run(tmp_path / "alive"), Jobs()) == (
        "killed",
        f"process {process.pid} on {socket.gethostname()} is gone without a word",
    )
    failed = local_run(tmp_path / "failed", pid=process.pid, outcome="failed", reason="step 4: loss is nan")
    assert judge(failed, Jobs()) == ("failed", "step 4: loss is nan")


def test_a_run_that_went_on_without_slurm_is_local(tmp_path: Path) -> None:
    run = recorded("failing", tmp_path)
    progress = {"attempt": None, "pid": 1, "host": "elsewhere", "outcome": "finished", "started": time.time()}
    (run.directory / "progress.json").write_text(json.dumps(progress))
    assert Run(run.directory).job_id is None
    assert judge(Run(run.directory), Jobs()) == ("finished", "")


def test_finding_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    recorded("requeued", tmp_path / "outputs/a")
    recorded("failing", tmp_path / "outputs/sweep")
    for index in (2, 10):
        shutil.copytree(tmp_path / "outputs/sweep/failing", tmp_path / f"outputs/sweep/{index}")
    names = [str(run.directory) for run in find_runs(Path("outputs"))]
    assert names == ["outputs/a/requeued", "outputs/sweep/2", "outputs/sweep/10", "outputs/sweep/failing"]
    assert [str(run.directory) for run in chosen("88034", {})] == ["outputs/a/requeued"]
    assert len(chosen("outputs/sweep", {})) == 3
    with pytest.raises(ConfigError, match="^job 99 belongs to no run under .*outputs; give its run directory$"):
        chosen("99", {})
    with pytest.raises(
        ConfigError, match="^nowhere does not exist; give a run directory or a job's id; there are outp"
    ):
        chosen("nowhere", {})
    status("outputs/a/requeued", as_json=True)
    (found,) = json.loads(capsys.readouterr().out)
    assert found["state"] == "finished" and found["ended_attempts"][1]["last_step"] == 25
    status(None)
    header, first, *_ = capsys.readouterr().out.splitlines()[-5:]
    assert header.split() == ["run", "job", "state", "step", "reward", "checkpoint", "eta"]
    assert first.split()[:5] == ["outputs/a/requeued", "88034", "finished,", "attempt", "3"]


def test_the_end_of_a_long_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(100)) + '{"step": 1')
    assert [row["step"] for row in tail_rows(path, num_bytes=40)] == [98, 99]
    assert [row["step"] for row in tail_rows(path)] == list(range(100))
    assert tail_rows(tmp_path / "absent") == []
