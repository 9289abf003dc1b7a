"""What an algorithm's settings ask of each other: each rule broken, and kept at its limit."""

import pytest

from tests.unit.config.test_checks import ACTOR, ROLLOUT, violations_of

DAPO = {"algorithm.filter_groups.enable": True, "trainer.total_training_steps": 9}
ADAPTIVE = {"algorithm.kl_ctrl.type": "adaptive", "algorithm.use_kl_in_reward": True}
OVERLONG = {"reward.overlong_buffer.enable": True}
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    "overrides",
    [
        {**DAPO, **OVERLONG, "data.gen_batch_size": 35, "algorithm.filter_groups.metric": "acc"},
        {**OVERLONG, "reward.overlong_buffer.len": 100},
        {"reward.overlong_buffer.len": 0, "data.gen_batch_size": 12},
        {f"{CORRECTION}.rollout_is_threshold": "0.5_5.0", f"{CORRECTION}.rollout_is": "token"},
        {f"{CORRECTION}.rollout_rs": "token_k1,seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold": "2.0,0.1"},
        {**ADAPTIVE, "algorithm.kl_ctrl.horizon": 10},
    ],
)
def test_allowed(overrides):
    assert violations_of(overrides) == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"data.gen_batch_size": 6}, ["gen_batch_size=6 is for algorithm.filter_groups.enable=true", "set null"]),
        ({**DAPO, "data.gen_batch_size": 3}, ["data.gen_batch_size=3 is below the 4 rollout replicas"]),
        (
            {**DAPO, "trainer.total_training_steps": None},
            ["filter_groups.enable=true: how many steps an epoch holds", "set trainer.total_training_steps"],
        ),
        (
            {
                **DAPO,
                f"{ROLLOUT}.n": 1,
                "algorithm.adv_estimator": "reinforce_plus_plus",
                f"{ACTOR}.ppo_mini_batch_size": 4,
            },
            ["compares the samples of a prompt, but", "rollout.n=1; set n to at least 2"],
        ),
        (
            {**DAPO, "algorithm.filter_groups.metric": "seq_final_reward", "algorithm.use_kl_in_reward": True},
            ["metric=seq_final_reward with algorithm.use_kl_in_reward=true", "set metric=reward (without it), or acc"],
        ),
        (
            {**DAPO, "algorithm.filter_groups.metric": "accuracy"},
            ["filter_groups.metric='accuracy' is unknown; choose acc, reward, score, seq_final_reward, seq_reward"],
        ),
        (
            {**OVERLONG, "reward.overlong_buffer.len": 101},
            ["overlong_buffer.len=101 must be 1 to data.max_response_length=100 tokens"],
        ),
        ({f"{CORRECTION}.rollout_is_threshold": 0.52}, [f"{CORRECTION}.rollout_is_threshold=0.52", "at least 1"]),
        ({f"{CORRECTION}.rollout_rs": "seq_max_k1"}, [f"{CORRECTION}.rollout_rs='seq_max_k1' is unknown"]),
        ({f"{CORRECTION}.rollout_rs": "token_k1"}, [f"{CORRECTION}.rollout_rs_threshold=None has 0 thresholds"]),
        ({f"{CORRECTION}.rollout_rs_threshold": 2.0}, [f"says nothing without {CORRECTION}.rollout_rs"]),
        ({**ADAPTIVE, "algorithm.kl_ctrl.horizon": 9}, ["horizon=9 is too short for the 48 samples", "at least 10"]),
        ({"algorithm.kl_ctrl.type": "pid"}, ["choose adaptive, fixed"]),
        ({"algorithm.kl_ctrl.type": "adaptive"}, ["type=adaptive is for the KL in the reward", "or type=fixed"]),
    ],
)
def test_refused_alone(overrides, parts):
    lines = violations_of(overrides)
    hits = [line for line in lines if all(part in line for part in parts)]
    assert len(hits) == 1, lines
