"""Hugging Face directories as tests read them: with safetensors alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def read_tensors(directory: Path | str) -> dict[str, torch.Tensor]:
    """Every tensor of every file, by name."""
    files = sorted(Path(directory).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
