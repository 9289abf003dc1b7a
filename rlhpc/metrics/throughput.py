"""Model FLOPs of decoder-only transformers, and the share of the hardware's peak that they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Families with grouped-query or latent attention and gated MLPs, which is what the counts below assume.
FAMILIES = (
    "deepseek_v3", "kimi_k2", "llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
)  # fmt: skip

# Dense bf16 peaks in FLOP/s, from NVIDIA's data sheets (SXM unless named; half the figure "with sparsity").
PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}


def peak_flops(device_name: str) -> float | None:
    """bf16 FLOP/s of a CUDA device by its name, such as "NVIDIA H200"; None where the table has none."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)


def active_parameters(config: Mapping[str, Any]) -> int:
    """Weights that multiply each token, from an HF config.json: all but the embedding's lookup and the norms.

    Of the experts, the `num_experts_per_tok` that a token is routed to (and a shared one), and the router.
    """
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    attention = _latent_attention(config) if "kv_lora_rank" in config else _grouped_query_attention(config)
    dense_mlp = 3 * hidden * int(config["intermediate_size"])
    mlp = sum(_moe_mlp(config) if _is_moe(config, layer) else dense_mlp for layer in range(layers))
    return layers * attention + mlp + hidden * int(config["vocab_size"])


def _grouped_query_attention(config: Mapping[str, Any]) -> int:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    return hidden * head_dim * (2 * heads + 2 * kv_heads)


def _latent_attention(config: Mapping[str, Any]) -> int:
    """As the trainer computes it, and an engine its prompts: keys and values of all heads are made."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rope, value, rank = (int(config[name]) for name in ("qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    nope, q_rank = int(config["qk_nope_head_dim"]), int(config.get("q_lora_rank") or 0)
    query = q_rank * (hidden + heads * (nope + rope)) if q_rank else hidden * heads * (nope + rope)
    return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _num_experts(config: Mapping[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _is_moe(config: Mapping[str, Any], layer: int) -> bool:
    if not _num_experts(config) or layer in (config.get("mlp_only_layers") or ()):
        return False
    if layer < int(config.get("first_k_dense_replace") or 0):
        return False
    return (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def _moe_mlp(config: Mapping[str, Any]) -> int:
    hidden = int(config["hidden_size"])
    expert = 3 * hidden * int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared_width = int(config.get("shared_expert_intermediate_size") or 0)
    shared = 3 * hidden * shared_width + (hidden if shared_width else 0)  # and its gate
    shared += int(config.get("n_shared_experts") or 0) * expert
    return int(config["num_experts_per_tok"]) * expert + shared + hidden * _num_experts(config)


def forward_flops_per_token(config: Mapping[str, Any], mean_context_tokens: float) -> float:
    """2 per active weight, and for each key attended to 2 per layer, head and element of a key and of a value (scores
    and weighted values).

    A training step costs three times as much; recomputed activations are not counted, as usual for MFU (PaLM,
    arXiv 2204.02311 appendix B).
    """
    heads = int(config["num_attention_heads"])
    if "kv_lora_rank" in config:
        sizes = sum(int(config[name]) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    else:
        sizes = 2 * int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    attention = 2 * int(config["num_hidden_layers"]) * heads * sizes * mean_context_tokens
    return 2.0 * active_parameters(config) + attention


def train_metrics(
    config: Mapping[str, Any], record: Mapping[str, float], *, epochs: int, num_ranks: int, peak: float | None
) -> dict[str, float]:
    """`perf/tflops/actor`, per rank over the update phase, and `perf/mfu/actor` where the peak is known.

    Empty for a family whose FLOPs are not known, and for records without an update.
    """
    seconds, num_tokens = record.get("timing_s/update_actor"), record.get("perf/total_num_tokens")
    if config.get("model_type") not in FAMILIES or not seconds or not num_tokens:
        return {}
    flops = 3 * forward_flops_per_token(config, record["perf/mean_context_tokens"]) * num_tokens * epochs
    achieved = flops / seconds / num_ranks
    metrics = {"perf/tflops/actor": achieved / 1e12}
    return metrics | ({"perf/mfu/actor": achieved / peak} if peak else {})
