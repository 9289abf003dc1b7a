"""PPO with its critic: the real command, and the same again from a checkpoint of both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.checkpoint.manifest import committed_steps
from tests.e2e.runs import ROOT, assert_same_state, command, comparable, finish, in_phase, rows, run_to_end, start
from tests.hf_files import read_tensors
from tests.tiny_model import write_tiny_model

PPO = (
    "algorithm=ppo",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=1.01",
    "actor_rollout_ref.rollout.n=2",
    "critic.optim.lr=1e-3",
    "critic.ppo_mini_batch_size=8",
    "trainer.critic_warmup=2",
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
    "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
)


def test_a_critic_is_trained_saved_and_resumed_bitwise(task: Path, tmp_path: Path) -> None:
    """The critic is a deeper model. Three steps, of which the first trains the critic alone; a run that takes over the
    state after it, and is stopped between the critic's updates of a step and the policy's, ends where they do."""
    whole, part, log = tmp_path / "whole", tmp_path / "part", tmp_path / "log"
    critic = write_tiny_model(tmp_path / "critic", seed=5, num_hidden_layers=3)
    (tmp_path / "reward.py").write_text("def odd(text, ground_truth):\n    return float(len(text) % 2)\n")
    settings = (*PPO, f"critic.model.path={critic}", f"reward.name={tmp_path / 'reward.py'}:odd")
    run_to_end(command(task, whole, *settings), log)
    metrics = rows(whole)
    for row in metrics[1:]:
        assert row["critic/vf_loss"] > 0 and row["critic/grad_norm"] > 0 and row["critic/lr"] == 1e-3
        assert row["timing_s/ranks/values"] > 0 and row["timing_s/ranks/update_critic"] > 0
        assert ("actor/pg_loss" in row) == (row["step"] >= 2), row["step"]
        # The policy is the reference as long as it isn't trained: a fifth too little KL, of 16 samples.
        assert row["actor/reward_kl_penalty_coeff"] == pytest.approx(0.001 * (1 - 0.2 * 16 / 100) ** (row["step"] - 1))
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 0.0  # on the same weights in float32
    assert metrics[1]["critic/values/max"] == 0.0 < metrics[3]["critic/values/max"]  # the head begins at 0
    returns = metrics[1]["critic/returns/mean"]  # each token's is 0 or 1, the trajectory's reward, and its own square
    assert 0 < returns < 1 and metrics[1]["critic/vf_loss"] == pytest.approx(returns / 2, rel=1e-6)
    check_checkpoints(task / "model", critic, whole, tmp_path / "exported")
    assert max(row["training/rollout_routing_diff"] for row in metrics[2:]) < 0.01  # routers agree in float32

    arguments = command(task, part, *settings, f"resume.from={whole / 'checkpoints/step-000001'}")
    process = start(arguments, log)
    between = round(1 / (1 + 2), 4)  # of a step's updates: one mini-batch of the critic, two of the policy
    in_phase("update", part, process, log, lambda pid: os.kill(pid, signal.SIGTERM), fraction=between)
    assert finish(process, log) == 75, log.read_text()[-3000:]
    assert committed_steps(part / "checkpoints").keys() == {2}, "step 1 is what it began from"
    run_to_end(arguments, log)
    assert comparable(part) == comparable(whole)[1:]
    assert_same_state(part, whole)


def check_checkpoints(policy: Path, critic: Path, run_dir: Path, target: Path) -> None:
    """The warm-up left the policy as it was, and an export is of the policy's tensors alone."""
    rlhpc = [sys.executable, "-m", "rlhpc.cli.main"]
    subprocess.run([*rlhpc, "export", run_dir, target, "--step", "1"], cwd=ROOT, check=True)
    weights, exported = read_tensors(policy), read_tensors(target)
    assert exported.keys() == weights.keys()
    assert all(tensor.equal(exported[name]) for name, tensor in weights.items())
    listed = [*rlhpc, "inspect", "--json", "--tensors", "critic.*", run_dir]
    tensors = json.loads(subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    found = {tensor["name"]: tensor["shape"] for tensor in tensors}
    expected = {f"critic.{name}": list(t.shape) for name, t in read_tensors(critic).items() if name != "lm_head.weight"}
    assert found == expected | {"critic.score.weight": [1, expected["critic.model.norm.weight"][0]]}
