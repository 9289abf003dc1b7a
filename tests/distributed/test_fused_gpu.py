"""What is compiled for CUDA gives what it gives as it stands, to bfloat16's rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhpc.backends.megatron import dispatch, experts, logprobs, norm
from rlhpc.backends.megatron.attention import PackedAttention
from rlhpc.backends.megatron.latent import LatentCoreAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def cases() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each function with inputs of two lengths: the second makes the first dimension dynamic."""
    made: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    for n in (128, 77):
        logits, g = 3 * randn(n, 1003), torch.randn(n, device="cuda")
        labels = torch.randint(-1, 1003, (n,), device="cuda")
        log_z, entropies = (logits.float() / 0.7).logsumexp(-1), torch.rand(n, device="cuda")
        made += [
            (logprobs._statistics, (logits, 0.7)),
            (logprobs._gradient, (logits, labels, log_z, g, entropies, None, 0.7)),
            (logprobs._gradient, (logits, labels, log_z, g, entropies, g * 0.1, 0.7)),
            (experts._swiglu, (randn(n, 64).requires_grad_(), torch.rand(n, 1, device="cuda", requires_grad=True))),
            *(
                (
                    kind.rotated,
                    (randn(n, 8, size).requires_grad_(), randn(n, 2, size), randn(n, 1, 16), randn(n, 1, 16)),
                )
                for kind, size in ((PackedAttention, 16), (LatentCoreAttention, 24))
            ),
            (norm._token_norm, (randn(n, 1024).requires_grad_(), randn(1024).requires_grad_(), 1e-6)),
            (norm._head_norm, (randn(n * 8, 64).requires_grad_(), randn(64).requires_grad_(), 1e-6)),
            (dispatch._sum_of, (randn(n * 4, 32), torch.randperm(n * 4, device="cuda").view(n, 4))),
        ]
    return made


def test_compiled_equals_as_written() -> None:
    for function, inputs in cases():
        gradients = []
        outputs = [f(*inputs) for f in (function, function.__wrapped__)]
        for values in outputs:
            values = values if isinstance(values, tuple) else (values,)
            wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
            total = sum(value.float().square().sum() for value in values)
            gradients.append([*values, *(torch.autograd.grad(total, wanted) if wanted else ())])
        for one, two in zip(*gradients, strict=True):
            scale = float(two.float().square().mean().sqrt())
            assert math.isfinite(scale)
            torch.testing.assert_close(one.float(), two.float(), atol=0.03 * scale, rtol=0.02, msg=function.__name__)


def test_memory_of_logprobs_is_bounded(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 tokens of a vocabulary of 40,000 are 655 MB in float32. In parts of 16 MiB, forward and backward stay below
    four parts, the weight's float32 gradient and its sums; and agree with torch's softmax."""
    monkeypatch.setitem(logprobs.CHUNK_BYTES, "cuda", 1 << 24)
    hidden, weight = randn(2048, 64).requires_grad_(), randn(40_000, 64).requires_grad_()
    labels = torch.randint(40_000, (2048,), device="cuda")

    for _ in range(2):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        values, _ = logprobs.VocabParallelLogprobs.apply(hidden, weight, labels, 0, 1.0, group)
        found = torch.autograd.grad(values.sum(), (hidden, weight))
    assert torch.cuda.max_memory_allocated() - before < 4 * (1 << 24) + 3 * 40_000 * 64 * 4
    table = (hidden @ weight.t()).float().log_softmax(-1)
    torch.testing.assert_close(values, table.gather(1, labels[:, None])[:, 0], atol=1e-4, rtol=1e-5)
    for one, two in zip(
        found, torch.autograd.grad(table.gather(1, labels[:, None]).sum(), (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(one.float(), two.float(), atol=0.02 * float(two.abs().max()), rtol=0.02)
