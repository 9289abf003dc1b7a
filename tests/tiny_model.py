"""A tiny random Qwen3-MoE in Hugging Face form, for tests that need a real model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.make_tiny_model import build_model, save_hf, tiny_config

__all__ = ["tiny_config", "write_tiny_model"]


def write_tiny_model(path: Path | str, seed: int = 0, **config_overrides: Any) -> Path:
    """Writes a random float32 model (2 layers, 8 experts, vocabulary 320) with its tokenizer to `path`.

    Weights are wide enough (std 0.1 unless `initializer_range` is given) and norms far enough from one that a
    swapped or stale tensor moves the log-probabilities by far more than float32 rounding.
    """
    import torch

    directory = Path(path)
    config = tiny_config(**({"initializer_range": 0.1} | config_overrides))
    model = build_model(seed, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    save_hf(model, config, directory)
    return directory
