"""From completions to the optimizer's tensors, with numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhpc.config.schema import ActorConfig, AlgorithmConfig, RolloutCorrectionConfig
from rlhpc.data.types import Completion, Prompt, Trajectory
from rlhpc.train.batch import RolloutBatch, prepare
from rlhpc.train.loop import mini_batches, step_seed


def trajectory(prompt_id: int, sample: int, tokens: list[int], reward: float) -> Trajectory:
    prompt = Prompt(prompt_id, "p", np.array([7, 8], np.int32), "", "arithmetic")
    logprobs = np.full(len(tokens), -0.5, np.float32)
    completion = Completion(prompt_id, sample, np.array(tokens, np.int32), logprobs, "stop")
    return Trajectory(prompt, completion, "", reward, "ok")


@pytest.fixture
def rollout() -> RolloutBatch:
    """Two groups of two: rewards 1 and 0, then 1 and 1."""
    return RolloutBatch.collate(
        [
            trajectory(3, 0, [1, 2], 1.0),
            trajectory(3, 1, [4], 0.0),
            trajectory(5, 0, [5, 6, 9], 1.0),
            trajectory(5, 1, [2], 1.0),
        ],
        n=2,
    )


def test_collate_puts_the_reward_on_the_last_token(rollout: RolloutBatch) -> None:
    assert rollout.group_ids.tolist() == [0, 0, 1, 1]
    assert rollout.mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]]
    assert rollout.scores.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert rollout.rollout_logprobs[2].tolist() == [-0.5, -0.5, -0.5]
    assert rollout.rollout_logprobs[3].tolist() == [-0.5, 0, 0]


def test_sequences_carry_the_fields_of_their_own_row(rollout: RolloutBatch) -> None:
    marks = torch.arange(12, dtype=torch.float32).view(4, 3)
    sequences = rollout.sequences(marks=marks)
    assert sequences[2].token_ids.tolist() == [7, 8, 5, 6, 9]
    assert sequences[2].prompt_len == 2
    assert sequences[2].fields["marks"].tolist() == [6, 7, 8]
    assert sequences[1].fields["marks"].tolist() == [3]


def test_grpo_without_std_centres_each_group(rollout: RolloutBatch) -> None:
    logprobs = [t.completion.logprobs for t in rollout.trajectories]
    batch = prepare(
        rollout, logprobs, None, AlgorithmConfig(norm_adv_by_std_in_grpo=False), kl_coef=0.1, kl_in_loss=False
    )
    assert batch.advantages.tolist() == [[0.5, 0.5, 0], [-0.5, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert set(batch.fields) == {"trainer_logprobs", "advantages"}


def test_kl_in_the_reward_is_taken_from_every_token(rollout: RolloutBatch) -> None:
    """k1 with the reference 0.25 below: 0.25 nats a token, times 0.1."""
    logprobs = [t.completion.logprobs for t in rollout.trajectories]
    reference = [values - 0.25 for values in logprobs]
    algorithm = AlgorithmConfig(use_kl_in_reward=True, kl_penalty="kl")
    batch = prepare(rollout, logprobs, reference, algorithm, kl_coef=0.1, kl_in_loss=False)
    assert batch.rewards[0].tolist() == pytest.approx([-0.025, 0.975, 0])
    assert batch.metrics["actor/reward_kl_penalty"] == pytest.approx(0.25)
    assert "ref_logprobs" not in batch.fields


def test_token_correction_is_capped(rollout: RolloutBatch) -> None:
    """The trainer gives every token e**1 times the rollout's probability; the cap is 2."""
    logprobs = [t.completion.logprobs + 1.0 for t in rollout.trajectories]
    algorithm = AlgorithmConfig()
    algorithm.rollout_correction.rollout_is = "token"
    batch = prepare(rollout, logprobs, None, algorithm, kl_coef=0.1, kl_in_loss=False)
    assert batch.fields["rollout_weights"][0].tolist() == pytest.approx([2.0, 2.0, 0.0])


def test_what_is_rejected_or_truncated_leaves_the_loss_and_stays_in_the_group(rollout: RolloutBatch) -> None:
    """The trainer gives the first token e times the rollout's probability; the third trajectory ran into the limit."""
    cut = replace(
        rollout.trajectories[2], completion=replace(rollout.trajectories[2].completion, finish_reason="length")
    )
    rollout = replace(rollout, trajectories=(*rollout.trajectories[:2], cut, rollout.trajectories[3]))
    logprobs = [t.completion.logprobs.copy() for t in rollout.trajectories]
    logprobs[0][0] += 1.0
    plain = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    strict = replace(plain, mask_truncated_completions=True)
    strict.rollout_correction = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=2.0)
    batch = prepare(rollout, logprobs, None, strict, kl_coef=0.1, kl_in_loss=False)
    assert batch.fields["kept"].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert (
        batch.advantages.tolist()
        == prepare(rollout, logprobs, None, plain, kl_coef=0.1, kl_in_loss=False).advantages.tolist()
    )
    assert batch.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 7)
    assert batch.metrics["training/kept_token_ratio"] == pytest.approx(3 / 7)
    assert [s.num_loss_tokens for s in rollout.sequences(**batch.fields)] == [1, 1, 0, 1]
    assert [s.num_loss_tokens for s in rollout.sequences()] == [2, 1, 3, 1]


def test_a_critics_values_are_the_baseline(rollout: RolloutBatch) -> None:
    """With gamma and lambda 1 a token's return is the reward still to come, and its advantage that less the value,
    whitened: 0.5, 0.75, -0.5, 0, 0, 0, 1 have mean 0.25 and variance 1.625 / 6."""
    logprobs = [t.completion.logprobs for t in rollout.trajectories]
    values = [np.array(row, np.float32) for row in ([0.5, 0.25], [0.5], [1.0, 1.0, 1.0], [0.0])]
    batch = prepare(
        rollout, logprobs, None, AlgorithmConfig(adv_estimator="gae"), kl_coef=0.1, kl_in_loss=False, values=values
    )
    assert batch.returns.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0]]
    raw = torch.tensor([[0.5, 0.75, 0.25], [-0.5, 0.25, 0.25], [0, 0, 0], [1, 0.25, 0.25]])
    torch.testing.assert_close(batch.advantages, (raw - 0.25) / (1.625 / 6) ** 0.5)
    assert set(batch.fields) == {"trainer_logprobs", "advantages"}
    assert {name: values[0].tolist() for name, values in batch.critic_fields.items()} == {
        "values": [0.5, 0.25, 0], "returns": [1, 1, 0],
    }  # fmt: skip


def test_mini_batches_keep_groups_whole(rollout: RolloutBatch) -> None:
    actor = ActorConfig(ppo_mini_batch_size=1, ppo_epochs=2)
    ids = [[s.sequence_id for s in part] for part in mini_batches(rollout.sequences(), actor, n=2, seed=0)]
    assert ids == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_shuffled_mini_batches_repeat_with_the_seed_and_cover_everything(rollout: RolloutBatch) -> None:
    actor = ActorConfig(ppo_mini_batch_size=1, ppo_epochs=3, shuffle=True)

    def draw(seed: int) -> list[list[int]]:
        return [[s.sequence_id for s in part] for part in mini_batches(rollout.sequences(), actor, n=2, seed=seed)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    flat = [i for part in draw(1) for i in part]
    assert [sorted(flat[k : k + 4]) for k in (0, 4, 8)] == [[0, 1, 2, 3]] * 3


def test_step_seeds_differ_between_steps_and_runs() -> None:
    seeds = {step_seed(run, step, batch) for run in range(20) for step in range(200) for batch in range(3)}
    assert len(seeds) == 12000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert step_seed(1, 12) != step_seed(11, 2)  # no concatenation of digits
    assert step_seed(0, 1) == 8724540124617128742  # what earlier runs sampled with
