"""What Slurm printed is read right. recorded/job-*.txt: `scontrol show job -o` of 22.05.8 with SLURM_TIME_FORMAT=%s."""

from pathlib import Path

import pytest

from rlhpc.cluster import slurm
from rlhpc.cluster.attempt import StopNotice
from rlhpc.cluster.slurm import JobRecord, SlurmEnv, classify, expand_nodelist, scrubbed
from rlhpc.errors import ConfigError, SlurmError

RECORDED = Path(__file__).parent / "recorded"


def job(name: str) -> JobRecord:
    found = slurm.records((RECORDED / f"job-{name}.txt").read_text())
    assert len(found) == 1
    return JobRecord(found[0])


@pytest.mark.parametrize(
    ("recorded", "signal", "cause", "deadline"),
    [
        # scontrol's own EndTime where the job still runs, else KillWait (10 s) after the signal
        ("grace", "SIGTERM", "preempted", 1796038101),
        ("running", "SIGTERM", "signal", 1796041659),
        ("requeued", "SIGTERM", "requeued", 1010),
        ("time-limit", "SIGTERM", "time_limit", 1010),
        ("cancelled", "SIGTERM", "cancelled", 1010),
    ],
)
def test_cause_and_deadline_of_a_signal(recorded: str, signal: str, cause: str, deadline: float) -> None:
    assert classify(job(recorded), 0, signal, 1000.0, 10.0) == StopNotice(cause, signal, 1000.0, deadline)


def test_a_warning_is_told_from_somebodys_signal_by_its_time() -> None:
    end = 1796041659
    causes = [classify(job("running"), 0, "SIGUSR2", end - left, 10.0, 300.0).cause for left in (361, 359, 300, 5)]
    assert causes == ["signal", "time_limit", "time_limit", "time_limit"]
    assert classify(job("running"), 0, "SIGTERM", end - 300, 10.0, 300.0).cause == "signal"


def test_an_attempt_that_slurm_requeued_before_is_not_taken_for_requeued_now() -> None:
    assert classify(job("requeued"), 1, "SIGTERM", 0.0, 10.0).cause == "cancelled"  # Restarts=1 is its own
    assert classify(None, 0, "SIGTERM", 1000.0, 10.0) == StopNotice("signal", "SIGTERM", 1000.0, 1010.0)


def test_states() -> None:
    pending = job("requeue-pending")
    assert (pending.pending, pending.running, pending.live, pending.held) == (True, False, True, False)
    assert (pending.reason, pending.restarts, pending.nodes) == ("BeginTime", 1, [])
    assert pending.time("EligibleTime") == 1796038079
    running = job("running")
    assert (running.pending, running.running, running.live, running.nodes) == (False, True, True, ["b4"])
    assert running.preempt_time is None and running.requeue
    going = job("cancelled")
    assert (going.pending, going.running, going.completing, going.live) == (False, False, True, True)


def test_waiting_tasks_of_an_array_share_a_record() -> None:
    array = job("array")
    assert array.fields["ArrayTaskId"] == "0-3,7%2"
    assert [task for task in range(10) if array.covers(f"80109_{task}")] == [0, 1, 2, 3, 7]
    assert array.covers("80109") and not array.covers("80108_1")
    assert array.held
    assert job("task").job_id == "80109_3"


def test_names_and_comments_cannot_pose_as_fields() -> None:
    """The recorded array is called "odd JobState=FAILED name"."""
    fields = job("array").fields
    assert fields["JobName"] == "odd JobState=FAILED name"
    assert (fields["JobState"], fields["Comment"]) == ("PENDING", "two words")
    posing = slurm.records(
        "JobId=1 JobName=x UserId=u(1) JobState=RUNNING Restarts=0 Comment=so JobState=FAILED it Restarts=9"
    )
    assert (posing[0]["JobState"], posing[0]["Restarts"]) == ("RUNNING", "0")


def test_fields_of_other_versions() -> None:
    """22.05 has no SubmitLine, ReqTRES, OOMKillStep or LicensesAlloc; flags may follow the state; times may be ISO."""
    line = (
        "JobId=5 JobName=n UserId=u(1) Priority=1 JobState=RUNNING,COMPLETING Reason=None Requeue=1 Restarts=2 "
        "EndTime=1970-01-02T00:00:00 StepMgrEnabled=Yes NodeList=gpu[01-02] ReqTRES=cpu=1,node=2 AllocTRES=cpu=4 "
        "LicensesAlloc=(null) SubmitLine=sbatch --comment=a b.sh OOMKillStep=0"
    )
    record = JobRecord(slurm.records(line)[0])
    assert (record.running, record.completing, record.restarts) == (False, True, 2)
    assert record.nodes == ["gpu01", "gpu02"]
    assert record.fields["SubmitLine"] == "sbatch --comment=a b.sh"
    assert record.end_time is not None and 0 < record.end_time < 3 * 86400
    assert JobRecord({"EndTime": "Unknown"}).end_time is None
    assert JobRecord({"EndTime": "in a while"}).end_time is None


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n[1-2,08],m2", ["n1", "n2", "n08", "m2"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[3-4]-ib", ["r1n3-ib", "r1n4-ib", "r2n3-ib", "r2n4-ib"]),
        ("login-1.site", ["login-1.site"]),
        ("", []),
    ],
)
def test_nodelists(nodelist: str, names: list[str]) -> None:
    assert expand_nodelist(nodelist) == names


def test_variables_of_a_job_and_of_the_last_task_of_an_array() -> None:
    environ = {
        "SLURM_JOB_ID": "90",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_NODEID": "2",
        "SLURMD_NODENAME": "n3",
        "SLURM_CPUS_PER_TASK": "6",
    }
    env = SlurmEnv.from_environ(environ)
    assert (env.job_id, env.restart, env.node_id, env.node_name, env.cpus_per_task) == ("90", 0, 2, "n3", 6)
    assert env.nodes == ["n1", "n2", "n3"]
    array = {"SLURM_ARRAY_JOB_ID": "90", "SLURM_ARRAY_TASK_ID": "7", "SLURM_RESTART_COUNT": "2"}
    env = SlurmEnv.from_environ(environ | array)
    assert (env.job_id, env.raw_job_id, env.restart, env.array_task) == ("90_7", "90", 2, 7)
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set"):
        SlurmEnv.from_environ({})


def test_scrubbed_environment_keeps_the_way_to_slurm() -> None:
    foreign = (
        "SLURM_JOB_ID",
        "SLURM_CPU_BIND",
        "SLURMD_NODENAME",
        "SBATCH_PARTITION",
        "SRUN_DEBUG",
        "PMI_RANK",
        "PMIX_RANK",
    )
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "PMIR": "mine"}
    assert scrubbed(dict.fromkeys(foreign, "1") | kept) == kept


def test_a_command_that_fails_hangs_or_is_missing_is_named() -> None:
    with pytest.raises(SlurmError, match=r"ls /nowhere-at-all: exit code 2: .*No such file"):
        slurm._run("ls", "/nowhere-at-all")
    with pytest.raises(SlurmError, match=r"sleep 60: no answer in 0.2 s"):
        slurm._run("sleep", "60", timeout_s=0.2)
    with pytest.raises(SlurmError, match="no-such-scontrol: not found; run this where Slurm's commands are"):
        slurm._run("no-such-scontrol")
