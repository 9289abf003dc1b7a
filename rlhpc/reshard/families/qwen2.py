"""Qwen2 and Qwen2.5: biases of q, k and v in every layer, whatever config.json says of attention_bias."""

from __future__ import annotations

from rlhpc.errors import ModelError
from rlhpc.reshard.families.facts import HfConfig, ModelFacts, decoder_facts
from rlhpc.reshard.families.family import Family
from rlhpc.reshard.families.parts import attention, dense_mlp


def model_facts(hf_config: HfConfig) -> ModelFacts:
    facts = decoder_facts(hf_config, qkv_bias=True)
    if facts.num_heads * facts.head_dim != facts.hidden_size:  # vLLM 0.32 (qwen2.py) looks at no head_dim
        raise ModelError(
            f"config.json: head_dim={facts.head_dim} is not supported for qwen2; "
            f"it must be hidden_size / num_attention_heads = {facts.hidden_size} / {facts.num_heads}"
        )
    return facts


QWEN2 = Family(model_type="qwen2", model_facts=model_facts, layer=(attention, dense_mlp))
