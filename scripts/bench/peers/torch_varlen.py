"""torch's own FlashAttention 2 as an attention of Transformers, for verl on a machine without the flash-attn package.

verl imports it by actor_rollout_ref.model.external_lib=torch_varlen; the model then takes it by
override_config.attn_implementation=torch_varlen. It is for packed sequences, which verl's use_remove_padding makes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

NAME = "torch_varlen"


@functools.lru_cache(maxsize=1)
def boundaries(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where sequences begin, int32 [sequences + 1], and the longest's tokens. All layers of a model get the same
    `position_ids`, so the device is asked once in a forward."""
    positions = position_ids.flatten()
    ends = torch.tensor([positions.numel()], device=positions.device)
    starts = torch.cat([(positions == 0).nonzero().flatten(), ends]).int()
    return starts, int(starts.diff().max())


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [batch, heads, T, head_dim], key and value with kv_heads -> [batch, T, heads, head_dim], causal within each
    sequence. Positions begin at 0 in every sequence."""
    if attention_mask is not None:
        raise ValueError(f"{NAME} is for packed sequences, not for padded ones; set use_remove_padding=true")
    spans, longest = boundaries(position_ids)
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    packed = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    output = varlen_attn(*packed, spans, spans, longest, longest, scale=scaling, window_size=(-1, 0))
    return output.unflatten(0, (query.shape[0], -1)), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, flash_attention_mask)
