"""The scripts that sbatch reads, whole: what a dry run prints and a submission submits."""

import re
import sys
from pathlib import Path

import pytest
from submitit.core.utils import FailedSubmissionError

from rlhpc.cluster.job import RunExecutor, arrays_of, job_of
from rlhpc.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[3]


def config(run_dir="/runs/a", **changes):
    cfg = RunConfig()
    cfg.run_dir, cfg.trainer.device, cfg.trainer.experiment_name = run_dir, "cpu", "arithmetic"
    for key, value in changes.items():
        section, _, name = key.partition("_")
        setattr(getattr(cfg, section), name, value)
    return cfg


def options(script):
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.MULTILINE))


def test_the_least_script():
    assert (
        job_of(config()).script
        == f"""\
#!/bin/bash

# Parameters
#SBATCH --cpus-per-task=3
#SBATCH --job-name=arithmetic
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/runs/a/slurm/%j.log
#SBATCH --requeue
#SBATCH --signal=USR2@300

# setup
set -e  # a line that fails fails the job
export PYTHONUNBUFFERED=1 PYTHONPATH={ROOT}${{PYTHONPATH:+:$PYTHONPATH}}

# command
export SUBMITIT_EXECUTOR=slurm
exec {sys.executable} -m rlhpc.cluster.batch /runs/a
"""
    )


def test_the_fullest_script():
    cfg = config(
        "/my runs/b",
        trainer_device="cuda",
        trainer_n_gpus_per_node=8,
        trainer_nnodes=4,
        cluster_partition="gpu",
        cluster_account="physics",
        cluster_qos="long",
        cluster_constraint="h200&ib",
        cluster_reservation="course",
        cluster_nodelist="n[1-4]",
        cluster_exclude="n7",
        cluster_exclusive=True,
        cluster_cpus_per_node=96,
        cluster_memory_gib_per_node=1.5,
        cluster_sbatch={"mail_type": "END,FAIL", "comment": "a b", "spread-job": True, "licenses": None},
        cluster_setup=["module load cuda", "export NCCL_DEBUG=WARN"],
        launch_time_min=1440,
        launch_stop_lead_s=600,
        launch_job_name="big run",
    )
    assert (
        job_of(cfg).script
        == f"""\
#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --comment='a b'
#SBATCH --constraint='h200&ib'
#SBATCH --cpus-per-task=96
#SBATCH --exclude=n7
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name='big run'
#SBATCH --mail-type=END,FAIL
#SBATCH --mem=1536M
#SBATCH --nodelist='n[1-4]'
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/my runs/b/slurm/%j.log'
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --requeue
#SBATCH --reservation=course
#SBATCH --signal=USR2@600
#SBATCH --spread-job
#SBATCH --time=1440

# setup
set -e  # a line that fails fails the job
module load cuda
export NCCL_DEBUG=WARN
export PYTHONUNBUFFERED=1 PYTHONPATH={ROOT}${{PYTHONPATH:+:$PYTHONPATH}}

# command
export SUBMITIT_EXECUTOR=slurm
exec {sys.executable} -m rlhpc.cluster.batch '/my runs/b'
"""
    )


@pytest.mark.parametrize("own", [{"gres": "gpu:h200:8"}, {"gpus-per-node": "h200:8"}], ids=str)
def test_a_kind_of_gpu_takes_the_place_of_the_plain_number(own):
    cfg = config(trainer_device="cuda", trainer_n_gpus_per_node=8, cluster_sbatch=own)
    found = {key: value for key, value in options(job_of(cfg).script).items() if key in ("gres", "gpus-per-node")}
    assert found == own


def test_whole_nodes_come_with_all_their_memory():
    """--exclusive alone gives all CPUs, and of the memory what Slurm gives by default."""
    assert options(job_of(config(cluster_exclusive=True)).script)["mem"] == "0M"
    given = options(job_of(config(cluster_exclusive=True, cluster_memory_gib_per_node=8)).script)
    assert given["mem"] == "8192M"
    assert "mem" not in options(job_of(config()).script)


def test_an_option_may_be_zero():
    made = options(job_of(config(cluster_sbatch={"nice": 0, "switches": None, "spread-job": False})).script)
    assert made["nice"] == "0" and not {"switches", "spread-job"} & made.keys()


def test_a_sweep_is_one_array():
    runs = [config(f"/sweep/{number}") for number in range(5)]
    [array] = arrays_of(runs, Path("/sweep"), 1000)
    assert options(array.script) | {"array": "0-4%5", "output": "/sweep/slurm/%A_%a.log"} == options(array.script)
    [throttled] = arrays_of([config(f"/sweep/{n}", launch_array_parallelism=2) for n in range(5)], Path("/sweep"), 1000)
    assert options(throttled.script)["array"] == "0-4%2"


def test_an_array_takes_no_more_tasks_than_it_may_and_the_throttle_counts_over_all():
    runs = [config(f"/sweep/{number}", launch_array_parallelism=7) for number in range(10)]
    arrays = arrays_of(runs, Path("/sweep"), 4)
    assert [[cfg.run_dir for cfg in array.runs] for array in arrays] == [
        [f"/sweep/{number}" for number in part] for part in ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))
    ]
    assert [options(array.script)["array"] for array in arrays] == ["0-3%3", "0-3%2", "0-1%2"]  # 7 = 3 + 2 + 2
    assert len({array.script for array in arrays}) == 3  # each has a list of its own


def test_points_that_ask_for_different_things_come_in_different_arrays():
    runs = [config(f"/sweep/{number}", trainer_nnodes=1 + number % 2) for number in range(4)]
    arrays = arrays_of(runs, Path("/sweep"), 1000)
    assert [[cfg.run_dir for cfg in array.runs] for array in arrays] == [
        ["/sweep/0", "/sweep/2"],
        ["/sweep/1", "/sweep/3"],
    ]
    assert [options(array.script)["nodes"] for array in arrays] == ["1", "2"]


@pytest.mark.parametrize(
    ("answer", "job_id", "cluster"), [("1234\n", "1234", None), ("1234;west\n", "1234", "west"), (b"7", "7", None)]
)
def test_what_sbatch_parsable_answers(tmp_path, answer, job_id, cluster):
    executor = RunExecutor(tmp_path)
    assert executor._get_job_id_from_submission_command(answer) == job_id
    assert executor.cluster == cluster


def test_an_answer_that_is_no_job_id(tmp_path):
    with pytest.raises(FailedSubmissionError, match="'Submitted batch job 7', which is no job id"):
        RunExecutor(tmp_path)._get_job_id_from_submission_command("Submitted batch job 7")


@pytest.mark.parametrize("name", ["train", "sweep"])
def test_the_batch_files_ask_for_what_a_submission_asks_for(name):
    """They say what can't be left to sbatch's options: that the job may be requeued, how it is told to stop."""
    text = (ROOT / f"slurm/{name}.sbatch").read_text()
    own, made = options(text), options(job_of(config()).script)
    shared = ("ntasks-per-node", "open-mode", "requeue", "signal")
    assert {key: own[key] for key in shared} == {key: made[key] for key in shared}
    assert set(own) == {*shared, "job-name", "cpus-per-task", "output"}
    assert len(text.splitlines()) < 50
    assert 'exec "$python" "$root/launch/run.py" launch=allocation' in text.splitlines()[-1]
