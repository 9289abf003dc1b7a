"""Causal attention over packed sequences, without padding and without a [T, T] mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch.nn.functional import scaled_dot_product_attention

from rlhpc.backends.megatron.attention_backend import Heads, dot_product, flash_attention, fused_attention
from rlhpc.backends.megatron.fused import fused
from rlhpc.backends.megatron.replay import Routing
from rlhpc.data.types import PackedBatch
from rlhpc.reshard.families import ModelFacts
from rlhpc.reshard.families.facts import YarnScaling


@dataclass
class PackedSequences(PackedSeqParams):
    """One microbatch as the model runs it: sequences sorted by length, so that equal ones lie side by side.

    `order` [T] says which token of the PackedBatch stands at each place; `runs` lists (length, number of sequences);
    `cos` and `sin` are [T, 1, rope_dim], rotary angles by each token's position in its own sequence.
    """

    input_ids: torch.Tensor | None = None  # [1, T]
    position_ids: torch.Tensor | None = None  # [1, T]
    order: torch.Tensor | None = None
    runs: tuple[tuple[int, int], ...] = ()
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    routing: Routing | None = None  # of the tokens that this rank routes
    counted: torch.Tensor | None = None  # bool, which of these the routers count

    @classmethod
    def of(
        cls, batch: PackedBatch, *, frequencies: torch.Tensor, dtype: torch.dtype, multiple: int = 1
    ) -> PackedSequences:
        """`frequencies` are rotary_frequencies' on the batch's device. `multiple`: T is filled up to a multiple of it
        with one more sequence (sequence parallelism splits T)."""
        device = batch.input_ids.device
        bounds = batch.cu_seqlens.tolist()
        spans = sorted(zip(bounds, bounds[1:], strict=False), key=lambda span: span[1] - span[0])
        lengths = [stop - start for start, stop in spans]
        starts, counts = torch.tensor([[start for start, _ in spans], lengths]).to(device, non_blocking=True)
        # Made there: a copy of this size would wait for all that comes from host memory (offload.py).
        order = torch.arange(sum(lengths), device=device)
        order += torch.repeat_interleave(starts - counts.cumsum(0) + counts, counts, output_size=len(order))
        input_ids, position_ids = batch.input_ids[order], batch.position_ids[order]
        if filler := -len(order) % multiple:
            input_ids = torch.cat([input_ids, input_ids.new_zeros(filler)])
            position_ids = torch.cat([position_ids, torch.arange(filler, device=device)])
            lengths.append(filler)
        angles = (position_ids.float()[:, None] * frequencies).repeat(1, 2)[:, None]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
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
    """Radians per position of each pair of a head's rotated elements, float32 [rope_dim / 2] (arXiv 2104.09864)."""
    frequencies = 1.0 / facts.rope_theta ** (torch.arange(0, facts.rope_dim, 2, dtype=torch.float32) / facts.rope_dim)
    if (scaling := facts.rope_scaling) is None:
        return frequencies
    if isinstance(scaling, YarnScaling):
        return _yarn(frequencies, facts.rope_theta, scaling)
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return frequencies / scaling.factor + kept.clamp(0, 1) * (frequencies - frequencies / scaling.factor)


def _yarn(frequencies: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """arXiv 2309.00071 section 3.2, with the bounds rounded outwards to whole pairs as in DeepSeek's own code."""

    def pair(turns: float) -> float:
        """The (fractional) number of the pair that turns so often over the original positions."""
        return len(frequencies) * math.log(scaling.original_positions / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(pair(scaling.fast_turns)), 0)
    last = min(math.ceil(pair(scaling.slow_turns)), 2 * len(frequencies) - 1)
    ramp = (torch.arange(len(frequencies), dtype=torch.float32) - first) / max(last - first, 0.001)
    return torch.lerp(frequencies, frequencies / scaling.factor, ramp.clamp(0, 1))


def rotation_by(rotate: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """What rotates queries and keys by `rotate(x, cos, sin)`, both in one kernel."""

    @fused
    def rotated(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(query, cos, sin), rotate(key, cos, sin)

    return rotated


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the half-split kind (arXiv 2104.09864, as Llama and Qwen store their weights)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PackedAttention(torch.nn.Module):
    """Megatron's core attention slot: rotary embedding, then causal attention within each sequence, by the backend that
    `config.attention_backend` names (attention_backend finds it).

    Rotary angles are applied here rather than by Megatron, whose packed path loops over sequences in Python.
    """

    rotated = staticmethod(rotation_by(_rotate))

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **slot: object) -> None:
        """`softmax_scale`: None for the square root of 1 / head_dim."""
        super().__init__()
        self.backend, self.scale = config.attention_backend, softmax_scale
        if self.backend is AttnBackend.fused:
            tp = config.tensor_model_parallel_size
            heads = Heads.of(config.num_attention_heads, config.num_query_groups, config.kv_channels, tp)
            self.dot_product = dot_product(heads)

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
        """query [T, heads, head_dim], key [T, kv_heads, head_dim], value [T, kv_heads, v_head_dim]
        -> [T, heads * v_head_dim]."""
        query, key = self.rotated(query, key, packed_seq_params.cos, packed_seq_params.sin)
        return self.attend(query, key, value, packed_seq_params)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        """The same without rotation."""
        if self.backend not in (AttnBackend.fused, AttnBackend.flash):
            return self._by_length(query, key, value, packed)
        spans, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        if self.backend is AttnBackend.fused:
            return fused_attention(self.dot_product, query, key, value.contiguous(), spans, longest)
        return flash_attention(query, key, value, spans, longest, self.scale)

    def _by_length(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        sizes = [length * count for length, count in packed.runs]
        outputs = []
        for (length, count), *qkv in zip(
            packed.runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True
        ):
            q, k, v = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in qkv)
            groups = q.shape[1] != k.shape[1]
            output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=groups)
            outputs.append(output.transpose(1, 2).reshape(count * length, -1))
        return torch.cat(outputs)
