"""rlhpc status, resume and cancel on a real run on this machine."""

import json
import subprocess
import sys
from pathlib import Path

from rlhpc.checkpoint.manifest import committed_steps
from tests.e2e.runs import ROOT, command, finish, rows, run_to_end, start, wait_for, write_task
from tests.hf_files import read_tensors

RLHPC = [sys.executable, "-m", "rlhpc.cli.main"]


def rlhpc(*arguments: str | Path, code: int = 0) -> str:
    done = subprocess.run([*RLHPC, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stderr if code else done.stdout


def check_checkpoint_commands(run_dir: Path, place: Path) -> None:
    """What two ranks, each with half of the experts, saved after one step."""
    (found,) = json.loads(rlhpc("inspect", "--json", run_dir))
    assert (found["step"], found["world_size"], found["layout"]["ep"], found["problem"]) == (1, 2, 2, None)
    size = sum(path.stat().st_size for path in (run_dir / "checkpoints/step-000001").glob("*.safetensors"))
    assert found["size_bytes"] == size and found["config_digest"]
    assert rlhpc("verify", run_dir).startswith("step 1: ok, ")
    assert "parameters in float32" in rlhpc("export", run_dir, place / "exported")
    start, trained = read_tensors(place / "model"), read_tensors(place / "exported")
    assert start.keys() == trained.keys() and found["parameters"] == sum(t.numel() for t in trained.values())
    changes = {name: (trained[name] - tensor).abs().max().item() for name, tensor in start.items()}
    assert all(0 < change < 0.01 for change in changes.values()), changes  # one step of Adam


def test_a_local_run_goes_on_as_it_was_or_for_longer_and_is_cancelled(tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    quick = (
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "data.val_files=null",
        "trainer.test_freq=-1",
    )
    run_to_end(command(write_task(tmp_path), run_dir, *quick), log)
    (status,) = json.loads(rlhpc("status", "--json", run_dir))
    assert (status["state"], status["step"], status["total_steps"], status["checkpoint_step"]) == ("finished", 1, 1, 1)
    check_checkpoint_commands(run_dir, tmp_path)
    assert rlhpc("resume", run_dir) == (
        f"{run_dir} has finished; train it for longer with trainer.total_training_steps=N\n"
    )
    assert rlhpc("resume", run_dir, "algorithm=rloo", code=2).splitlines()[:2] == [
        f"error: {run_dir} has trained already; these settings would make it another run:",
        'error:   algorithm.adv_estimator: "grpo" -> "rloo"',
    ]

    process = start([*RLHPC, "resume", str(run_dir), "trainer.total_training_steps=500"], log)
    wait_for(lambda: len(rows(run_dir)) > 3, process, log)
    (status,) = json.loads(rlhpc("status", "--json", run_dir))
    assert status["state"] == "running" and status["why"].startswith(f"process {process.pid} on ")
    assert status["step"] >= 2 and status["total_steps"] == 500 and status["eta_s"] > 0
    said = rlhpc("cancel", run_dir)
    assert finish(process, log) == 75
    step = max(committed_steps(run_dir / "checkpoints"))
    assert step - rows(run_dir)[-1]["step"] in (0, 1)  # stopped in an update, its line is written by the next attempt
    assert said == f"{run_dir}: stopped; checkpoint of step {step}; rlhpc resume {run_dir} goes on with it\n"
    assert "trainer.total_training_steps: 1 -> 500" in log.read_text()
    assert f"resuming after step 1 from {run_dir}" in log.read_text()
