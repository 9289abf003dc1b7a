"""Logprobs and entropies of labels from hidden states, without ever holding [N, V] logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

CHUNK_LOGITS = 1 << 24  # float32 logits alive at once on a rank: 64 MiB


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
        num, chunk = len(hidden), max(1, CHUNK_LOGITS // max(1, len(weight)))
        log_z, label_logits, mean_logits = torch.zeros(3, num, dtype=torch.float32, device=hidden.device)
        for part in _slices(num, chunk):
            logits = _logits(hidden[part], weight, temperature)
            largest = logits.amax(-1) if len(weight) else logits.new_full((len(logits),), -torch.inf)
            _reduce(largest, group, dist.ReduceOp.MAX)
            shifted = (logits - largest[:, None]).exp_()
            at, mine = _local(labels[part], start, len(weight))
            sums = torch.stack(
                (
                    shifted.sum(-1),
                    (shifted * logits).sum(-1),
                    torch.where(mine, logits.gather(1, at[:, None])[:, 0], 0) if len(weight) else largest * 0,
                )
            )
            _reduce(sums, group, dist.ReduceOp.SUM)
            log_z[part] = largest + sums[0].log()
            mean_logits[part] = sums[1] / sums[0]
            label_logits[part] = sums[2]
        entropies = log_z - mean_logits
        ctx.save_for_backward(hidden, weight, labels, log_z, entropies)
        ctx.constants = start, temperature, chunk
        return label_logits - log_z, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropies: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, labels, log_z, entropies = ctx.saved_tensors
        start, temperature, chunk = ctx.constants
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _slices(len(hidden), chunk):
            logprobs = _logits(hidden[part], weight, temperature).sub_(log_z[part, None])
            probs = logprobs.exp()
            grad = torch.zeros_like(probs)
            if grad_logprobs is not None:
                at, mine = _local(labels[part], start, len(weight))
                grad.sub_(probs * grad_logprobs[part, None])
                grad.scatter_add_(1, at[:, None], torch.where(mine, grad_logprobs[part], 0)[:, None])
            if grad_entropies is not None:  # dH/dz = -p (log p + H)
                grad.sub_(probs * (logprobs + entropies[part, None]) * grad_entropies[part, None])
            grad = grad.div_(temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _slices(num: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, num)) for i in range(0, num, chunk)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.mm(hidden, weight.t()).float().div_(temperature)


def _local(labels: torch.Tensor, start: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each label in this rank's part (clamped into it) and whether it is really there."""
    at = labels - start
    return at.clamp(0, max(rows - 1, 0)), (at >= 0) & (at < rows)


def _reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
