"""What the layers of decoders are made of: attention and a dense or sparse MLP, each with its tensors' names, shapes
and places in both backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlhpc.reshard.families.facts import ModelFacts
from rlhpc.reshard.families.placement import (
    Placement,
    Shape,
    concat,
    experts,
    qkv_blocks,
    qkv_groups,
    replicated,
    split,
)


class Part(NamedTuple):
    """Canonical names (relative to "model.layers.{i}.", "{e}" standing for an expert) with their shapes, and two
    tables from a parameter's name within its layer to its placement."""

    shapes: Mapping[str, Shape]
    trainer: Mapping[str, Placement]
    rollout: Mapping[str, Placement]


LayerPart = Callable[[ModelFacts], Part]


def attention(facts: ModelFacts) -> Part:
    """Grouped-query attention and the norm before it; with biases of q, k and v or norms of q and k as `facts` say."""
    hidden, dim = facts.hidden_size, facts.head_dim
    rows = {"q": facts.num_heads * dim, "k": facts.num_kv_heads * dim, "v": facts.num_kv_heads * dim}
    norm, out = "input_layernorm.weight", "self_attn.o_proj.weight"
    shapes: dict[str, Shape] = {norm: (hidden,)}
    trainer, rollout = {norm: replicated(norm)}, {norm: replicated(norm)}
    for kind in ("weight", "bias") if facts.qkv_bias else ("weight",):
        names = [f"self_attn.{x}_proj.{kind}" for x in rows]
        extents = [(extent, hidden) if kind == "weight" else (extent,) for extent in rows.values()]
        shapes |= zip(names, extents, strict=True)
        trainer[f"self_attention.linear_qkv.{kind}"] = qkv_groups(*names)
        rollout[f"self_attn.qkv_proj.{kind}"] = qkv_blocks(*names)
    for x in "qk" if facts.qk_norm else "":
        shapes[name := f"self_attn.{x}_norm.weight"] = (dim,)
        trainer[f"self_attention.{x}_layernorm.weight"] = rollout[name] = replicated(name)
    shapes[out] = (hidden, rows["q"])
    trainer["self_attention.linear_proj.weight"] = rollout[out] = split(out, 1)
    return Part(shapes, trainer, rollout)


def latent_attention(facts: ModelFacts) -> Part:
    """Multi-head latent attention and the norm before it. Projections to latent vectors, which all heads share, are
    whole on every rank."""
    assert (latent := facts.latent) is not None
    hidden, heads = facts.hidden_size, facts.num_heads
    norm, out = "input_layernorm.weight", "self_attn.o_proj.weight"
    kv_a, kv_norm, kv_b = (f"self_attn.{x}.weight" for x in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"))
    shapes: dict[str, Shape] = {
        norm: (hidden,),
        kv_a: (latent.kv_rank + latent.rope_dim, hidden),
        kv_norm: (latent.kv_rank,),
        kv_b: (heads * (latent.nope_dim + latent.v_dim), latent.kv_rank),
        out: (hidden, heads * latent.v_dim),
    }
    trainer = {
        norm: replicated(norm),
        "self_attention.linear_kv_down_proj.weight": replicated(kv_a),
        "self_attention.kv_layernorm.weight": replicated(kv_norm),
        "self_attention.linear_kv_up_proj.weight": split(kv_b, 0),
        "self_attention.linear_proj.weight": split(out, 1),
    }
    rollout = {norm: replicated(norm), kv_norm: replicated(kv_norm), kv_b: split(kv_b, 0), out: split(out, 1)}
    if latent.q_rank is None:
        query = "self_attn.q_proj.weight"
        shapes[query] = (heads * facts.head_dim, hidden)
        trainer["self_attention.linear_q_proj.weight"] = rollout[query] = split(query, 0)
        rollout[kv_a] = replicated(kv_a)
    else:
        q_a, q_norm, q_b = (f"self_attn.{x}.weight" for x in ("q_a_proj", "q_a_layernorm", "q_b_proj"))
        shapes |= {q_a: (latent.q_rank, hidden), q_norm: (latent.q_rank,)}
        shapes[q_b] = (heads * facts.head_dim, latent.q_rank)
        trainer["self_attention.linear_q_down_proj.weight"] = replicated(q_a)
        trainer["self_attention.q_layernorm.weight"] = rollout[q_norm] = replicated(q_norm)
        trainer["self_attention.linear_q_up_proj.weight"] = rollout[q_b] = split(q_b, 0)
        rollout["self_attn.fused_qkv_a_proj.weight"] = concat(replicated(q_a), replicated(kv_a))
    return Part(shapes, trainer, rollout)


def dense_mlp(facts: ModelFacts) -> Part:
    """SwiGLU and the norm before it."""
    shapes, trainer, rollout = _swiglu("mlp", facts.hidden_size, facts.intermediate_size)
    return Part(
        shapes={_NORM: (facts.hidden_size,), **shapes},
        trainer={"pre_mlp_layernorm.weight": replicated(_NORM), **trainer},
        rollout={_NORM: replicated(_NORM), **rollout},
    )


def shared_mlp(facts: ModelFacts) -> Part:
    """SwiGLU beside the experts: HF's "shared experts" are one MLP of their common size."""
    return _swiglu("mlp.shared_experts", facts.hidden_size, facts.shared_intermediate_size)


def _swiglu(block: str, hidden: int, width: int) -> Part:
    gate, up, down = (f"{block}.{x}_proj.weight" for x in ("gate", "up", "down"))
    gate_up = concat(split(gate, 0), split(up, 0))
    return Part(
        shapes={gate: (width, hidden), up: (width, hidden), down: (hidden, width)},
        trainer={f"{block}.linear_fc1.weight": gate_up, f"{block}.linear_fc2.weight": split(down, 1)},
        rollout={f"{block}.gate_up_proj.weight": gate_up, down: split(down, 1)},
    )


def correction_bias(facts: ModelFacts) -> Part:
    """What is added to the router's sigmoids where experts are chosen; frozen."""
    bias = "mlp.gate.e_score_correction_bias"
    return Part({bias: (facts.num_experts,)}, {"mlp.router.expert_bias": replicated(bias)}, {bias: replicated(bias)})


def sparse_mlp(block: str, *, gate: str, up: str, down: str) -> LayerPart:
    """Top-k experts with their router, and the norm before them. HF and vLLM call the module `block`, HF an expert's
    projections `gate`, `up` and `down`."""
    router, projections = f"{block}.gate.weight", (f"{block}.experts.{{e}}.{x}.weight" for x in (gate, up, down))
    one_gate, one_up, one_down = projections
    w13, w2 = experts(concat(split(one_gate, 0), split(one_up, 0))), experts(split(one_down, 1))

    def part(facts: ModelFacts) -> Part:
        hidden, width = facts.hidden_size, facts.moe_intermediate_size
        return Part(
            shapes={
                _NORM: (hidden,),
                router: (facts.num_experts, hidden),
                one_gate: (width, hidden),
                one_up: (width, hidden),
                one_down: (hidden, width),
            },
            trainer={
                "pre_mlp_layernorm.weight": replicated(_NORM),
                "mlp.router.weight": replicated(router),
                "mlp.experts.w13": w13,
                "mlp.experts.w2": w2,
            },
            rollout={  # vLLM 0.32, layers/fused_moe
                _NORM: replicated(_NORM),
                router: replicated(router),
                f"{block}.experts.routed_experts.w13_weight": w13,
                f"{block}.experts.routed_experts.w2_weight": w2,
            },
        )

    return part


_NORM = "post_attention_layernorm.weight"
