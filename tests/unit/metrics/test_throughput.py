"""FLOPs against PyTorch's own counter, run on the real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlhpc.metrics.throughput import active_parameters, forward_flops_per_token, peak_flops, train_metrics

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3_moe", {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1]}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 12}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
]


@pytest.mark.parametrize(("model_type", "options"), MODELS, ids=[name for name, _ in MODELS])
def test_forward_flops_equal_the_counted_ones(model_type: str, options: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    # Eager attention computes all scores, masked ones included: every token's context is the whole row.
    config = AutoConfig.for_model(model_type, **SHAPE | options, attn_implementation="eager")
    config._experts_implementation = "eager"  # the grouped matmul is not in PyTorch's counter
    model = AutoModelForCausalLM.from_config(config).eval()
    rows, length = 3, 20
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, 96, (rows, length)))
    expected = rows * length * forward_flops_per_token(config.to_dict(), mean_context_tokens=length)
    assert counter.get_total_flops() == expected


def test_qwen3_30b_a3b_has_three_billion_active_parameters() -> None:
    config = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    # The published 3.3 billion activated parameters count the embedding's lookup too.
    assert active_parameters(config) + 151_936 * 2048 == pytest.approx(3.3e9, rel=0.02)


def test_mfu() -> None:
    config = {**SHAPE, "model_type": "llama"}
    record = {"timing_s/update_actor": 2.0, "perf/total_num_tokens": 1000, "perf/mean_context_tokens": 10.0}
    flops = 3 * forward_flops_per_token(config, 10.0) * 1000 * 2 / 2.0 / 4
    metrics = train_metrics(config, record, epochs=2, num_ranks=4, peak=1e9)
    assert metrics == pytest.approx({"perf/tflops/actor": flops / 1e12, "perf/mfu/actor": flops / 1e9})
    assert "perf/mfu/actor" not in train_metrics(config, record, epochs=2, num_ranks=4, peak=None)
    # 26,112 active weights: 2·26112 + 4 layers·heads·head_dim·context = 4·3·4·8·10.
    assert forward_flops_per_token(config, 10.0) == 2 * 26_112 + 3_840


def test_unknown_families_and_steps_without_an_update_have_no_flops() -> None:
    record = {"timing_s/update_actor": 2.0, "perf/total_num_tokens": 1000, "perf/mean_context_tokens": 10.0}
    assert train_metrics({"model_type": "mamba"}, record, epochs=1, num_ranks=1, peak=1e12) == {}
    assert train_metrics({**SHAPE, "model_type": "llama"}, {}, epochs=1, num_ranks=1, peak=1e12) == {}


def test_peaks_by_device_name() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("Tesla T4") is None
