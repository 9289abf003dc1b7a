"""Loading: keys, types, verl's keys, digests and differences."""

import inspect
import re
from pathlib import Path

import pytest

from rlhpc.config import schema
from rlhpc.config.load import config_digest, known_keys, load, to_yaml, violations
from rlhpc.config.tree import diff
from rlhpc.errors import ConfigError

REQUIRED = {"actor_rollout_ref": {"model": {"path": "/m"}}, "data": {"train_files": "/d.jsonl"}}


def with_leaf(key, value):
    """REQUIRED with one more leaf."""
    from omegaconf import OmegaConf

    cfg = OmegaConf.create(REQUIRED)
    OmegaConf.update(cfg, key, value, force_add=True)
    return OmegaConf.to_container(cfg)


def refusal(key, value):
    with pytest.raises(ConfigError) as caught:
        load(with_leaf(key, value))
    return str(caught.value)


def test_defaults_types_and_interpolation():
    cfg = load(with_leaf("actor_rollout_ref.actor.optim.lr", 1))
    assert cfg.actor_rollout_ref.actor.optim.lr == 1.0
    assert isinstance(cfg.actor_rollout_ref.actor.optim.lr, float)
    assert cfg.algorithm.adv_estimator == "grpo"
    assert cfg.run_dir == str(Path("outputs/rlhpc/default").absolute())
    assert load(with_leaf("trainer.experiment_name", 7)).run_dir.endswith("outputs/rlhpc/7")


def test_paths_are_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cfg = load(with_leaf("data.train_files", ["a.jsonl", "/b.jsonl"]))
    assert cfg.data.train_files == [str(tmp_path / "a.jsonl"), "/b.jsonl"]
    assert cfg.data.val_files is None
    assert load(with_leaf("data.val_files", "~/v.jsonl")).data.val_files == str(Path.home() / "v.jsonl")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actor.megatron.expert_parallel_size", "expert_model_parallel_size"),
        ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),
        ("algorithms.gamma", "algorithm.gamma"),
    ],
)
def test_unknown_key_names_the_nearest(key, nearest):
    message = refusal(key, 1)
    assert message.startswith(f"unknown key {key}; did you mean ")
    assert nearest in message.split("did you mean ")[1].split(" or ")[0]


def test_beginnings_that_are_alike_suggest_nothing():
    assert (
        refusal("actor_rollout_ref.rollout.quick_sampling", 1) == "unknown key actor_rollout_ref.rollout.quick_sampling"
    )


def test_unknown_key_far_from_all():
    assert refusal("foo.bar", 1) == "unknown key foo.bar"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trainer.nnodes", "x", "trainer.nnodes='x' has type str; expected int"),
        ("trainer.nnodes", 1.5, "trainer.nnodes=1.5 has type float; expected int"),
        ("trainer.nnodes", True, "trainer.nnodes=True has type bool; expected int"),
        ("trainer.nnodes", None, "trainer.nnodes=null has type NoneType; expected int"),
        ("data.shuffle", 1, "data.shuffle=1 has type int; expected bool"),
        (
            "trainer.total_training_steps",
            "5",
            "trainer.total_training_steps='5' has type str; expected int or null",
        ),
        ("trainer.logger", 3, "trainer.logger=3 has type int; expected a list of str"),
        (
            "actor_rollout_ref.actor.optim.betas",
            [0.9, "b"],
            "actor_rollout_ref.actor.optim.betas=[0.9, 'b'] has type list; expected a list of float",
        ),
        ("reward.kwargs", 3, "reward.kwargs=3 has type int; expected a section of names and values"),
    ],
)
def test_wrong_type_names_value_and_expectation(key, value, message):
    assert refusal(key, value) == message


def test_section_expected():
    assert refusal("checkpoint", 3) == (
        "checkpoint=3 must be a section with the keys async_save, read_back, keep, keep_every, keep_best, best_metric, "
        "best_mode, save_final"
    )


def test_every_problem_is_listed():
    with pytest.raises(ConfigError) as caught:
        load({"trainer": {"nnodes": "x", "nope": 1}, "seed": None})
    assert len(str(caught.value).splitlines()) == 5  # and the two required values that are missing


def test_missing_values_say_what_to_give():
    with pytest.raises(ConfigError) as caught:
        load({})
    model, data = str(caught.value).splitlines()
    assert model.startswith("actor_rollout_ref.model.path is not set; give a directory")
    assert data.endswith("data.train_files=PATH/train.jsonl")


def test_bad_interpolation():
    assert "can't be composed" in refusal("run_dir", "${trainer.nowhere}/x")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.model.use_remove_padding", True),
        ("actor_rollout_ref.actor.use_dynamic_bsz", True),
        ("actor_rollout_ref.actor.strategy", "megatron"),
        ("actor_rollout_ref.hybrid_engine", True),
        ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz", True),
        ("actor_rollout_ref.rollout.calculate_log_probs", True),
        ("actor_rollout_ref.ref.megatron.param_offload", True),
        ("actor_rollout_ref.ref.megatron.optimizer_offload", False),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion", True),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type", "alltoall"),
        ("actor_rollout_ref.actor.checkpoint.save_contents", ["model", "optimizer", "extra"]),
        ("actor_rollout_ref.model.mtp.enable", False),
        ("algorithm.filter_groups.max_inflight_gen_batches", 1),
        ("reward_model.reward_manager", "dapo"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg", {"enable": False, "log": False}),
        ("reward.overlong_buffer.log", True),
        ("data.return_raw_chat", True),
        ("data.truncation", "error"),
        ("critic.enable", False),
        ("critic.strategy", "megatron"),
        ("critic.model.use_remove_padding", True),
        ("critic.megatron.use_mbridge", True),
        ("critic.optim.lr_decay_steps", None),
        ("algorithm.use_critic", False),
    ],
)
def test_verl_key_that_says_what_is_done_anyway(key, value):
    load(with_leaf(key, value))


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("actor_rollout_ref.model.use_remove_padding", False, "always packed"),
        ("actor_rollout_ref.model.use_remove_padding", 1, "always packed"),
        ("actor_rollout_ref.actor.strategy", "fsdp", "set megatron"),
        ("actor_rollout_ref.actor.fsdp_config", {"param_offload": True}, "FSDP is not available yet"),
        ("actor_rollout_ref.actor.grad_clip", 1.0, "set actor_rollout_ref.actor.optim.clip_grad"),
        ("actor_rollout_ref.ref.megatron.param_offload", False, "set actor_rollout_ref.actor.megatron.param_offload"),
        ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size", 2, "the actor's layout"),
        ("actor_rollout_ref.actor.router_replay.mode", "R3", "set actor_rollout_ref.actor.megatron.router_replay.mode"),
        (
            "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff",
            0.01,
            "set actor_rollout_ref.actor.megatron.moe_aux_loss_coeff",
        ),
        (
            "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload",
            True,
            "set actor_rollout_ref.actor.megatron.optimizer_offload",
        ),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type", "flex", "remove it"),
        ("trainer.v1.sampler.max_off_policy_threshold", 1, "take turns"),
        ("actor_rollout_ref.rollout.engine_kwargs", {"vllm": {"a": 1}}, "only the keys of"),
        ("algorithm.filter_groups.max_inflight_gen_batches", 2, "set 1"),
        ("algorithm.rollout_correction.rollout_is_batch_normalize", True, "set false"),
        ("reward_model.reward_manager", "prime", "naive or dapo"),
        ("reward_model.overlong_buffer.enable", True, "set reward.overlong_buffer.enable"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len", 4096, "set reward.overlong_buffer.len"),
        ("reward_model.reward_kwargs.max_resp_len", 20480, "it is data.max_response_length"),
        ("critic.strategy", "fsdp", "set megatron"),
        ("critic.megatron.override_transformer_config", {"x": 1}, "what actor_rollout_ref.actor.megatron says"),
        ("critic.optim.lr_warmup_steps_ratio", 0.1, "set critic.optim.lr_warmup_steps"),
        ("reward_model.enable", True, "rule reward"),
        ("trainer.max_actor_ckpt_to_keep", 3, "set checkpoint.keep"),
        ("data.truncation", "left", "never cut"),
    ],
)
def test_verl_key_is_refused_by_name(key, value, instead):
    message = refusal(key, value)
    assert message.startswith(key) and " is verl's: " in message and instead in message


def test_refused_verl_keys_point_to_keys_that_exist():
    from rlhpc.config.verl import VERL_KEYS

    sections = {key.partition(".")[0] for key in known_keys()}
    for entry in VERL_KEYS.values():
        for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", entry.instead):
            if key.partition(".")[0] in sections:
                assert key in known_keys(), entry.instead


def test_no_verl_entry_shadows_a_key_of_the_schema():
    from rlhpc.config.verl import VERL_KEYS

    assert not set(VERL_KEYS) & set(known_keys())


def test_a_keyword_of_python_is_a_key_like_others(tmp_path, monkeypatch):
    import yaml

    monkeypatch.chdir(tmp_path)
    cfg = load(REQUIRED | {"resume": {"from": "other", "what": "weights"}})
    assert (cfg.resume.from_, cfg.tree()["resume"]["from"]) == (str(tmp_path / "other"),) * 2
    assert load(yaml.safe_load(to_yaml(cfg))) == cfg and "resume.from" in known_keys()
    assert diff(load(REQUIRED).tree(), cfg.tree())[0] == ("resume.from", None, str(tmp_path / "other"))
    assert violations({"resume": {"from": 3, "from_": 4}}) == ["unknown key resume.from_; did you mean resume.from?"]


def test_partial_tree_is_judged_alone():
    assert violations({"trainer": {"nnodes": 2}}) == []
    assert violations({"trainer": {"nnodes": "2"}}) == ["trainer.nnodes='2' has type str; expected int"]


def test_yaml_digest_and_diff():
    import yaml

    old = load(with_leaf("reward.kwargs", {"method": "strict"}))
    assert load(yaml.safe_load(to_yaml(old))) == old
    new = load(with_leaf("seed", 1))
    assert diff(old.tree(), new.tree()) == [("reward.kwargs.method", "strict", "???"), ("seed", 0, 1)]
    assert diff(old.tree(), old.tree()) == []
    assert config_digest(old) == config_digest(load(with_leaf("reward.kwargs", {"method": "strict"})))
    assert config_digest(old) != config_digest(new)
    assert re.fullmatch("[0-9a-f]{16}", config_digest(old))


def test_every_leaf_is_explained():
    leaves = re.findall(r"^    [a-z_]+: (?!\w+Config\b).*", inspect.getsource(schema), re.MULTILINE)
    assert len(leaves) > 100
    assert [leaf for leaf in leaves if "  # " not in leaf and "run_dir" not in leaf] == []


def test_cluster_nodes_and_trainer_nnodes_are_one():
    assert load({"cluster": {"nodes": 4}} | REQUIRED).trainer.nnodes == 4
    assert load({"cluster": {"nodes": 4}, "trainer": {"nnodes": 4}} | REQUIRED).trainer.nnodes == 4
    assert load({"trainer": {"nnodes": 3}} | REQUIRED).trainer.nnodes == 3
    with pytest.raises(ConfigError, match="cluster.nodes=4 contradicts trainer.nnodes=2; set one of them"):
        load({"cluster": {"nodes": 4}, "trainer": {"nnodes": 2}} | REQUIRED)


def test_a_list_of_text_may_be_one_text():
    assert load(with_leaf("trainer.logger", "console")).trainer.logger == ["console"]  # verl's quickstart writes it so


@pytest.mark.parametrize("key", ["run_dir", "data.val_files", "resume.from"])
def test_a_path_isnt_empty_as_an_unset_shell_variable_leaves_it(key):
    assert refusal(key, "") == f"{key} is empty; give a path, or leave it out"


def test_a_rewards_file_is_found_from_any_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load(with_leaf("reward.name", "mine.py:score")).reward.name == f"{tmp_path}/mine.py:score"
    assert load(with_leaf("reward.name", "gsm8k")).reward.name == "gsm8k"
