"""DeepSeek-V3 and R1, Moonlight, Kimi-K2, and others of their shape: latent attention, some dense layers before those
with experts, experts that every token goes through beside those that a router chooses by sigmoids and correction
biases."""

from __future__ import annotations

from dataclasses import replace

from rlhpc.errors import ModelError
from rlhpc.reshard.families.facts import (
    HfConfig,
    LatentAttention,
    ModelFacts,
    SigmoidRouting,
    decoder_facts,
    positive,
    refuse,
    whole_number,
)
from rlhpc.reshard.families.family import Family
from rlhpc.reshard.families.parts import correction_bias, dense_mlp, latent_attention, shared_mlp, sparse_mlp

# What config.json must say, with what vLLM and Transformers make of it otherwise.
REQUIRED = {
    "scoring_func": "sigmoid",  # vLLM: softmax
    "topk_method": "noaux_tc",  # vLLM: no correction biases
    "norm_topk_prob": True,  # Megatron renormalises in any case
}


def model_facts(hf_config: HfConfig) -> ModelFacts:
    """The norms of latent vectors have rms_norm_eps, as in vLLM; Transformers takes 1e-6 for them whatever it is."""
    for key, needed in REQUIRED.items():
        if hf_config.get(key) != needed:
            raise ModelError(
                f"config.json: {key}={hf_config.get(key)!r} is not supported for {hf_config['model_type']}; "
                f"set {needed!r} if the model was trained so, as DeepSeek-V3's own config.json says"
            )
    for key in ("q_lora_rank", "first_k_dense_replace"):  # Transformers takes DeepSeek-V3's own where one is absent
        if key not in hf_config:
            raise ModelError(f"config.json of {hf_config['model_type']} lacks {key}")
    for key, allowed in (("moe_layer_freq", (None, 1)), ("rope_interleave", (None, True)), ("index_topk", (None,))):
        refuse(hf_config, key, allowed)
    latent = LatentAttention(
        q_rank=None if hf_config.get("q_lora_rank") is None else whole_number(hf_config, "q_lora_rank"),
        kv_rank=whole_number(hf_config, "kv_lora_rank"),
        nope_dim=whole_number(hf_config, "qk_nope_head_dim"),
        rope_dim=whole_number(hf_config, "qk_rope_head_dim"),
        v_dim=whole_number(hf_config, "v_head_dim"),
    )
    sizes = {"num_experts": whole_number(hf_config, "n_routed_experts"), "head_dim": latent.nope_dim + latent.rope_dim}
    facts = decoder_facts(dict(hf_config) | sizes, sparse=True, rope_kinds=("default", "yarn"))
    facts = replace(
        facts,
        intermediate_size=whole_number(hf_config, "intermediate_size"),
        moe_intermediate_size=whole_number(hf_config, "moe_intermediate_size"),
        num_dense_layers=_num_dense_layers(hf_config, facts.num_layers),
        shared_intermediate_size=whole_number(hf_config, "n_shared_experts") * facts.moe_intermediate_size,
        sigmoid_routing=_routing(hf_config, facts),
        latent=latent,
    )
    if facts.num_kv_heads != facts.num_heads:
        raise ModelError(
            f"config.json: num_key_value_heads={facts.num_kv_heads} must be num_attention_heads={facts.num_heads}: "
            "latent attention has no groups of heads"
        )
    if latent.rope_dim % 2:
        raise ModelError(f"config.json: qk_rope_head_dim={latent.rope_dim} must be even")
    return facts


def _num_dense_layers(hf_config: HfConfig, num_layers: int) -> int:
    count = hf_config["first_k_dense_replace"]
    if type(count) is not int or not 0 <= count < num_layers:
        raise ModelError(
            f"config.json: first_k_dense_replace={count!r} must be a whole number from 0 to num_hidden_layers - 1 = "
            f"{num_layers - 1}"
        )
    return count


def _routing(hf_config: HfConfig, facts: ModelFacts) -> SigmoidRouting:
    """Megatron-core 0.16.1 judges a group by its best top-k / topk_group experts, DeepSeek by its best two: only where
    both are the same there can be groups."""
    groups, of_token = whole_number(hf_config, "n_group"), whole_number(hf_config, "topk_group")
    experts, top_k = facts.num_experts, facts.experts_per_token
    if experts % groups or of_token > groups:
        raise ModelError(
            f"config.json: n_group={groups} must divide n_routed_experts={experts}, and be at least "
            f"topk_group={of_token}"
        )
    if of_token < groups and (top_k // of_token != 2 or experts // groups < 2 or top_k > of_token * experts // groups):
        raise ModelError(
            f"config.json: topk_group={of_token} of n_group={groups} with num_experts_per_tok={top_k} of {experts} is "
            "not supported; supported: num_experts_per_tok // topk_group = 2, from groups of at least 2 experts, or "
            "n_group=1"
        )
    return SigmoidRouting(groups, of_token, positive(hf_config, "routed_scaling_factor"))


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    model_facts=model_facts,
    layer=(
        latent_attention,
        sparse_mlp("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        correction_bias,
        shared_mlp,
    ),
    dense_layer=(latent_attention, dense_mlp),
)
# vLLM (0.24, 0.32) reads it with the same classes; Transformers has none of its own.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
