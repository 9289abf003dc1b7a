"""Qwen3-MoE (Qwen3-30B-A3B and kin): grouped-query attention with QK norm, softmax top-k experts in every
layer."""

from __future__ import annotations

from rlhpc.errors import ModelError
from rlhpc.reshard.families.facts import HfConfig, ModelFacts, decoder_facts, refuse
from rlhpc.reshard.families.family import Family
from rlhpc.reshard.families.placement import Shape, concat, experts, qkv_blocks, qkv_groups, replicated, split

Q, K, V = (f"self_attn.{x}_proj.weight" for x in "qkv")
GATE, UP, DOWN = (f"mlp.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up", "down"))


def model_facts(hf_config: HfConfig) -> ModelFacts:
    refuse(hf_config, "mlp_only_layers", (None, []))
    refuse(hf_config, "decoder_sparse_step", (1,))
    refuse(hf_config, "shared_expert_intermediate_size", (None, 0))
    facts = decoder_facts(hf_config, qk_norm=True)
    if not facts.num_experts:
        raise ModelError("config.json of qwen3_moe lacks num_experts (or num_local_experts)")
    return facts


def layer_shapes(facts: ModelFacts) -> dict[str, Shape]:
    hidden, dim, inter = facts.hidden_size, facts.head_dim, facts.moe_intermediate_size
    return {
        "input_layernorm.weight": (hidden,),
        Q: (facts.num_heads * dim, hidden),
        K: (facts.num_kv_heads * dim, hidden),
        V: (facts.num_kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, facts.num_heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate.weight": (facts.num_experts, hidden),
        GATE: (inter, hidden),
        UP: (inter, hidden),
        DOWN: (hidden, inter),
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    model_facts=model_facts,
    layer_shapes=layer_shapes,
    trainer_layer={
        "input_layernorm.weight": replicated("input_layernorm.weight"),
        "self_attention.linear_qkv.weight": qkv_groups(Q, K, V),
        "self_attention.linear_proj.weight": split("self_attn.o_proj.weight", 1),
        "self_attention.q_layernorm.weight": replicated("self_attn.q_norm.weight"),
        "self_attention.k_layernorm.weight": replicated("self_attn.k_norm.weight"),
        "pre_mlp_layernorm.weight": replicated("post_attention_layernorm.weight"),
        "mlp.router.weight": replicated("mlp.gate.weight"),
        "mlp.experts.w13": experts(concat(split(GATE, 0), split(UP, 0))),
        "mlp.experts.w2": experts(split(DOWN, 1)),
    },
    rollout_layer={  # vLLM 0.32, models/qwen3_moe.py and layers/fused_moe
        "input_layernorm.weight": replicated("input_layernorm.weight"),
        "self_attn.qkv_proj.weight": qkv_blocks(Q, K, V),
        "self_attn.o_proj.weight": split("self_attn.o_proj.weight", 1),
        "self_attn.q_norm.weight": replicated("self_attn.q_norm.weight"),
        "self_attn.k_norm.weight": replicated("self_attn.k_norm.weight"),
        "post_attention_layernorm.weight": replicated("post_attention_layernorm.weight"),
        "mlp.gate.weight": replicated("mlp.gate.weight"),
        "mlp.experts.routed_experts.w13_weight": experts(concat(split(GATE, 0), split(UP, 0))),
        "mlp.experts.routed_experts.w2_weight": experts(split(DOWN, 1)),
    },
)
