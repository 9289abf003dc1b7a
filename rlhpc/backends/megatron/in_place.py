"""Experts in memory that is the rollout engine's: what it publishes of them is there as soon as they are updated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlhpc.errors import ConfigError


@torch.no_grad()
def place_experts(model: torch.nn.Module, shared: Mapping[str, torch.Tensor]) -> None:
    """Makes the experts of `model` these tensors, by parameter names, and their content the experts'.

    Raises ConfigError unless they are all of its experts, contiguous, of the same shape and dtype.
    """
    experts = {name: p for name, p in model.named_parameters() if not getattr(p, "allreduce", True)}
    if experts.keys() != shared.keys():
        raise ConfigError(
            f"reshard.in_place_experts=true: the trainer's experts are {sorted(experts)[:4]}, the engine's "
            f"{sorted(shared)[:4]}; set false"
        )
    for name, tensor in shared.items():
        own = experts[name]
        if (tensor.shape, tensor.dtype) != (own.shape, own.dtype) or not tensor.is_contiguous():
            raise ConfigError(
                f"reshard.in_place_experts=true: the engine's {name} is {tensor.dtype} {list(tensor.shape)} with "
                f"strides {tensor.stride()}, the trainer needs {own.dtype} {list(own.shape)}, contiguous; set false"
            )
        own.data = tensor


@torch.no_grad()
def keep_in_place(model: DistributedDataParallel, shared: Mapping[str, torch.Tensor]) -> None:
    """Takes the experts, which Megatron has moved to a buffer of its own, back to these tensors, and frees the buffer.
    For experts that this rank alone updates, before there is an optimizer."""
    for buffer in model.expert_parallel_buffers:
        buffer.param_data = buffer.param_data.new_empty(0)
        for bucket in buffer.buckets:
            bucket.param_data = buffer.param_data  # what Megatron gathers of them, from this rank alone, is nothing
    place_experts(model.module, shared)


def update_in_place(part: DistributedOptimizer) -> None:
    """Has an optimizer of such experts, if it is one, write to them. Megatron's writes to the buffer it knows of."""
    if any(not bucket.param_data.numel() for buffer in part.buffers for bucket in buffer.buckets):
        part._copy_main_params_to_model_params = partial(_copy_masters, part)


@torch.no_grad()
def _copy_masters(part: DistributedOptimizer) -> None:
    for masters, weights in zip(part.shard_fp32_from_float16_groups, part.shard_float16_groups, strict=True):
        if masters:
            torch._foreach_copy_(weights, masters)
