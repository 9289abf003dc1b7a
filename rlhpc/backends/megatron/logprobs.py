"""Logprobs and entropies of labels from hidden states, without ever holding [N, V] logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rlhpc.backends.megatron.fused import fused

# Bytes of logits alive at once on a rank, in the model's dtype. On a CPU they are passed over in float32, and small
# parts stay in its caches; a GPU needs thousands of rows to be busy with a product, and adds one [V, H] per part.
CHUNK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}


class VocabParallelLogprobs(torch.autograd.Function):
    """(logprobs, entropies) float32 [N] of the distribution softmax(hidden @ weight.T / temperature).

    hidden is [N, H], labels int64 [N] and weight this rank's vocabulary rows [V_local, H], which begin at row `start`
    of the vocabulary and contain no padding. Logits are made chunk by chunk in the model's dtype and used in float32;
    the backward makes them again. The gradient for `hidden` is this rank's part: the caller sums it over `group`
    (the backward of Megatron's copy or gather mappings does).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        start: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        num, rows = len(hidden), len(weight)
        local = torch.where((labels >= start) & (labels < start + rows), labels - start, -1)  # -1: another rank's
        largest = torch.full((num,), -torch.inf, device=hidden.device)
        sums = torch.zeros(3, num, device=hidden.device)  # of exp(z), of exp(z) z, and of the label's z
        for part in _chunks(num, weight):
            logits = hidden[part] @ weight.t()
            largest[part], sums[0, part], sums[1, part] = _statistics(logits, temperature)
            own = logits.gather(1, local[part, None].clamp(min=0))[:, 0].float() / temperature
            sums[2, part] = torch.where(local[part] >= 0, own, 0)
        if group.size() > 1 and num:
            own_largest = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            sums[:2] *= (own_largest - largest).exp()
            dist.all_reduce(sums, group=group)
        log_z = largest + sums[0].log()
        entropies = log_z - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, local, log_z, entropies)
        ctx.temperature = temperature
        return sums[2] - log_z, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropies: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, local, log_z, entropies = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(len(hidden), weight):
            own, own_entropies = (None if g is None else g[part] for g in (grad_logprobs, grad_entropies))
            logits = hidden[part] @ weight.t()
            grad = _gradient(logits, local[part], log_z[part], own, entropies[part], own_entropies, ctx.temperature)
            grad_hidden[part] = grad @ weight
            _add_product(grad_weight, grad.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(num: int, weight: torch.Tensor) -> list[slice]:
    """None where the rank has no row of the vocabulary."""
    if not len(weight):
        return []
    size = max(1, CHUNK_BYTES[weight.device.type] // (len(weight) * weight.element_size()))
    size = size // 256 * 256 or size  # whole tiles of a product
    return [slice(i, min(i + size, num)) for i in range(0, num, size)]


@fused
def _statistics(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row of z = logits / temperature: its largest element m, the sum of exp(z - m) and of exp(z - m) z."""
    z = logits.float() / temperature
    largest = z.amax(-1)
    weights = (z - largest[:, None]).exp()
    return largest, weights.sum(-1), (weights * z).sum(-1)


@fused
def _gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_z: torch.Tensor,
    grad_logprobs: torch.Tensor | None,
    entropies: torch.Tensor,
    grad_entropies: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """Of the logits, in their dtype: d logprob / dz = [z is the label's] - p, and dH / dz = -p (log p + H)."""
    logprobs = logits.float() / temperature - log_z[:, None]
    factor = torch.zeros_like(logprobs) if grad_logprobs is None else -grad_logprobs[:, None]
    if grad_entropies is not None:
        factor = factor - (logprobs + entropies[:, None]) * grad_entropies[:, None]
    grad = logprobs.exp() * factor
    if grad_logprobs is not None:
        columns = torch.arange(logits.shape[1], device=logits.device)
        grad = torch.where(columns == labels[:, None], grad + grad_logprobs[:, None], grad)
    return (grad / temperature).to(logits.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, with `total` in float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b
