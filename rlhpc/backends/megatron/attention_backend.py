"""What computes attention over packed sequences: which implementations there are, and which one a run takes."""

from __future__ import annotations

import inspect
import os
from functools import partial
from typing import NamedTuple

import torch
from megatron.core.transformer.enums import AttnBackend
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from rlhpc.errors import ConfigError

try:
    import transformer_engine
    from transformer_engine.pytorch import DotProductAttention
except ImportError:
    transformer_engine = None

TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch >= 2.13
BACKENDS = (AttnBackend.fused, AttnBackend.flash, AttnBackend.local)  # the fastest first
KEY = "actor_rollout_ref.actor.megatron.attention_backend"
# What Megatron sets for AttnBackend.fused: Transformer Engine then takes cuDNN's or none.
FUSED_ALONE = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"}
GIVEN = {name: os.environ.get(name) for name in FUSED_ALONE}  # by the user, before Megatron sets them


class Heads(NamedTuple):
    """Of a rank's attention: how many of queries, how many of keys and of values, elements of one, and with latent
    attention of a value."""

    query: int
    key: int
    size: int
    value_size: int | None = None

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int, tp: int, v_head_dim: int | None = None) -> Heads:
        return cls(num_heads // tp, max(1, num_kv_heads // tp), head_dim, v_head_dim)


def attention_backend(wanted: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> AttnBackend:
    """The one of BACKENDS with this name, or for "auto" the fastest that this machine and model have:

    fused  cuDNN's, through Transformer Engine (its DotProductAttention over cu_seqlens); it is tried first
    flash  torch's own over cu_seqlens, which is FlashAttention 2 (torch.nn.attention.varlen)
    local  torch's scaled_dot_product_attention of all sequences of one length at a time

    The rank's log says what was taken, and what a faster one needs. Raises ConfigError for one whose needs aren't met.
    """
    _restore_environment()  # Megatron refuses what a trainer before this one in the process made it set
    lacks = {backend.name: _lacks(backend, device, dtype, heads) for backend in BACKENDS}
    if wanted in ("auto", "fused") and not lacks["fused"]:
        lacks["fused"] = _trial(device, dtype, heads)
    fastest = next(name for name, lack in lacks.items() if not lack)
    if lack := lacks.get(wanted):
        raise ConfigError(f"{KEY}={wanted} needs {lack}; set auto, which takes {fastest} here")
    chosen = fastest if wanted == "auto" else wanted
    faster = [name for name in lacks if wanted == "auto" and lacks[name]]
    print("; ".join([f"attention: {chosen}", *(f"{name} needs {lacks[name]}" for name in faster)]), flush=True)
    return AttnBackend[chosen]


def _restore_environment() -> None:
    for name, value in GIVEN.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _lacks(backend: AttnBackend, device: torch.device, dtype: torch.dtype, heads: Heads) -> str:
    """What `backend` needs that isn't there, in words; "" when it can run. Sizes are those of aten's flash_attn (torch
    2.11 to 2.13), and those that cuDNN has a backward for on Hopper and Blackwell (9.6 to 9.19)."""
    if backend is AttnBackend.local:
        return ""
    largest = 128 if backend is AttnBackend.fused else 256
    if device.type != "cuda":
        return "a CUDA device"
    if dtype.itemsize != 2:
        return f"a 16-bit model.dtype, not {str(dtype).removeprefix('torch.')}"
    if heads.size > largest or heads.size % 8:
        return f"head_dim={heads.size} to be a multiple of 8 up to {largest}"
    if backend is AttnBackend.flash:
        return ""
    if heads.value_size is not None:
        return "attention that isn't latent"
    if transformer_engine is None:
        return "Transformer Engine, which isn't installed"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        return f"a GPU of compute capability 9 or 10, not {major}.{minor}"
    if (cudnn := torch.backends.cudnn.version() or 0) < 90600:  # older ones plan anew for every maximum length
        return f"cuDNN 9.6, not {cudnn // 10000}.{cudnn // 100 % 100}"
    return ""


def _trial(device: torch.device, dtype: torch.dtype, heads: Heads) -> str:
    """What Transformer Engine's attention lacks though it is installed, "" when it runs: two short sequences, forward
    and backward, must give what torch's do. It is at the mercy of the cuDNN that the process has loaded."""
    if other := [f"{name}={value}" for name, value in GIVEN.items() if value not in (None, FUSED_ALONE[name])]:
        return f"an environment without {' '.join(other)}"
    generator = torch.Generator(device).manual_seed(0)
    *inputs, gradient = (
        torch.randn(48, n, heads.size, device=device, dtype=dtype, generator=generator)
        for n in (heads.query, heads.key, heads.key, heads.query)
    )
    leaves = [x.requires_grad_() for x in inputs]
    spans = torch.tensor([0, 5, 48], dtype=torch.int32, device=device)
    values = []
    os.environ.update(FUSED_ALONE)
    try:
        for attend in (partial(fused_attention, dot_product(heads)), flash_attention):
            output = attend(*leaves, spans, 43)
            values.append((output, *torch.autograd.grad(output, leaves, gradient.flatten(1))))
        error = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*values, strict=True))
    except (RuntimeError, ValueError, AssertionError) as failure:
        return f"a Transformer Engine that runs here ({type(failure).__name__}: {str(failure).strip()})"
    finally:
        _restore_environment()
    return "" if error < 0.02 else f"a Transformer Engine whose attention is right (off by {error:.2%} of its norm)"


def dot_product(heads: Heads) -> torch.nn.Module:
    """Transformer Engine's module, for fused_attention."""
    module: torch.nn.Module = DotProductAttention(
        heads.query,
        heads.size,
        num_gqa_groups=heads.key,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    return module


def fused_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """As flash_attention."""
    output: torch.Tensor = module(
        query, key, value, cu_seqlens_q=spans, cu_seqlens_kv=spans, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return output


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: torch.Tensor,
    longest: int,
    scale: float | None = None,
) -> torch.Tensor:
    """query [T, heads, head_dim], key [T, kv_heads, head_dim], value [T, kv_heads, v_head_dim], `spans` int32 the
    cu_seqlens, of which the longest has `longest` tokens -> [T, heads * v_head_dim]. Scores are multiplied by `scale`,
    1 / sqrt(head_dim) where it is None.

    The kernel takes values of head_dim elements alone: shorter ones get zeros."""
    options: dict[str, object] = {"enable_gqa": True} if TAKES_GROUPS else {}
    if scale is not None:
        options["scale"] = scale
    if (size := value.shape[-1]) < query.shape[-1]:
        value = pad(value, (0, query.shape[-1] - size))  # a contiguous copy
    if not TAKES_GROUPS and query.shape[1] != key.shape[1]:  # so are these
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    output: torch.Tensor = varlen_attn(
        query, key, value.contiguous(), spans, spans, longest, longest, window_size=(-1, 0), **options
    )
    return output[..., :size].flatten(1)
