"""Qwen3, dense (Qwen3-0.6B to 32B): grouped-query attention with QK norm; the small ones tie their embeddings."""

from __future__ import annotations

from rlhpc.reshard.families.facts import HfConfig, ModelFacts, decoder_facts
from rlhpc.reshard.families.family import Family
from rlhpc.reshard.families.parts import attention, dense_mlp


def model_facts(hf_config: HfConfig) -> ModelFacts:
    return decoder_facts(hf_config, qk_norm=True)


QWEN3 = Family(model_type="qwen3", model_facts=model_facts, layer=(attention, dense_mlp))
