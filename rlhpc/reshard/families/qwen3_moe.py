"""Qwen3-MoE (Qwen3-30B-A3B and kin): grouped-query attention with QK norm, softmax top-k experts in every
layer."""

from __future__ import annotations

from rlhpc.reshard.families.facts import HfConfig, ModelFacts, decoder_facts, refuse
from rlhpc.reshard.families.family import Family
from rlhpc.reshard.families.parts import attention, sparse_mlp


def model_facts(hf_config: HfConfig) -> ModelFacts:
    refuse(hf_config, "mlp_only_layers", (None, []))
    refuse(hf_config, "decoder_sparse_step", (1,))
    refuse(hf_config, "shared_expert_intermediate_size", (None, 0))
    return decoder_facts(hf_config, sparse=True, qk_norm=True)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    model_facts=model_facts,
    layer=(attention, sparse_mlp("mlp", gate="gate_proj", up="up_proj", down="down_proj")),
)
