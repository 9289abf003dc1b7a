"""launch/run.py and the rlhpc command as a user starts them: real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.config.test_checks import MODEL

ROOT = Path(__file__).resolve().parents[3]


def start(*arguments, cwd, program=(str(ROOT / "launch/run.py"),)):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_cfg_job_from_anywhere_leaves_nothing_behind(tmp_path):
    done = start("experiment=tiny_arithmetic", "seed=5", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seed: 5\n" in done.stdout and "adv_estimator: grpo" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_composing_loads_nothing_heavy():
    code = "import sys, launch.run; print({m.partition('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for heavy in ("torch", "numpy", "ray", "vllm", "megatron", "transformers", "submitit"):
        assert f"'{heavy}'" not in done.stdout


def test_help_shows_examples_and_groups(tmp_path):
    done = start("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "python launch/run.py experiment=tiny_arithmetic" in done.stdout
    experiments = ", ".join(sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml")))
    assert "tiny_arithmetic" in experiments
    assert f"experiment: {experiments}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment=tiny_gsm8k"], "data.train_files is not set"),
        (["trainer.nnode=1"], "unknown key trainer.nnode; did you mean trainer.nnodes or cluster.nodes?"),
        (["experiment=tiny_arithmetic"], "run python scripts/make_tiny_model.py first"),
        (["experiment=tiny_arithmetic", "launch=slurm"], "run python scripts/make_tiny_model.py first"),
        (["experiment=tiny_arithmetic", "launch=allocation"], "SLURM_JOB_ID is not set, so this is no Slurm job"),
        (["+experiment=tiny_arithmetic"], "experiment"),
        (["experiment=tiny_arithmetic", "hydra/launcher=nope"], "hydra/launcher"),
    ],
)
def test_user_errors_have_no_traceback_and_exit_2(tmp_path, arguments, message):
    done = start(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines()), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_wrong_environment_is_named():
    done = subprocess.run([sys.executable, "-S", "launch/run.py"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {sys.executable} has no hydra") and ".venv/bin/activate" in done.stderr


def test_unknown_key_in_a_yaml_file(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer:\n  nnode: 1\n")
    done = start("--config-dir", str(tmp_path), "experiment=mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "unknown key trainer.nnode; did you mean trainer.nnodes or cluster.nodes?" in done.stderr


def tiny(tmp_path):
    """What a dry run needs: the model's config.json and a data file."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    row = {"prompt": "1+1=", "ground_truth": "2", "data_source": "arithmetic"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    return [
        "experiment=tiny_arithmetic",
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        "data.val_files=null",
        "trainer.test_freq=-1",
    ]


def test_plan_prints_the_layout_and_starts_nothing(tmp_path):
    arguments = tiny(tmp_path)
    before = sorted(tmp_path.iterdir())
    done = start(
        "plan",
        *arguments,
        cwd=tmp_path,
        program=(
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from rlhpc.cli.main import main; main()",
        ),
    )
    assert done.returncode == 0, done.stderr
    assert "experts  etp=1 ep=2 pp=1 edp=1" in done.stdout
    assert "rollout   1 replica of tp=2" in done.stdout
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_model_is_refused_before_anything_starts(tmp_path):
    index = {"weight_map": {name: "model-00001-of-00002.safetensors" for name in ("lm_head.weight", "a", "b")}}
    arguments = [*tiny(tmp_path), "run_dir=run"]
    done = start(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and "neither model.safetensors.index.json nor model.safetensors" in done.stderr
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    done = start(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    missing = tmp_path / "model" / "model-00001-of-00002.safetensors"
    assert done.stderr == (
        f"error: model.safetensors.index.json names files that are missing: {missing}; copy them again\n"
    )
    assert not (tmp_path / "run").exists()


def test_points_of_a_sweep_write_apart(tmp_path):
    done = start("-m", *tiny(tmp_path), "seed=0,1", "launch.dry_run=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("writes ")]
    assert written == [str(tmp_path / "outputs/tiny/arithmetic" / point) for point in "01"]
    assert done.stdout.count(f"starts    at step 0 from {tmp_path / 'model'}\n") == 2


def test_a_failed_point_ends_the_sweep(tmp_path):
    done = start("-m", *tiny(tmp_path), "trainer.n_gpus_per_node=3,2", "launch.dry_run=true", cwd=tmp_path)
    assert done.returncode == 2
    assert "must divide the 3 ranks" in done.stderr and done.stdout == ""
