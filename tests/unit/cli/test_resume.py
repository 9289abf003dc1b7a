"""What resume takes for a run's settings, and which changes it lets pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.resume import composed
from rlhpc.cli.resume import changes, finished, settings_of
from rlhpc.config.load import load, to_yaml
from rlhpc.config.tree import shown
from rlhpc.errors import ConfigError

GIVEN = {"actor_rollout_ref": {"model": {"path": "/m"}}, "data": {"train_files": "/d.jsonl"}, "run_dir": "/elsewhere"}


def write_run(directory: Path, *, steps: int = 100) -> Path:
    directory.mkdir(exist_ok=True)
    cfg = load(GIVEN | {"trainer": {"total_training_steps": steps}})
    (directory / "config.yaml").write_text(to_yaml(cfg))
    return directory


def test_the_newest_settings_count_and_a_run_may_have_been_moved(tmp_path: Path) -> None:
    run = write_run(tmp_path / "moved")
    old = settings_of(run)
    assert (old.trainer.total_training_steps, old.run_dir) == (100, str(run))
    driven = load(GIVEN | {"trainer": {"total_training_steps": 200}}).tree()
    (run / "run.json").write_text(json.dumps({"config": driven, "model": {}}))
    os.utime(run / "config.yaml", (1, 1))
    assert settings_of(run).trainer.total_training_steps == 200
    os.utime(run / "run.json", (0, 0))
    assert settings_of(run).trainer.total_training_steps == 100
    with pytest.raises(ConfigError, match="holds no run .neither config.yaml nor run.json.; give the run_dir of one"):
        settings_of(tmp_path)


def test_free_keys_change_and_others_only_before_the_first_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    old = settings_of(run)
    new = composed(old, ["trainer.total_training_steps=200", "seed=7", "launch=slurm", "cluster.sbatch.comment=again"])
    assert list(shown(changes(run, old, new))) == [
        'cluster.sbatch.comment: not set -> "again"',
        'launch.mode: "local" -> "slurm"',
        "seed: 0 -> 7",
        "trainer.total_training_steps: 100 -> 200",
    ]
    (run / "metrics.jsonl").write_text('{"step": 0, "timing_s/step": 0.25}\n')  # told before the first step
    assert len(changes(run, old, new)) == 4
    (run / "checkpoints/step-000000").mkdir(parents=True)
    with pytest.raises(ConfigError, match="seed"):
        changes(run, old, new)
    (run / "checkpoints/step-000000").rmdir()
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    with pytest.raises(ConfigError) as refused:
        changes(run, old, new)
    assert str(refused.value).splitlines()[1:] == [
        "  seed: 0 -> 7",
        "start that with launch/run.py and another run_dir, or leave them out",
    ]
    free = composed(old, ["trainer.total_training_steps=200"])
    assert [key for key, _, _ in changes(run, old, free)] == ["trainer.total_training_steps"]
    with pytest.raises(ConfigError, match="^resume can't change run_dir"):
        changes(run, old, composed(old, ["run_dir=/other"]))


def test_a_run_is_finished_until_more_is_asked_of_it(tmp_path: Path) -> None:
    """In an order of events: trained here, asked for more, given to a job that fails before it drives."""
    run = write_run(tmp_path / "run", steps=5)
    asked = settings_of(run)
    assert not finished(asked)
    (run / "progress.json").write_text(json.dumps({"outcome": "stopped", "attempt": None}))
    assert not finished(asked)
    (run / "progress.json").write_text(json.dumps({"outcome": "finished", "attempt": None}))
    assert finished(asked) and finished(composed(asked, ["launch.time_min=60", "cluster=h200", "trainer.device=auto",
                                                         "trainer.n_gpus_per_node=1"]))  # fmt: skip
    more = composed(asked, ["trainer.total_training_steps=6"])
    assert not finished(more)
    (run / "config.yaml").write_text(to_yaml(more))
    (run / "job.json").write_text(json.dumps({"job_id": "7", "submitted": 0.0}))
    (run / "progress.json").write_text(json.dumps({"outcome": "finished", "attempt": "6-0"}))
    (run / "attempts.jsonl").write_text(json.dumps({"job_id": "7", "outcome": "failed", "requeued": False}) + "\n")
    assert not finished(more)


@pytest.mark.parametrize(
    "argument, said",
    [
        ("trainer.total_step=5", "unknown key trainer.total_step; did you mean trainer.total"),
        ("-m", "'-m' is no override; give KEY=VALUE"),
        ("launch=mars", "launch=mars is unknown; .*choose allocation, local, slurm"),
        ("trainer.save_freq=often", "trainer.save_freq='often' has type str; expected int"),
    ],
)
def test_wrong_overrides(tmp_path: Path, argument: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        composed(settings_of(write_run(tmp_path / "run")), [argument])


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhpc.cli.main", "resume", str(tmp_path / "none")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path / 'none'} does not exist; give a run directory or a job's id\n"
