"""A run directory before its job: what is written, who holds it, what an allocation gives."""

import fcntl
import json

import pytest

from rlhpc.cluster.slurm_env import SlurmEnv
from rlhpc.cluster.submission import Submission, claimed, fit_allocation, holders, prepare
from rlhpc.config.load import load, load_file
from rlhpc.errors import ConfigError


def config(tmp_path, **sections):
    given = {"actor_rollout_ref": {"model": {"path": "/m"}}, "data": {"train_files": "/d"}, "run_dir": str(tmp_path)}
    cfg = load(given | sections)
    if cfg.trainer.device == "auto":
        cfg.trainer.device = "cpu"
    return cfg


def test_prepare_writes_what_a_job_reads(tmp_path):
    cfg = config(tmp_path / "run", trainer={"nnodes": 2, "n_gpus_per_node": 4, "device": "cuda"})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/STOP").write_text("")
    prepare(cfg)
    assert load_file(tmp_path / "run/config.yaml") == cfg
    spec = json.loads((tmp_path / "run/cluster.json").read_text())
    assert (spec["num_nodes"], spec["ranks_per_node"], spec["gpus_per_node"], spec["stop_lead_s"]) == (2, 4, 4, 300)
    assert (tmp_path / "run/slurm").is_dir() and not (tmp_path / "run/STOP").exists()
    prepare(config(tmp_path / "run"))
    assert json.loads((tmp_path / "run/cluster.json").read_text())["gpus_per_node"] == 0


def test_job_json_is_read_as_it_was_written(tmp_path):
    assert Submission.read(tmp_path) is None
    made = Submission.made_now("12_3", "slurm", tmp_path / "slurm/12_3.log", "west")
    made.write(tmp_path)
    assert Submission.read(tmp_path) == made
    assert (made.job_id, made.cluster, made.log) == ("12_3", "west", f"{tmp_path}/slurm/12_3.log")


def test_a_driver_on_this_machine_holds_its_directory(tmp_path):
    assert holders([str(tmp_path)]) == {}
    with (tmp_path / ".lock").open("a+") as lock:
        lock.write("4711 host-4711-1")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert holders([str(tmp_path)]) == {str(tmp_path): "process 4711 on this machine"}
    assert holders([str(tmp_path)]) == {}


def test_only_a_requeued_job_goes_on_with_what_it_wrote(tmp_path):
    def env(job, restart):
        return SlurmEnv.from_environ({"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restart})

    assert not claimed(str(tmp_path), env("7", "1"))
    prepare(config(tmp_path))
    Submission.made_now("7", "allocation", None).write(tmp_path)
    assert claimed(str(tmp_path), env("7", "1"))
    assert not claimed(str(tmp_path), env("7", "0"))  # the first start, or again in the same salloc shell
    assert not claimed(str(tmp_path), env("8", "1"))


def allocation(**more):
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "8", **more}


def fitted(cfg, environ):
    fit_allocation(cfg, SlurmEnv.from_environ(environ), environ)
    return cfg


def test_an_allocation_gives_nodes_and_device(tmp_path):
    cfg = fitted(config(tmp_path), allocation())
    assert (cfg.trainer.nnodes, cfg.trainer.device) == (2, "cpu")
    cfg = config(tmp_path, cluster={"nodes": 2})
    cfg.trainer.device = "auto"
    assert fitted(cfg, allocation(SLURM_JOB_GPUS="0-2,5")).trainer.device == "cuda"
    cfg.trainer.device = "auto"
    assert fitted(cfg, allocation(SLURM_GPUS_ON_NODE="4")).trainer.device == "cuda"
    cfg.trainer.device = "auto"
    assert fitted(cfg, allocation()).trainer.device == "cpu"


@pytest.mark.parametrize(
    ("sections", "variables", "message"),
    [
        (
            {"cluster": {"nodes": 3}},
            {},
            "trainer.nnodes=3, but job 7 has 2 nodes; set cluster.nodes=2, or allocate 3: sbatch --nodes=3",
        ),
        (
            {"trainer": {"device": "cuda", "n_gpus_per_node": 4}},
            {"SLURM_JOB_GPUS": "0-2"},
            "trainer.n_gpus_per_node=4, but job 7 has 3 GPUs on this node; allocate them: sbatch --gpus-per-node=4, or "
            "set trainer.device=cpu",
        ),
        (
            {"trainer": {"n_gpus_per_node": 3}, "cluster": {"cpus_per_rank": 3}},
            {},
            "trainer.n_gpus_per_node=3 ranks * cluster.cpus_per_rank=3 = 9 CPUs, but job 7 has 8 on this node; "
            "allocate them: sbatch --cpus-per-task=9",
        ),
    ],
)
def test_an_allocation_that_is_not_what_is_wanted(tmp_path, sections, variables, message):
    with pytest.raises(ConfigError) as caught:
        fitted(config(tmp_path, **sections), allocation(**variables))
    assert str(caught.value) == message
