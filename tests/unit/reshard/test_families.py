"""Shard specs against parameters assembled with numpy, and what config.json may say."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from rlhpc.errors import ConfigError, ModelError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.families import family_for, model_facts, padded_vocab_size
from rlhpc.reshard.families.facts import Llama3Scaling
from tests.fp8_files import quantisation
from tests.tiny_family import write_tiny_family
from tests.unit.reshard.reference import CONFIG, CONFIGS, Arrays, canonical_arrays, rollout_buffers, trainer_buffers

FP8 = quantisation((128, 128))
YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def fill(specs: list[ShardSpec], rank: int, tensors: Arrays, expected: Arrays) -> Arrays:
    """The rank's parameters, filled by its shards into zeros; writing an element twice fails."""
    buffers = {name: np.zeros_like(array) for name, array in expected.items()}
    written = {name: np.zeros(array.shape, int) for name, array in expected.items()}
    for spec in specs:
        for shard in (shard for shard in spec.shards if shard.rank == rank):
            box = tensors[spec.name][tuple(map(slice, shard.start, shard.stop))]
            lead = len(shard.offset) - box.ndim
            extent = (1,) * lead + box.shape
            where = tuple(slice(o, o + n) for o, n in zip(shard.offset, extent, strict=True))
            buffers[shard.buffer][where] = box
            written[shard.buffer][where] += 1
    assert all(count.max() <= 1 for count in written.values())  # 0: a rank with nothing but vocabulary pad
    return buffers


def assert_equal(got: Arrays, expected: Arrays) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


LAYOUTS = [
    ParallelLayout(tp=tp, pp=pp, cp=1, ep=ep, etp=etp, world_size=8)
    for tp, pp, ep, etp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (1, 2))
    if tp * pp <= 8 and ep * etp * pp <= 8
]


DENSE = [layout for layout in LAYOUTS if layout.ep == layout.etp == 1]
TRAINED = {"qwen3_moe": LAYOUTS, "mixtral": LAYOUTS[::4], "deepseek_v3": LAYOUTS[1::3]} | dict.fromkeys(
    ("llama", "qwen2", "qwen3"), DENSE
)


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [(name, layout) for name, layouts in TRAINED.items() for layout in layouts],
    ids=lambda x: x if isinstance(x, str) else f"tp{x.tp}pp{x.pp}ep{x.ep}etp{x.etp}",
)
def test_trainer_parameters(model_type: str, layout: ParallelLayout) -> None:
    config = CONFIGS[model_type]
    family, facts = family_for(config), model_facts(config)
    tensors = canonical_arrays(family.canonical_tensors(config))
    specs = family.trainer_specs(config, layout, "float32")
    for rank in range(layout.world_size):
        expected = trainer_buffers(tensors, facts, layout, rank)
        assert_equal(fill(specs, rank, tensors, expected), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS[::5], ids=lambda x: f"tp{x.tp}pp{x.pp}ep{x.ep}etp{x.etp}")
def test_critic_parameters(layout: ParallelLayout, tied: bool) -> None:
    """The policy's, with one row instead of the vocabulary's, whole on every rank of the last stage."""
    config = CONFIGS["qwen3_moe"] | {"tie_word_embeddings": tied}
    family = family_for(config)
    tensors = canonical_arrays(family.critic_tensors(config) | family.canonical_tensors(config))
    specs = family.critic_specs(config, layout, "float32")
    assert {spec.name: spec.shape for spec in specs} == family.critic_tensors(config)
    for rank in range(layout.world_size):
        expected = trainer_buffers(tensors, model_facts(config), layout, rank)
        expected.pop("output_layer.weight", None)
        if layout.coords(rank).pp == layout.pp - 1:
            expected["output_layer.weight"] = tensors["score.weight"]
        assert_equal(fill(specs, rank, tensors, expected), expected)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("model_type", "expert_parallel"),
    [*((name, False) for name in CONFIGS), *((name, True) for name in ("qwen3_moe", "mixtral", "deepseek_v3"))],
)
def test_rollout_parameters(model_type: str, expert_parallel: bool, tp: int) -> None:
    config = CONFIGS[model_type]
    family, facts = family_for(config), model_facts(config)
    tensors = canonical_arrays(family.canonical_tensors(config))
    ranks = range(8, 8 + 2 * tp)  # two replicas, not from rank 0
    specs = family.rollout_specs(config, tp, ranks, "float32", expert_parallel=expert_parallel)
    for i, rank in enumerate(ranks):
        expected = rollout_buffers(tensors, facts, i % tp, tp, expert_parallel=expert_parallel)
        assert_equal(fill(specs, rank, tensors, expected), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_canonical_tensors_are_those_that_transformers_writes(model_type: str, tied: bool, tmp_path: Path) -> None:
    directory = write_tiny_family(tmp_path / "model", model_type, tie_word_embeddings=tied)
    config = json.loads((directory / "config.json").read_text())
    with safe_open(directory / "model.safetensors", framework="np") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert family_for(config).canonical_tensors(config) == written


def test_facts_of_both_config_generations() -> None:
    old = model_facts(CONFIG)
    new = {k: v for k, v in CONFIG.items() if k not in ("rope_theta", "num_experts")}
    new |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "num_local_experts": 8}
    assert model_facts(new) == old
    assert (old.num_experts, old.rope_theta, old.head_dim, old.moe_intermediate_size) == (8, 1e6, 4, 8)
    assert model_facts({k: v for k, v in CONFIG.items() if k != "head_dim"}).head_dim == 2  # 16 / 8 heads


def test_llama3_scaling_of_both_config_generations() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    old = {**CONFIGS["llama"], "rope_theta": 5e5, "rope_scaling": scaling}
    new = {**CONFIGS["llama"], "rope_parameters": {**scaling, "rope_theta": 5e5}}
    assert model_facts(old) == model_facts(new)
    assert model_facts(old).rope_theta == 5e5
    assert model_facts(old).rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert model_facts(CONFIGS["llama"]).rope_scaling is None


def test_what_families_imply() -> None:
    facts = {name: model_facts(config) for name, config in CONFIGS.items()}
    assert [name for name in facts if facts[name].qkv_bias] == ["qwen2"]
    assert [name for name in facts if facts[name].qk_norm] == ["qwen3_moe", "qwen3"]
    mixtral = facts["mixtral"]
    assert (mixtral.num_experts, mixtral.moe_intermediate_size, mixtral.norm_topk_prob) == (8, 32, True)
    assert (facts["llama"].num_experts, facts["llama"].intermediate_size) == (0, 32)
    llama2 = {key: value for key, value in CONFIGS["llama"].items() if key != "rope_theta"}
    assert model_facts(llama2).rope_theta == 10000.0
    with_unused_window = {"use_sliding_window": False, "sliding_window": 131072, "layer_types": ["full_attention"] * 4}
    assert model_facts(CONFIGS["qwen2"] | with_unused_window) == facts["qwen2"]


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True is not supported for llama; supported: None, False"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported for llama"),
        ("llama", {"sliding_window": 4096}, "sliding_window=4096 is not supported for llama"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ("llama", {"intermediate_size": None}, "config.json of llama lacks intermediate_size"),
        ("qwen2", {"head_dim": 4}, "head_dim=4 is not supported for qwen2; .* = 16 / 8"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not supported for qwen2"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported for qwen3"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096 is not supported for mixtral"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported for mixtral"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported where routing weights"),
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            "scoring_func='softmax' is not supported for deepseek_v3; set 'sig",
        ),
        ("deepseek_v3", {"topk_method": None}, "topk_method=None is not supported for deepseek_v3; set 'noaux_tc'"),
        ("deepseek_v3", {"n_group": None}, "config.json of deepseek_v3 lacks n_group"),
        ("deepseek_v3", {"n_group": 3}, "n_group=3 must divide n_routed_experts=8, and be at least topk_group=2"),
        (
            "deepseek_v3",
            {"topk_group": 1},
            "topk_group=1 of n_group=4 with num_experts_per_tok=4 of 8 is not supported",
        ),
        ("deepseek_v3", {"first_k_dense_replace": 7}, "first_k_dense_replace=7 must be .* num_hidden_layers - 1 = 6"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 must be num_attention_heads=8"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "llama3"}},
            "'llama3' is not supported; supported: 'default', 'yarn'",
        ),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale_all_dim": 0}}, "mscale_all_dim=0 is not supported"),
        ("deepseek_v3", {"kv_lora_rank": None}, "config.json of deepseek_v3 lacks kv_lora_rank"),
        ("mixtral", {"num_local_experts": None}, "config.json of mixtral lacks num_experts or num_local_experts"),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(model_type: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_facts(CONFIGS[model_type] | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt5"}, "model_type='gpt5' is unknown; known: .*qwen3_moe"),
        ({"model_type": ["qwen3_moe"]}, r"model_type=\['qwen3_moe'\] is unknown; known: .*qwen3_moe"),
        ({"layer_types": 7}, "layer_types 7 not supported; supported: full_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for qwen3_moe; supported: 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling of rope_type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "config.json of qwen3_moe lacks factor"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"quantization_config": FP8 | {"weight_block_size": None}}, "weight_block_size=None is not supported"),
        ({"quantization_config": FP8 | {"weight_block_size": [128, 0]}}, r"weight_block_size=\[128, 0\] is not"),
        ({"quantization_config": FP8 | {"quant_method": "awq"}}, "quant_method='awq' is not supported; readable are"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt='e5m2' is not supported; readable are .* 'fp8'"),
        ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme='static' is not supported"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8' must be an object"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config=.* is not supported"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_experts=8"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported where routing weights are renormalised"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=8"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number of at least 1"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4' must be a whole number"),
        ({"hidden_size": 16.5}, "hidden_size=16.5 must be a whole number"),
        ({"head_dim": -4}, "head_dim=-4 must be a whole number"),
        ({"num_key_value_heads": []}, r"num_key_value_heads=\[\] must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a number above 0"),
        ({"rope_theta": "1e6"}, "rope_theta='1e6' must be a number above 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' must be an object"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "say different things; remove the wrong"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_facts(CONFIG | change)


def test_correction_biases_stay_float32() -> None:
    config = CONFIGS["deepseek_v3"]
    family, layout = family_for(config), ParallelLayout(tp=2, pp=1, cp=1, ep=2, etp=1, world_size=2)
    for specs in (
        family.trainer_specs(config, layout, "bfloat16"),
        family.rollout_specs(config, 2, (0, 1), "bfloat16"),
    ):
        wide = {spec.name for spec in specs if spec.dtype == "float32"}
        assert wide == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(1, 7)}
        assert {spec.dtype for spec in specs} == {"bfloat16", "float32"}


def test_layouts_that_cannot_shard_name_the_choices() -> None:
    family = family_for(CONFIG)
    with pytest.raises(ConfigError, match="tp=3 must divide num_attention_heads=8; choose 1, 2, 4, 8"):
        family.trainer_specs(CONFIG, ParallelLayout(3, 1, 1, 1, 1, 3), "float32")
    with pytest.raises(ConfigError, match="ep=6 must divide num_experts=8; choose 1, 2, 4, 8"):
        family.trainer_specs(CONFIG, ParallelLayout(1, 1, 1, 6, 1, 6), "float32")
    with pytest.raises(
        ConfigError, match="pp=3 stages of 2 layers leave none of num_hidden_layers=4 to the last; choose 1, 2, 4"
    ):
        family.trainer_specs(CONFIG, ParallelLayout(1, 3, 1, 1, 1, 3), "float32")
    with pytest.raises(ConfigError, match="ep=2 needs a model with experts, this llama is dense; set 1"):
        family_for(CONFIGS["llama"]).trainer_specs(CONFIGS["llama"], ParallelLayout(1, 1, 1, 2, 1, 2), "float32")
    three = CONFIGS["llama"] | {"num_attention_heads": 12, "num_key_value_heads": 3}
    with pytest.raises(ConfigError, match="tp=2 must divide .* num_key_value_heads=3; choose 1, 3 or a multiple of 3"):
        family_for(three).trainer_specs(three, ParallelLayout(2, 1, 1, 1, 1, 2), "float32")
    with pytest.raises(ConfigError, match="rollout tensor_model_parallel_size=16 must divide num_attention_heads=8"):
        family.rollout_specs(CONFIG, 16, range(16), "float32")


@pytest.mark.parametrize("key", ["q_lora_rank", "first_k_dense_replace", "topk_group"])
def test_what_transformers_would_assume_must_be_said(key: str) -> None:
    with pytest.raises(ModelError, match=f"config.json of deepseek_v3 lacks {key}"):
        model_facts({name: value for name, value in CONFIGS["deepseek_v3"].items() if name != key})


def test_stages_that_the_layers_do_not_divide() -> None:
    """DeepSeek-V3's 61 layers."""
    facts = replace(model_facts(CONFIGS["deepseek_v3"]), num_layers=61)
    assert [len(facts.stage(rank, 8)) for rank in range(8)] == [8] * 7 + [5]
    assert [len(facts.stage(rank, 16)) for rank in range(16)] == [4] * 15 + [1]
    assert [layer for rank in range(16) for layer in facts.stage(rank, 16)] == list(range(61))
    assert facts.stage_counts == [*range(1, 10), 11, 13, 16, 21, 31, 61]


def test_vocabulary_padding() -> None:
    assert padded_vocab_size(70, 1) == 70
    assert padded_vocab_size(70, 4) == 72
    assert padded_vocab_size(151936, 8) == 151936
    assert padded_vocab_size(70, 2, 64) == 128  # 64 is already a multiple of 2
    assert padded_vocab_size(70, 3, 64) == 192
