"""Reading HF directories under several layouts, and what a damaged one is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlhpc.errors import ModelError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.reshard.families import family_for, model_facts
from rlhpc.reshard.hf import check_hf, copy_side_files, load_hf
from tests.unit.reshard.reference import CONFIG, canonical_arrays, trainer_buffers

SINGLE = ParallelLayout(1, 1, 1, 1, 1, 1)
NORM = "model.layers.2.input_layernorm.weight"
DOWN = "model.layers.3.mlp.experts.7.down_proj.weight"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    arrays = canonical_arrays(family_for(CONFIG).canonical_tensors(CONFIG))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def write_indexed(directory: Path, tensors: dict[str, torch.Tensor], num_files: int = 3) -> None:
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_files):
        part = names[i::num_files]
        save_file({name: tensors[name] for name in part}, directory / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def empty_buffers(layout: ParallelLayout, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    zeros = {name: np.zeros(shape) for name, shape in family_for(CONFIG).canonical_tensors(CONFIG).items()}
    return {
        name: torch.zeros(array.shape, dtype=dtype)
        for name, array in trainer_buffers(zeros, model_facts(CONFIG), layout, rank).items()
    }


def load(directory: Path, layout: ParallelLayout = SINGLE, rank: int = 0) -> dict[str, torch.Tensor]:
    """Through both doors: what the check before the start refuses, a rank refuses in the same words."""
    told: list[str] = []
    try:
        check_hf(directory, family_for(CONFIG).canonical_tensors(CONFIG))
    except ModelError as error:
        told.append(str(error))
    try:
        buffers = load_unchecked(directory, layout, rank)
    except ModelError as error:
        assert told == [str(error)]
        raise
    assert told == []
    return buffers


def load_unchecked(directory: Path, layout: ParallelLayout, rank: int) -> dict[str, torch.Tensor]:
    buffers = empty_buffers(layout, rank, torch.float32)
    load_hf(directory, family_for(CONFIG).trainer_specs(CONFIG, layout, "float32"), rank, buffers)
    return buffers


@pytest.mark.parametrize("indexed", [False, True])
def test_each_rank_reads_its_part(tmp_path: Path, tensors: dict[str, torch.Tensor], indexed: bool) -> None:
    if indexed:
        write_indexed(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    layout = ParallelLayout(tp=2, pp=2, cp=1, ep=2, etp=2, world_size=8)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    for rank in range(8):
        got = load(tmp_path, layout, rank)
        for name, expected in trainer_buffers(arrays, model_facts(CONFIG), layout, rank).items():
            np.testing.assert_array_equal(got[name].numpy(), expected, err_msg=f"rank {rank}: {name}")


@pytest.mark.parametrize(("on_disk", "in_memory"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_values_are_cast(tmp_path: Path, tensors: dict[str, torch.Tensor], on_disk: str, in_memory: str) -> None:
    save_file({n: t.to(getattr(torch, on_disk)) for n, t in tensors.items()}, tmp_path / "model.safetensors")
    buffers = empty_buffers(SINGLE, 0, getattr(torch, in_memory))
    load_hf(tmp_path, family_for(CONFIG).trainer_specs(CONFIG, SINGLE, in_memory), 0, buffers)
    expected = tensors[NORM].to(torch.bfloat16).to(getattr(torch, in_memory))
    assert torch.equal(buffers["decoder.layers.2.input_layernorm.weight"], expected)


def test_known_extras_are_ignored(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    load(tmp_path)


def test_tied_model_may_repeat_its_embedding_as_head(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    embedding = tensors["model.embed_tokens.weight"]
    write_indexed(tmp_path, tensors | {"lm_head.weight": embedding.clone()})
    config = CONFIG | {"tie_word_embeddings": True}
    check_hf(tmp_path, family_for(config).canonical_tensors(config))
    buffers = empty_buffers(SINGLE, 0, torch.float32)
    load_hf(tmp_path, family_for(config).trainer_specs(config, SINGLE, "float32"), 0, buffers)
    assert torch.equal(buffers["embedding.word_embeddings.weight"], embedding)


def test_tied_model_with_a_trained_head(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Transformers unties it with a warning, vLLM ties it and says nothing."""
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    write_indexed(tmp_path, tensors | {"lm_head.weight": head})
    config = CONFIG | {"tie_word_embeddings": True}
    with pytest.raises(ModelError, match=r"lm_head.weight differs from model.embed_tokens.weight; set tie_word"):
        check_hf(tmp_path, family_for(config).canonical_tensors(config))


def test_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        load(tmp_path)


def test_missing_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_indexed(tmp_path, tensors)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"files that are missing: .*/part-1.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_file(tmp_path: Path, tensors: dict[str, torch.Tensor], keep: int) -> None:
    write_indexed(tmp_path, tensors)
    path = tmp_path / "part-2.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"part-2.safetensors can't be read .*truncated or damaged"):
        load(tmp_path)


def test_damaged_index(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_indexed(tmp_path, tensors)
    for text in ("{", '{"metadata": {}}', "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelError, match=r"model.safetensors.index.json is damaged"):
            load(tmp_path)


def test_index_that_lies(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_indexed(tmp_path, tensors)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][DOWN])
    index["weight_map"][DOWN] = other
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"{other} lacks {DOWN}"):
        load(tmp_path)


def test_wrong_tensors_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if name != DOWN}, path)
    with pytest.raises(ModelError, match=f"lacks 1 tensors that config.json asks for: {DOWN}"):
        load(tmp_path)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, path)
    with pytest.raises(ModelError, match=r"holds 1 tensors .*: model.layers.0.self_attn.q_proj.bias"):
        load(tmp_path)
    save_file(tensors | {DOWN: torch.zeros(16, 9)}, path)
    with pytest.raises(ModelError, match=rf"{DOWN} has shape \(16, 9\); config.json asks for \(16, 8\)"):
        load(tmp_path)
    save_file(tensors | {DOWN: torch.zeros(16, 8, dtype=torch.int8)}, path)
    with pytest.raises(ModelError, match=f"model.safetensors: {DOWN} has dtype I8; readable are F64, F32, BF16, F16"):
        load(tmp_path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    further = {"model.layers.4.eh_proj.weight": torch.ones(2), "model.layers.5.shared_head.norm.weight": torch.ones(2)}
    save_file(tensors | further, source / "model.safetensors")
    config = CONFIG | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"holds 1 tensors .*: model.layers.5.shared_head.norm.weight"):
        load(source)
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    load(source)
    copy_side_files(source, target)
    assert json.loads((target / "config.json").read_text()) == config | {"num_nextn_predict_layers": 0}
