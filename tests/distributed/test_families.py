"""Every family through everything: trainer = Transformers = vLLM, publishing between them, files in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.cli.main import main
from tests.distributed.family_ranks import BIAS_RATE, Case
from tests.distributed.megatron_reference import assert_equal_steps, transformers_step
from tests.distributed.ranks import run_ranks
from tests.fp8_files import quantise_directory
from tests.hf_files import read_tensors
from tests.saved_runs import write_run
from tests.tiny_family import write_tiny_family

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
# What ranks read these models from: fp8 files, whose blocks no rank's part ends with.
FP8 = {"mixtral": (48, 80), "deepseek": (128, 128), "deepseek-tp2-pp2-ep2": (128, 128), "qwen3-moe-top1-ep4": (40, 56)}
# model_type, config, trainer, rollout tp
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int], int]] = {
    "llama": ("llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}, {"pp": 2}, 2),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}, {"tp": 2}, 2),  # a KV head on both ranks, cut in the trainer
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "head_dim": 64}, {"tp": 2}, 1),
    "mixtral": ("mixtral", {"tie_word_embeddings": True}, {"ep": 2}, 2),
    "deepseek": ("deepseek_v3", {"rope_scaling": YARN}, {"tp": 2}, 2),
    "moonlight": ("deepseek_v3", MOONLIGHT, {"pp": 2}, 1),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def write_model(root: Path, name: str, model_type: str, config: dict[str, Any]) -> Path:
    """What the ranks are given; root/models/`name` has it without quantisation, for everybody else."""
    plain = write_tiny_family(root / "models" / name, model_type, **config)
    return quantise_directory(plain, root / "fp8" / name, FP8[name]) if name in FP8 else plain


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, dict[str, Any]]]:
    cases = {
        name: Case(write_model(root, name, model_type, config), sizes, rollout_tp)
        for name, (model_type, config, sizes, rollout_tp) in CASES.items()
    }
    return run_ranks("tests.distributed.family_ranks:all_cases", 2, timeout_s=500, cases=cases, out_dir=root)


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_equals_transformers(name: str, root: Path, ranks: list[dict[str, Any]]) -> None:
    """Biases, tied embeddings and padded vocabularies too."""
    wanted = transformers_step(root / "models" / name)
    assert_equal_steps([rank[name]["step"] for rank in ranks], wanted)
    assert_moved_biases([rank[name]["step"] for rank in ranks], root / "models" / name, wanted["loads"])


def assert_moved_biases(ranks: list[dict[str, Any]], model: Path, loads: dict[int, np.ndarray]) -> None:
    """Each down where Transformers gives its expert more than the mean of all tokens, up where less."""
    before = {key: tensor.numpy() for key, tensor in read_tensors(model).items() if "correction_bias" in key}
    seen = set()
    for rank in ranks:
        for spec in rank["specs"]:
            for shard in spec.on(rank["rank"]) if spec.name in before else ():
                load = loads[int(spec.name.split(".")[2])]
                step = np.sign(load.mean() - load).astype(np.float32) * np.float32(BIAS_RATE)
                assert np.any(step > 0) and np.any(step < 0)
                np.testing.assert_array_equal(rank["biases"][shard.buffer], before[spec.name] + step)
                seen.add(spec.name)
    assert seen == before.keys()


# model_type, config, trainer
STEPS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama-tied-pp2-dp2": ("llama", {"tie_word_embeddings": True}, {"pp": 2}),
    "llama-tied-tp2-pp2": ("llama", {"tie_word_embeddings": True}, {"tp": 2, "pp": 2}),
    "qwen2-tp4": ("qwen2", {}, {"tp": 4}),  # two ranks per KV head, whose bias is cut
    "qwen3-tied-tp4": ("qwen3", {"tie_word_embeddings": True}, {"tp": 4}),
    "qwen3-moe-top1-ep4": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}, {"ep": 4}),
    "mixtral-tied-tp2-etp2-ep2": ("mixtral", {"tie_word_embeddings": True}, {"tp": 2, "ep": 2, "etp": 2}),
    "deepseek-tp2-pp2-ep2": (
        "deepseek_v3",
        {"rope_scaling": YARN, "num_hidden_layers": 3},
        {"tp": 2, "pp": 2, "ep": 2},
    ),
    "moonlight-tp2-etp2-ep2": ("deepseek_v3", MOONLIGHT, {"tp": 2, "ep": 2, "etp": 2}),
}


@pytest.fixture(scope="module")
def four_ranks(root: Path) -> list[dict[str, dict[str, Any]]]:
    calls = {
        name: (write_model(root, name, model_type, config), sizes)
        for name, (model_type, config, sizes) in STEPS.items()
    }
    return run_ranks("tests.distributed.family_ranks:steps", 4, timeout_s=500, calls=calls)


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_on_four_ranks_equals_transformers(
    name: str, root: Path, four_ranks: list[dict[str, Any]]
) -> None:
    wanted = transformers_step(root / "models" / name)
    assert_equal_steps([rank[name] for rank in four_ranks], wanted)
    assert_moved_biases([rank[name] for rank in four_ranks], root / "models" / name, wanted["loads"])


@pytest.mark.parametrize("stage", ["loaded", "trained"])
@pytest.mark.parametrize("name", CASES)
def test_engine_and_trainer_and_transformers_agree(
    name: str, stage: str, root: Path, ranks: list[dict[str, Any]]
) -> None:
    """On what vLLM sampled with published weights, Transformers reading the trainer's exported file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / name / stage, dtype=torch.float32)
    for rank in ranks:
        assert len(rank[name][stage]) == 8
        for sample in rank[name][stage]:
            tokens = torch.from_numpy(sample["tokens"].astype(np.int64))
            with torch.no_grad():
                table = model(tokens[None]).logits[0].log_softmax(-1)
            expected = table[:-1].gather(1, tokens[1:, None])[sample["prompt_len"] - 1 :, 0].numpy()
            np.testing.assert_allclose(sample["trainer"], expected, atol=2e-5)
            np.testing.assert_allclose(sample["engine"], expected, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_files_come_back_bit_by_bit(name: str, root: Path, ranks: list[dict[str, Any]]) -> None:
    places = (root / "models" / name, root / name / "loaded", root / name / "trained")
    source, loaded, trained = map(read_tensors, places)
    assert source.keys() == loaded.keys() == trained.keys()
    for key, tensor in source.items():
        assert torch.equal(tensor, loaded[key]), key
        assert not torch.equal(tensor, trained[key]), key


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_exported_as_what_the_trainer_holds(name: str, root: Path, ranks: list[dict[str, Any]]) -> None:
    """Through its optimizer's flat ranges, the same bits as gathering the parameters gives."""
    run = write_run(root / name / "run", root / ("fp8" if name in FP8 else "models") / name)
    assert main(["export", str(run), str(root / name / "exported"), "--shard-size", "200KB"]) == 0
    exported, trained = read_tensors(root / name / "exported"), read_tensors(root / name / "trained")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in trained.items())
    assert main(["export", str(run), str(root / name / "narrow"), "--dtype", "bfloat16"]) == 0
    for key, tensor in read_tensors(root / name / "narrow").items():  # what chooses experts keeps its bits
        assert torch.equal(tensor, trained[key] if "correction_bias" in key else trained[key].bfloat16()), key
