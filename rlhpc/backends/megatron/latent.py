"""Multi-head latent attention (arXiv 2405.04434 section 2.1) over packed sequences.

Megatron-core's own (0.16.1, multi_latent_attention.py) rotates packed sequences one by one in Python, and without
Transformer Engine takes the projections to latent vectors for column-parallel linear layers, whose gathered output
gets but a rank's own part of the gradient: the part of keys that all heads share would learn from one rank's heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from torch.nn import Linear
from torch.nn.utils import skip_init

from rlhpc.backends.megatron.attention import PackedAttention, rotation_by
from rlhpc.backends.megatron.norm import RMSNorm
from rlhpc.reshard.families.facts import LatentAttention


@dataclass
class LatentAttentionSubmodules:
    """What Megatron's Attention builds of a layer's spec."""

    core_attention: type
    linear_proj: ModuleSpec | type


def _rotate_end(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`cos` and `sin` [T, 1, rope] hold the angles of all pairs twice. The rotated elements come out in another order,
    the same for queries and keys: their products don't see it."""
    kept, rotated = x.split([x.shape[-1] - cos.shape[-1], cos.shape[-1]], -1)
    cos, sin = (angles.chunk(2, -1)[0] for angles in (cos, sin))
    first, second = rotated[..., ::2], rotated[..., 1::2]
    return torch.cat([kept, first * cos - second * sin, second * cos + first * sin], -1)


class LatentCoreAttention(PackedAttention):
    """PackedAttention that rotates the last elements of queries and keys, neighbours together."""

    rotated = staticmethod(rotation_by(_rotate_end))


class LatentSelfAttention(Attention):
    """Every tensor-parallel rank projects its part of the sequence to latent vectors, by weights that all hold, and the
    whole sequence from those to its own heads."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LatentAttentionSubmodules,
        layer_number: int,
        latent: LatentAttention,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        **slot: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, attention_type="self", **slot)
        self.latent, heads = latent, config.num_attention_heads
        self.q_layernorm = self.k_layernorm = None  # the forward asks for them
        query_size = heads * (latent.nope_dim + latent.rope_dim)
        if latent.q_rank is None:
            self.linear_q_proj = self._to_heads(config.hidden_size, query_size)
        else:
            self.linear_q_down_proj = self._to_latent(latent.q_rank)
            self.q_layernorm = RMSNorm(config, latent.q_rank, config.layernorm_epsilon)
            self.linear_q_up_proj = self._to_heads(latent.q_rank, query_size)
        self.linear_kv_down_proj = self._to_latent(latent.kv_rank + latent.rope_dim)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, config.layernorm_epsilon)
        self.linear_kv_up_proj = self._to_heads(latent.kv_rank, heads * (latent.nope_dim + latent.v_dim))

    def _to_latent(self, size: int) -> Linear:
        linear = skip_init(Linear, self.config.hidden_size, size, bias=False, dtype=self.config.params_dtype)
        linear.weight.sequence_parallel = self.config.sequence_parallel  # Megatron adds up the ranks' gradients
        return linear

    def _to_heads(self, input_size: int, output_size: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden_states [T / tp, 1, H] -> query and key [T, 1, heads / tp, nope + rope], not rotated yet, and value
        [T, 1, heads / tp, v]."""
        latent, heads = self.latent, self.num_attention_heads_per_partition
        if latent.q_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        compressed, shared = self.linear_kv_down_proj(hidden_states).split([latent.kv_rank, latent.rope_dim], -1)
        expanded, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        if self.config.sequence_parallel:  # its gradient is the sum of what the ranks' heads give
            shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)
        expanded = expanded.unflatten(-1, (heads, latent.nope_dim + latent.v_dim))
        unrotated, value = expanded.split([latent.nope_dim, latent.v_dim], -1)
        key = torch.cat([unrotated, shared.unsqueeze(-2).expand(-1, -1, heads, -1)], -1)
        return query.unflatten(-1, (heads, latent.nope_dim + latent.rope_dim)), key, value
