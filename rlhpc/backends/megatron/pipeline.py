"""Microbatches through Megatron's pipeline, and what its last stage made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlhpc.backends.megatron.attention import PackedSequences
from rlhpc.backends.megatron.model import Decoder
from rlhpc.data.types import PackedBatch

OF_TOKENS = ("input_ids", "position_ids", "loss_mask", "experts")
OfHidden = Callable[[torch.Tensor, PackedBatch, PackedSequences], torch.Tensor]


def schedule(
    model: torch.nn.Module, batches: Sequence[PackedBatch], finish: Callable[..., Any], *, forward_only: bool
) -> list[Any]:
    """Runs all microbatches through the pipeline; what `finish` gave for each on the last stage, else nothing."""

    def forward_step(batch_iterator: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Any, Any]:
        batch = next(batch_iterator)
        packed = getattr(model, "module", model).pack(batch)
        return model(packed), partial(finish, batch=batch, packed=packed)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=max(batch.num_tokens for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def per_token(module: Decoder, batches: Sequence[PackedBatch], of_hidden: OfHidden) -> list[torch.Tensor]:
    """What `of_hidden` makes of the last stage's hidden states, float32 [T] per batch, on every stage. No gradient."""

    def collect(hidden: torch.Tensor, batch: PackedBatch, packed: PackedSequences, non_loss_data: bool) -> torch.Tensor:
        return of_hidden(hidden, batch, packed)

    module.eval()
    with torch.no_grad():
        found = schedule(module, batches, collect, forward_only=True)
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return found
    values = [value.contiguous() for value in found] or [torch.empty_like(batch.loss_mask) for batch in batches]
    for value in values:
        dist.broadcast(value, group=group, group_src=group.size() - 1)
    return values


def on_device(batches: Sequence[PackedBatch], device: torch.device) -> list[PackedBatch]:
    """With what there is for each token. What there is for each sequence is read on the host, and stays there."""
    move = partial(torch.Tensor.to, device=device, non_blocking=True)
    return [
        replace(
            batch,
            **{name: move(value) for name in OF_TOKENS if (value := getattr(batch, name)) is not None},
            token_fields={name: move(value) for name, value in batch.token_fields.items()},
        )
        for batch in batches
    ]


def num_step_tokens(batches: Sequence[PackedBatch], device: torch.device) -> int:
    """Over all data-parallel ranks."""
    total = torch.tensor(sum(batch.num_tokens for batch in batches), device=device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return int(total)


def sum_metrics(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Of microbatches, each a scalar; on every stage what the last one has."""
    names = sorted(parts[0]) if parts else []
    rows = [torch.stack([part[name].double() for name in names]) for part in parts]
    metrics = [dict(zip(names, torch.stack(rows).sum(0).tolist() if rows else [], strict=True))]
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast_object_list(metrics, group=group, group_src=group.size() - 1)
    return metrics[0]
