"""The YAML groups: no default twice, only valid keys, every experiment composes."""

from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from rlhpc.config.load import defaults, load, violations

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if "hydra" not in path.relative_to(CONFIGS).parts)
GIVEN = ["actor_rollout_ref.model.path=/m", "data.train_files=/d.jsonl"]


def tree_of(path):
    """The file's own content at its package."""
    text = path.read_text()
    content = OmegaConf.to_container(OmegaConf.load(path)) or {}
    for meta in ("defaults", "hydra"):
        content.pop(meta, None)
    package = path.parent.name if path.parent != CONFIGS else "_global_"
    if text.startswith("# @package "):
        package = text.split("\n", 1)[0].removeprefix("# @package ").strip()
    return content if package == "_global_" or not content else {package: content}


def leaves(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def compose_with(*overrides):
    ConfigStore.instance().store(name="schema", node=defaults())
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", list(overrides))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_only_valid_keys_and_no_default_twice(path):
    tree = tree_of(path)
    assert violations(tree) == []
    default = dict(leaves(defaults()))
    repeated = [key for key, value in leaves(tree) if key in default and value == default[key]]
    assert repeated == [], "a default lives once, in rlhpc/config/schema.py"


def test_config_yaml_sets_nothing_itself():
    assert set(yaml.safe_load((CONFIGS / "config.yaml").read_text())) == {"defaults", "hydra"}


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml")))
def test_every_experiment_loads(name):
    load(compose_with(f"experiment={name}", *GIVEN))


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != CONFIGS], ids=lambda p: f"{p.parent.name}={p.stem}")
def test_every_option_loads(path):
    load(compose_with(f"{path.parent.name}={path.stem}", *GIVEN))


def test_composed_values():
    cfg = load(compose_with("experiment=tiny_arithmetic", "algorithm=dr_grpo", "logger=wandb", "seed=3"))
    assert cfg.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    assert cfg.algorithm.norm_adv_by_std_in_grpo is False
    assert cfg.trainer.logger == ["console", "wandb"]
    assert cfg.actor_rollout_ref.actor.megatron.expert_model_parallel_size == 2
    assert cfg.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    assert cfg.actor_rollout_ref.model.dtype == "float32"
    assert cfg.seed == 3
    assert cfg.run_dir.endswith("outputs/tiny/arithmetic")


def test_experiment_overrules_groups_and_command_line_overrules_experiment():
    cfg = load(compose_with("experiment=tiny_gsm8k", "data.max_response_length=7", *GIVEN))
    assert (cfg.data.max_prompt_length, cfg.data.max_response_length) == (768, 7)
    assert cfg.data.chat_template is True
