"""Command-line overrides before Hydra sees them."""

from pathlib import Path

import pytest

from launch.overrides import checked
from rlhpc.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
EXPERIMENTS = ", ".join(sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml")))


def refusal(*arguments):
    with pytest.raises(ConfigError) as caught:
        checked(arguments, CONFIGS)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("trainer.nnodes=2", "trainer.nnodes=2"),
        ("+trainer.nnodes=2", "trainer.nnodes=2"),  # recipes add keys that verl's YAML doesn't list
        ("++trainer.nnodes=2", "trainer.nnodes=2"),
        ("reward.kwargs.method=strict", "++reward.kwargs.method=strict"),
        ("+reward.kwargs.method=strict", "++reward.kwargs.method=strict"),
        ("actor_rollout_ref.actor.optim.lr=1e-6,2e-6", "actor_rollout_ref.actor.optim.lr=1e-6,2e-6"),
        (
            "algorithm.rollout_correction.rollout_is=null,token",
            "algorithm.rollout_correction.rollout_is=null,token",
        ),
        ("seed=range(0,3)", "seed=range(0,3)"),
        (
            "trainer.experiment_name=${trainer.project_name}",
            "trainer.experiment_name=${trainer.project_name}",
        ),
        ("trainer.total_training_steps=${seed}", "trainer.total_training_steps=${seed}"),
        ("experiment=tiny_arithmetic", "experiment=tiny_arithmetic"),
        ("algorithm=rloo,grpo", "algorithm=rloo,grpo"),
        ("hydra.verbose=true", "hydra.verbose=true"),
        ("hydra/launcher=basic", "hydra/launcher=basic"),
        ("--cfg", "--cfg"),
        ("-m", "-m"),
        ("data={shuffle: false}", "data={shuffle: false}"),
    ],
)
def test_kept(given, kept):
    assert checked([given], CONFIGS) == [kept]


def test_verl_keys_that_change_nothing_are_dropped():
    assert checked(["actor_rollout_ref.model.use_remove_padding=True", "seed=1"], CONFIGS) == ["seed=1"]


def test_flags_keep_their_values():
    assert checked(["--cfg", "job", "seed=1"], CONFIGS) == ["--cfg", "job", "seed=1"]
    told = "is no override; give KEY=VALUE without blanks, such as seed=1"
    assert refusal("seed", "=", "3") == [f"'seed' {told}", f"'=' {told}", f"'3' {told}"]


def test_verls_reference_may_repeat_the_actors_layout():
    ref, actor = "actor_rollout_ref.ref.megatron", "actor_rollout_ref.actor.megatron"
    ep = f"{actor}.expert_model_parallel_size=4"
    given = [ep, f"{ref}.expert_model_parallel_size=4", f"{ref}.pipeline_model_parallel_size=1"]
    given += [f"{ref}.tensor_model_parallel_size=${{{actor}.tensor_model_parallel_size}}"]
    assert checked(given, CONFIGS) == [ep]
    assert "can't be removed" in refusal(f"~{ref}.expert_model_parallel_size")[0]
    assert refusal(ep, f"{ref}.expert_model_parallel_size=2") == [
        f"{ref}.expert_model_parallel_size=2 is verl's: the reference policy has the actor's layout; remove it"
    ]


def test_all_refusals_at_once():
    assert refusal(
        "experiment=tiny_aritmetic",
        "actor_rollout_ref.rollout.temprature=1",
        "trainer.nnodes=two",
        "seed=1,x",
        "actor_rollout_ref.actor.strategy=fsdp",
        "~trainer.nnodes",
    ) == [
        f"experiment=tiny_aritmetic is unknown; did you mean tiny_arithmetic? choose {EXPERIMENTS}",
        "unknown key actor_rollout_ref.rollout.temprature; did you mean "
        "actor_rollout_ref.rollout.temperature or actor_rollout_ref.rollout.val_kwargs.temperature?",
        "trainer.nnodes='two' has type str; expected int",
        "seed='x' has type str; expected int",
        "actor_rollout_ref.actor.strategy='fsdp' is verl's: the trainer is Megatron-core; set megatron",
        "~trainer.nnodes: a setting can't be removed; give it another value",
    ]


def test_unparsable():
    (line,) = refusal("trainer.nnodes=[1")
    assert line.startswith("trainer.nnodes=[1: ")


def test_settings_with_dashes_and_verls_configurations():
    assert refusal("--experiment", "tiny_arithmetic") == [
        "--experiment: settings have no dashes; write experiment=VALUE",
    ]
    assert refusal("--seed=3") == ["--seed=3: settings have no dashes; write seed=3"]
    assert "remove it" in refusal("--config-name=ppo_megatron_trainer.yaml")[0]


def test_how_to_write_what_isnt_plain():
    (line,) = refusal("run_dir=outputs/größe")
    assert line.endswith("""quote what isn't plain: 'run_dir="outputs/größe"'""")
    assert checked(['run_dir="outputs/größe"'], CONFIGS) == ['run_dir="outputs/größe"']
