"""One contract per thing private to vLLM that rlhpc touches. A failure here means: read rlhpc/backends/vllm/private.py
against the new vLLM before anything else. What the engine does with them is tested on real ranks, in
tests/distributed/test_vllm.py."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.backends.vllm import private
from rlhpc.backends.vllm.engine import engine_arguments
from rlhpc.config.schema import RunConfig
from rlhpc.errors import EngineError


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_version_is_one_that_private_was_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    private.check_version()
    monkeypatch.setattr(private, "VERSION", "0.99.1")
    with pytest.raises(EngineError, match=r"vllm 0\.99\.1 is not supported; install 0\.24 or 0\.32"):
        private.check_version()


def test_external_launcher_gives_init_method_rank_and_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    executor = private.ExecutorWithExternalLauncher.__new__(private.ExecutorWithExternalLauncher)
    original = private.ExecutorWithExternalLauncher._distributed_args
    assert original(executor) == ("env://", 5, 1), "ExecutorWithExternalLauncher._distributed_args has changed"
    with private.launching("abc"):
        assert executor._distributed_args() == ("env://:abc", 5, 1)
    assert private.ExecutorWithExternalLauncher._distributed_args is original


def test_cpu_worker_names_segments_after_the_end_of_the_init_method() -> None:
    from vllm.v1.worker import cpu_worker

    source = inspect.getsource(cpu_worker.CPUWorker.init_device)
    assert "VLLM_DIST_IDENT" in source and 'init_method.split(":")[-1]' in source, (
        "CPUWorker derives the shared-memory ident differently: see private.launching"
    )


def test_groups_take_a_message_queue_flag() -> None:
    original = private.parallel_state.init_model_parallel_group
    assert "use_message_queue_broadcaster" in parameters(original), "init_model_parallel_group lost its queue flag"
    source = inspect.getsource(private.parallel_state.initialize_model_parallel)
    assert "use_message_queue_broadcaster=True" in source, "the queue flag is no longer passed by keyword"
    with private.launching("abc"):
        assert private.parallel_state.init_model_parallel_group is not original
    assert private.parallel_state.init_model_parallel_group is original


def test_parallel_state_has_the_groups() -> None:
    for name in ("_WORLD", "get_tp_group", "destroy_model_parallel"):
        assert hasattr(private.parallel_state, name), f"vllm.distributed.parallel_state.{name} is gone"
    assert "cpu_group" in inspect.getsource(private.parallel_state.GroupCoordinator)
    assert parameters(private.parallel_state.GroupCoordinator.destroy) == ["self"]


def test_shutdown_goes_through_the_cleanup_that_is_replaced() -> None:
    source = inspect.getsource(private.core.EngineCore.shutdown)
    assert "cleanup_dist_env_and_memory()" in source, "EngineCore.shutdown may destroy the world's process group"


def test_models_are_built_and_processed_by_these_signatures() -> None:
    assert "vllm_config" in parameters(private.initialize_model), "initialize_model has changed"
    assert parameters(private.process_weights_after_loading)[:3] == ["model", "model_config", "target_device"]


def test_layers_register_in_the_compilation_config() -> None:
    from vllm.config import CompilationConfig

    config = CompilationConfig()
    assert config.static_forward_context == {} and isinstance(config.static_forward_context, dict)
    assert config.static_all_moe_layers == [] and isinstance(config.static_all_moe_layers, list)


def test_the_configuration_knows_the_device_and_models_load_by_name() -> None:
    from vllm.config import DeviceConfig
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    assert "device" in {field.name for field in dataclasses.fields(DeviceConfig)}, "DeviceConfig.device is gone"
    assert parameters(Qwen3MoeForCausalLM.load_weights) == ["self", "weights"], "load_weights has changed"


def test_the_sampler_is_called_as_it_is_replaced() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner._sample)
    assert "self.sampler(" in source and "logits=logits" in source, "GPUModelRunner._sample samples by other means"
    source = inspect.getsource(Sampler.forward)
    assert "sampled, processed_logprobs = self.sample(logits, sampling_metadata)" in source, (
        "Sampler.sample is not used"
    )
    source = inspect.getsource(Sampler.sample)
    assert "random_sampled, processed_logprobs = self.topk_topp_sampler(" in source, "Sampler.sample draws otherwise"
    assert parameters(TopKTopPSampler.forward_native) == ["self", "logits", "generators", "k", "p"]
    assert "self.forward =" in inspect.getsource(TopKTopPSampler.__init__), "TopKTopPSampler.forward is no attribute"
    assert parameters(private.apply_top_k_top_p) == ["logits", "k", "p"], "apply_top_k_top_p has changed"
    assert parameters(Sampler.compute_logprobs) == ["logits"], "Sampler.compute_logprobs has changed"


def test_the_batch_tells_its_requests_and_their_lengths() -> None:
    from vllm import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(InputBatch.__init__)
    for name in ("num_tokens_no_spec", "num_prompt_tokens"):
        assert f"self.{name} =" in source, f"InputBatch.{name} is gone"
    assert isinstance(InputBatch.req_ids, property), "InputBatch.req_ids is gone"
    source = inspect.getsource(GPUModelRunner.__init__)
    assert "self.input_batch =" in source and "self.requests:" in source, "GPUModelRunner keeps requests otherwise"
    assert "sampling_params" in {field.name for field in dataclasses.fields(CachedRequestState)}
    assert SamplingParams(extra_args={private.ROW: 3}).clone().extra_args == {private.ROW: 3}
    # A token's place is counted while the token itself may still be on its way from the device.
    assert "self.input_batch.num_tokens_no_spec[req_idx] = end_idx" in inspect.getsource(
        GPUModelRunner._bookkeeping_sync
    ), "GPUModelRunner counts tokens elsewhere"


def test_gumbel_noise_depends_on_seed_and_token_alone() -> None:
    """Also: infinitely unlikely tokens are never drawn, and shares follow the softmax."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(64, 5000, device=device)
    logits[:, ::2] = -torch.inf
    seeds = torch.arange(64, device=device) * 2**40
    drawn = private.gumbel_argmax(logits, seeds)
    assert drawn.dtype == torch.int64 and bool((drawn % 2 == 1).all())
    assert torch.equal(private.gumbel_argmax(logits.flip(0), seeds.flip(0)).flip(0), drawn)
    assert torch.equal(private.gumbel_argmax(logits[40:43], seeds[40:43]), drawn[40:43])
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05], device=device)
    many = private.gumbel_argmax(shares.log().expand(200_000, 4), torch.arange(200_000, device=device))
    found = torch.bincount(many, minlength=4) / 200_000
    assert torch.all((found - shares).abs() < 5 * (shares * (1 - shares) / 200_000).sqrt())


def test_attention_owns_the_kv_cache() -> None:
    assert "kv_cache" in inspect.getsource(private.Attention.__init__), "Attention no longer holds the KV cache"
    assert "self.kv_cache = " in inspect.getsource(private.MLAAttention.__init__), "MLAAttention's KV cache has moved"


def test_only_weights_stay_out_of_the_pool_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from vllm.v1.worker.gpu_worker import Worker

    source = inspect.getsource(Worker)
    for tag in ("weights", "kv_cache"):
        assert f'self._maybe_get_memory_pool_context(tag="{tag}")' in source, f"Worker takes {tag} from elsewhere"
    assert parameters(Worker._maybe_get_memory_pool_context) == ["self", "tag"]
    monkeypatch.setattr(Worker, "_maybe_get_memory_pool_context", lambda self, tag: f"the pool of {tag}")
    worker = Worker.__new__(Worker)
    with private.weights_stay():
        assert isinstance(worker._maybe_get_memory_pool_context(tag="weights"), nullcontext)
        assert worker._maybe_get_memory_pool_context(tag="kv_cache") == "the pool of kv_cache"
    assert worker._maybe_get_memory_pool_context(tag="weights") == "the pool of weights"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_engine_argument_exists(device: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    cfg = RunConfig()
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert engine_arguments(cfg, Path("/model"), device).keys() <= known


def test_environment_is_set_before_vllm_is_imported() -> None:
    import os

    import vllm.envs

    from rlhpc.backends.vllm.environment import DEFAULTS

    assert os.environ.keys() >= DEFAULTS.keys()
    assert not vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING and not vllm.envs.VLLM_USE_V2_MODEL_RUNNER


def test_routers_tell_what_they_choose() -> None:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    assert private.MoERunner is MoERunner and isinstance(MoERunner.layer_id, property)
    assert isinstance(MoERunner._quant_method, property), "MoERunner._quant_method is gone"
    assert "self.router.select_experts(" in inspect.getsource(MoERunner), "MoERunner chooses experts otherwise"
    assert parameters(private.BaseRouter.set_capture_fn) == ["self", "capture_fn"]
    source = inspect.getsource(private.BaseRouter)
    at = [
        source.index(text) for text in ("= self._compute_routing(", "self.capture_fn(topk_ids)", "_apply_eplb_mapping(")
    ]
    assert at[0] < at[1] < source.index("topk_ids = self._apply_eplb_mapping(topk_ids)"), "routers tell other numbers"
    # Before memory is counted: graphs are captured, and pools that sleep unmaps are opened, later.
    assert "self.model_runner.profile_run(" in inspect.getsource(Worker.determine_available_memory)
    source = inspect.getsource(GPUModelRunner)
    assert "self.scheduler_config =" in source and "self.query_start_loc.np[1 : num_reqs + 1] = cu_num_tokens" in source
    assert "self.input_batch.num_computed_tokens_cpu[req_index] = num_computed_tokens" in source


def test_latent_attention_derives_two_tensors_from_kv_b_proj() -> None:
    source = inspect.getsource(private.MLAAttention.process_weights_after_loading)
    assert "W_UK_T" in source and "W_UV" in source, "MLAAttention derives other tensors: see private.renew_derived"
    assert "kv_b_proj" in parameters(private.MLAAttention.__init__)
