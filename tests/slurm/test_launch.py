"""launch=slurm, sweeps and the batch files as users type them, on a real Slurm. Jobs that need not run are held."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, command, rows, write_task
from tests.slurm.cluster import Cluster, own_cluster, wait_until

HOLD = "cluster.sbatch.hold=true"
QUICK = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1")
ONE_RANK = (
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("launch"))


def launch(
    cluster: Cluster, arguments: list[str], code: int = 0, timeout_s: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command in the repository's directory; its output, after a look at its exit code."""
    done = subprocess.run(
        arguments, cwd=ROOT, env=cluster.environ(**variables), capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def multirun(arguments: list[str]) -> list[str]:
    return [*arguments[:2], "-m", *arguments[2:]]


def job_of(run_dir: Path) -> str:
    return json.loads((run_dir / "job.json").read_text())["job_id"]


def queued(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "-h", "-r", "-o", "%i").split()


def script_of(cluster: Cluster, job: str) -> str:
    """What slurmctld got."""
    return cluster.run("scontrol", "write", "batch_script", job, "-")


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]


def test_a_dry_run_prints_the_bytes_that_are_submitted(slurm: Cluster, task: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = command(task, run_dir, "launch=slurm", "launch.time_min=20", HOLD)
    printed = launch(slurm, [*arguments, "launch.dry_run=true"]).stdout
    assert queued(slurm) == [] and not run_dir.exists()
    told = launch(slurm, [*arguments, "launch.wait=true"], code=1).stdout  # a held job would keep one waiting for ever
    job = job_of(run_dir)
    assert f"job {job}: held: held by its owner; scontrol release {job} lets it run" in told
    assert told.startswith(f"submitted job {job}: 1 node, 20 min\n")
    assert f"rlhpc logs -f {run_dir}" in told and f"rlhpc cancel {run_dir}" in told
    assert "experts  etp=1 ep=2" in printed and "memory of the fullest rank" in printed
    assert printed.endswith(f"what sbatch would read, for {run_dir}:\n{script_of(slurm, job)}")
    fields = slurm.show(job)
    assert (fields["JobState"], fields["Reason"], fields["TimeLimit"]) == ("PENDING", "JobHeldUser", "00:20:00")
    assert (fields["NumNodes"], fields["CPUs/Task"], fields["Requeue"]) == ("1-1", "4", "1")
    assert fields["StdOut"] == str(run_dir / f"slurm/{job}.log") and (run_dir / "slurm").is_dir()

    again = launch(slurm, arguments, code=2)
    assert errors(again) == [
        f"run_dir={run_dir} belongs to job {job} (pending); follow it with: rlhpc logs -f {run_dir}, end it with: "
        f"rlhpc cancel {run_dir}, or choose another run_dir"
    ]
    assert queued(slurm) == [job]


def test_a_reader_that_leaves_early_does_not_undo_a_submission(slurm: Cluster, task: Path, tmp_path: Path) -> None:
    piped = ["bash", "-c", '"$0" "$@" | true; exit ${PIPESTATUS[0]}']
    done = launch(slurm, [*piped, *command(task, tmp_path / "run", "launch=slurm", HOLD)])
    assert queued(slurm) == [job_of(tmp_path / "run")] and "Broken" not in done.stderr


def test_a_sweep_is_an_array_and_again_submits_only_what_is_missing(slurm: Cluster, task: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    arguments = multirun(
        command(task, sweep, "launch=slurm", "launch.array_parallelism=2", HOLD, "trainer.save_freq=5")
    )
    printed = launch(slurm, [*arguments, "seed=0,1,2", "launch.dry_run=true"]).stdout
    table = launch(slurm, [*arguments, "seed=0,1,2"]).stdout.splitlines()
    array = job_of(sweep / "0").partition("_")[0]
    assert [line.split() for line in table[:4]] == [
        ["point", "job", "run", "dir", "overrides"],
        *[[str(n), f"{array}_{n}", str(sweep / str(n)), f"seed={n}"] for n in range(3)],
    ]
    assert printed.endswith(f"what sbatch would read, for {sweep}:\n{script_of(slurm, array)}")
    assert printed.count("memory of the fullest rank") == 1  # the points are alike
    assert slurm.show(array)["ArrayTaskThrottle"] == "2"
    assert sorted(queued(slurm)) == [f"{array}_{n}" for n in range(3)]
    assert [json.loads((sweep / f"{n}/cluster.json").read_text())["num_nodes"] for n in range(3)] == [1, 1, 1]
    assert "seed: 2\n" in (sweep / "2/config.yaml").read_text()

    slurm.cancel(f"{array}_1")
    table = launch(slurm, [*arguments, "seed=0,1,2,3"]).stdout.splitlines()
    second = job_of(sweep / "3").partition("_")[0]
    assert [line.split()[1:4] for line in table[1:5]] == [
        ["job", f"{array}_0", "(pending)"],
        [f"{second}_0", str(sweep / "1"), "seed=1"],
        ["job", f"{array}_2", "(pending)"],
        [f"{second}_1", str(sweep / "3"), "seed=3"],
    ]
    [listed] = re.findall(r"--array-list (\S+)", script_of(slurm, second))
    assert Path(listed).read_text() == f"{sweep}/1\n{sweep}/3\n"


def test_one_wrong_point_keeps_all_from_being_submitted(slurm: Cluster, task: Path, tmp_path: Path) -> None:
    arguments = multirun(command(task, tmp_path / "sweep", "launch=slurm"))
    done = launch(slurm, [*arguments, "trainer.n_gpus_per_node=2,3"], code=2)
    assert errors(done) and all(line.startswith("point 1: ") for line in errors(done))
    assert queued(slurm) == []


def test_what_the_cluster_can_not_give_is_refused(slurm: Cluster, task: Path, tmp_path: Path) -> None:
    """sbatch takes every one of these, and lets it wait for ever."""
    asked = ["cluster.nodes=6", "launch.time_min=100", "cluster.memory_gib_per_node=64", "cluster.cpus_per_node=20"]
    done = launch(slurm, command(task, tmp_path / "run", "launch=slurm", *ONE_RANK, *asked, "data.train_batch_size=12",
                                 "actor_rollout_ref.rollout.chunk_prompts=0",
                                 "actor_rollout_ref.actor.ppo_mini_batch_size=12"), code=2)  # fmt: skip
    assert errors(done) == [
        "launch.time_min=100 exceeds MaxTime=60 min of partition low, where it would wait for ever; set at most 60: a "
        "run that reaches its limit saves and goes on in the next attempt",
        "trainer.nnodes=6 exceeds the 4 nodes of partition low; set at most 4, or choose another partition",
    ]
    done = launch(slurm, command(task, tmp_path / "run", "launch=slurm", *asked[2:]), code=2)
    assert [line.partition(" exceeds")[0] for line in errors(done)] == [
        "cluster.cpus_per_node=20", "cluster.memory_gib_per_node=64.0"
    ]  # fmt: skip
    assert queued(slurm) == [] and not (tmp_path / "run").exists()


def test_a_job_inherits_nothing_of_the_job_it_is_submitted_from(slurm: Cluster, task: Path, tmp_path: Path) -> None:
    inherited = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_NNODES": "3",
        "SLURM_MEM_PER_CPU": "77",
        "SBATCH_PARTITION": "high",
        "SBATCH_TIMELIMIT": "7",
        "PMIX_RANK": "5",
    }
    launch(slurm, command(task, tmp_path / "run", "launch=slurm", HOLD), **inherited)
    fields = slurm.show(job_of(tmp_path / "run"))
    assert (fields["Partition"], fields["TimeLimit"], fields["NumNodes"]) == ("low", "01:00:00", "1-1")
    setup = [
        f"env >{tmp_path}/seen",
        "exit 7",  # a failing line ends the job with its code, before anything starts
    ]
    arguments = command(task, tmp_path / "other", "launch=slurm", f"cluster.setup={setup}")
    launch(slurm, arguments, **inherited)
    job = job_of(tmp_path / "other")
    assert slurm.wait_end(job) == "FAILED" and slurm.show(job)["ExitCode"] == "7:0"
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert "SLURM_CPU_BIND" not in seen and "PMIX_RANK" not in seen
    assert seen["SLURM_NNODES"] == "1" and seen["SLURM_CONF"] == str(slurm.conf)


def test_sbatch_refusals_are_told_once(slurm: Cluster, task: Path, tmp_path: Path) -> None:
    done = launch(
        slurm, command(task, tmp_path / "run", "launch=slurm", "cluster.sbatch.dependency=afterok:nonsense"), 2
    )
    assert done.stderr.count("ependency") == 1 and errors(done)[0].startswith("sbatch refused the job: sbatch: error:")
    assert not (tmp_path / "run/job.json").exists()


def test_a_sweep_trains_waits_and_reports_each_point(slurm: Cluster, task: Path, tmp_path: Path) -> None:
    """One point is right; the other's data goes away after it was submitted, which only its job can see."""
    sweep, lost = tmp_path / "sweep", tmp_path / "lost.jsonl"
    lost.write_text((task / "train.jsonl").read_text())
    files = f"data.train_files={task / 'train.jsonl'},{lost}"
    arguments = multirun(command(task, sweep, "launch=slurm", *QUICK, *ONE_RANK, "launch.wait=true", files))
    with (tmp_path / "out").open("w") as out:
        waiting = subprocess.Popen(arguments, cwd=ROOT, env=slurm.environ(), stdout=out, stderr=subprocess.STDOUT)
        wait_until(lambda: (sweep / "1/job.json").exists(), 120, "both points are submitted")
        lost.unlink()
        assert waiting.wait(timeout=300) == 2, (tmp_path / "out").read_text()
    good, bad = job_of(sweep / "0"), job_of(sweep / "1")
    said = (tmp_path / "out").read_text()
    assert f"job {good}: completed; the run finished" in said
    assert re.search(rf"job {bad}: failed, exit code 2; the run failed: .*{re.escape(str(lost))}", said), said
    assert slurm.state(bad) == "FAILED" and slurm.show(bad)["ExitCode"] == "2:0"
    assert [row["step"] for row in rows(sweep / "0")] == [0, 1]
    for number, job in enumerate((good, bad)):
        assert (sweep / f"{number}/slurm/{job}.log").resolve() == sweep / f"slurm/{job}.log"
    assert lost.name in (sweep / f"1/slurm/{bad}.log").read_text()

    lost.write_text((task / "train.jsonl").read_text())
    again = launch(
        slurm, [part for part in arguments if not part.startswith("launch.wait")] + [HOLD]
    ).stdout.splitlines()
    assert again[1].split()[:2] == ["0", "finished"] and again[2].split()[1] == job_of(sweep / "1") != bad

    settings = (sweep / "0/config.yaml").read_text()
    other = command(task, sweep / "0", "launch=slurm", *QUICK, *ONE_RANK, HOLD, "seed=7")
    refused = errors(launch(slurm, other, code=2))
    assert refused[:2] == [f"run_dir={sweep / '0'} belongs to a run with other settings:", "  config.seed: 0 -> 7"]
    assert (sweep / "0/config.yaml").read_text() == settings, "what the run was submitted with stays"


@pytest.mark.parametrize("launcher", ["submitit_slurm", "submitit_local"])
def test_plain_submitit_launchers_fail_where_a_point_fails(
    slurm: Cluster, task: Path, tmp_path: Path, launcher: str
) -> None:
    """With hydra-submitit-launcher alone a task function that raises ends its Slurm job as COMPLETED."""
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "1").write_text("where the point's directory has to be")
    own = ["hydra.launcher.partition=low", "hydra.launcher.timeout_min=5"] if launcher.endswith("slurm") else []
    arguments = command(task, sweep, f"hydra/launcher={launcher}", *own, "launch.dry_run=true,false", *ONE_RANK)
    launch(slurm, multirun(arguments), code=1)
    logs = "".join(path.read_text() for path in sweep.rglob("*_log.*"))
    assert f"writes    {sweep}/0" in logs and f"{sweep}/1 can't be made or written to: File exists" in logs
    if launcher.endswith("slurm"):
        array = next(sweep.rglob("*_log.err")).name.partition("_")[0]
        ends = [slurm.show(f"{array}_{number}") for number in range(2)]
        assert [(end["JobState"], end["ExitCode"]) for end in ends] == [("COMPLETED", "0:0"), ("FAILED", "2:0")]


def test_train_sbatch_trains_over_the_nodes_of_its_job(slurm: Cluster, task: Path, tmp_path: Path) -> None:
    """Submitted from another directory: Slurm runs a copy of the file."""
    overrides = command(task, tmp_path / "run", *QUICK, *ONE_RANK)[2:]
    ask = ["sbatch", "--parsable", "--nodes=2", f"--chdir={tmp_path}", str(ROOT / "slurm/train.sbatch")]
    variables = {"RLHPC_VENV": sys.prefix}
    wrong = run_from(tmp_path, slurm, [*ask, *overrides, "cluster.nodes=3"], variables)
    job = run_from(tmp_path, slurm, [*ask, *overrides], variables)
    assert slurm.wait_end(wrong, 120) == "FAILED" and slurm.show(wrong)["ExitCode"] == "2:0"
    assert (tmp_path / f"slurm-{wrong}.log").read_text().strip() == (
        f"error: trainer.nnodes=3, but job {wrong} has 2 nodes; set cluster.nodes=2, or allocate 3: sbatch --nodes=3"
    )
    assert slurm.wait_end(job, 300) == "COMPLETED", (tmp_path / f"slurm-{job}.log").read_text()[-3000:]
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]
    assert job_of(tmp_path / "run") == job
    assert (tmp_path / f"run/slurm/{job}.log").resolve() == tmp_path / f"slurm-{job}.log"


def run_from(directory: Path, cluster: Cluster, arguments: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        arguments, cwd=directory, env=cluster.environ(**variables), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_sweep_sbatch_gives_each_task_its_line(slurm: Cluster, task: Path, tmp_path: Path) -> None:
    (tmp_path / "points.txt").write_text("seed=1 'trainer.experiment_name=a b'\nseed=2 trainer.n_gpus_per_node=3\n")
    overrides = [part for part in command(task, tmp_path / "unused", *QUICK)[2:] if not part.startswith("run_dir=")]
    ask = ["sbatch", "--parsable", "--array=0-2", f"--chdir={tmp_path}", str(ROOT / "slurm/sweep.sbatch"), "points.txt"]
    array = run_from(tmp_path, slurm, [*ask, *overrides, "launch.dry_run=true"], {"RLHPC_VENV": sys.prefix})
    for number, (state, code, said) in enumerate(
        [
            ("COMPLETED", "0:0", f"writes    {tmp_path}/outputs/points/0\n"),
            ("FAILED", "2:0", "must divide the 3 ranks"),
            ("FAILED", "2:0", "error: task 2 has no line in points.txt; submit it with --array=0-1\n"),
        ]
    ):
        assert slurm.wait_end(f"{array}_{number}") == state
        assert slurm.show(f"{array}_{number}")["ExitCode"] == code
        assert said in (tmp_path / f"slurm-{array}_{number}.log").read_text()


@pytest.fixture(scope="module")
def forgetful_slurm():
    """Ended jobs are forgotten at once, and arrays have at most three tasks."""
    with own_cluster("f", nodes=1, extra="MinJobAge=2\nMaxArraySize=4\n") as cluster:
        yield cluster


def test_sweeps_above_max_array_size_are_sharded(forgetful_slurm: Cluster, task: Path, tmp_path: Path) -> None:
    arguments = multirun(command(task, tmp_path / "sweep", "launch=slurm", HOLD))
    launch(forgetful_slurm, [*arguments, "seed=range(0,7)"])
    jobs = [job_of(tmp_path / f"sweep/{number}").split("_") for number in range(7)]
    assert [task for _, task in jobs] == ["0", "1", "2", "0", "1", "2", "0"]
    assert len({array for array, _ in jobs}) == 3
    assert len(queued(forgetful_slurm)) == 7
    forgetful_slurm.cancel(*{array for array, _ in jobs})


def test_waiting_ends_after_scancel_without_accounting(forgetful_slurm: Cluster, task: Path, tmp_path: Path) -> None:
    """submitit's own launcher asks sacct alone and waits for ever here."""
    conf = tmp_path / "slurm.conf"  # as a user on a cluster without accounting has it
    conf.write_text(re.sub(r"(?m)^AccountingStorage.*\n", "", forgetful_slurm.conf.read_text()))
    environ = forgetful_slurm.environ(SLURM_CONF=str(conf))
    arguments = command(task, tmp_path / "run", "launch=slurm", "launch.wait=true", "cluster.setup=[sleep 600]")
    with (tmp_path / "out").open("w") as out:
        waiting = subprocess.Popen(arguments, cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT)
    wait_until(lambda: "running on" in (tmp_path / "out").read_text(), 120, "the job runs")
    forgetful_slurm.cancel(job_of(tmp_path / "run"))
    assert waiting.wait(timeout=120) == 1
    last = (tmp_path / "out").read_text().splitlines()[-1]
    assert "cancelled" in last or "gone from the queue" in last
