"""Causal attention over packed sequences, without padding and without a [T, T] mask."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from itertools import groupby

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from rlhpc.backends.megatron.fused import fused
from rlhpc.data.types import PackedBatch
from rlhpc.reshard.families import ModelFacts

try:  # torch >= 2.10
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    VARLEN_OPTIONS: frozenset[str] = frozenset()
else:
    VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)


@dataclass
class PackedSequences(PackedSeqParams):
    """One microbatch as the model runs it: sequences sorted by length, so that equal ones lie side by side.

    `order` [T] says which token of the PackedBatch stands at each place; `runs` lists (length, number of sequences);
    `cos` and `sin` are [T, 1, head_dim], rotary angles by each token's position in its own sequence.
    """

    input_ids: torch.Tensor | None = None  # [1, T]
    position_ids: torch.Tensor | None = None  # [1, T]
    order: torch.Tensor | None = None
    runs: tuple[tuple[int, int], ...] = ()
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None

    @classmethod
    def of(
        cls, batch: PackedBatch, *, frequencies: torch.Tensor, dtype: torch.dtype, multiple: int = 1
    ) -> PackedSequences:
        """`frequencies` are rotary_frequencies' on the batch's device. `multiple`: T is filled up to a multiple of it
        with one more sequence (sequence parallelism splits T)."""
        device = batch.input_ids.device
        bounds = batch.cu_seqlens.tolist()
        spans = sorted(zip(bounds, bounds[1:], strict=False), key=lambda span: span[1] - span[0])
        order = torch.cat([torch.arange(start, stop) for start, stop in spans]).to(device)
        input_ids, position_ids = batch.input_ids[order], batch.position_ids[order]
        lengths = [stop - start for start, stop in spans]
        if filler := -len(order) % multiple:
            input_ids = torch.cat([input_ids, input_ids.new_zeros(filler)])
            position_ids = torch.cat([position_ids, torch.arange(filler, device=device)])
            lengths.append(filler)
        angles = (position_ids.float()[:, None] * frequencies).repeat(1, 2)[:, None]
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            order=order,
            runs=tuple((length, len(list(run))) for length, run in groupby(lengths)),
            cos=angles.cos().to(dtype),
            sin=angles.sin().to(dtype),
        )


def rotary_frequencies(facts: ModelFacts) -> torch.Tensor:
    """Radians per position of each pair of a head's elements, float32 [head_dim / 2] (arXiv 2104.09864)."""
    frequencies = 1.0 / facts.rope_theta ** (torch.arange(0, facts.head_dim, 2, dtype=torch.float32) / facts.head_dim)
    if (scaling := facts.rope_scaling) is None:
        return frequencies
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return frequencies / scaling.factor + kept.clamp(0, 1) * (frequencies - frequencies / scaling.factor)


class PackedAttention(torch.nn.Module):
    """Megatron's core attention slot: rotary embedding, then causal attention within each sequence.

    Rotary angles are applied here rather than by Megatron, whose packed path loops over sequences in Python.
    """

    def __init__(self, config: TransformerConfig, **slot: object) -> None:
        super().__init__()
        self.scale = config.softmax_scale  # None: 1 / sqrt(head_dim)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        /,
        *,
        packed_seq_params: PackedSequences,
        **slot: object,
    ) -> torch.Tensor:
        """query [T, heads, head_dim], key and value [T, kv_heads, head_dim] -> [T, heads * head_dim]."""
        packed = packed_seq_params
        query, key = _rotated(query, key, packed.cos, packed.sin)
        if self.scale is None and flash_takes(query):
            return self._varlen(query, key, value, packed)
        return self._by_length(query, key, value, packed)

    def _varlen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        """torch's flash attention over cu_seqlens; its options differ between torch 2.10 and 2.13."""
        options = {"window_size": (-1, 0)} if "window_size" in VARLEN_OPTIONS else {"is_causal": True}
        if "enable_gqa" in VARLEN_OPTIONS:
            options["enable_gqa"] = True
        elif query.shape[1] != key.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        spans = (packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv)
        return varlen_attn(query, key, value.contiguous(), *spans, **options).flatten(1)

    def _by_length(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        sizes = [length * count for length, count in packed.runs]
        outputs = []
        for (length, count), *qkv in zip(
            packed.runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True
        ):
            q, k, v = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in qkv)
            output = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(output.transpose(1, 2).reshape(count * length, -1))
        return torch.cat(outputs)


def flash_takes(query: torch.Tensor) -> bool:
    """Whether torch has a flash attention over cu_seqlens for it: CUDA, 16 bits, heads of at most 256 elements, a
    multiple of 8 (aten's flash_attn, 2.10 to 2.13). Everything else is batched by length."""
    size = query.shape[-1]
    return bool(VARLEN_OPTIONS) and query.is_cuda and query.element_size() == 2 and size <= 256 and size % 8 == 0


@fused
def _rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of the half-split kind (arXiv 2104.09864, as Llama and Qwen store their weights)."""
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
