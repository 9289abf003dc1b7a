"""Whether the files that a run's models begin with are whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.config.critic import critic_model_config, needs_critic
from rlhpc.config.model_dir import eos_token_ids
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ModelError
from rlhpc.reshard.families import family_for


def check_model_files(cfg: RunConfig, model_config: Mapping[str, Any]) -> None:
    """Raises ModelError where weights of the policy or of a critic are missing or truncated, nothing ends an answer, or
    a critic reads other tokens. Of weights it reads headers alone."""
    from rlhpc.reshard.hf import check_hf  # torch, which a submission does without

    model_dir = Path(cfg.actor_rollout_ref.model.path)
    check_hf(model_dir, family_for(model_config).canonical_tensors(model_config))
    eos_token_ids(model_dir, model_config)
    _check_tokenizer(model_dir, trusted=cfg.actor_rollout_ref.model.trust_remote_code)
    if needs_critic(cfg) and cfg.critic.model.path is not None:
        critic_dir, critic_config = Path(cfg.critic.model.path), critic_model_config(cfg, model_config)
        check_hf(critic_dir, family_for(critic_config).canonical_tensors(critic_config))
        _check_same_tokens(model_dir, critic_dir)


def _check_tokenizer(model_dir: Path, *, trusted: bool) -> None:
    """One that is code of the directory's own (Kimi-K2's, Moonlight's) isn't run unasked."""
    file = model_dir / "tokenizer_config.json"
    if trusted or not file.is_file() or (model_dir / "tokenizer.json").is_file():
        return
    try:
        own = json.loads(file.read_text()).get("auto_map", {}).get("AutoTokenizer")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file} can't be read as a tokenizer's settings ({error!r}); copy it again") from error
    if own:
        raise ModelError(
            f"{model_dir} has a tokenizer of its own code ({file.name}: AutoTokenizer={own!r}); read that, and set "
            "actor_rollout_ref.model.trust_remote_code=true to run it"
        )


def _check_same_tokens(policy: Path, critic: Path) -> None:
    """The critic is given the policy's tokens as they are; it may know more. Directories without a tokenizer.json can't
    be compared."""
    files = [directory / "tokenizer.json" for directory in (policy, critic)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    ours, theirs = map(_token_ids, files)
    for token, number in ours.items():
        if theirs.get(token) != number:
            raise ModelError(
                f"critic.model.path={critic} has another tokenizer than actor_rollout_ref.model.path={policy}: "
                f"{token!r} is {theirs.get(token, 'no token')} there, {number} here; give a model with the same one"
            )


def _token_ids(file: Path) -> dict[str, int]:
    try:
        tokenizer = json.loads(file.read_text())
        vocab = tokenizer["model"]["vocab"]
        pieces = vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
        return pieces | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} can't be read as a tokenizer ({error!r}); copy it again") from error
