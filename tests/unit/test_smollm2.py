"""The conversion of GGUF files, on a small one written with gguf's own writer from a model whose weights are known."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhpc.errors import ModelError
from scripts.make_smollm2 import GGUF_SHA256, check, convert, main, make

HEADS, KV_HEADS, HIDDEN = 3, 1, 96
Q8_0 = gguf.GGMLQuantizationType.Q8_0
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["a b", "ab c", "Ġ Ġ", "1 2", "Ġ 1"]  # those of digits never apply: digits are split off first
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def quantised(name: str) -> bool:
    return "norm" not in name and "emb" not in name


def vocabulary():
    from tokenizers import pre_tokenizers

    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()), hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, rms_norm_eps=1e-5, tie_word_embeddings=True,
        max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e5}, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if quantised(name):  # to values that 8 bits hold exactly
                parameter.copy_(torch.tensor(gguf.dequantize(gguf.quantize(parameter.numpy(), Q8_0), Q8_0)))
    return model


@pytest.fixture(scope="module")
def file(model, tmp_path_factory) -> Path:
    """The model as llama.cpp keeps it: its names, rows of q and k interleaved, large matrices quantised."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(vocabulary()))
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            add(writer, name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, name: str, weight: np.ndarray) -> None:
    for heads, module in ((HEADS, "q_proj"), (KV_HEADS, "k_proj")):
        if module in name:  # row 2i of a head is row i of its first half, row 2i+1 of its second
            halves = weight.reshape(heads, 2, -1, HIDDEN)
            weight = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)
    name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(
        name, name.replace("model.layers", "blk")
    )
    for hf, ggml in MODULES.items():
        name = name.replace(hf, ggml)
    if quantised(name):
        writer.add_tensor(name, gguf.quantize(weight, Q8_0), raw_dtype=Q8_0)
    else:
        writer.add_tensor(name, weight)


@pytest.fixture(scope="module")
def directory(file, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("made")
    convert(file, made)
    return made


def test_weights_and_logits_are_the_models(model, directory):
    converted = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours, theirs = converted.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    tokens = torch.arange(30)[None] * 5
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)


def test_config_names_every_fact(directory):
    config = json.loads((directory / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 1e5 and config["tie_word_embeddings"] is True
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["intermediate_size"]) == (3, 1, 64)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert "Apache License" in (directory / "LICENSE").read_text()
    assert "Changed:" in (directory / "NOTICE").read_text()


def test_tokenizer_splits_digits_merges_letters_and_knows_the_chat(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "abc  12 Näïve 🙂"
    assert tokenizer.tokenize("abc  12") == ["abc", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False)
    assert chat == "<|im_start|>user\n12<|im_end|>\n"
    ids = tokenizer(chat).input_ids
    assert ids[0] == 1 and 2 in ids and tokenizer.decode(ids, skip_special_tokens=True) == "user\n12\n"


def test_another_file_is_refused_and_leaves_nothing(file, tmp_path, monkeypatch, capsys):
    with pytest.raises(ModelError, match=f"has sha256 [0-9a-f]{{64}}, .* has {GGUF_SHA256}"):
        make(tmp_path / "out", file)
    with pytest.raises(ModelError, match="can't be read"):
        check(tmp_path / "nothing.gguf")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    monkeypatch.setattr("sys.argv", ["make_smollm2.py", "--out", str(tmp_path / "mine"), "--gguf", str(file)])
    assert main() == 2
    assert "mine has other files in it; choose a new or empty directory" in capsys.readouterr().err
