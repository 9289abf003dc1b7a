"""Every attention backend on CUDA against softmax written out in float32, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from megatron.core.transformer import TransformerConfig

from rlhpc.backends.megatron.attention import PackedAttention, PackedSequences
from rlhpc.backends.megatron.attention_backend import Heads, attention_backend
from rlhpc.data.packing import TokenSequence, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_transformer_engine = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
BATCHES = ((1, 700, 64, 130, 3, 64), (513,), tuple(range(1, 41)))  # of different numbers of tokens and sequences
CUDA = torch.device("cuda")


def packed(lengths: Sequence[int]) -> PackedSequences:
    """In the order of `lengths`, which ascend."""
    sequences = [TokenSequence(i, np.zeros(length, np.int32), 1) for i, length in enumerate(lengths)]
    ((batch,),) = pack(sequences, dp_size=1, max_tokens=sum(lengths))
    made = PackedSequences.of(batch, frequencies=torch.zeros(1), dtype=torch.bfloat16)
    made.cu_seqlens_q = made.cu_seqlens_kv = made.cu_seqlens_q.to(CUDA)
    return made


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    groups, outputs = query.shape[1] // key.shape[1], []
    for q, k, v in zip(*(x.float().split(list(lengths)) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("backend", [pytest.param("fused", marks=needs_transformer_engine), "flash", "local"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 4, 128), (9, 3, 64)])
def test_equals_softmax_written_out(backend: str, heads: int, kv_heads: int, head_dim: int) -> None:
    check(backend, Heads(heads, kv_heads, head_dim), scale=None)


@pytest.mark.parametrize("backend", ["flash", "local"])
def test_values_shorter_than_keys_and_a_scale_of_its_own(backend: str) -> None:
    """DeepSeek-V3's heads, and its temperature for long contexts."""
    check(backend, Heads(16, 16, 192, 128), scale=1.87 / 192**0.5)


def check(backend: str, sizes: Heads, scale: float | None) -> None:
    """The backward multiplies rounded probabilities and gradients: 2^-8 each."""
    heads, kv_heads, head_dim, value_size = sizes
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * head_dim, num_attention_heads=heads, num_query_groups=kv_heads,
        kv_channels=head_dim, attention_dropout=0.0,
        attention_backend=attention_backend(backend, CUDA, torch.bfloat16, sizes),
    )  # fmt: skip
    attention = PackedAttention(config, softmax_scale=scale)
    for lengths in map(sorted, BATCHES):
        torch.manual_seed(len(lengths))
        *inputs, gradient = (
            torch.randn(sum(lengths), n, size, device=CUDA).bfloat16()
            for n, size in zip(
                (heads, kv_heads, kv_heads, heads),
                (head_dim, head_dim, value_size or head_dim, value_size or head_dim),
                strict=True,
            )
        )
        leaves = [x.requires_grad_() for x in inputs]
        found = attention.attend(*leaves, packed(lengths))
        wanted = written_out(*leaves, lengths, scale or head_dim**-0.5)
        assert found.dtype == torch.bfloat16 and found.shape == wanted.shape
        values = [(y, *torch.autograd.grad(y, leaves, gradient.flatten(1).to(y.dtype))) for y in (found, wanted)]
        for name, a, b in zip(("output", "dq", "dk", "dv"), *values, strict=True):
            error = float((a.float() - b.float()).norm() / b.float().norm())
            assert error < 0.01, (name, lengths, error)
