"""The same trainer on CUDA: flash attention over packed sequences, grouped matmul, sleep and wake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.megatron_reference import canonical_gradients, transformers_step, whole_step
from tests.distributed.ranks import run_ranks
from tests.distributed.test_attention_gpu import needs_transformer_engine
from tests.tiny_model import write_tiny_model

RANKS = "tests.distributed.megatron_ranks"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Nats, and the share of tokens that may be further off; the gradient's relative norm and cosine. bfloat16 has 8 bits of
# mantissa, and where a router's near tie picks another expert a token's logprob jumps (0.55 nats seen).
TOLERANCES = {"float32": (1e-4, 0.0, 1e-4, 0.9999), "bfloat16": (0.3, 0.05, 0.1, 0.97)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=319)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, Any]:
    return transformers_step(model_dir)


def check_step(ranks: list[dict[str, Any]], expected: dict[str, Any], dtype: str) -> None:
    nats, share, norm, cosine = TOLERANCES[dtype]
    step = whole_step(ranks)
    gaps = np.concatenate([step["logprobs"][index] - logprobs for index, logprobs in expected["logprobs"].items()])
    assert np.mean(np.abs(gaps) > nats) <= share, np.sort(np.abs(gaps))[-8:]
    wanted = np.concatenate([g.ravel() for g in expected["gradients"].values()]).astype(np.float64)
    gradients = canonical_gradients(ranks)
    found = np.concatenate([gradients[name].ravel() for name in expected["gradients"]]).astype(np.float64)
    assert step["norm"] == pytest.approx(np.linalg.norm(wanted), rel=norm)
    assert found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted) > cosine


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        ("float32", "auto"),
        ("bfloat16", "flash"),
        pytest.param("bfloat16", "fused", marks=needs_transformer_engine),
    ],
)
def test_equals_transformers_on_a_cpu(
    model_dir: Path, expected: dict[str, Any], dtype: str, attention: str, recompute: bool
) -> None:
    ranks = run_ranks(
        f"{RANKS}:one_step", 1, model_dir=model_dir, sizes={}, max_tokens=40, device="cuda", model__dtype=dtype,
        model__enable_gradient_checkpointing=recompute, actor__megatron__attention_backend=attention,
    )  # fmt: skip
    check_step(ranks, expected, dtype)


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@needs_two
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_two_gpus_equal_transformers_on_a_cpu(model_dir: Path, expected: dict[str, Any], dtype: str) -> None:
    """Data, expert, tensor and pipeline parallelism over NCCL, one after the other in one start of the ranks."""
    layouts: list[dict[str, int]] = [{}, {"ep": 2}, {"tp": 2}, {"tp": 2, "etp": 2}, {"pp": 2}]
    calls = [
        (
            "one_step",
            {"model_dir": model_dir, "sizes": sizes, "max_tokens": 40, "device": "cuda", "model__dtype": dtype},
        )
        for sizes in layouts
    ]
    ranks = run_ranks(f"{RANKS}:in_turn", 2, 400.0, calls=calls)
    for i in range(len(layouts)):
        check_step([rank[i] for rank in ranks], expected, dtype)


@needs_two
def test_layouts_agree_on_a_slice_of_a_real_shape(tmp_path: Path) -> None:
    """Three steps on two layers of Qwen3-30B-A3B's shape (1.8 B parameters, bfloat16): loss, gradient norm, and the
    mean logprob of every sequence, which differs between sequences by about 0.06."""
    layouts: dict[str, dict[str, int]] = {"DP2": {}, "EP2": {"ep": 2}, "TP2": {"tp": 2}, "TP2·EP2": {"tp": 2, "ep": 2}}
    calls = [("write_slice", {"model_dir": tmp_path})]
    calls += [("steps_on_slice", {"model_dir": tmp_path, "sizes": sizes}) for sizes in layouts.values()]
    ranks = run_ranks("tests.distributed.slice_ranks:in_turn", 2, 500.0, calls=calls)
    steps = {name: [whole_step([rank[i + 1][s] for rank in ranks]) for s in range(3)] for i, name in enumerate(layouts)}
    for name, found in steps.items():
        print(name, [(step["loss"], step["norm"]) for step in found])
    for wanted, *others in zip(*steps.values(), strict=True):
        assert len(wanted["logprobs"]) == 16 and np.std(list(wanted["logprobs"].values())) > 0.02
        for found in others:
            assert found["loss"] == pytest.approx(wanted["loss"], rel=0.01)
            assert found["norm"] == pytest.approx(wanted["norm"], rel=0.03)
            for i, logprob in wanted["logprobs"].items():
                assert found["logprobs"][i] == pytest.approx(logprob, abs=0.005)


@pytest.fixture(scope="module")
def slept(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All in one start of the rank."""
    directories = {name: tmp_path_factory.mktemp(name) for name in (*TOLERANCES, "critic", "staying")}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("sleep_and_train", {"model_dir": model_dir, "dtype": dtype, "checkpoints": directories[dtype]})
        for dtype in TOLERANCES
    ]
    critic = {"dtype": "bfloat16", "adv_estimator": "gae", "checkpoints": directories["critic"]}
    calls += [("sleep_and_train", {"model_dir": model_dir} | critic)]
    calls += [("stay_awake", {"model_dir": model_dir, "checkpoints": directories["staying"]})]
    calls += [("overlap", {"num_bytes": 2**32})]
    (outcomes,) = run_ranks("tests.distributed.offload_ranks:in_turn", 1, calls=calls)
    return dict(zip((*TOLERANCES, "critic", "staying", "overlap"), outcomes, strict=True))


@pytest.mark.parametrize("case", [*TOLERANCES, "critic"])
def test_sleep_frees_and_wake_restores(slept: dict[str, Any], case: str) -> None:
    """Per parameter: weight, two moments, the reference's weight, and a master for bfloat16, as a critic's is; its
    float32 gradient is gone first. Steps whose state arrives while they run equal steps without a sleep, bit by bit."""
    outcome = slept[case]
    awake, leaving, asleep = outcome["allocated"]
    policy, critic = outcome["parameters"], outcome["critic_parameters"]
    assert (critic > 0) == (case == "critic")
    assert awake - leaving >= 4 * (policy + critic)
    per_parameter = 4 + 8 + 4 if case == "float32" else 2 + 4 + 8 + 2
    assert leaving - asleep >= per_parameter * policy + (2 + 4 + 8) * critic
    assert all(outcome["right"].values()), outcome
    assert all(np.isfinite(m["actor/grad_norm"]) and m["actor/grad_norm"] > 0 for m in outcome["metrics"])


def test_what_stays_awake_is_saved_from_there(slept: dict[str, Any]) -> None:
    gradients, freed = 4 * slept["staying"]["parameters"], slept["staying"]["freed"]
    assert slept["staying"]["right"] and gradients <= freed < 1.1 * gradients + 2**20
    assert "gpu_memory_utilization=1 leaves 0.0 GiB of the GPU's" in slept["staying"]["refused"]
    assert "weights 0.0 GiB, optimizer 0.0 GiB; set at most 0.99, or more of" in slept["staying"]["refused"]


def test_state_travels_behind_the_caller(slept: dict[str, Any]) -> None:
    assert all(slept["overlap"].values()), slept["overlap"]
