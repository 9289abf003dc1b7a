"""Whether the files that a run's models begin with are whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.config.critic import critic_model_config, needs_critic
from rlhpc.config.model_dir import eos_token_ids
from rlhpc.config.schema import RunConfig
from rlhpc.reshard.families import family_for


def check_model_files(cfg: RunConfig, model_config: Mapping[str, Any]) -> None:
    """Raises ModelError where weights of the policy or of a critic are missing or truncated, or nothing ends an answer;
    reads headers alone."""
    from rlhpc.reshard.hf import check_hf  # torch, which a submission does without

    model_dir = Path(cfg.actor_rollout_ref.model.path)
    check_hf(model_dir, family_for(model_config).canonical_tensors(model_config))
    eos_token_ids(model_dir, model_config)
    if needs_critic(cfg) and cfg.critic.model.path is not None:
        critic_config = critic_model_config(cfg, model_config)
        check_hf(Path(cfg.critic.model.path), family_for(critic_config).canonical_tensors(critic_config))
