"""A step's metrics from a small batch whose every number is known."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhpc.data.types import Completion, Prompt, Trajectory
from rlhpc.metrics.records import batch_metrics, means, timing_metrics
from rlhpc.metrics.timer import PhaseTimer
from rlhpc.train.batch import RolloutBatch, TrainBatch


def trajectory(
    prompt_len: int, response_len: int, reward: float, finish_reason: str = "stop", status: str = "ok"
) -> Trajectory:
    prompt = Prompt(0, "", np.ones(prompt_len, np.int32), "", "arithmetic")
    tokens = np.ones(response_len, np.int32)
    completion = Completion(0, 0, tokens, np.full(response_len, -0.5, np.float32), finish_reason)
    return Trajectory(prompt, completion, "", reward, status)


def train_batch() -> TrainBatch:
    """Two groups of two; the last trajectory was aborted before its first token."""
    rollout = RolloutBatch.collate(
        [
            trajectory(3, 2, 1.0),
            trajectory(3, 4, 0.0, "length", "timeout"),
            trajectory(5, 1, 0.0, "stop", "error"),
            trajectory(5, 0, 0.0, "abort"),
        ],
        n=2,
    )
    advantages = torch.tensor([[2.0, 2.0, 0, 0], [-1.0, -1.0, -1.0, -1.0], [3.0, 0, 0, 0], [0, 0, 0, 0]])
    rewards = rollout.scores - 0.25 * rollout.mask
    return TrainBatch(rollout, rollout.rollout_logprobs, rewards, advantages, 2 * advantages, {}, {})


def test_batch_metrics_by_hand() -> None:
    assert batch_metrics(train_batch()) == pytest.approx(
        {
            "critic/score/mean": 1 / 3,
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            # Less 0.25 a token: 0.5, -1, -0.25.
            "critic/rewards/mean": -0.25,
            "critic/rewards/max": 0.5,
            "critic/rewards/min": -1.0,
            # Seven tokens: 2·2 - 4·1 + 3.
            "critic/advantages/mean": 3 / 7,
            "critic/advantages/max": 3.0,
            "critic/advantages/min": -1.0,
            "critic/returns/mean": 6 / 7,
            "critic/returns/max": 6.0,
            "critic/returns/min": -2.0,
            "response_length/mean": 7 / 4,
            "response_length/max": 4,
            "response_length/min": 0,
            "response_length/clip_ratio": 1 / 4,
            "prompt_length/mean": 4.0,
            "prompt_length/max": 5,
            "prompt_length/min": 3,
            "response/aborted_ratio": 1 / 4,
            "reward/error_rate": 1 / 4,
            "reward/timeout_rate": 1 / 4,
            "reward/zero_std_group_ratio": 1 / 2,
            "perf/total_num_tokens": 23,
            # Lengths 5, 7, 6, 5: tokens attend to 1..length keys, 15 + 28 + 21 + 15 in all.
            "perf/mean_context_tokens": 79 / 23,
        }
    )


def test_value_metrics_by_hand() -> None:
    """Returns of seven tokens are 4, 4, -2, -2, -2, -2, 6; values half of that: a quarter of the variance is left."""
    batch = train_batch()
    metrics = batch_metrics(replace(batch, values=batch.returns / 2))
    found = {name: value for name, value in metrics.items() if name.startswith(("critic/values/", "critic/vf_"))}
    assert found == pytest.approx(
        {
            "critic/values/mean": 3 / 7,
            "critic/values/max": 3.0,
            "critic/values/min": -1.0,
            "critic/vf_explained_var": 0.75,
        },
        rel=1e-5,
    )
    assert not any(name.startswith(("critic/values/", "critic/vf_")) for name in batch_metrics(batch))


def test_means_are_over_the_steps_that_have_a_metric() -> None:
    assert means([{"critic/lr": 1.0}, {"critic/lr": 2.0}, {"actor/lr": 5.0}]) == {"critic/lr": 1.5, "actor/lr": 5.0}
    assert means([]) == {}


def test_batch_metrics_repeat_bitwise() -> None:
    assert batch_metrics(train_batch()) == batch_metrics(train_batch())


def test_timing_metrics_by_hand() -> None:
    record = {
        "timing_s/gen": 4.0,
        "timing_s/update_actor": 2.0,
        "timing_s/old_log_prob": 1.0,
        "timing_s/update_weights": 0.5,
        "timing_s/ranks/gen": 3.9,  # a part of gen: not counted again
        "timing_s/ranks/update_weights/sync": 0.4,
        "perf/total_num_tokens": 1000,
        "response_length/mean": 30.0,
        "prompt_length/mean": 10.0,
    }
    assert timing_metrics(record, step_s=8.0, num_ranks=5) == pytest.approx(
        {
            "timing_s/step": 8.0,
            "timing_s/other": 0.5,
            "perf/time_per_step": 8.0,
            "timing_per_token_ms/gen": 4000 / 750,  # three quarters of the tokens are the responses'
            "timing_per_token_ms/update_actor": 2.0,
            "timing_per_token_ms/old_log_prob": 1.0,
            "perf/throughput": 1000 / 8 / 5,
            "perf/wait_time_ratio": 5 / 8,
        }
    )


def test_timing_metrics_of_a_step_without_tokens() -> None:
    assert timing_metrics({"timing_s/testing": 3.0}, step_s=4.0, num_ranks=2) == {
        "timing_s/step": 4.0,
        "timing_s/other": 1.0,
        "perf/time_per_step": 4.0,
    }


def test_phases_add_up_and_survive_errors() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("gen"):
            time.sleep(0.02)
    with pytest.raises(KeyError), timer.phase("reward"):
        raise KeyError
    metrics = timer.metrics()
    assert list(metrics) == ["timing_s/gen", "timing_s/reward"]
    assert 0.04 <= metrics["timing_s/gen"] < 1
    assert 0 <= metrics["timing_s/reward"] < 0.02
