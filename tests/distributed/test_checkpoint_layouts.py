"""Checkpoints of the real trainer, loaded in other processes under the same and under other layouts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.checkpoint.manifest import read_manifest
from rlhpc.layout.spec import ShardSpec
from rlhpc.reshard.saved import load_saved
from tests.distributed.checkpoint_ranks import CHUNK_BYTES
from tests.distributed.ranks import run_ranks
from tests.hf_files import read_tensors
from tests.tiny_family import write_tiny_family
from tests.tiny_model import write_tiny_model

STEP = 3  # optimizer steps before the save
Calls = dict[str, tuple[str, dict[str, Any]]]
Outcomes = dict[str, list[Any]]  # by call, then by rank
MOMENTS = ("exp_avg", "exp_avg_sq")
BIAS = "e_score_correction_bias"
# What was saved, on how many ranks, under which layout. The odd vocabulary is padded under TP.
FULL = {"model__dtype": "float32", "actor__optim__lr_warmup_steps": 5}
PPO = FULL | {"adv_estimator": "gae"}  # a critic beside the policy
HALF = FULL | {"model__dtype": "bfloat16", "actor__megatron__freeze_moe_router": True}
SAVED: dict[str, tuple[int, str, dict[str, int], dict[str, Any]]] = {
    "TP2": (2, "model", {"tp": 2}, FULL),
    "EP2 bf16": (2, "tied", {"ep": 2}, HALF),
    "DeepSeek TP2 EP2": (2, "latent", {"tp": 2, "ep": 2}, FULL),  # frozen biases beside trained routers
    "TP2 EP2 PP2": (4, "tied", {"tp": 2, "ep": 2, "pp": 2}, PPO),
}
# What is loaded, on how many ranks, under which layout.
LOADED: dict[tuple[str, str], tuple[int, dict[str, int]]] = {
    ("TP2", "TP2"): (2, {"tp": 2}),
    ("TP2", "PP2"): (2, {"pp": 2}),
    ("TP2", "EP2"): (2, {"ep": 2}),
    ("TP2", "TP2 PP2 on 4"): (4, {"tp": 2, "pp": 2}),
    ("EP2 bf16", "EP2"): (2, {"ep": 2}),
    ("EP2 bf16", "TP2 ETP2"): (2, {"tp": 2, "etp": 2}),
    ("EP2 bf16", "EP2 on 4"): (4, {"ep": 2}),
    ("DeepSeek TP2 EP2", "TP2 PP2 on 4"): (4, {"tp": 2, "pp": 2}),
    ("TP2 EP2 PP2", "EP2 on 2"): (2, {"ep": 2}),
    ("TP2 EP2 PP2", "TP2 on 2"): (2, {"tp": 2}),
}
SAME = {"TP2": "TP2", "EP2 bf16": "EP2"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and, by run, checkpoints: `<what>/step-000001`."""
    root = tmp_path_factory.mktemp("layouts")
    write_tiny_model(root / "model", vocab_size=319)
    write_tiny_model(root / "tied", vocab_size=319, tie_word_embeddings=True)
    write_tiny_family(root / "latent", "deepseek_v3")
    write_tiny_model(root / "other seed", vocab_size=319, tie_word_embeddings=True, seed=1)
    return root


def checkpoint(root: Path, run: str) -> Path:
    return root / run / "step-000001"


@pytest.fixture(scope="module")
def outcomes(root: Path) -> Outcomes:
    """Three starts of the ranks, which take most of the time: two save, four load that and save, two load all of it."""
    begins: dict[int, Calls] = {2: {}, 4: {}}
    resumes: dict[int, Calls] = {2: {}, 4: {}}
    for name, (size, model, sizes, settings) in SAVED.items():
        arguments = {"steps": range(STEP), "save_to": root / name, "model_dir": root / model, "sizes": sizes}
        begins[size][name] = ("begin", arguments | settings)
    for (saved, name), (size, sizes) in LOADED.items():
        _, model, _, settings = SAVED[saved]
        arguments = {"load_from": checkpoint(root, saved), "save_to": root / f"{saved} as {name}", "step": STEP}
        arguments |= {"model_dir": root / model, "sizes": sizes}
        resumes[size][f"{saved} as {name}"] = ("resume", arguments | settings)
    found = run_calls(2, begins[2])
    damage(root)
    found |= run_calls(4, resumes[4] | begins[4])
    return found | run_calls(2, resumes[2] | warm_starts(root) | refusals(root))


def run_calls(world_size: int, calls: Calls) -> Outcomes:
    ranks = run_ranks("tests.distributed.checkpoint_ranks:in_turn", world_size, 400.0, calls=list(calls.values()))
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(calls)}


def damage(root: Path) -> None:
    """A copy of a checkpoint with a flipped bit in what rank 1 alone reads."""
    copy = Path(shutil.copytree(checkpoint(root, "TP2"), checkpoint(root, "damaged")))
    with (copy / "rank-00001-0000.safetensors").open("r+b") as file:
        file.seek(5 * CHUNK_BYTES + 17)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


def warm_starts(root: Path) -> Calls:
    half = {"model__dtype": "bfloat16", "model_dir": root / "tied", "step": 0, "sizes": {"tp": 2, "etp": 2}}
    full = {"model__dtype": "float32", "model_dir": root / "model", "step": STEP, "sizes": {"pp": 2}}
    return {
        "of files": ("warm_start", half | {"load_from": root / "other seed", "save_to": root / "of files"}),
        "of TP2": ("warm_start", full | {"load_from": checkpoint(root, "TP2"), "save_to": root / "of TP2"}),
    }


def refusals(root: Path) -> Calls:
    cases = {
        "damaged": ("damaged", "model", {"tp": 2}, FULL),
        "another model": ("TP2", "tied", {}, FULL),
        "not frozen": ("EP2 bf16", "tied", {}, FULL),
        "no critic": ("EP2 bf16", "tied", {"ep": 2}, HALF | {"adv_estimator": "gae"}),
    }
    return {
        name: ("refusal", {"load_from": checkpoint(root, run), "model_dir": root / model, "sizes": sizes} | settings)
        for name, (run, model, sizes, settings) in cases.items()
    }


def whole(directory: Path) -> dict[tuple[str, str], torch.Tensor]:
    """All that a checkpoint holds, by kind and canonical name."""
    manifest = read_manifest(directory)
    found = {}
    for kind in manifest.kinds:
        dtype = {piece.name: piece.dtype for piece in manifest.pieces(kind)}
        tensors = {name: torch.empty(manifest.shapes[name], dtype=getattr(torch, dtype[name])) for name in dtype}
        specs = [ShardSpec.whole(name, manifest.shapes[name], dtype[name], (0,)) for name in dtype]
        load_saved(manifest, kind, specs, 0, tensors)
        found |= {(kind, name): tensor for name, tensor in tensors.items()}
    return found


def totals(ranks: list[Any], step: int) -> dict[str, float]:
    """A step's metrics, summed over data-parallel ranks as the driver does."""
    of_replica = {rank["dp_rank"]: rank["metrics"][step] for rank in ranks}.values()
    names = [name for name in ranks[0]["metrics"][step] if name.endswith(("/grad_norm", "/lr"))]
    same = {name: {rank["metrics"][step][name] for rank in ranks} for name in names}
    assert all(len(values) == 1 for values in same.values())
    sums = {name: sum(metrics[name] for metrics in of_replica) for name in ranks[0]["metrics"][step]}
    return sums | {name: values.pop() for name, values in same.items()}


@pytest.mark.parametrize(("saved", "name"), list(SAME.items()), ids=list(SAME))
def test_the_same_layout_goes_on_bitwise(outcomes: Outcomes, saved: str, name: str) -> None:
    """A new process takes the same two steps to the last bit, random generators included."""
    for one, two in zip(outcomes[saved], outcomes[f"{saved} as {name}"], strict=True):
        assert one["metrics"] == two["metrics"]
        assert one["random"] == two["random"]
        for parameter, weights in one["weights"].items():
            np.testing.assert_array_equal(weights, two["weights"][parameter], err_msg=parameter)


@pytest.mark.parametrize(("saved", "name"), list(LOADED), ids=[" as ".join(key) for key in LOADED])
def test_another_layout_goes_on_alike(outcomes: Outcomes, root: Path, saved: str, name: str) -> None:
    """The state is the same bit for bit, whoever holds it, and so, to rounding, are the two steps that follow: the
    second one is taken with what masters, moments and schedule made of the first."""
    before, after = whole(checkpoint(root, saved)), whole(checkpoint(root, f"{saved} as {name}"))
    assert before.keys() == after.keys()
    assert [
        f"{kind}/{tensor}" for kind, tensor in before if not torch.equal(before[kind, tensor], after[kind, tensor])
    ] == []
    tolerance = 0.05 if SAVED[saved][3] is HALF else 1e-4
    of_critic = ("critic/grad_norm", "critic/vf_loss", "critic/vpred_mean") if SAVED[saved][3] is PPO else ()
    for step in range(2):
        expected, found = totals(outcomes[saved], step), totals(outcomes[f"{saved} as {name}"], step)
        assert found["actor/lr"] == expected["actor/lr"]
        for metric in ("actor/grad_norm", "actor/pg_loss", "actor/entropy", "actor/kl_loss", *of_critic):
            assert found[metric] == pytest.approx(expected[metric], rel=tolerance), (step, metric)


def test_what_is_saved_is_named_and_shaped_as_in_the_models_files(outcomes: Outcomes, root: Path) -> None:
    for run, (_, model, _, settings) in SAVED.items():
        shapes = {name: tensor.shape for name, tensor in read_tensors(root / model).items()}
        if settings is PPO:
            hidden_size = shapes["model.norm.weight"][0]
            shapes |= {f"critic.{name}": shape for name, shape in shapes.items()}
            shapes["critic.score.weight"] = torch.Size([1, hidden_size])
        ends = ("mlp.gate.weight",) if settings is HALF else (BIAS,)
        frozen = {name for name in shapes if name.endswith(ends)}
        held = {key: (tensor.shape, tensor.dtype) for key, tensor in whole(checkpoint(root, run)).items()}
        expected = {
            (kind, name): (shapes[name], torch.float32)
            for name in shapes.keys() - frozen
            for kind in ("master", *MOMENTS)
        }
        kept = torch.bfloat16 if settings is HALF else torch.float32
        expected |= {("weight", name): (shapes[name], kept) for name in frozen}
        assert held == expected, run


def test_a_warm_start_takes_weights_alone(outcomes: Outcomes, root: Path) -> None:
    """As exactly as the source has them, also into masters of bfloat16; the optimizer begins anew."""
    of_files, of_checkpoint = whole(checkpoint(root, "of files")), whole(checkpoint(root, "of TP2"))
    originals = read_tensors(root / "other seed")
    source = whole(checkpoint(root, "TP2"))
    assert {name for kind, name in of_files if kind == "master"} == originals.keys()
    for (kind, name), tensor in of_files.items():
        assert torch.equal(tensor, originals[name] if kind == "master" else torch.zeros_like(tensor)), (kind, name)
    for (kind, name), tensor in of_checkpoint.items():
        assert torch.equal(tensor, source[kind, name] if kind == "master" else torch.zeros_like(tensor)), (kind, name)
    begun, gone_on = totals(outcomes["of TP2"], 0), totals(outcomes["TP2"], 0)
    assert begun["actor/grad_norm"] == pytest.approx(gone_on["actor/grad_norm"], rel=1e-4)  # the same weights
    assert begun["actor/lr"] == pytest.approx(1e-2) and gone_on["actor/lr"] == pytest.approx(1e-2 * 4 / 5)


def test_all_ranks_refuse_together(outcomes: Outcomes, root: Path) -> None:
    first, second = outcomes["damaged"]
    assert first == second
    assert first.startswith("CheckpointError: rank 1: ") and "rank-00001-0000.safetensors: chunk 5 has xxh3" in first
    first, second = outcomes["another model"]
    assert first == second and "is of another model" in first and "lm_head.weight" in first
    first, second = outcomes["not frozen"]
    assert first == second and "has no master of model.layers.0.mlp.gate.weight, only weight" in first
    first, second = outcomes["no critic"]
    assert first == second and "is of another model than this run's: it has no critic.model" in first
