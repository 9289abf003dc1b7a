"""The grouped product against one expert at a time, in values and in gradients."""

from __future__ import annotations

import pytest
import torch

from rlhpc.backends.megatron.experts import GroupedProduct

COUNTS = (3, 0, 7, 1)


@pytest.mark.parametrize("counts", [COUNTS, (0, 0, 0, 0)], ids=["some", "none"])
def test_equals_one_expert_at_a_time(counts: tuple[int, ...]) -> None:
    """Two microbatches after a step that left something behind: main_grad ends as the sum of their gradients alone."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 24, 16, generator=generator).bfloat16())
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    weight.main_grad, weight.main_grad_is_stale = torch.full(weight.shape, 7.0), True
    total = torch.zeros(weight.shape)
    for _ in range(2):
        x = torch.randn(sum(counts), 16, generator=generator).bfloat16().requires_grad_()
        direction = torch.randn(sum(counts), 24, generator=generator).bfloat16()
        y = GroupedProduct.apply(x, weight, ends)
        gradient, _ = torch.autograd.grad(y, (x, weight), direction)
        for e in range(4):
            rows = slice(sum(counts[:e]), sum(counts[: e + 1]))
            part, grad, d = x[rows], gradient[rows], direction[rows]
            wanted = part.float() @ weight[e].float().t()
            torch.testing.assert_close(y[rows].float(), wanted, atol=0.05, rtol=0.01)
            torch.testing.assert_close(grad.float(), d.float() @ weight[e].float(), atol=0.05, rtol=0.01)
            total[e] += d.float().t() @ part.float()
    assert not weight.main_grad_is_stale and weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad, total.detach(), atol=0.05, rtol=0.01)
