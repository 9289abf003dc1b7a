"""Names and layouts per model family: how HF tensors lie in the trainer's and the rollout engine's
parameters."""

from __future__ import annotations

from rlhpc.errors import ModelError
from rlhpc.reshard.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from rlhpc.reshard.families.facts import HfConfig, ModelFacts
from rlhpc.reshard.families.family import Family, padded_vocab_size
from rlhpc.reshard.families.llama import LLAMA
from rlhpc.reshard.families.mixtral import MIXTRAL
from rlhpc.reshard.families.qwen2 import QWEN2
from rlhpc.reshard.families.qwen3 import QWEN3
from rlhpc.reshard.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "Family", "HfConfig", "ModelFacts", "family_for", "model_facts", "padded_vocab_size"]

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (DEEPSEEK_V3, KIMI_K2, LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)
}


def family_for(hf_config: HfConfig) -> Family:
    """The family of an HF `config.json`. Raises ModelError for an unknown `model_type`."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"config.json: model_type={model_type!r} is unknown; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def model_facts(hf_config: HfConfig) -> ModelFacts:
    """The facts of an HF `config.json`. Raises ModelError where the model isn't supported."""
    return family_for(hf_config).model_facts(hf_config)
