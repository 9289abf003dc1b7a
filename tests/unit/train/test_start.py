"""From where a run would start: every kind of origin, what a dry run says of it, what is refused beforehand."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.checkpoint.manifest import MANIFEST_NAME
from rlhpc.checkpoint.origin import Origin, find_origin
from rlhpc.config.load import load
from rlhpc.config.schema import RunConfig
from rlhpc.errors import CheckpointError, ConfigError, ModelError, RlhpcError
from rlhpc.train.model_files import check_model_files
from rlhpc.train.start import check_start, describe_start
from tests.hf_files import read_tensors
from tests.saved_runs import write_checkpoint, write_run
from tests.tiny_family import write_tiny_family
from tests.tiny_model import write_tiny_model

CURSOR = {"num_batches_drawn": 20, "num_prompts": 64, "batch_size": 8, "seed": 0, "shuffle": True}
LAYOUT = {"tp": 1, "pp": 1, "cp": 1, "ep": 2, "etp": 1, "world_size": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a run of it with the checkpoints of two steps, and three ranks' layout in them."""
    root = tmp_path_factory.mktemp("made")
    model = write_tiny_model(root / "model")
    other = write_run(root / "other", model)
    for step in (10, 20):
        write_checkpoint(other, step, read_tensors(model), cursor=CURSOR, layout=LAYOUT)
    return root


@pytest.fixture
def world(made: Path, tmp_path: Path) -> Path:
    """A copy to damage; the checkpoints were made an hour ago."""
    shutil.copytree(made, tmp_path / "world")
    for path in tmp_path.rglob(MANIFEST_NAME):
        os.utime(path, (time.time() - 3600,) * 2)
    write_run(tmp_path / "world/other", tmp_path / "world/model")
    return tmp_path / "world"


def config(world: Path, **sections: dict[str, Any]) -> RunConfig:
    given: dict[str, Any] = {
        "actor_rollout_ref": {"model": {"path": str(world / "model"), "dtype": "float32"}},
        "data": {"train_files": "/d.jsonl", "train_batch_size": 8},
        "run_dir": str(world / "run"),
    }
    return load(given | {k: given.get(k, {}) | v for k, v in sections.items()})


def model_config(world: Path) -> dict[str, Any]:
    return json.loads((world / "model" / "config.json").read_text())


def told(cfg: RunConfig, world: Path) -> list[str]:
    """With the temporary directory left out."""
    return [line.replace(f"{world}/", "") for line in describe_start(cfg, model_config(world))]


def test_what_a_path_is(world: Path) -> None:
    other, root = world / "other", world / "other/checkpoints"
    assert find_origin(world / "model", "weights") == Origin(world / "model", "weights")
    assert find_origin(other, "all") == Origin(other, "all", root)
    assert find_origin(root, "all") == Origin(root, "all", root)
    assert find_origin(root / "step-000010", "all") == Origin(root / "step-000010", "all", root)
    assert find_origin(root / "step-000010", "all").manifest.step == 10
    shutil.copytree(root / "step-000010", other / "good")
    assert find_origin(other / "good", "all").manifest.step == 10
    shutil.move(root, world / "elsewhere")
    identity = json.loads((other / "run.json").read_text())
    identity["config"]["trainer"]["default_local_dir"] = str(world / "elsewhere")
    (other / "run.json").write_text(json.dumps(identity))
    found = find_origin(other, "all")
    assert found.root == world / "elsewhere" and found.manifest.step == 20 and found.settings == identity


def test_the_newest_whole_one_is_chosen_by_sizes(world: Path) -> None:
    os.truncate(world / "other/checkpoints/step-000020/rank-00001-0000.safetensors", 100)
    found = find_origin(world / "other", "weights")
    assert [step for step, _ in found.newest_first()] == [20, 10]
    assert found.manifest.step == 10


def test_a_first_start_says_from_what(world: Path) -> None:
    assert told(config(world), world) == ["starts    at step 0 from model"]
    cfg = config(world, resume={"from": str(world / "other"), "what": "weights"})
    place, saved = "other/checkpoints/step-000020", "saved 1h00m ago by 3 ranks (tp=1 pp=1 cp=1 ep=2 etp=1)"
    assert told(cfg, world) == [f"starts    at step 0 with the weights of {place}, {saved}"]
    cfg.resume.what = "all"
    assert told(cfg, world) == [f"starts    after step 20 with the whole state of {place}, {saved}"]
    cfg = config(world, trainer={"resume_mode": "resume_path", "resume_from_path": str(world / place)})
    assert told(cfg, world) == [f"starts    after step 20 with the whole state of {place}, {saved}"]


def test_differing_settings_are_shown_old_to_new(world: Path) -> None:
    theirs = config(world).tree()
    theirs["cluster"]["partition"] = "long"  # where it ran is of no interest
    del theirs["reshard"]["verify_every"]  # a setting that its rlhpc didn't have
    identity = {"config": theirs, "model": model_config(world) | {"rope_theta": 5e5, "rope_scaling": {"factor": 4}}}
    (world / "other/run.json").write_text(json.dumps(identity))
    cfg = config(world, resume={"from": str(world / "other"), "what": "weights"}, trainer={"total_training_steps": 90})
    cfg.actor_rollout_ref.actor.optim.lr = 5e-6
    ours = model_config(world)["rope_theta"]
    assert told(cfg, world)[1:] == [
        "differs   actor_rollout_ref.actor.optim.lr: 1e-06 -> 5e-06",
        "          trainer.total_training_steps: null -> 90",
        "          model.rope_scaling.factor: 4 -> not set",
        f"          model.rope_theta: 500000.0 -> {ours}",
    ]


def test_checkpoints_of_its_own_come_first(world: Path) -> None:
    shutil.move(world / "other", world / "run")
    os.truncate(world / "run/checkpoints/step-000020/rank-00002-0000.safetensors", 100)
    cfg = config(world, resume={"from": "/gone"})
    lines = told(cfg, world)
    assert lines[0].startswith("starts    after step 10 from run/checkpoints/step-000010, saved 1h00m ago by 3 ranks")
    assert lines[1].startswith("          not from step 20: run/checkpoints/step-000020/rank-00002-0000.safetensors: ")
    assert lines[2] == "          resume.from=/gone counts no more: the run has checkpoints of its own"
    check_start(cfg, model_config(world))  # nor is it looked at
    verls = config(world, trainer={"resume_mode": "resume_path", "resume_from_path": "/gone"})
    assert told(verls, world)[2] == lines[2].replace("resume.from", "trainer.resume_from_path")
    cfg.trainer.resume_mode = "disable"
    with pytest.raises(CheckpointError, match=r"resume_mode=disable, but \S+ holds steps \[10, 20\], which a new run"):
        check_start(cfg, model_config(world))
    cfg.trainer.resume_mode = "auto"
    os.truncate(world / "run/checkpoints/step-000010/rank-00000-0000.safetensors", 100)
    with pytest.raises(CheckpointError) as raised:
        describe_start(cfg, model_config(world))
    first, *reasons, fix = str(raised.value).splitlines()
    assert first == f"none of the 2 checkpoints of {world / 'run/checkpoints'} can be used:"
    assert [reason.split(": ")[0] for reason in reasons] == ["  step 20", "  step 10"]
    assert all("100 bytes, the manifest says" in reason for reason in reasons)
    assert "choose another run_dir" in fix


def without_checkpoints(world: Path) -> dict[str, str]:
    shutil.rmtree(world / "other/checkpoints")
    return {"from": str(world / "other")}


def uncommitted(world: Path) -> dict[str, str]:
    (world / "other/checkpoints/step-000020" / MANIFEST_NAME).unlink()
    return {"from": str(world / "other/checkpoints/step-000020")}


def all_damaged(world: Path) -> dict[str, str]:
    for step in ("step-000010", "step-000020"):
        os.truncate(world / "other/checkpoints" / step / "rank-00000-0000.safetensors", 8)
    return {"from": str(world / "other"), "what": "weights"}


def other_heads(world: Path) -> dict[str, str]:
    """The same shapes, attended to differently."""
    identity = json.loads((world / "other/run.json").read_text())
    heads = identity["model"]["num_attention_heads"]
    identity["model"] |= {"num_attention_heads": heads // 2, "head_dim": identity["model"]["head_dim"] * 2}
    (world / "other/run.json").write_text(json.dumps(identity))
    return {"from": str(world / "other"), "what": "weights"}


def other_shapes(world: Path) -> dict[str, str]:
    (world / "other/run.json").unlink()  # shapes are in the manifest
    shutil.rmtree(world / "model")
    write_tiny_model(world / "model", moe_intermediate_size=48)
    return {"from": str(world / "other"), "what": "weights"}


def other_hf_shapes(world: Path) -> dict[str, str]:
    write_tiny_model(world / "wide", moe_intermediate_size=48)
    return {"from": str(world / "wide"), "what": "weights"}


REFUSALS: list[tuple[Callable[[Path], dict[str, str]], type[RlhpcError], str]] = [
    (
        lambda world: {"from": "/nowhere"},
        ConfigError,
        r"resume\.from=/nowhere is not a directory; give an HF model dir",
    ),
    (lambda world: {"from": str(world)}, ConfigError, "holds neither checkpoints nor a config.json; give an HF model"),
    (
        lambda world: {"from": str(world / "model"), "what": "all"},
        ConfigError,
        "has weights alone; set resume.what=weights, or give a run",
    ),
    (without_checkpoints, ConfigError, "is a run without a committed checkpoint; wait for its first"),
    (uncommitted, ConfigError, "step-000020 has no manifest.json: it was never committed"),
    (all_damaged, CheckpointError, r"(?s)none of the 2 checkpoints of \S+/other can be used:.*step 20: .*step 10: "),
    (other_heads, ModelError, r"other is of another architecture than \S+model\.path: num_heads \d, not \d, head_dim"),
    (other_shapes, ModelError, r"step-000020 is of another model .*: model\.layers\.0\.mlp\.experts\.0\.down_proj"),
    (other_hf_shapes, ModelError, r"experts\.0\.gate_proj\.weight has shape \(48, 128\); config\.json asks for"),
]


@pytest.mark.parametrize(("arrange", "kind", "message"), REFUSALS)
def test_refused_before_anything_starts(
    world: Path, arrange: Callable[[Path], dict[str, str]], kind: type[RlhpcError], message: str
) -> None:
    cfg = config(world, resume=arrange(world))
    with pytest.raises(kind, match=message):
        check_start(cfg, model_config(world))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"train_batch_size": 16}},
            r"data\.train_batch_size=16, but .*step-000020 .* drawn with 8; set that, or",
        ),
        ({"data": {"gen_batch_size": 4}}, r"data\.gen_batch_size=4, but .* drawn with 8; set that, or"),
        ({"seed": 5}, r"^seed=5, but .* drawn with 0"),
        ({"data": {"shuffle": False}}, r"data\.shuffle=false, but .* drawn with true"),
        ({"trainer": {"total_training_steps": 20}}, "total_training_steps=20 leaves nothing to train: .* of step 20"),
    ],
)
def test_a_whole_state_goes_on_only_in_its_order_of_the_data(
    world: Path, sections: dict[str, Any], message: str
) -> None:
    seed = sections.pop("seed", 0)
    cfg = config(world, resume={"from": str(world / "other")}, **sections)
    cfg.seed = seed
    with pytest.raises(ConfigError, match=message):
        check_start(cfg, model_config(world))
    cfg.resume.what = "weights"
    check_start(cfg, model_config(world))


def test_a_whole_state_goes_on_only_with_the_same_parameters_frozen(world: Path) -> None:
    weights = read_tensors(world / "model")
    routers = [name for name in weights if name.endswith("mlp.gate.weight")]
    write_checkpoint(write_run(world / "frozen", world / "model"), 5, weights, frozen=routers, cursor=CURSOR)
    for run, was, now in (("other", "false", True), ("frozen", "true", False)):
        cfg = config(world, resume={"from": str(world / run)})
        cfg.actor_rollout_ref.actor.megatron.freeze_moe_router = now
        with pytest.raises(ConfigError, match=rf"freeze_moe_router={json.dumps(now)}, but \S+ was saved with {was}, "):
            check_start(cfg, model_config(world))
        cfg.resume.what = "weights"
        check_start(cfg, model_config(world))
        cfg.resume.what, cfg.actor_rollout_ref.actor.megatron.freeze_moe_router = "all", not now
        check_start(cfg, model_config(world))


def test_correction_biases_are_frozen_in_any_case(world: Path) -> None:
    model = write_tiny_family(world / "model", "deepseek_v3")
    weights = read_tensors(model)
    biases = [name for name in weights if name.endswith("e_score_correction_bias")]
    write_checkpoint(write_run(world / "latent", model), 5, weights, frozen=biases, cursor=CURSOR)
    cfg = config(world, resume={"from": str(world / "latent")})
    check_start(cfg, model_config(world))
    cfg.actor_rollout_ref.actor.megatron.freeze_moe_router = True
    with pytest.raises(ConfigError, match=r"freeze_moe_router=true, but \S+ was saved with false, "):
        check_start(cfg, model_config(world))


def test_a_whole_state_goes_on_only_with_the_critic_that_it_has(world: Path) -> None:
    weights = read_tensors(world / "model")
    critic = {f"critic.{name}": tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    critic["critic.score.weight"] = torch.ones(1, len(weights["model.norm.weight"]))
    write_checkpoint(write_run(world / "ppo", world / "model"), 5, weights | critic, cursor=CURSOR)
    for run, now, message in (
        ("ppo", "grpo", r"adv_estimator=grpo has no critic, but \S+step-000005 was saved with one; set .*=gae, or"),
        ("other", "gae", r"adv_estimator=gae needs a critic, but \S+step-000020 was saved without one; set the"),
    ):
        cfg = config(world, resume={"from": str(world / run)}, algorithm={"adv_estimator": now})
        with pytest.raises(ConfigError, match=message):
            check_start(cfg, model_config(world))
        cfg.resume.what = "weights"
        check_start(cfg, model_config(world))
    cfg = config(world, resume={"from": str(world / "ppo")}, algorithm={"adv_estimator": "gae"})
    check_start(cfg, model_config(world))
    cfg.critic.model.path = str(write_tiny_model(world / "deeper", num_hidden_layers=3))
    with pytest.raises(ModelError, match=r"the critic in \S+ is of another model .*: it has no critic\.model\.lay"):
        check_start(cfg, model_config(world))


def test_files_of_a_critic_are_looked_at_too(world: Path) -> None:
    """Its weights, and whether it reads the same tokens: it may know more than the policy."""
    cfg = config(world, algorithm={"adv_estimator": "gae"}, critic={"model": {"path": str(world / "critic")}})
    shutil.copytree(world / "model", world / "critic")
    file = world / "critic/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    number = tokenizer["model"]["vocab"].pop("7")
    for token, at, message in (
        ("seven", number, rf"has another tokenizer than \S+=\S+: '7' is no token there, {number} here; give a"),
        ("7", 3, rf"'7' is 3 there, {number} here"),
        ("7", number, ""),
    ):
        vocab = tokenizer["model"]["vocab"] | {token: at, "more": 319}
        file.write_text(json.dumps(tokenizer | {"model": tokenizer["model"] | {"vocab": vocab}}))
        with pytest.raises(ModelError, match=message) if message else nullcontext():
            check_model_files(cfg, model_config(world))
    os.truncate(world / "critic/model.safetensors", 10_000)
    with pytest.raises(ModelError, match=r"critic/model.safetensors .* truncated or damaged"):
        check_model_files(cfg, model_config(world))
    cfg.algorithm.adv_estimator = "grpo"
    check_model_files(cfg, model_config(world))


def test_a_tokenizer_that_is_code(world: Path) -> None:
    """As Kimi-K2's and Moonlight's are; Transformers would ask on the terminal."""
    cfg, model_dir = config(world), world / "model"
    (model_dir / "tokenizer.json").unlink()
    auto_map = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    with pytest.raises(
        ModelError, match=r"tokenization_kimi.*; read that, and set \S+trust_remote_code=true to run it"
    ):
        check_model_files(cfg, model_config(world))
    cfg.actor_rollout_ref.model.trust_remote_code = True
    check_model_files(cfg, model_config(world))


def test_a_new_critic_is_told_of(world: Path) -> None:
    cfg = config(world, algorithm={"adv_estimator": "gae"})
    critic = "          the critic with the weights of model, its head at 0"
    assert told(cfg, world) == ["starts    at step 0 from model", critic]
    cfg.resume.from_, cfg.resume.what = str(world / "other"), "weights"
    assert told(cfg, world)[0].startswith("starts    at step 0 with the weights of other/checkpoints/step-000020")
    assert told(cfg, world)[1] == critic
