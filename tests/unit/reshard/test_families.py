"""Shard specs against parameters assembled with numpy, and what config.json may say."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from rlhpc.errors import ConfigError, ModelError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.families import family_for, model_facts, padded_vocab_size
from tests.unit.reshard.reference import CONFIG, Arrays, canonical_arrays, rollout_buffers, trainer_buffers


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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"tp{x.tp}pp{x.pp}ep{x.ep}etp{x.etp}")
def test_trainer_parameters(layout: ParallelLayout, tied: bool) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    family, facts = family_for(config), model_facts(config)
    tensors = canonical_arrays(family.canonical_tensors(config))
    specs = family.trainer_specs(config, layout, "float32")
    for rank in range(layout.world_size):
        expected = trainer_buffers(tensors, facts, layout, rank)
        assert_equal(fill(specs, rank, tensors, expected), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "expert_parallel"), [*itertools.product((1, 2, 4, 8), (False, True))])
def test_rollout_parameters(tp: int, expert_parallel: bool, tied: bool) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    family, facts = family_for(config), model_facts(config)
    tensors = canonical_arrays(family.canonical_tensors(config))
    ranks = list(range(8, 24))  # several replicas, not from rank 0
    specs = family.rollout_specs(config, tp, ranks, "float32", expert_parallel=expert_parallel)
    for i, rank in enumerate(ranks):
        expected = rollout_buffers(tensors, facts, i % tp, tp, expert_parallel=expert_parallel)
        assert_equal(fill(specs, rank, tensors, expected), expected)


def test_canonical_tensors_are_those_that_transformers_writes(tmp_path: Path) -> None:
    import json

    from safetensors import safe_open

    from tests.tiny_model import write_tiny_model

    directory = write_tiny_model(tmp_path / "model")
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt5"}, "model_type='gpt5' is unknown; known: .*qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for qwen3_moe; supported: 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling of rope_type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "config.json of qwen3_moe lacks factor"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_experts=8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=8"),
        ({"vocab_size": None}, "lacks vocab_size"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_facts(CONFIG | change)


def test_layouts_that_cannot_shard_name_the_choices() -> None:
    family = family_for(CONFIG)
    with pytest.raises(ConfigError, match="tp=3 must divide num_attention_heads=8; choose 1, 2, 4, 8"):
        family.trainer_specs(CONFIG, ParallelLayout(3, 1, 1, 1, 1, 3), "float32")
    with pytest.raises(ConfigError, match="ep=6 must divide num_experts=8; choose 1, 2, 4, 8"):
        family.trainer_specs(CONFIG, ParallelLayout(1, 1, 1, 6, 1, 6), "float32")
    with pytest.raises(ConfigError, match="pp=3 must divide num_hidden_layers=4"):
        family.trainer_specs(CONFIG, ParallelLayout(1, 3, 1, 1, 1, 3), "float32")
    with pytest.raises(ConfigError, match="rollout tensor_model_parallel_size=16 must divide num_attention_heads=8"):
        family.rollout_specs(CONFIG, 16, range(16), "float32")


def test_vocabulary_padding() -> None:
    assert padded_vocab_size(70, 1) == 70
    assert padded_vocab_size(70, 4) == 72
    assert padded_vocab_size(151936, 8) == 151936
    assert padded_vocab_size(70, 2, 64) == 128  # 64 is already a multiple of 2
    assert padded_vocab_size(70, 3, 64) == 192
