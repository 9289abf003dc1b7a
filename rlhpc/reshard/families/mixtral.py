"""Mixtral (8x7B, 8x22B and upcycled models of its shape): Llama's attention, experts in every layer, routing weights
always renormalised over the chosen experts."""

from __future__ import annotations

from rlhpc.reshard.families.facts import HfConfig, ModelFacts, decoder_facts, refuse
from rlhpc.reshard.families.family import Family
from rlhpc.reshard.families.parts import attention, sparse_mlp


def model_facts(hf_config: HfConfig) -> ModelFacts:
    refuse(hf_config, "sliding_window", (None,))
    refuse(hf_config, "router_jitter_noise", (None, 0, 0.0))
    return decoder_facts(hf_config, sparse=True, norm_topk_prob=True)


MIXTRAL = Family(
    model_type="mixtral",
    model_facts=model_facts,
    # Published checkpoints hold these names, and Transformers 5, whose module is called mlp, reads and writes them.
    layer=(attention, sparse_mlp("block_sparse_moe", gate="w1", up="w3", down="w2")),
)
