"""Causal attention over packed sequences, without padding and without a [T, T] mask."""

from __future__ import annotations

import inspect
import logging
import math
from dataclasses import dataclass
from itertools import groupby

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from rlhpc.backends.megatron.fused import fused
from rlhpc.data.types import PackedBatch
from rlhpc.errors import ConfigError
from rlhpc.reshard.families import ModelFacts

try:
    import transformer_engine
    from transformer_engine.pytorch import DotProductAttention
except ImportError:
    transformer_engine = None

TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch >= 2.13
BACKENDS = (AttnBackend.fused, AttnBackend.flash, AttnBackend.local)  # the fastest first
KEY = "actor_rollout_ref.actor.megatron.attention_backend"

logger = logging.getLogger(__name__)


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
        lengths = [stop - start for start, stop in spans]
        # Made there: a copy of this size would wait for all that comes from host memory (offload.py).
        starts, counts = torch.tensor([[start for start, _ in spans], lengths], device=device)
        order = torch.arange(sum(lengths), device=device)
        order += torch.repeat_interleave(starts - counts.cumsum(0) + counts, counts, output_size=len(order))
        input_ids, position_ids = batch.input_ids[order], batch.position_ids[order]
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


def attention_backend(wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttnBackend:
    """The one of BACKENDS with this name, or for "auto" the fastest that this machine and model have:

    fused  cuDNN's, through Transformer Engine (its DotProductAttention over cu_seqlens)
    flash  torch's own over cu_seqlens, which is FlashAttention 2 (torch.nn.attention.varlen)
    local  torch's scaled_dot_product_attention of all sequences of one length at a time

    Raises ConfigError for an unknown name, and for one whose needs aren't met.
    """
    lacks = {backend.name: _lacks(backend, device, dtype, head_dim) for backend in BACKENDS}
    fastest = next(name for name, lack in lacks.items() if not lack)
    if wanted not in ("auto", *lacks):
        raise ConfigError(f"{KEY}={wanted!r} is unknown; choose auto, {', '.join(lacks)}")
    if lack := lacks.get(wanted):
        raise ConfigError(f"{KEY}={wanted} needs {lack}; set auto, which takes {fastest} here")
    if wanted == "auto":
        wanted = fastest
        slower_than = [f"{name} needs {lack}" for name, lack in lacks.items() if lack]
        logger.info("attention: %s", "; ".join([wanted, *slower_than]))
    else:
        logger.info("attention: %s, as configured", wanted)
    return AttnBackend[wanted]


def _lacks(backend: AttnBackend, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """What `backend` needs that isn't there, in words; "" when it can run. Sizes are those of aten's flash_attn (torch
    2.11 to 2.13), and those that cuDNN has a backward for on Hopper and Blackwell (9.6 to 9.19)."""
    if backend is AttnBackend.local:
        return ""
    largest = 128 if backend is AttnBackend.fused else 256
    if device.type != "cuda":
        return "a CUDA device"
    if dtype.itemsize != 2:
        return f"a 16-bit model.dtype, not {str(dtype).removeprefix('torch.')}"
    if head_dim > largest or head_dim % 8:
        return f"head_dim={head_dim} to be a multiple of 8 up to {largest}"
    if backend is AttnBackend.flash:
        return ""
    if transformer_engine is None:
        return "Transformer Engine, which isn't installed"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        return f"a GPU of compute capability 9 or 10, not {major}.{minor}"
    if (cudnn := torch.backends.cudnn.version() or 0) < 90600:  # older ones plan anew for every maximum length
        return f"cuDNN 9.6, not {cudnn // 10000}.{cudnn // 100 % 100}"
    return ""


class PackedAttention(torch.nn.Module):
    """Megatron's core attention slot: rotary embedding, then causal attention within each sequence, by the backend that
    `config.attention_backend` names (attention_backend finds it).

    Rotary angles are applied here rather than by Megatron, whose packed path loops over sequences in Python.
    """

    def __init__(self, config: TransformerConfig, **slot: object) -> None:
        super().__init__()
        self.backend = config.attention_backend
        self.scale = config.softmax_scale  # None: 1 / sqrt(head_dim)
        if self.backend is AttnBackend.fused:
            tp = config.tensor_model_parallel_size
            self.dot_product = DotProductAttention(
                config.num_attention_heads // tp,
                config.kv_channels,
                num_gqa_groups=max(1, config.num_query_groups // tp),
                qkv_format="thd",
                attn_mask_type="padding_causal",
                softmax_scale=self.scale,
            )

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
        query, key = _rotated(query, key, packed_seq_params.cos, packed_seq_params.sin)
        return self.attend(query, key, value, packed_seq_params)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        """The same without rotation."""
        if self.backend is AttnBackend.fused:
            return self._fused(query, key, value.contiguous(), packed)
        if self.backend is AttnBackend.flash:
            return self._flash(query, key, value.contiguous(), packed)
        return self._by_length(query, key, value, packed)

    def _fused(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        output: torch.Tensor = self.dot_product(
            query,
            key,
            value,
            cu_seqlens_q=packed.cu_seqlens_q,
            cu_seqlens_kv=packed.cu_seqlens_kv,
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_kv=packed.max_seqlen_kv,
        )
        return output

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        options = {"enable_gqa": True} if TAKES_GROUPS else {}
        if not TAKES_GROUPS and query.shape[1] != key.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        spans = (packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv)
        return varlen_attn(query, key, value, *spans, scale=self.scale, window_size=(-1, 0), **options).flatten(1)

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


@fused
def _rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of the half-split kind (arXiv 2104.09864, as Llama and Qwen store their weights)."""
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
