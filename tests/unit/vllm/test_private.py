"""One contract per thing private to vLLM that rlhpc touches. A failure here means: read rlhpc/backends/vllm/private.py
against the new vLLM before anything else. What the engine does with them is tested on real ranks, in
tests/distributed/test_vllm.py."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def test_attention_owns_the_kv_cache() -> None:
    assert "kv_cache" in inspect.getsource(private.Attention.__init__), "Attention no longer holds the KV cache"


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
