"""RMSNorm as Megatron's layer specs want it."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from rlhpc.backends.megatron.fused import fused


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv 1910.07467).

    Megatron's own without Transformer Engine refuses sequence parallelism; all it takes is the mark on the weight by
    which finalize_model_grads knows to sum its gradient over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # torch's kernel has a block of threads for each row, however short; a head has 64 to 256 elements.
        norm = _head_norm if x.shape[-1] <= 256 else _token_norm
        return norm(x.reshape(-1, x.shape[-1]).contiguous(), self.weight, self.eps).view(x.shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


@fused
def _token_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x, weight, eps)


@fused
def _head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """A function of its own, because one that has met rows of two lengths is compiled for any."""
    return rms_norm(x, weight, eps)
