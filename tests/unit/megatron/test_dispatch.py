"""Tokens to experts and back by gathers, against Megatron's own permutation."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from rlhpc.backends.megatron.dispatch import _FromExperts, _ToExperts, by_expert


def test_equals_megatrons_permutation() -> None:
    """Values and gradients of x -> f(sorted x) -> sums, where f differs from place to place. One expert has none."""
    generator = torch.Generator().manual_seed(0)
    num, width, num_experts, top_k = 50, 6, 8, 3
    x = torch.randn(num, width, generator=generator, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(num, num_experts, generator=generator)
    scores[:, 5] = 0
    routing_map = torch.zeros(num, num_experts, dtype=torch.bool).scatter(1, scores.topk(top_k).indices, True)
    weights = torch.rand(num * top_k, 1, generator=generator, dtype=torch.float64)

    tokens, _, rows = permute(x, routing_map, num_out_tokens=num * top_k)
    sums = unpermute(tokens * weights, rows, x.shape)
    (wanted,) = torch.autograd.grad(sums.square().sum(), x)

    experts, order = by_expert(routing_map, top_k)
    assert experts.tolist() == [row.nonzero()[:, 0].tolist() for row in routing_map]
    assert torch.equal(order // top_k, rows)
    places = order.argsort().view(num, top_k)
    sorted_tokens = _ToExperts.apply(x, rows, places)
    assert torch.equal(sorted_tokens, tokens)
    found = _FromExperts.apply(sorted_tokens * weights, rows, places)
    torch.testing.assert_close(found, sums)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    torch.testing.assert_close(gradient, wanted)
