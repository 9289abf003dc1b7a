"""What each rank's parameters must be, written with numpy's reshape, split and stack instead of boxes."""

from __future__ import annotations

import numpy as np

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.reshard.families import ModelFacts

Arrays = dict[str, np.ndarray]

_DECODER = {
    "hidden_act": "silu",
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "vocab_size": 70,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
CONFIG = {
    **_DECODER,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
CONFIGS = {
    "qwen3_moe": CONFIG,
    "mixtral": {
        **_DECODER, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
        "tie_word_embeddings": True, "head_dim": 2,
    },
    "llama": {**_DECODER, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**_DECODER, "model_type": "qwen2", "head_dim": 2},
    "qwen3": {**_DECODER, "model_type": "qwen3", "tie_word_embeddings": True},
    "deepseek_v3": {
        **_DECODER, "model_type": "deepseek_v3", "num_hidden_layers": 7, "num_key_value_heads": 8,
        "q_lora_rank": 10, "kv_lora_rank": 12,
        "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4, "first_k_dense_replace": 1,
        "moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": True,
        "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
}  # fmt: skip


def canonical_arrays(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    """Every element of every tensor is different: an element in the wrong place can't go unnoticed."""
    rng = np.random.default_rng(seed)
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    values = rng.permutation(sum(sizes.values())).astype(np.float32)
    ends = np.cumsum(list(sizes.values()))
    return {
        name: part.reshape(shape)
        for (name, shape), part in zip(shapes.items(), np.split(values, ends[:-1]), strict=True)
    }


def _gate_up_down(tensors: Arrays, mlp: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By either of the names that published checkpoints use."""
    for names in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        if f"{mlp}.{names[0]}.weight" in tensors:
            gate, up, down = (tensors[f"{mlp}.{name}.weight"] for name in names)
            return gate, up, down
    raise KeyError(mlp)


def _mlp(tensors: Arrays, mlp: str, tp: int, tp_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(gate over up, down), each split over tp_size ranks."""
    gate, up, down = _gate_up_down(tensors, mlp)
    return (
        np.concatenate([np.split(gate, tp_size)[tp], np.split(up, tp_size)[tp]]),
        np.split(down, tp_size, axis=1)[tp],
    )


def _experts(tensors: Arrays, block: str, chosen: range, tp: int, tp_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(w13, w2) of the chosen experts, each split over tp_size ranks."""
    w13, w2 = zip(*(_mlp(tensors, f"{block}.experts.{e}", tp, tp_size) for e in chosen), strict=True)
    return np.stack(w13), np.stack(w2)


def _qkv(tensors: Arrays, attention: str) -> dict[str, list[np.ndarray]]:
    """q, k and v of each kind of parameter that the model has."""
    kinds = [kind for kind in ("weight", "bias") if f"{attention}.q_proj.{kind}" in tensors]
    return {kind: [tensors[f"{attention}.{x}_proj.{kind}"] for x in "qkv"] for kind in kinds}


def _latent(tensors: Arrays, attention: str, tp: int, tp_size: int) -> tuple[Arrays, Arrays]:
    """Of the projections and norms that the layer has, by HF's names: what every rank has whole, and this rank's heads'
    rows."""
    whole = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    by_head = ("q_proj", "q_b_proj", "kv_b_proj")
    found = {name: tensors.get(f"{attention}.{name}.weight") for name in (*whole, *by_head)}
    return (
        {name: found[name] for name in whole if found[name] is not None},
        {name: np.split(found[name], tp_size)[tp] for name in by_head if found[name] is not None},
    )


def _block(facts: ModelFacts) -> str:
    return "block_sparse_moe" if facts.model_type == "mixtral" else "mlp"


def _vocab(table: np.ndarray, padded: int, tp: int, tp_size: int) -> np.ndarray:
    """The rank's rows; pad rows are zero."""
    return np.split(np.concatenate([table, np.zeros((padded - len(table), table.shape[1]), table.dtype)]), tp_size)[tp]


def trainer_buffers(tensors: Arrays, facts: ModelFacts, layout: ParallelLayout, rank: int) -> Arrays:
    """Megatron's parameters of one rank."""
    at = layout.coords(rank)
    per_stage, groups = -(-facts.num_layers // layout.pp), facts.num_kv_heads
    buffers: Arrays = {}
    for local in range(min(per_stage, facts.num_layers - at.pp * per_stage)):
        hf, ours = f"model.layers.{at.pp * per_stage + local}.", f"decoder.layers.{local}."
        latent = _latent(tensors, hf + "self_attn", at.tp, layout.tp) if facts.latent else ({}, {})
        names = {"q_a_proj": "linear_q_down_proj", "q_a_layernorm": "q_layernorm", "q_b_proj": "linear_q_up_proj"}
        names |= {"kv_a_proj_with_mqa": "linear_kv_down_proj", "kv_a_layernorm": "kv_layernorm"}
        names |= {"kv_b_proj": "linear_kv_up_proj", "q_proj": "linear_q_proj"}
        buffers |= {f"{ours}self_attention.{names[x]}.weight": each for part in latent for x, each in part.items()}
        for kind, qkv in ({} if facts.latent else _qkv(tensors, hf + "self_attn")).items():
            grouped = np.concatenate([x.reshape(groups, -1, *x.shape[1:]) for x in qkv], axis=1)
            rows = np.split(grouped.reshape(-1, *qkv[0].shape[1:]), layout.tp)[at.tp]
            buffers[f"{ours}self_attention.linear_qkv.{kind}"] = rows
        for x in "qk" if facts.model_type in ("qwen3", "qwen3_moe") else "":
            buffers[f"{ours}self_attention.{x}_layernorm.weight"] = tensors[f"{hf}self_attn.{x}_norm.weight"]
        proj = np.split(tensors[hf + "self_attn.o_proj.weight"], layout.tp, axis=1)[at.tp]
        buffers |= {
            ours + "input_layernorm.weight": tensors[hf + "input_layernorm.weight"],
            ours + "self_attention.linear_proj.weight": proj,
            ours + "pre_mlp_layernorm.weight": tensors[hf + "post_attention_layernorm.weight"],
        }
        if f"{hf}{_block(facts)}.gate.weight" in tensors:
            local_experts = facts.num_experts // layout.ep
            chosen = range(at.ep * local_experts, (at.ep + 1) * local_experts)
            w13, w2 = _experts(tensors, hf + _block(facts), chosen, at.etp, layout.etp)
            router = tensors[f"{hf}{_block(facts)}.gate.weight"]
            buffers |= {ours + "mlp.router.weight": router, ours + "mlp.experts.w13": w13, ours + "mlp.experts.w2": w2}
            if facts.shared_intermediate_size:
                fc1, fc2 = _mlp(tensors, hf + "mlp.shared_experts", at.tp, layout.tp)
                shared = ours + "mlp.shared_experts.linear_"
                buffers |= {f"{shared}fc1.weight": fc1, f"{shared}fc2.weight": fc2}
                buffers[ours + "mlp.router.expert_bias"] = tensors[hf + "mlp.gate.e_score_correction_bias"]
        else:
            fc1, fc2 = _mlp(tensors, hf + "mlp", at.tp, layout.tp)
            buffers |= {ours + "mlp.linear_fc1.weight": fc1, ours + "mlp.linear_fc2.weight": fc2}
    padded = -(-facts.vocab_size // layout.tp) * layout.tp
    embed = _vocab(tensors["model.embed_tokens.weight"], padded, at.tp, layout.tp)
    if at.pp == 0:
        buffers["embedding.word_embeddings.weight"] = embed
    if at.pp == layout.pp - 1:
        buffers["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
        if not facts.tied_embeddings:
            buffers["output_layer.weight"] = _vocab(tensors["lm_head.weight"], padded, at.tp, layout.tp)
        elif layout.pp > 1:
            buffers["output_layer.weight"] = embed
    return buffers


def rollout_buffers(tensors: Arrays, facts: ModelFacts, tp: int, tp_size: int, *, expert_parallel: bool) -> Arrays:
    """vLLM's parameters of tensor-parallel rank `tp`."""
    buffers: Arrays = {}
    for i in range(facts.num_layers):
        layer = f"model.layers.{i}."
        kv_copies = max(tp_size // facts.num_kv_heads, 1)
        if facts.latent:
            whole, by_head = _latent(tensors, layer + "self_attn", tp, tp_size)
            if "q_a_proj" in whole:
                fused = [whole.pop("q_a_proj"), whole.pop("kv_a_proj_with_mqa")]
                whole["fused_qkv_a_proj"] = np.concatenate(fused)
            buffers |= {f"{layer}self_attn.{name}.weight": each for name, each in (whole | by_head).items()}
        for kind, (q, k, v) in ({} if facts.latent else _qkv(tensors, layer + "self_attn")).items():
            by_head = [np.repeat(x.reshape(facts.num_kv_heads, -1, *x.shape[1:]), kv_copies, axis=0) for x in (k, v)]
            local = [np.split(q, tp_size)[tp], *(np.concatenate(np.split(x, tp_size)[tp]) for x in by_head)]
            buffers[f"{layer}self_attn.qkv_proj.{kind}"] = np.concatenate(local)
        same = ["input_layernorm", "post_attention_layernorm"]
        same += ["self_attn.q_norm", "self_attn.k_norm"] if facts.model_type in ("qwen3", "qwen3_moe") else []
        sparse = f"{layer}{_block(facts)}.gate.weight" in tensors
        same += [f"{_block(facts)}.gate"] if sparse else []
        buffers |= {f"{layer}{name}.weight": tensors[f"{layer}{name}.weight"] for name in same}
        out = np.split(tensors[layer + "self_attn.o_proj.weight"], tp_size, 1)[tp]
        buffers[layer + "self_attn.o_proj.weight"] = out
        block = layer + _block(facts)
        if sparse:
            per_rank = facts.num_experts // tp_size
            whole = (range(tp * per_rank, (tp + 1) * per_rank), 0, 1)
            parts = whole if expert_parallel else (range(facts.num_experts), tp, tp_size)
            w13, w2 = _experts(tensors, block, *parts)
            buffers |= {
                f"{block}.experts.routed_experts.w13_weight": w13,
                f"{block}.experts.routed_experts.w2_weight": w2,
            }
            if facts.shared_intermediate_size:
                gate_up, down = _mlp(tensors, f"{block}.shared_experts", tp, tp_size)
                shared = f"{block}.shared_experts."
                buffers |= {f"{shared}gate_up_proj.weight": gate_up, f"{shared}down_proj.weight": down}
                bias = f"{block}.gate.e_score_correction_bias"
                buffers[bias] = tensors[bias]
        else:
            gate_up, down = _mlp(tensors, block, tp, tp_size)
            buffers |= {f"{block}.gate_up_proj.weight": gate_up, f"{block}.down_proj.weight": down}
    padded = -(-facts.vocab_size // 64) * 64
    heads = ("model.embed_tokens.weight",) if facts.tied_embeddings else ("model.embed_tokens.weight", "lm_head.weight")
    buffers |= {name: _vocab(tensors[name], padded, tp, tp_size) for name in heads}
    buffers["model.norm.weight"] = tensors["model.norm.weight"]
    return buffers
