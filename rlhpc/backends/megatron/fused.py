"""Chains of elementwise operations and reductions that CUDA runs as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def fused(function: Function, *, dynamic: bool | None = None) -> Function:
    """A function of tensors, compiled by torch.compile where its first argument is on CUDA; elsewhere as it stands.

    Between kernels every intermediate value would go through the device's memory, in the dtype of its tensor; within
    one they stay in registers, in float32. It is compiled at its first call for a kind of input and once more when a
    dimension turns out to vary; with dynamic=False, anew for each size. TORCH_COMPILE_DISABLE=1 runs it as it stands
    everywhere.
    """
    compiled: Callable[..., Any] | None = None

    @wraps(function)
    def call(first: torch.Tensor, *rest: Any) -> Any:
        nonlocal compiled
        if not first.is_cuda:
            return function(first, *rest)
        if compiled is None:
            compiled = torch.compile(function, dynamic=dynamic)
        return compiled(first, *rest)

    return call  # type: ignore[return-value]
