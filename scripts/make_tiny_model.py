"""Makes the tiny Qwen3-MoE, its tokenizer and the arithmetic problems of `experiment=tiny_arithmetic`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

PAD, BOS, EOS, IM_START, IM_END = "<|pad|>", "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = (
    320  # 5 special tokens, 256 bytes, reserved up to a multiple of 64 (tensor-parallel vocabularies)
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """Writes a byte-level tokenizer without merges: one token per UTF-8 byte, so one per digit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = [PAD, BOS, EOS, IM_START, IM_END]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: idx for idx, token in enumerate(tokens + reserved)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special + reserved)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of a Qwen3-MoE of 1.2 million parameters, spelled as published checkpoints are."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    } | overrides


def build_model(seed: int, config: dict[str, Any]) -> Qwen3MoeForCausalLM:
    """A randomly initialised float32 model of a config.json's content."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(config)).float()


def save_hf(model: Qwen3MoeForCausalLM, config: dict[str, Any], directory: Path) -> None:
    """Writes model.safetensors, config.json, generation_config.json and the tokenizer to `directory`."""
    model.save_pretrained(directory)
    # Transformers 5 renames `num_experts` and `rope_theta` when it saves; published checkpoints don't.
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # An assistant's turn ends with <|im_end|>, a bare completion with <|endoftext|>: both stop generation.
    generation = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2, 4]}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(directory)
