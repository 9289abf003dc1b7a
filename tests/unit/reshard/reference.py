"""What each rank's parameters must be, written with numpy's reshape, split and stack instead of boxes."""

from __future__ import annotations

import numpy as np

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.reshard.families import ModelFacts

Arrays = dict[str, np.ndarray]

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 70,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


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


def _experts(tensors: Arrays, prefix: str, chosen: range, tp: int, tp_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(w13, w2) of the chosen experts, each split over tp_size ranks."""
    w13, w2 = [], []
    for e in chosen:
        gate, up, down = (tensors[f"{prefix}mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up", "down"))
        w13.append(np.concatenate([np.split(gate, tp_size)[tp], np.split(up, tp_size)[tp]]))
        w2.append(np.split(down, tp_size, axis=1)[tp])
    return np.stack(w13), np.stack(w2)


def _vocab(table: np.ndarray, padded: int, tp: int, tp_size: int) -> np.ndarray:
    """The rank's rows; pad rows are zero."""
    return np.split(np.concatenate([table, np.zeros((padded - len(table), table.shape[1]), table.dtype)]), tp_size)[tp]


def trainer_buffers(tensors: Arrays, facts: ModelFacts, layout: ParallelLayout, rank: int) -> Arrays:
    """Megatron's parameters of one rank."""
    at = layout.coords(rank)
    per_stage, groups = facts.num_layers // layout.pp, facts.num_kv_heads
    buffers: Arrays = {}
    for local in range(per_stage):
        hf, ours = f"model.layers.{at.pp * per_stage + local}.", f"decoder.layers.{local}."
        q, k, v = (tensors[f"{hf}self_attn.{x}_proj.weight"] for x in "qkv")
        grouped = np.concatenate([x.reshape(groups, -1, facts.hidden_size) for x in (q, k, v)], axis=1)
        local_experts = facts.num_experts // layout.ep
        chosen = range(at.ep * local_experts, (at.ep + 1) * local_experts)
        w13, w2 = _experts(tensors, hf, chosen, at.etp, layout.etp)
        proj = np.split(tensors[hf + "self_attn.o_proj.weight"], layout.tp, axis=1)[at.tp]
        buffers |= {
            ours + "input_layernorm.weight": tensors[hf + "input_layernorm.weight"],
            ours + "self_attention.linear_qkv.weight": np.split(grouped.reshape(-1, facts.hidden_size), layout.tp)[
                at.tp
            ],
            ours + "self_attention.linear_proj.weight": proj,
            ours + "self_attention.q_layernorm.weight": tensors[hf + "self_attn.q_norm.weight"],
            ours + "self_attention.k_layernorm.weight": tensors[hf + "self_attn.k_norm.weight"],
            ours + "pre_mlp_layernorm.weight": tensors[hf + "post_attention_layernorm.weight"],
            ours + "mlp.router.weight": tensors[hf + "mlp.gate.weight"],
            ours + "mlp.experts.w13": w13,
            ours + "mlp.experts.w2": w2,
        }
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
        q, k, v = (tensors[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv")
        kv_copies = max(tp_size // facts.num_kv_heads, 1)
        by_head = [np.repeat(x.reshape(facts.num_kv_heads, -1, x.shape[1]), kv_copies, axis=0) for x in (k, v)]
        local = [np.split(q, tp_size)[tp], *(np.concatenate(np.split(x, tp_size)[tp]) for x in by_head)]
        if expert_parallel:
            per_rank = facts.num_experts // tp_size
            w13, w2 = _experts(tensors, layer, range(tp * per_rank, (tp + 1) * per_rank), 0, 1)
        else:
            w13, w2 = _experts(tensors, layer, range(facts.num_experts), tp, tp_size)
        same = ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "mlp.gate")
        buffers |= {f"{layer}{name}.weight": tensors[f"{layer}{name}.weight"] for name in same}
        buffers |= {
            layer + "self_attn.qkv_proj.weight": np.concatenate(local),
            layer + "self_attn.o_proj.weight": np.split(tensors[layer + "self_attn.o_proj.weight"], tp_size, 1)[tp],
            layer + "mlp.experts.routed_experts.w13_weight": w13,
            layer + "mlp.experts.routed_experts.w2_weight": w2,
        }
    padded = -(-facts.vocab_size // 64) * 64
    heads = ("model.embed_tokens.weight",) if facts.tied_embeddings else ("model.embed_tokens.weight", "lm_head.weight")
    buffers |= {name: _vocab(tensors[name], padded, tp, tp_size) for name in heads}
    buffers["model.norm.weight"] = tensors["model.norm.weight"]
    return buffers
