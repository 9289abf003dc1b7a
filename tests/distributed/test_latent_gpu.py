"""DeepSeek-V3's layers on CUDA: the trainer's latent attention with heads of published sizes, vLLM's kernels for it,
and what a publish leaves in the tensors that vLLM derives from kv_b_proj."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.family_ranks import Case
from tests.distributed.megatron_reference import transformers_step
from tests.distributed.ranks import run_ranks
from tests.distributed.test_families import MOONLIGHT, YARN
from tests.distributed.test_megatron_gpu import check_step
from tests.fp8_files import quantise_directory
from tests.hf_files import read_tensors
from tests.tiny_family import write_tiny_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": 384, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_hidden_layers": 3, "initializer_range": 0.05,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"deepseek": {"rope_scaling": YARN}, "moonlight": MOONLIGHT}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_family(root / name, "deepseek_v3", **SIZES | more) for name, more in MODELS.items()}


def test_a_step_equals_transformers_on_a_cpu(models: dict[str, Path]) -> None:
    expected = transformers_step(models["deepseek"])
    cases = (("float32", "auto"), ("bfloat16", "local"), ("bfloat16", "flash"))
    calls = [
        (
            "one_step",
            {"model_dir": models["deepseek"], "sizes": {}, "max_tokens": 40, "device": "cuda", "model__dtype": dtype,
             "actor__megatron__attention_backend": attention},
        )
        for dtype, attention in cases
    ]  # fmt: skip
    (outcomes,) = run_ranks("tests.distributed.megatron_ranks:in_turn", 1, timeout_s=300, calls=calls)
    for (dtype, _), outcome in zip(cases, outcomes, strict=True):
        check_step([outcome], expected, dtype)


def test_engine_and_trainer_agree_before_and_after_training(models: dict[str, Path], tmp_path: Path) -> None:
    """In bfloat16, the only one of our dtypes that vLLM's kernels have; with CUDA graphs and without; one from fp8."""
    plain = models["deepseek"]
    models = models | {"deepseek": quantise_directory(plain, tmp_path / "fp8", (128, 128))}
    engine = {"gpu_memory_utilization": 0.3, "max_num_seqs": 16}
    cases = {
        name: Case(path, {}, 1, "cuda", "bfloat16", engine | {"enforce_eager": name == "moonlight"})
        for name, path in models.items()
    }
    (rank,) = run_ranks("tests.distributed.family_ranks:all_cases", 1, timeout_s=500, cases=cases, out_dir=tmp_path)
    for name in cases:
        samples = {stage: rank[name][stage] for stage in ("loaded", "trained")}
        for stage, found in samples.items():
            gaps = np.concatenate([np.abs(sample["trainer"] - sample["engine"]) for sample in found])
            print(f"{name} {stage}: mean {gaps.mean():.4f}, 95 % {np.quantile(gaps, 0.95):.4f}, most {gaps.max():.3f}")
            assert gaps.mean() < 0.05 and np.mean(gaps > 0.3) <= 0.05
    loaded = read_tensors(tmp_path / "deepseek/loaded")
    for name, tensor in read_tensors(plain).items():
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name
