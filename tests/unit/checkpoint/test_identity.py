"""A run directory goes on with its own settings, and says what differs from others."""

import json
from pathlib import Path

import pytest

from rlhpc.checkpoint.identity import FREE, check_identity
from rlhpc.config.schema import RunConfig
from rlhpc.errors import CheckpointError

MODEL = {"model_type": "qwen3_moe", "hidden_size": 128, "rope": {"theta": 1e6}}


def test_the_same_settings_go_on(tmp_path: Path) -> None:
    config = RunConfig().tree()
    check_identity(tmp_path / "run", config, MODEL, trained=True)
    check_identity(tmp_path / "run", config, MODEL, trained=True)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model"] == MODEL


def test_what_may_change_is_taken_over(tmp_path: Path) -> None:
    cfg = RunConfig()
    check_identity(tmp_path, cfg.tree(), MODEL, trained=True)
    cfg.trainer.total_training_steps, cfg.trainer.logger, cfg.checkpoint.keep = 500, ["console", "wandb"], 9
    cfg.trainer.n_gpus_per_node, cfg.actor_rollout_ref.actor.megatron.tensor_model_parallel_size = 4, 2
    check_identity(tmp_path, cfg.tree(), MODEL, trained=True)
    stored = json.loads((tmp_path / "run.json").read_text())["config"]
    assert stored["trainer"]["total_training_steps"] == 500 and stored["checkpoint"]["keep"] == 9


def test_the_rest_is_listed_with_old_and_new(tmp_path: Path) -> None:
    cfg = RunConfig()
    check_identity(tmp_path, cfg.tree(), MODEL, trained=True)
    before = (tmp_path / "run.json").read_text()
    cfg.seed, cfg.actor_rollout_ref.actor.optim.lr, cfg.trainer.save_freq = 3, 0.5, 7
    with pytest.raises(CheckpointError) as raised:
        check_identity(tmp_path, cfg.tree(), MODEL | {"hidden_size": 256}, trained=True)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"run_dir={tmp_path} belongs to a run with other settings:"
    assert lines[1:-1] == [
        "  config.actor_rollout_ref.actor.optim.lr: 1e-06 -> 0.5",
        "  config.seed: 0 -> 3",
        "  model.hidden_size: 128 -> 256",
    ]
    assert (
        f"choose another run_dir, where resume.from={tmp_path} begins" in lines[-1] and "trainer.save_freq" in lines[-1]
    )
    assert (tmp_path / "run.json").read_text() == before


def test_a_critics_settings_bind_where_there_is_one(tmp_path: Path) -> None:
    """A run whose rlhpc knew of none goes on; one that has a critic keeps it, and how it is trained."""
    cfg = RunConfig()
    config = cfg.tree()
    config["critic"] = {"enable": None}
    check_identity(tmp_path / "older", config, MODEL, trained=False)
    cfg.critic.optim.lr = 3e-5
    check_identity(tmp_path / "older", cfg.tree(), MODEL, trained=True)
    cfg.algorithm.adv_estimator = "gae"
    check_identity(tmp_path / "ppo", cfg.tree(), MODEL, trained=False)
    cfg.critic.megatron.param_offload, cfg.critic.forward_max_token_len_per_gpu = False, 4096
    check_identity(tmp_path / "ppo", cfg.tree(), MODEL, trained=True)
    cfg.critic.optim.lr, cfg.algorithm.adv_estimator = 1e-6, "grpo"
    with pytest.raises(CheckpointError) as raised:
        check_identity(tmp_path / "ppo", cfg.tree(), MODEL, trained=True)
    assert str(raised.value).splitlines()[1:-1] == [
        '  config.algorithm.adv_estimator: "gae" -> "grpo"',
        "  config.critic.optim.lr: 3e-05 -> 1e-06",
    ]


def test_what_the_runs_rlhpc_did_not_know_is_as_by_default(tmp_path: Path) -> None:
    cfg = RunConfig()
    older = cfg.tree()
    del older["algorithm"]["filter_groups"], older["algorithm"]["gamma"], older["seed"]
    check_identity(tmp_path, older, MODEL, trained=False)
    check_identity(tmp_path, cfg.tree(), MODEL, trained=True)
    check_identity(tmp_path, older, MODEL, trained=False)
    cfg.algorithm.gamma, cfg.algorithm.filter_groups.enable = 0.9, True
    with pytest.raises(CheckpointError) as raised:
        check_identity(tmp_path, cfg.tree(), MODEL, trained=True)
    assert str(raised.value).splitlines()[1:-1] == [
        "  config.algorithm.filter_groups.enable: not set -> true",
        "  config.algorithm.gamma: not set -> 0.9",
    ]


def test_a_start_that_trained_nothing_binds_nobody(tmp_path: Path) -> None:
    cfg = RunConfig()
    check_identity(tmp_path, cfg.tree(), MODEL, trained=False)
    cfg.seed = 3
    check_identity(tmp_path, cfg.tree(), MODEL, trained=False)
    assert json.loads((tmp_path / "run.json").read_text())["config"]["seed"] == 3


def test_every_free_key_exists() -> None:
    config = RunConfig().tree()
    for key in FREE:
        node = config
        for part in key.split("."):
            assert part in node, f"{key} is not in the schema"
            node = node[part]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match="run.json is damaged"):
        check_identity(tmp_path, {}, MODEL, trained=True)
