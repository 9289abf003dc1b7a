"""The rollout engine on CUDA: both sinks into memory that has slept, CUDA graphs, and logprobs against Transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.test_vllm import check_distributions, check_recorded
from tests.distributed.vllm_ranks import spec
from tests.distributed.vllm_reference import expected, transformers_logits
from tests.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 90  # padded to 128
# Nats, the share of sampled tokens that may be further off, and the mean: in bfloat16 a router's near tie may pick
# another expert, and a token's logprob jumps: of 24 tokens, two by 0.4 and 0.6 with TP=2, whose sums round otherwise.
# Another model's are off by 0.2 and more in the mean.
TOLERANCES = {"float32": (1e-3, 0.0, 1e-4), "bfloat16": (0.2, 0.15, 0.1)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": VOCAB, "moe_intermediate_size": 128}
    return write_tiny_model(root / "old", seed=0, **sizes), write_tiny_model(root / "new", seed=1, **sizes)


def gaps(samples: list[dict[str, Any]], model_dir: Path, dtype: str) -> np.ndarray:
    """Differences from Transformers, which computes in float64 with the weights rounded to `dtype`, per token."""
    logits = transformers_logits(model_dir, dtype)
    return np.concatenate(
        [np.abs(np.asarray(s["logprobs"]) - expected(logits, s["prompt"], s["tokens"], spec())) for s in samples]
    )


# Half the cases with CUDA graphs, which keep the addresses of the parameters that they were captured with.
@pytest.mark.parametrize(
    ("dtype", "tp", "rollout"),
    [
        ("float32", 1, {"enforce_eager": True}),
        ("bfloat16", 1, {"enforce_eager": False}),
        ("bfloat16", 2, {"enforce_eager": True}),
        ("bfloat16", 2, {"enforce_eager": False, "expert_parallel_size": 2}),
    ],
    ids=["float32", "bfloat16-graphs", "bfloat16-tp2", "bfloat16-tp2-ep2-graphs"],
)
def test_both_sinks(models: tuple[Path, Path], dtype: str, tp: int, rollout: dict[str, Any]) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} CUDA devices")
    rng = np.random.default_rng(0)
    prompts = [(i, rng.integers(5, VOCAB, length).tolist()) for i, length in enumerate((140, 170, 192))]
    old, new = models
    ranks = run_ranks(
        "tests.distributed.sink_ranks:on_cuda", tp, timeout_s=600,
        old=str(old), new=str(new), tp=tp, dtype=dtype, prompts=prompts,
        gpu_memory_utilization=0.3, max_num_seqs=16, **rollout,
    )  # fmt: skip
    nats, share, mean = TOLERANCES[dtype]
    for result in ranks:
        assert result["old unequal"] == result["new unequal"] == result["unchanged"] == []
        assert result["direct kept bytes"] <= 2**20 and result["reference kept bytes"] <= 2**20
        for (_, published), samples in result["samples"].items():
            model_dir = {"old": old, "new": new}[published]
            assert all((sample["cached"] >= 128) == (published == "old") for sample in samples)
            found = gaps(samples, model_dir, dtype)
            assert np.mean(found > nats) <= share and found.mean() < mean, np.sort(found)[-8:]
            other = gaps(samples, {"old": new, "new": old}[published], dtype)
            assert other.mean() > 0.2  # the models do differ
        for model in ("old", "new"):
            tokens, through_loader = (
                [sample["tokens"] for sample in result["samples"][sink, model]] for sink in ("direct", "reference")
            )
            assert tokens == through_loader


@pytest.mark.parametrize(
    ("dtype", "tight", "eager"),
    [("float32", False, True), ("float32", True, True), ("bfloat16", True, False)],
    ids=["float32", "float32-tight", "bfloat16-graphs-tight"],
)
def test_recorded_logprobs_are_vllms_own(models: tuple[Path, Path], dtype: str, tight: bool, eager: bool) -> None:
    """With asynchronous scheduling; `tight` chunks prompts and, in bfloat16, has a KV cache for about half of the
    requests (in float32 the same number of blocks was enough for all of them).

    CUDA kernels round otherwise for batches of another size. So tokens of both schedules need not be the same, as they
    are on a CPU; what they are drawn from is, but for rounding.
    """
    result = recorded(models[0], dtype, tight, eager)
    check_recorded(result)
    if dtype == "bfloat16":
        assert result["ours"]["preempted"] > 0
    else:  # not in bfloat16, where a router's near tie may fall otherwise, far from rounding
        check_distributions(result["ours"], recorded(models[0], dtype, not tight, eager)["ours"], nats=5e-3)


@cache
def recorded(model_dir: Path, dtype: str, tight: bool, eager: bool) -> dict[str, Any]:
    rollout = {"max_num_seqs": 12, "enforce_eager": eager, "gpu_memory_utilization": 0.3}
    if tight:
        rollout["max_num_batched_tokens"] = 48
    [result] = run_ranks(
        "tests.distributed.vllm_ranks:recorded", 1, timeout_s=300, model_dir=str(model_dir), device="cuda",
        dtype=dtype, num_blocks=70 if tight else None, **rollout,
    )  # fmt: skip
    return result
