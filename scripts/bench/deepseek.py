"""DeepSeek-V3 in Megatron's parameters: 671 billion of them, and not one in memory."""

from __future__ import annotations

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.families import family_for
from rlhpc.reshard.families.family import FLOAT32

# Its published config.json, but for what says how its files are quantised.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
    "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False, "attention_dropout": 0.0,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    "vocab_size": 129280, "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


def trainer_specs(layout: ParallelLayout, dtype: str = "float32") -> list[ShardSpec]:
    """Of all tensors that a gradient updates: not of the routers' correction biases."""
    specs = family_for(DEEPSEEK_V3).trainer_specs(DEEPSEEK_V3, layout, dtype)
    return [spec for spec in specs if not spec.name.endswith(FLOAT32)]
