from pathlib import Path

import pytest

from rlhpc.backends.vllm.engine import VllmEngine, engine_arguments
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError
from tests.tiny_model import tiny_config


def config(**rollout: object) -> RunConfig:
    cfg = RunConfig()
    cfg.data.max_prompt_length, cfg.data.max_response_length = 100, 28
    for name, value in rollout.items():
        setattr(cfg.actor_rollout_ref.rollout, name, value)
    return cfg


def test_tensor_parallel_size_must_divide_the_ranks() -> None:
    cfg = config(tensor_model_parallel_size=4)
    with pytest.raises(ConfigError, match=r"model_parallel_size=4 must divide the 6 ranks .*; choose 1, 2, 3, 6"):
        VllmEngine(cfg, tiny_config(), Path("/model"), "cpu", 0, 6, "x")


def test_expert_parallelism_needs_a_gpu() -> None:
    cfg = config(tensor_model_parallel_size=2, expert_parallel_size=2)
    assert engine_arguments(cfg, Path("/model"), "cuda")["enable_expert_parallel"]
    assert not engine_arguments(config(tensor_model_parallel_size=2), Path("/model"), "cuda")["enable_expert_parallel"]
    with pytest.raises(ConfigError, match="expert_parallel_size=2 needs GPUs: vLLM's CPU build .*; set 1"):
        VllmEngine(cfg, tiny_config(), Path("/model"), "cpu", 0, 2, "x")


def test_arguments_follow_the_config() -> None:
    cpu = engine_arguments(config(cpu_kv_cache_gib=0.25, max_num_seqs=9000), Path("/model"), "cpu")
    assert cpu["kv_cache_memory_bytes"] == 268_435_456 and cpu["enforce_eager"] and "enable_sleep_mode" not in cpu
    assert cpu["max_model_len"] == 128 and cpu["max_num_batched_tokens"] == 9000 and cpu["skip_tokenizer_init"]
    few = engine_arguments(config(max_num_batched_tokens=50, max_num_seqs=4), Path("/model"), "cpu")
    assert few["max_num_batched_tokens"] == 50
    latent = engine_arguments(config(), Path("/model"), "cpu", latent=True)
    assert latent["attention_config"] == {"backend": "CPU_MLA"} and "attention_config" not in cpu
    cuda = engine_arguments(config(max_model_len=77, stop=["x"], free_cache_engine=False), Path("/model"), "cuda")
    assert cuda["max_model_len"] == 77 and not cuda["skip_tokenizer_init"] and not cuda["enable_sleep_mode"]
    assert cuda["moe_backend"] == "triton" and not cuda["enforce_eager"] and "kv_cache_memory_bytes" not in cuda


def test_every_number_of_sequences_has_a_cuda_graph() -> None:
    def sizes(**rollout: object) -> list[int]:
        arguments = engine_arguments(config(**rollout), Path("/model"), "cuda")
        return arguments["compilation_config"]["cudagraph_capture_sizes"]

    assert sizes(max_num_seqs=24) == [1, 2, 4, 8, 16, 24] and sizes(max_num_seqs=3) == [1, 2, 3]
    many = sizes(max_num_seqs=1000)
    assert many[:5] == [1, 2, 4, 8, 16] and many[-9:] == [512, 576, 640, 704, 768, 832, 896, 960, 1000]
    assert sizes(max_num_seqs=1000, cudagraph_capture_sizes=[8, 512]) == [8, 512]
