"""Everything that rlhpc touches of vLLM beyond its public interface.

Written against vLLM 0.24 (GPU) and 0.32 (CPU). tests/unit/vllm/test_private.py pins every name used here, so
that a new vLLM fails there and not in a run.
"""

from __future__ import annotations

import rlhpc.backends.vllm.environment  # noqa: F401  # isort: skip  # before the first vllm import

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from torch import nn
from torch.distributed import ProcessGroup
from vllm import LLM as LLM  # the engine takes it from here, after the environment is set
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine import core
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rlhpc.errors import EngineError

VERSION: str = vllm.__version__
SUPPORTED_VERSIONS = ("0.24", "0.32")


def check_version() -> None:
    """Raises EngineError under a vLLM that this file was not written for."""
    if ".".join(VERSION.split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise EngineError(
            f"vllm {VERSION} is not supported; install {' or '.join(SUPPORTED_VERSIONS)}.x (rlhpc[gpu] or rlhpc[cpu])"
        )


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def launching(ident: str) -> Iterator[None]:
    """Within it a new engine names its shared memory after `ident` and creates no message queue.

    The name comes from what follows the last ':' of the init method, which serves for nothing else once
    torch.distributed runs. The queue would carry the driver's broadcasts, and an external launcher has no
    driver; its segment has a random name, which nobody could clean up after a kill.
    """
    distributed_args = ExecutorWithExternalLauncher._distributed_args
    init_group = parallel_state.init_model_parallel_group

    def named(self: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        method, rank, local_rank = distributed_args(self)
        return f"{method}:{ident}", rank, local_rank

    def without_queue(*args: Any, **kwargs: Any) -> Any:
        return init_group(*args, **kwargs | {"use_message_queue_broadcaster": False})

    with (
        _replaced(ExecutorWithExternalLauncher, "_distributed_args", named),
        _replaced(parallel_state, "init_model_parallel_group", without_queue),
    ):
        yield


def _runner(llm: LLM) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def running_model(llm: LLM) -> nn.Module:
    """The module that generates."""
    model: nn.Module = _runner(llm).model
    return model


def vllm_config(llm: LLM) -> VllmConfig:
    return llm.llm_engine.vllm_config


def device(llm: LLM) -> torch.device:
    """Where the model is: cpu, or cuda, which means the current one."""
    return torch.device(vllm_config(llm).device_config.device)


def build_model(llm: LLM) -> nn.Module:
    """A second instance of the running model, its weights allocated but neither loaded nor processed.

    A layer registers itself in the static forward context when it is built, and refuses a name that is taken:
    the running model's entries are set aside meanwhile.
    """
    config = vllm_config(llm)
    layers, moe_layers = (
        config.compilation_config.static_forward_context,
        config.compilation_config.static_all_moe_layers,
    )
    kept, kept_moe = dict(layers), list(moe_layers)
    layers.clear()
    moe_layers.clear()
    try:
        with set_default_torch_dtype(config.model_config.dtype), device(llm):
            return initialize_model(vllm_config=config)
    finally:
        layers.clear()
        layers.update(kept)
        moe_layers[:] = kept_moe


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> set[str]:
    """vLLM's own loader: HF tensors by name, whole, into this rank's parts. Returns the parameters that it wrote."""
    loaded: set[str] = model.load_weights(weights.items())
    return loaded


def adopt(llm: LLM, fresh: nn.Module) -> None:
    """Processes the weights of `fresh` into the kernels' layouts and makes the running model use them.

    On CUDA its values are copied into the running parameters, whose addresses CUDA graphs have recorded. On a CPU
    vLLM's own `reload_weights` leaves stale prepacked weights behind (0.32): there every module takes over all
    attributes of its new counterpart but its submodules; Attention keeps its own, the KV cache among them.
    """
    config, target = vllm_config(llm), device(llm)
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        process_weights_after_loading(fresh, config.model_config, target)
    if target.type == "cuda":
        values = dict(fresh.named_parameters())
        for name, parameter in running_model(llm).named_parameters():
            parameter.data.copy_(values[name].data)
            values[name].data = values[name].data.new_empty(0)  # not when the garbage collector gets to it
        torch.cuda.synchronize()  # vLLM may read on another stream
        torch.cuda.empty_cache()  # the KV cache takes memory from the device, not from torch's allocator
        return
    counterparts = dict(fresh.named_modules())
    for name, module in running_model(llm).named_modules():
        if not isinstance(module, Attention):
            attributes = counterparts[name].__dict__
            module.__dict__.update({key: value for key, value in attributes.items() if key != "_modules"})


def tensor_parallel_group() -> ProcessGroup:
    """The gloo group of this rank's replica."""
    return parallel_state.get_tp_group().cpu_group


def shut_down(llm: LLM) -> None:
    """Ends the engine and vLLM's own process groups. Its shutdown would destroy the world's group as well, which
    belongs to the caller and carries the trainer."""

    def destroy_groups() -> None:
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None

    with _replaced(core, "cleanup_dist_env_and_memory", destroy_groups):
        llm.llm_engine.engine_core.shutdown()
