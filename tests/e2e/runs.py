"""Starts the real command on a tiny task and reads what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.cluster.attempt import read_json
from rlhpc.cluster.session import alive
from rlhpc.metrics.records import MEASURED
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
# Steps of eight groups out of two or three batches of six prompts: some groups are alike, some are too many.
DYNAMIC = (
    "algorithm.filter_groups.enable=true",
    "data.gen_batch_size=6",
    "reward.overlong_buffer.enable=true",
    "actor_rollout_ref.actor.megatron.router_replay.mode=R2",
)
_started: set[int] = set()  # pids, of which one owns the session of its run


def write_task(directory: Path) -> Path:
    """A random tiny model and a few additions in `directory`; the rewards are dense enough for advantages."""
    write_tiny_model(directory / "model", seed=0)
    for name, begin, end in (("train", 0, 24), ("val", 24, 32)):
        rows = [
            {"prompt": f"{a}+{a % 7}=", "ground_truth": str(a + a % 7), "data_source": "digits"}
            for a in range(begin, end)
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(
        "import time\n"
        "from pathlib import Path\n\n"
        "def digits(text, ground_truth):\n"
        '    """The share of characters that are digits: a random model gets some. Hangs while told to."""\n'
        "    while Path(__file__).with_name('hang').exists():\n"
        "        time.sleep(0.1)\n"
        "    return sum(c.isdigit() for c in text) / max(len(text), 1)\n"
    )
    return directory


def command(task: Path, run_dir: Path, *overrides: str) -> list[str]:
    settings = {
        "actor_rollout_ref.model.path": task / "model",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.chunk_prompts": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "reward.name": f"{task / 'reward.py'}:digits",
        "data.train_files": task / "train.jsonl",
        "data.val_files": task / "val.jsonl",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 12,
        "trainer.total_training_steps": 6,
        "trainer.save_freq": 2,
        "trainer.test_freq": 3,
        "checkpoint.keep": 10,
        "run_dir": run_dir,
    }
    given = {override.split("=", 1)[0].lstrip("+~") for override in overrides}
    chosen = [f"{key}={value}" for key, value in settings.items() if key not in given]
    return [sys.executable, str(ROOT / "launch/run.py"), "experiment=tiny_arithmetic", *chosen, *overrides]


def start(arguments: list[str], log: Path, **environ: str) -> subprocess.Popen[bytes]:
    """The command in a process group of its own, as a shell would start it."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environ},
        )
    _started.add(process.pid)
    return process


def finish(process: subprocess.Popen[bytes], log: Path, timeout_s: float = 300) -> int:
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"still running after {timeout_s} s:\n{log.read_text()[-3000:]}") from None


def run_to_end(arguments: list[str], log: Path) -> None:
    code = finish(start(arguments, log), log)
    assert code == 0, f"exit {code}:\n{log.read_text()[-5000:]}"


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout_s: float = 240
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, f"ended early with {process.returncode}:\n{log.read_text()[-5000:]}"
        assert time.monotonic() < deadline, f"nothing happened in {timeout_s} s:\n{log.read_text()[-3000:]}"
        time.sleep(0.02)


def in_phase(
    phase: str,
    run_dir: Path,
    process: subprocess.Popen[bytes],
    log: Path,
    act: Callable[[int], None],
    *,
    fraction: float | None = None,
) -> dict[str, Any]:
    """Waits until the driver is in `phase`, with a part of it done where it has parts (`fraction` says which), and
    calls `act(its pid)` while it is held still there. Returns its progress at that moment."""

    def progress() -> dict[str, Any] | None:
        found = read_json(run_dir / "progress.json")
        parts = phase in ("generate", "validate", "update")
        if not found or found["phase"] != phase:
            return None
        there = found["fraction"] == fraction if fraction else 0 < found["fraction"] < 0.8 or not parts
        return found if there and found["outcome"] == "running" else None

    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None, f"ended before {phase}, with {process.returncode}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"not in {phase} within 240 s:\n{log.read_text()[-3000:]}"
        if found := progress():
            os.kill(found["pid"], signal.SIGSTOP)
            try:
                if now := progress():
                    act(now["pid"])
                    return now
            finally:
                os.kill(found["pid"], signal.SIGCONT)
        time.sleep(0.001)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl as written so far, a torn last line left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics without times and rates."""
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows(run_dir)]


def final_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Weights, optimizer state and torch's RNG of all ranks from the newest checkpoint.

    Python's and numpy's global generators are saved too, but libraries outside training draw from them (names of
    temporary files and the like), so that their state is no function of the run.
    """
    store = CheckpointStore(run_dir / "checkpoints")
    manifest = store.load(max(store.steps()))
    return {
        f"{entry.rank}/{name}": tensor
        for entry in manifest.files
        for name, tensor in load_file(manifest.directory / entry.name).items()
        if name not in ("rng/numpy", "rng/python")
    }


def assert_same_end(run_dir: Path, reference: Path) -> None:
    """Bitwise: the metrics of every step, and every tensor of the last checkpoint."""
    assert comparable(run_dir) == comparable(reference)
    assert_same_state(run_dir, reference)


def assert_same_state(run_dir: Path, reference: Path) -> None:
    """Bitwise: every tensor of the last checkpoint."""
    ours, theirs = final_tensors(run_dir), final_tensors(reference)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8))]
    assert different == []


def leftovers() -> list[str]:
    """Directories of sessions whose owner is a process that `start` started, and gone. Other tests may end others."""
    owners = Path(f"/tmp/rlhpc-{os.getuid()}").glob("*/owner.json")
    return sorted(str(path.parent) for path in owners if _owner(path) in _started and not alive(path.parent))


def _owner(path: Path) -> int:
    try:
        return int(json.loads(path.read_text())["pid"])
    except FileNotFoundError:  # cleaned a moment ago
        return 0
