"""What a configuration may say of PPO's critic."""

import json

import pytest

from tests.unit.config.test_checks import ACTOR, EP, MODEL, PP, ROLLOUT, M, violations_of

GAE = {"algorithm.adv_estimator": "gae"}
LAYOUT = "under actor_rollout_ref.actor.megatron's layout: "


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"algorithm.use_critic": True}, ["use_critic=true, but algorithm.adv_estimator=grpo", "adv_estimator=gae"]),
        ({"critic.enable": True}, ["critic.enable=true, but algorithm.adv_estimator=grpo", "adv_estimator=gae"]),
        (GAE | {"critic.enable": False}, ["critic.enable=false, but algorithm.adv_estimator=gae needs"]),
        (GAE | {"algorithm.use_critic": False}, ["use_critic=false, but", "such as algorithm.adv_estimator=grpo"]),
        (GAE | {"critic.megatron.tensor_model_parallel_size": 2}, ["critic.megatron.tensor_model", "is 1", "too"]),
        (GAE | {"critic.ppo_mini_batch_size": 96}, ["critic.ppo_mini_batch_size=96 must divide", "choose 1, 2"]),
        (GAE | {"critic.ppo_mini_batch_size": 1, f"{ROLLOUT}.n": 2}, ["critic.ppo_mini", "= 2 traj", "of the 4"]),
        (GAE | {"critic.forward_max_token_len_per_gpu": 9}, ["critic.forward_max_token_len_per_gpu=9", "at least"]),
        (GAE | {"critic.model.path": "/none"}, ["critic.model.path=/none", "not a directory"]),
        (GAE | {"critic.optim.lr_decay_style": "linear"}, ["critic.optim.lr_decay_style=linear must know"]),
        (
            GAE | {"critic.optim.lr_warmup_steps": 6, "trainer.total_training_steps": 3},
            ["critic.optim.lr_warmup_steps=6 must be below the 6 optimizer steps"],
        ),
        (GAE | {"critic.loss_scale_factor": 0}, ["critic.loss_scale_factor=0", "above 0"]),
        (GAE | {"critic.cliprange_value": 0}, ["critic.cliprange_value=0", "above 0"]),
        (GAE | {"critic.loss_agg_mode": "mean"}, ["critic.loss_agg_mode='mean' is unknown", "token-mean"]),
        (
            GAE | {"trainer.critic_warmup": 4, "trainer.total_training_steps": 3},
            ["critic_warmup=4 is beyond trainer.total_training_steps=3", "set at most"],
        ),
        (
            GAE | {"trainer.critic_warmup": 3, "trainer.total_training_steps": 3, f"{ACTOR}.optim.lr_warmup_steps": 2},
            [f"{ACTOR}.optim.lr_warmup_steps=2 must be below the 2 optimizer steps"],
        ),
        ({"trainer.critic_warmup": 1}, ["critic_warmup=1 needs a critic", "adv_estimator=gae"]),
    ],
)
def test_refused_alone(overrides, parts):
    """Each is the only violation, and names what to do."""
    (violation,) = violations_of(overrides)
    assert all(part in violation for part in parts), violation


@pytest.mark.parametrize(
    ("change", "overrides", "parts"),
    [
        ({"vocab_size": 400}, {}, ["knows 400 tokens, the policy has 500", "same tokenizer"]),
        ({"max_position_embeddings": 128}, {}, ["ends at max_position_embeddings=128", "have 200 tokens"]),
        ({"model_type": "mamba"}, {}, ["config.json: model_type", "mamba"]),
        ({"num_hidden_layers": 1}, {PP: 2}, [f"{LAYOUT}pp=2", "num_hidden_layers=1"]),
        ({"model_type": "llama"}, {EP: 2}, [f"{LAYOUT}ep=2 needs a model with experts"]),
        ({"model_type": "llama"}, {f"{M}.recompute_modules": ["moe"]}, ["layers have no moe", "core_attn alone"]),
    ],
)
def test_a_critic_that_does_not_fit(change, overrides, parts, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | change))
    critic = GAE | {"critic.model.path": str(tmp_path)}
    (violation,) = violations_of(critic | overrides)
    assert violation.startswith(f"critic.model.path={tmp_path}")
    assert all(part in violation for part in parts), violation
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert violations_of(critic | overrides) == []
