"""Lets megatron-core 0.16.1 run where there is no CUDA device.

Nothing global stays patched: torch itself is as it was for every other user in the process (vLLM in particular), but
for `Tensor.type` while the optimizer is built (`cuda_type_names`), and no torch operation gets slower. On a CUDA
machine `install` does only the last two of these. Megatron's own modules get

* `torch`: a copy of the torch namespace whose `cuda` answers for the CPU and whose factories take device="cuda" for
  "cpu" (clip_grads.py, optimizer.py, schedules.py, mappings.py and others name the device literally);
* the two functions of tensor_parallel/random.py that reach for CUDA generators, on the CPU generator;
* the gather and reduce-scatter of unequal parts, by which expert tensor parallelism exchanges its tokens, as the
  all-to-all that gloo has: its own all_gather and reduce_scatter take equal parts only;
* `maybe_move_tensor_to_cpu`, which the token dispatcher relies on for numpy split sizes, for tensors already there;
* the router's product as it is without Transformer Engine, whose kernels need a device;
* the gradient norm by torch's kernel, which takes 5.4 ms on an H200 where Transformer Engine's takes 6.3, and without
  Megatron's wait for the device at every tensor;
* `te_general_gemm`, undefined in moe_utils.py of 0.16.1 without Transformer Engine although read by the router.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


class _Stream:
    """A stream or an event of a device that runs everything in program order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> _Stream:
        return self

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and "cuda" in str(kwargs["device"]):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _cpu_torch() -> types.ModuleType:
    stream = _Stream()
    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update(torch.cuda.__dict__)
    cuda.__dict__.update(
        Stream=_Stream,
        Event=_Stream,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda *args: None,
        empty_cache=lambda: None,
        manual_seed=lambda seed: torch.manual_seed(seed),
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
    )
    namespace = types.ModuleType("torch")
    namespace.__dict__.update(torch.__dict__)
    namespace.__dict__.update({name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}, cuda=cuda)
    namespace.__getattr__ = functools.partial(getattr, torch)  # type: ignore[method-assign]  # lazily loaded names
    return namespace


_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")


def install() -> None:
    """Prepares the Megatron modules imported so far. Call after importing them; calling again is harmless."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.__dict__.setdefault("te_general_gemm", None)
    clip_grads.multi_tensor_applier = utils.local_multi_tensor_applier
    clip_grads.l2_norm_impl = _l2_norm
    if torch.cuda.is_available():
        return
    namespace = _cpu_torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module.__dict__.get("torch") is torch:
            module.torch = namespace
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    mappings._gather_along_first_dim = _gather_parts(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_parts(mappings._reduce_scatter_along_first_dim)
    moe_utils.te_general_gemm = None
    for user in (moe_utils, token_dispatcher):
        user.maybe_move_tensor_to_cpu = _maybe_numpy


def _l2_norm(
    chunk_size: int, overflow: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *args: Any
) -> tuple[torch.Tensor, None]:
    """Of all tensors of the one list, float32 [1]; bit for bit Megatron's local_multi_tensor_l2_norm."""
    (tensors,) = tensor_lists
    norms = torch.stack([tensor.norm() for tensor in tensors]).cpu()
    return norms.norm()[None].to(tensors[0].device), None


Collective = Callable[..., torch.Tensor]


def _gather_parts(equal: Collective) -> Collective:
    equal = getattr(equal, "__wrapped__", equal)  # installed before

    @functools.wraps(equal)
    def gather(
        part: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *rest: Any
    ) -> torch.Tensor:
        """Concatenates every rank's part, the i-th of `sizes[i]` rows."""
        if sizes is None or group.size() == 1:
            return equal(part, group, sizes, *rest)
        whole = part.new_empty(sum(sizes), *part.shape[1:])
        dist.all_to_all_single(whole, torch.cat([part] * group.size()), sizes, [len(part)] * group.size(), group)
        return whole

    return gather


def _reduce_scatter_parts(equal: Collective) -> Collective:
    equal = getattr(equal, "__wrapped__", equal)

    @functools.wraps(equal)
    def reduce_scatter(
        whole: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *rest: Any
    ) -> torch.Tensor:
        """This rank's part, `sizes[rank]` rows, of the sum over ranks."""
        if sizes is None or group.size() == 1:
            return equal(whole, group, sizes, *rest)
        terms = whole.new_empty(group.size(), sizes[group.rank()], *whole.shape[1:])
        received = [terms.shape[1]] * group.size()
        dist.all_to_all_single(terms.flatten(0, 1), whole.contiguous(), received, sizes, group)
        return terms.sum(0)

    return reduce_scatter


def _maybe_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@contextlib.contextmanager
def cuda_type_names() -> Iterator[None]:
    """While open, `Tensor.type()` names CPU tensors like CUDA's: the distributed optimizer sorts parameters into its
    groups by comparing with "torch.cuda.FloatTensor". Needed only while it is built."""
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    torch.Tensor.type = type_name  # hides the one that Tensor inherits
    try:
        yield
    finally:
        del torch.Tensor.type
