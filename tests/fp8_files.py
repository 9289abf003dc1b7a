"""Model directories quantised to block-scaled fp8, as DeepSeek-V3 and Qwen3's FP8 models are published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.hf_files import read_tensors

Tensors = dict[str, torch.Tensor]


def quantise(tensors: Tensors, block: tuple[int, int]) -> tuple[Tensors, Tensors]:
    """(what the files hold, what that means in float32): projections and experts as e4m3, each block's largest element
    at e4m3's, the rest as it is. An e4m3 number times a float32 one is exact in float64."""
    files, meant = {}, {}
    for name, tensor in tensors.items():
        files[name] = meant[name] = tensor
        if "proj" not in name and ".experts." not in name or tensor.dim() != 2:
            continue
        rows, columns = tensor.shape
        scales = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
        stored, exact = torch.zeros_like(tensor, dtype=torch.float8_e4m3fn), torch.zeros_like(tensor).double()
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                scales[i, j] = tensor[place].abs().max().clamp(min=1e-4) / 448
                stored[place] = (tensor[place] / scales[i, j]).to(torch.float8_e4m3fn)
                exact[place] = stored[place].double() * scales[i, j].double()
        files |= {name: stored, f"{name}_scale_inv": scales}
        meant[name] = exact.float()
    return files, meant


def quantise_directory(source: Path, target: Path, block: tuple[int, int]) -> Path:
    """`target` becomes `source`, quantised; `source` is left with what that means."""
    files, meant = quantise(read_tensors(source), block)
    shutil.copytree(source, target)
    for directory, tensors in ((source, meant), (target, files)):
        for path in directory.glob("*.safetensors"):
            path.unlink()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantisation(block)}
    (target / "config.json").write_text(json.dumps(config))
    return target


def quantisation(block: tuple[int, int]) -> dict[str, object]:
    """Of DeepSeek-V3's config.json."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
