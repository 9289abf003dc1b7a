"""Llama 2 and 3, TinyLlama, SmolLM2 and others of Llama's shape: no biases; the small ones tie their embeddings."""

from __future__ import annotations

from rlhpc.reshard.families.facts import HfConfig, ModelFacts, decoder_facts, refuse
from rlhpc.reshard.families.family import Family
from rlhpc.reshard.families.parts import attention, dense_mlp

ROPE_THETA = 10000.0  # LlamaConfig's default, which Llama 2's config.json leaves out


def model_facts(hf_config: HfConfig) -> ModelFacts:
    for bias in ("mlp_bias", "qkv_bias"):
        refuse(hf_config, bias, (None, False))
    refuse(hf_config, "sliding_window", (None,))
    return decoder_facts({"rope_theta": ROPE_THETA} | dict(hf_config))


LLAMA = Family(model_type="llama", model_facts=model_facts, layer=(attention, dense_mlp))
