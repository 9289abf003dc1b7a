"""The grouped product against one expert at a time, in values and in gradients; which tokens count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhpc.backends.megatron.experts import GroupedProduct, of_no_filler
from rlhpc.data.packing import TokenSequence, pack

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


def test_what_only_fills_up_is_not_counted() -> None:
    """Three sequences of three tokens in four microbatches, of which one has two tokens of filler; two ranks share the
    tokens of each, for which there is one too few."""
    made = [TokenSequence(i, np.zeros(3, np.int32), 1) for i in range(3)]
    batches = [batch for rank in pack(made, dp_size=2, max_tokens=3, max_sequences=1) for batch in rank]
    found = [
        [of_no_filler(b, torch.arange(b.num_tokens).flip(0), 2, part).tolist() for part in (0, 1)] for b in batches
    ]
    assert sorted(found) == [[[False], [False]], *[[[True, True], [True, False]]] * 3]
