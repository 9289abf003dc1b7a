"""Tiny random models of every family, written by Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 319,
    "hidden_size": 128,  # 4 heads of 32, the smallest that vLLM computes on a CPU
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 512,  # this and the next, the only ones for which vLLM computes latent attention on a CPU
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 96,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    },
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "qwen3_moe": {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 96, "norm_topk_prob": True},
}


def write_tiny_family(path: Path | str, model_type: str, seed: int = 0, **config_overrides: Any) -> Path:
    """Writes a random float32 model (2 layers, vocabulary 319, 4 or 16 experts where it has some) without a tokenizer.

    Weights are wide and norms and biases far from one and zero, so that a tensor left out or in the wrong place moves
    log-probabilities by far more than float32 rounding.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **SIZES | MORE.get(model_type, {}) | config_overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or name.endswith("bias"):
                tensor.add_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(path)
    return Path(path)
