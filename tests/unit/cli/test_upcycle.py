"""Upcycling compared with Transformers: the mixture of experts must compute what the dense model computes."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlhpc.cli.main import main
from rlhpc.cli.upcycle import Upcycling, upcycle
from rlhpc.errors import ConfigError, ModelError
from rlhpc.reshard.families import family_for
from tests.fp8_files import quantisation
from tests.hf_files import read_tensors

TOKENS = torch.arange(48).view(2, 24) * 7 % 96
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def write_dense(directory, *, drop=(), dtype=torch.float32, **overrides):
    """A random Llama of 3 query and 1 KV heads whose norms and weights are far from their initial values."""
    torch.manual_seed(0)
    shape = dict(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**(shape | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5} | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}\n")
    config = directory / "config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k not in drop}))
    return directory


def logits(directory):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(TOKENS).logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": False},
        {"rope_parameters": LLAMA3},
        {"num_key_value_heads": 3, "drop": ("num_key_value_heads", "rope_parameters", "head_dim")},
    ],
    ids=["tied", "untied", "llama3-rope", "llama-2-defaults"],
)
def test_logits_are_the_dense_models(tmp_path, options):
    dense = write_dense(tmp_path / "dense", **options)
    said = upcycle(dense, tmp_path / "moe", Upcycling(num_experts=4, experts_per_token=2), file_bytes=60_000)
    expected = logits(dense)
    assert expected.std() > 1  # so that 1e-5 means something
    torch.testing.assert_close(logits(tmp_path / "moe"), expected, rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "moe/config.json").read_text())
    held = read_tensors(tmp_path / "moe")
    assert {n: tuple(t.shape) for n, t in held.items()} == family_for(config).canonical_tensors(config)
    assert said.endswith(f"{sum(t.numel() for t in held.values()):,} parameters")


def test_routers_choose_different_experts_for_different_tokens(tmp_path):
    upcycle(write_dense(tmp_path / "dense"), tmp_path / "moe", Upcycling(4, 2, router_std=0.05))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    with torch.no_grad():
        router_logits = model(TOKENS, output_router_logits=True).router_logits
    for layer in router_logits:
        chosen = layer.topk(2).indices.sort().values
        assert len(chosen.unique(dim=0)) > 3  # of the 6 pairs
    routers = [t for n, t in read_tensors(tmp_path / "moe").items() if n.endswith("gate.weight")]
    assert len(routers) == 2 and not torch.equal(*routers)
    assert torch.cat(routers).std() == pytest.approx(0.05, rel=0.15)


def test_files_are_split_by_size_and_indexed(tmp_path):
    dense = write_dense(tmp_path / "dense")
    upcycle(dense, tmp_path / "one", Upcycling(2, 2))
    upcycle(dense, tmp_path / "many", Upcycling(2, 2), file_bytes=40_000)
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    for path in files:
        held = load_file(path)
        assert sum(t.nbytes for t in held.values()) <= 40_000
        assert {name for name, file in index["weight_map"].items() if file == path.name} == held.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_tensors(tmp_path / "one").values())
    one, many = read_tensors(tmp_path / "one"), read_tensors(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[n], many[n]) for n in one)  # random ones, too
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert {"tokenizer.json", "generation_config.json"} <= names
    assert len({path.stat().st_mode for path in (tmp_path / "one").iterdir()}) == 1  # whoever reads one reads all


def test_sharded_bfloat16_in_and_out(tmp_path):
    dense = write_dense(tmp_path / "dense", dtype=torch.bfloat16)
    weights = load_file(dense / "model.safetensors")
    names = sorted(weights)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({n: weights[n] for n in part}, dense / f"{i}.safetensors", metadata={"format": "pt"})
    weight_map = {n: f"{i}.safetensors" for i, part in enumerate((names[::2], names[1::2])) for n in part}
    (dense / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    os.unlink(dense / "model.safetensors")
    upcycle(dense, tmp_path / "moe", Upcycling(2, 2))
    with safe_open(tmp_path / "moe/model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
        up = file.get_tensor("model.layers.1.block_sparse_moe.experts.1.w3.weight")
    assert torch.equal(up, weights["model.layers.1.mlp.up_proj.weight"])


def test_noise_parts_the_experts(tmp_path):
    dense = write_dense(tmp_path / "dense")
    upcycle(dense, tmp_path / "moe", Upcycling(2, 2, expert_noise=0.1, seed=3))
    source, held = read_tensors(dense), read_tensors(tmp_path / "moe")
    for projection, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        weight = source[f"model.layers.0.mlp.{name}.weight"]
        noise = [held[f"model.layers.0.block_sparse_moe.experts.{e}.{projection}.weight"] - weight for e in range(2)]
        for one in noise:
            assert one.std() / weight.std() == pytest.approx(0.1, rel=0.1)
        assert torch.corrcoef(torch.stack([n.flatten() for n in noise]))[0, 1].abs() < 0.1
    upcycle(dense, tmp_path / "other", Upcycling(2, 2, expert_noise=0.1, seed=4))
    upcycle(dense, tmp_path / "again", Upcycling(2, 2, expert_noise=0.1, seed=3))
    again, other = read_tensors(tmp_path / "again"), read_tensors(tmp_path / "other")
    drawn = {n for n in held if "block_sparse_moe" in n}
    assert {n for n in held if not torch.equal(held[n], other[n])} == drawn
    assert not {n for n in held if not torch.equal(held[n], again[n])}


def test_refusals_name_what_is_wrong_and_leave_nothing(tmp_path):
    dense = write_dense(tmp_path / "dense")
    config = json.loads((dense / "config.json").read_text())
    recipe = Upcycling(4, 2)

    def refused(message, **changed):
        (dense / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(ModelError, match=message):
            upcycle(dense, tmp_path / "moe", recipe)
        (dense / "config.json").write_text(json.dumps(config))

    refused("model_type='qwen3_moe' is not a dense Llama", model_type="qwen3_moe")
    refused("attention_bias=True is not supported for llama", attention_bias=True)
    refused("quantised files can't be upcycled; convert", quantization_config=quantisation((128, 128)))
    refused("has shape .80, 48.; config.json asks for .64, 48.", intermediate_size=64)
    refused("lacks 9 tensors that config.json asks for: model.layers.2.input_layernorm.weight", num_hidden_layers=3)
    refused("holds 9 tensors that config.json's model hasn't: model.layers.1", num_hidden_layers=1)
    weights = load_file(dense / "model.safetensors")
    head = weights["model.embed_tokens.weight"] + 1
    save_file(weights | {"lm_head.weight": head}, dense / "model.safetensors", metadata={"format": "pt"})
    refused("ties the embeddings, yet lm_head.weight differs from model.embed_tokens.weight")
    save_file(weights, dense / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="dense exists; choose another directory"):
        upcycle(dense, dense, recipe)
    with pytest.raises(ModelError, match="nowhere/config.json can't be read as JSON"):
        upcycle(tmp_path / "nowhere", tmp_path / "moe", recipe)
    (dense / "model.safetensors").write_bytes((dense / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(ModelError, match="model.safetensors can't be read"):
        upcycle(dense, tmp_path / "moe", recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_recipes_that_make_no_sense():
    with pytest.raises(ConfigError, match=r"experts_per_token=5 must be within 2..num_experts=4"):
        Upcycling(4, 5)
    with pytest.raises(ConfigError, match="experts_per_token=1 must be .* a single expert the weight 1"):
        Upcycling(4, 1)
    with pytest.raises(ConfigError, match="num_experts=0"):
        Upcycling(0, 1)
    with pytest.raises(ConfigError, match="router_std=0.0 must be positive"):
        Upcycling(4, 2, router_std=0.0)
    with pytest.raises(ConfigError, match="router_std=nan must be positive"):
        Upcycling(4, 2, router_std=float("nan"))
    for noise in (-1.0, float("inf")):
        with pytest.raises(ConfigError, match=f"expert_noise={noise} must be at least 0"):
            Upcycling(4, 2, expert_noise=noise)


def test_the_command(tmp_path, capsys):
    dense = write_dense(tmp_path / "dense")
    arguments = ["upcycle", str(dense), str(tmp_path / "moe"), "--num-experts", "2", "--experts-per-token"]
    assert main([*arguments, "3"]) == 2
    assert "error: experts_per_token=3 must be within 2..num_experts=2" in capsys.readouterr().err
    assert main([*arguments, "2", "--router-std", "0.3", "--seed", "9"]) == 0
    assert "2 experts a layer, 2 per token" in capsys.readouterr().out
    upcycle(dense, tmp_path / "same", Upcycling(2, 2, router_std=0.3, seed=9))
    assert (tmp_path / "same/model.safetensors").read_bytes() == (tmp_path / "moe/model.safetensors").read_bytes()
