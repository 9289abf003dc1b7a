"""DeepSeek-V3's shape in Megatron's parameters: 671 billion of them, and not one in memory.

Names and sizes are those of its published config.json and of Transformers 5 (modeling_deepseek_v3.py), without the
layer for multi-token prediction and the routers' correction biases, which no gradient updates. Latent attention lies on
tensor-parallel ranks as in Megatron-core 0.16.1 (multi_latent_attention.py): the down-projections whole on each.
"""

from __future__ import annotations

from functools import partial

from rlhpc.layout.parallel import ParallelLayout
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.families.facts import ModelFacts, decoder_facts
from rlhpc.reshard.families.family import Family
from rlhpc.reshard.families.parts import Part, dense_mlp, sparse_mlp
from rlhpc.reshard.families.placement import Placement, Shape, concat, replicated, split

NUM_DENSE_LAYERS = 3
Q_RANK, KV_RANK, NOPE_DIM, ROPE_DIM, V_DIM = 1536, 512, 128, 64, 128
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_act": "silu", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 129280, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "max_position_embeddings": 163840, "tie_word_embeddings": False,
}  # fmt: skip


def latent_attention(facts: ModelFacts) -> Part:
    """Multi-head latent attention and the norm before it, in the order in which Megatron makes the parameters."""
    hidden, heads, attn = facts.hidden_size, facts.num_heads, "self_attn."
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        attn + "o_proj.weight": (hidden, heads * V_DIM),
        attn + "q_a_proj.weight": (Q_RANK, hidden),
        attn + "q_b_proj.weight": (heads * (NOPE_DIM + ROPE_DIM), Q_RANK),
        attn + "kv_a_proj_with_mqa.weight": (KV_RANK + ROPE_DIM, hidden),
        attn + "kv_b_proj.weight": (heads * (NOPE_DIM + V_DIM), KV_RANK),
        attn + "q_a_layernorm.weight": (Q_RANK,),
        attn + "kv_a_layernorm.weight": (KV_RANK,),
    }
    dims = {"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1}
    placed: dict[str, Placement] = {
        name: split(name, dims[part]) if (part := name.split(".")[-2]) in dims else replicated(name) for name in shapes
    }
    return Part(shapes, placed, {})


def shared_expert(facts: ModelFacts) -> Part:
    """The one that every token goes through, beside the routed ones."""
    hidden, width = facts.hidden_size, facts.moe_intermediate_size
    gate, up, down = (f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down"))
    trainer = {
        "mlp.shared_experts.linear_fc1.weight": concat(split(gate, 0), split(up, 0)),
        "mlp.shared_experts.linear_fc2.weight": split(down, 1),
    }
    return Part({gate: (width, hidden), up: (width, hidden), down: (hidden, width)}, trainer, {})


DENSE = Family("deepseek_v3", decoder_facts, (latent_attention, dense_mlp))
SPARSE = Family(
    "deepseek_v3",
    partial(decoder_facts, sparse=True),
    (latent_attention, sparse_mlp("mlp", gate="gate_proj", up="up_proj", down="down_proj"), shared_expert),
)


def trainer_specs(layout: ParallelLayout, dtype: str = "float32") -> list[ShardSpec]:
    """Of the whole model: the first layers are dense, and sharded over the attention's grid alone."""
    dense_prefixes = tuple(f"model.layers.{i}." for i in range(NUM_DENSE_LAYERS))
    dense_layout = ParallelLayout(tp=layout.tp, cp=layout.cp, pp=layout.pp, world_size=layout.world_size)
    dense = DENSE.trainer_specs(DEEPSEEK_V3, dense_layout, dtype)
    first = [spec for spec in dense if spec.name.startswith(dense_prefixes)]
    rest = [
        spec for spec in SPARSE.trainer_specs(DEEPSEEK_V3, layout, dtype) if not spec.name.startswith(dense_prefixes)
    ]
    return [rest[0], *first, *rest[1:]]  # after the embedding
