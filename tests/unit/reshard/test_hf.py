"""Reading HF directories under several layouts, and what a damaged one is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlhpc.errors import ModelError
from rlhpc.layout.parallel import ParallelLayout
from rlhpc.memory.reads import read_bytes
from rlhpc.reshard.families import family_for, model_facts
from rlhpc.reshard.fp8 import dequantise
from rlhpc.reshard.hf import check_hf, copy_side_files, load_hf
from rlhpc.reshard.hf_files import tensor_bytes
from tests.fp8_files import quantisation, quantise
from tests.hf_files import read_tensors
from tests.unit.reshard.reference import CONFIG, CONFIGS, canonical_arrays, trainer_buffers

SINGLE = ParallelLayout(1, 1, 1, 1, 1, 1)
NORM = "model.layers.2.input_layernorm.weight"
DOWN = "model.layers.3.mlp.experts.7.down_proj.weight"
SCALES = f"{DOWN}_scale_inv"
BLOCK = (3, 5)  # divides nothing: boxes begin and end within blocks


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


def empty_buffers(
    layout: ParallelLayout, rank: int, dtype: torch.dtype, config: dict[str, Any] = CONFIG
) -> dict[str, torch.Tensor]:
    zeros = {name: np.zeros(shape) for name, shape in family_for(config).canonical_tensors(config).items()}
    return {
        name: torch.zeros(array.shape, dtype=dtype)
        for name, array in trainer_buffers(zeros, model_facts(config), layout, rank).items()
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


def write_fp8(directory: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns what the files mean, in float32. Scales lie in another file than what they scale."""
    arrays = canonical_arrays(family_for(config).canonical_tensors(config))
    files, meant = quantise({name: torch.from_numpy(array) for name, array in arrays.items()}, BLOCK)
    write_indexed(directory, files, num_files=2)
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation(BLOCK)}))
    return meant


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_each_rank_reads_its_part_of_fp8_files(tmp_path: Path, model_type: str) -> None:
    config = CONFIGS[model_type]
    family, facts = family_for(config), model_facts(config)
    meant = {name: tensor.numpy() for name, tensor in write_fp8(tmp_path, config).items()}
    check_hf(tmp_path, family.canonical_tensors(config))
    layout = ParallelLayout(tp=2, pp=2, cp=1, ep=2, etp=2, world_size=8)
    for rank in range(8):
        for dtype in ("float32", "bfloat16") if rank == 0 else ("float32",):
            got = empty_buffers(layout, rank, getattr(torch, dtype), config)
            load_hf(tmp_path, family.trainer_specs(config, layout, dtype), rank, got)
            for name, expected in trainer_buffers(meant, facts, layout, rank).items():
                rounded = torch.from_numpy(expected.copy()).to(got[name].dtype)
                assert torch.equal(got[name], rounded), f"rank {rank}: {name} in {dtype}"


def test_transformers_reads_the_same_of_fp8_files() -> None:
    """Its own dequantisation: of whole blocks."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    files, meant = quantise({DOWN: torch.randn(256, 384)}, (128, 128))
    target = torch.empty(200, 300)
    dequantise(files[DOWN][56:, 84:], files[SCALES], (128, 128), (56, 84), target)
    theirs = Fp8Dequantize(None)._dequantize_one(files[DOWN], files[SCALES], torch.float32)
    assert torch.equal(target, theirs[56:, 84:]) and torch.equal(theirs, meant[DOWN])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({SCALES: None}, f"{DOWN} has dtype F8_E4M3; its scales, {SCALES}, are missing"),
        ({SCALES: torch.ones(2, 6)}, rf"{SCALES} has shape \(2, 6\); quantization_config .* asks for \(6, 2\)"),
        ({SCALES: torch.ones(5, 2)}, rf"{SCALES} has shape \(5, 2\); quantization_config .* asks for \(6, 2\)"),
        ({SCALES: torch.ones(6, 2).bfloat16()}, f"{SCALES} has dtype BF16; scales are read in F32"),
        ({DOWN: torch.ones(16, 8)}, f"{DOWN} has dtype F32; {SCALES} are scales of F8_E4M3"),
        ({f"{NORM}_scale_inv": torch.ones(6)}, f"{NORM}_scale_inv: {NORM} is no matrix"),
        ({"lm_head.weight_scale": torch.ones(6, 2)}, "holds 1 tensors .*: lm_head.weight_scale; is it this model's"),
    ],
)
def test_scales_that_do_not_fit(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    write_fp8(tmp_path, CONFIG)
    tensors = {name: tensor for name, tensor in (read_tensors(tmp_path) | change).items() if tensor is not None}
    write_indexed(tmp_path, tensors)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_fp8_files_whose_config_says_nothing(tmp_path: Path) -> None:
    write_fp8(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match=r"_scale_inv.*model's config.json, and has it lost its quantization_config\?"):
        load(tmp_path)
    write_indexed(tmp_path, {n: t for n, t in read_tensors(tmp_path).items() if not n.endswith("_scale_inv")})
    with pytest.raises(ModelError, match=r"has dtype F8_E4M3; config.json has no quantization_config"):
        load(tmp_path)


def test_bytes_of_each_tensor(tmp_path: Path) -> None:
    write_fp8(tmp_path, CONFIG)
    sizes = tensor_bytes(tmp_path, family_for(CONFIG).canonical_tensors(CONFIG))
    assert sizes[DOWN] == 16 * 8 + 4 * 6 * 2
    assert sizes[NORM] == 4 * 16
    assert sum(sizes.values()) == sum(tensor.nbytes for tensor in read_tensors(tmp_path).values())
    specs = family_for(CONFIG).trainer_specs(CONFIG, ParallelLayout(1, 1, 1, 2, 1, 2), "bfloat16")
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert read_bytes(specs, sizes, 2) == [sum(sizes.values()) - experts // 2] * 2


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


def test_exports_are_not_quantised(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write_fp8(source, CONFIG)
    copy_side_files(source, target)
    assert json.loads((target / "config.json").read_text()) == CONFIG


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
