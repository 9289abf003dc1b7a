"""What a run reads of an HF model directory before anything starts, beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.errors import ModelError

MADE_BY = {  # what experiments ask for and a script of ours makes
    "assets/tiny_arithmetic": "run python scripts/make_tiny_model.py first",
    "assets/smollm2": "run python scripts/make_smollm2.py and rlhpc upcycle first, as README.md shows",
}


def read_model_config(path: str | Path, *, key: str = "actor_rollout_ref.model.path") -> dict[str, Any]:
    """The parsed `config.json` of an HF model directory, which a key of the configuration names.

    Raises ModelError: no directory or file, not JSON, or a family that isn't known.
    """
    from rlhpc.reshard.families import family_for

    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        fix = "check the path; what is on the Hugging Face hub has to be here first: hf download NAME --local-dir DIR"
        raise ModelError(f"{key}={path} is not a directory; {made_by(path) or fix}")
    try:
        model_config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing; {key} must be an HF model directory") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{file} can't be read as JSON: {error}; copy the model directory again") from error
    if not isinstance(model_config, dict):
        raise ModelError(f"{file} holds a JSON {type(model_config).__name__}, not an object of settings")
    try:
        family_for(model_config)
    except ModelError as error:
        raise ModelError(f"{key}={path}: {error}") from error
    return model_config


def eos_token_ids(model_dir: Path, hf_config: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer: generation_config.json's `eos_token_id`, else config.json's.

    Raises ModelError when neither names one, or generation_config.json is damaged.
    """
    path = model_dir / "generation_config.json"
    try:
        generation = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ModelError(f"{path} can't be read as JSON: {error}; copy it again, or remove it") from error
    for config in (generation, hf_config):
        eos = config.get("eos_token_id")
        if eos is not None:
            return sorted(eos) if isinstance(eos, list) else [int(eos)]
    raise ModelError(f"{model_dir}: neither generation_config.json nor config.json has an eos_token_id; add one")


def made_by(path: str | Path) -> str | None:
    """What makes a path that one of our experiments asks for; None for others."""
    return next((fix for asset, fix in MADE_BY.items() if asset in str(path)), None)
