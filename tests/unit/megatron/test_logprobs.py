"""Fused logprobs and entropies against torch's own softmax and autograd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rlhpc.backends.megatron import logprobs
from rlhpc.backends.megatron.logprobs import VocabParallelLogprobs

N, H, V, TEMPERATURE = 11, 6, 17, 0.6


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (N,), generator=generator)
    return hidden.float().requires_grad_(), weight.float().requires_grad_(), labels


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
@pytest.mark.parametrize("used", ["logprobs", "entropies", "both"])
def test_values_and_gradients(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, rows_at_once: int, used: str
) -> None:
    monkeypatch.setitem(logprobs.CHUNK_BYTES, "cpu", rows_at_once * V * 4)  # a memory budget
    hidden, weight, labels = inputs()
    found = VocabParallelLogprobs.apply(hidden, weight, labels, 0, TEMPERATURE, group)
    table = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    wanted = table.gather(1, labels[:, None])[:, 0], -(table.exp() * table).sum(-1)
    for value, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, reference, atol=2e-5, rtol=1e-5)

    mix = torch.linspace(-1, 1, N), torch.linspace(2, -1, N)
    parts = {"logprobs": [0], "entropies": [1], "both": [0, 1]}[used]
    gradients = [
        torch.autograd.grad(sum((mix[i] * values[i]).sum() for i in parts), (hidden, weight))
        for values in (found, wanted)
    ]
    for value, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(value, reference, atol=2e-5, rtol=1e-5)


def test_large_logits_stay_finite(group: dist.ProcessGroup) -> None:
    """Logits of ±1000: the label's are 0 and -2000 below the maximum, the entropy 0."""
    hidden, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[1000.0], [-1000.0]])
    values, entropies = VocabParallelLogprobs.apply(hidden, weight, torch.tensor([0, 1]), 0, 1.0, group)
    assert values.tolist() == [0.0, -2000.0]
    assert entropies.tolist() == [0.0, 0.0]


def test_nothing_to_predict_still_reaches_the_weights(group: dist.ProcessGroup) -> None:
    """A filler microbatch: gradients of zeros, so that collectives in the backward of the model still run."""
    hidden, weight, labels = inputs()
    values, _ = VocabParallelLogprobs.apply(hidden[:0], weight, labels[:0], 0, 1.0, group)
    values.sum().backward()
    assert hidden.grad is not None and hidden.grad.eq(0).all()
    assert weight.grad is not None and weight.grad.eq(0).all()
