"""Everything that rlhpc touches of vLLM beyond its public interface.

Written against vLLM 0.24 (GPU) and 0.32 (CPU). tests/unit/vllm/test_private.py pins every name used here, so
that a new vLLM fails there and not in a run.
"""

from __future__ import annotations

import rlhpc.backends.vllm.environment  # noqa: F401  # isort: skip  # before the first vllm import

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import vllm
from torch import nn
from torch.distributed import ProcessGroup
from vllm import LLM as LLM  # the engine takes it from here, after the environment is set
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine import core
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p as apply_top_k_top_p
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rlhpc.errors import EngineError

VERSION: str = vllm.__version__
SUPPORTED_VERSIONS = ("0.24", "0.32")
ROW = "row"  # in a request's extra_args: its number in the call


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


@contextmanager
def weights_stay() -> Iterator[None]:
    """Within it a new engine keeps its weights in torch's own memory rather than in the pool that its sleep mode
    unmaps: they keep address and content while the engine sleeps, which gives up the KV cache alone."""
    from vllm.v1.worker.gpu_worker import Worker

    pool = Worker._maybe_get_memory_pool_context

    def of(self: Worker, tag: str) -> AbstractContextManager[Any]:
        return nullcontext() if tag == "weights" else pool(self, tag)

    with _replaced(Worker, "_maybe_get_memory_pool_context", of):
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
    attributes of its new counterpart but its submodules; Attention keeps its own, the KV cache among them, and latent
    attention the KV cache.
    """
    config, target = vllm_config(llm), device(llm)
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        process_weights_after_loading(fresh, config.model_config, target)
    if target.type == "cuda":
        values = dict(fresh.named_parameters())
        for name, parameter in loadable_parameters(running_model(llm)).items():
            parameter.data.copy_(values[name].data)
            values[name].data = values[name].data.new_empty(0)  # not when the garbage collector gets to it
        renew_derived(llm)
        torch.cuda.synchronize()  # vLLM may read on another stream
        torch.cuda.empty_cache()  # the KV cache takes memory from the device, not from torch's allocator
        return
    counterparts = dict(fresh.named_modules())
    for name, module in running_model(llm).named_modules():
        if not isinstance(module, Attention):
            kept = {"_modules", "kv_cache"} if isinstance(module, MLAAttention) else {"_modules"}
            attributes = counterparts[name].__dict__
            module.__dict__.update({key: value for key, value in attributes.items() if key not in kept})


def loadable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that files have values for, by name: not what 0.32 keeps as parameters of latent attention after
    processing (see renew_derived)."""
    derived = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, MLAAttention)
        for tensor in module.parameters(recurse=False)
    }
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in derived}


def renew_derived(llm: LLM) -> None:
    """After the running model's parameters have changed in place: latent attention decodes with two views of kv_b_proj
    (mla_attention.py: W_UK_T and W_UV). Where they are copies instead they are made again, which 0.32 does in place."""
    config = vllm_config(llm)
    for module in running_model(llm).modules():
        if isinstance(module, MLAAttention):
            weight = module.kv_b_proj.weight.untyped_storage().data_ptr()
            if any(view.untyped_storage().data_ptr() != weight for view in (module.W_UK_T, module.W_UV)):
                with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
                    module.process_weights_after_loading(config.model_config.dtype)


class Batch:
    """The requests whose next tokens are being sampled, in the order of the logits' rows."""

    def __init__(self, llm: LLM) -> None:
        self._runner = _runner(llm)
        self._ids: list[str] = []
        self._rows = np.empty(0, np.int64)

    def rows(self) -> np.ndarray:
        """Every request's `ROW`, int64."""
        ids = self._runner.input_batch.req_ids
        if ids != self._ids:
            requests = self._runner.requests
            self._ids = list(ids)
            self._rows = np.array([requests[request].sampling_params.extra_args[ROW] for request in ids], np.int64)
        return self._rows

    def positions(self) -> np.ndarray:
        """How many tokens each has been given before, int64. Known on the host even when the tokens are not yet."""
        batch = self._runner.input_batch
        count = len(batch.req_ids)
        return (batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count]).astype(np.int64)

    def fed(self) -> tuple[np.ndarray, np.ndarray]:
        """Where in each request's tokens the last forward began, and how many of them it was fed, int64. Their hidden
        states lie one request after the other."""
        count = len(self._runner.input_batch.req_ids)
        starts = self._runner.input_batch.num_computed_tokens_cpu[:count].astype(np.int64)
        return starts, np.diff(self._runner.query_start_loc.np[: count + 1]).astype(np.int64)


class ChosenExperts:
    """What the routers of an engine's model chose for the tokens of its last forward, in their order.

    The forward itself writes `ids` [max_num_batched_tokens, layers, k], also as a CUDA graph; layers without experts
    stay 0. Not by vLLM's `enable_return_routed_experts`, which copies them to the host at every step and keeps them
    there for the whole KV cache (0.24).
    """

    def __init__(self, num_layers: int, top_k: int, dtype: torch.dtype) -> None:
        self._per_token, self._dtype = (num_layers, top_k), dtype
        self.ids = torch.empty(0, *self._per_token, dtype=dtype)

    @contextmanager
    def of_new_engine(self) -> Iterator[None]:
        """Within it an engine that is launched tells its routers before it records CUDA graphs, and before it counts
        what memory is left for the KV cache. `ids` is outside the pools that sleep unmaps."""
        profile = GPUModelRunner.profile_run

        def profiled(runner: GPUModelRunner, *args: Any, **kwargs: Any) -> None:
            self._watch(runner)
            profile(runner, *args, **kwargs)

        with _replaced(GPUModelRunner, "profile_run", profiled):
            yield

    def watch(self, llm: LLM) -> None:
        """Tells the running model's routers: on a CPU nothing is profiled, and a publish leaves the model with new
        ones."""
        self._watch(_runner(llm))

    def _watch(self, runner: GPUModelRunner) -> None:
        size = runner.scheduler_config.max_num_batched_tokens
        if len(self.ids) != size:
            self.ids = torch.zeros(size, *self._per_token, dtype=self._dtype, device=runner.device)
        for module in runner.model.modules():
            if isinstance(module, MoERunner):
                if module._quant_method.is_monolithic or not isinstance(module.router, BaseRouter):
                    raise EngineError(
                        f"vllm {VERSION} routes {module.layer_name} inside its kernel; set "
                        "actor_rollout_ref.rollout.enable_rollout_routing_replay=false"
                    )
                module.router.set_capture_fn(partial(self._keep, module.layer_id))

    def _keep(self, layer: int, ids: torch.Tensor) -> None:
        self.ids[: len(ids), layer] = ids


@contextmanager
def sampling(
    llm: LLM,
    draw: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None,
    record: Callable[[torch.Tensor, torch.Tensor], None],
) -> Iterator[None]:
    """Within it `draw` (vLLM's own where None) takes tempered logits [B, V], vLLM's generators by row and its top-k and
    top-p [B] or None, and returns tokens [B] and processed logprobs [B, V]; `record` sees both for every batch."""
    sampler = _runner(llm).sampler
    sample = sampler.sample

    def recorded(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = sample(logits, *args, **kwargs)
        if logprobs is None:  # vLLM computes none for a batch that is all greedy
            logprobs = sampler.compute_logprobs(logits)
        record(tokens, logprobs)
        return tokens, logprobs

    drawing = sampler.topk_topp_sampler
    with _replaced(drawing, "forward", draw or drawing.forward), _replaced(sampler, "sample", recorded):
        yield


@contextmanager
def sampler_mode(llm: LLM, logprobs_mode: str) -> Iterator[None]:
    """Within it vLLM's own sampler is as in an engine with this `logprobs_mode`."""
    sampler = _runner(llm).sampler
    with (
        _replaced(sampler, "logprobs_mode", logprobs_mode),
        _replaced(sampler.topk_topp_sampler, "logprobs_mode", logprobs_mode),
    ):
        yield


def gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Samples a token of each row of float32 logits [B, V] by Gumbel noise that is a function of (seeds[row], token)
    alone, in one launch. On CUDA the kernel of vLLM's V2 runner, on a CPU that of its V1 runner."""
    if logits.device.type == "cpu":
        tokens: torch.Tensor = torch.ops._C.fused_gumbel_argmax(logits.contiguous(), seeds)
        return tokens
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample  # needs Triton

    every = torch.arange(len(seeds), device=logits.device)
    ones = torch.ones(len(seeds), device=logits.device)
    tokens = gumbel_sample(logits, every, ones, seeds, torch.zeros_like(seeds), apply_temperature=False)
    return tokens


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
