"""Whose run directory this is: the configuration it began with, and what may change when it goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.durable import publish_file
from rlhpc.config.schema import RunConfig
from rlhpc.config.tree import MISSING, Change, diff, leaves, shown
from rlhpc.errors import CheckpointError

RUN_NAME = "run.json"

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

# Keys of the parallel layout and of the machine: any checkpoint loads under any of them. Losses stay the same but for
# rounding.
LAYOUT = (
    f"{_ACTOR}.megatron.attention_backend",
    f"{_ACTOR}.megatron.context_parallel_size",
    f"{_ACTOR}.megatron.expert_model_parallel_size",
    f"{_ACTOR}.megatron.expert_tensor_parallel_size",
    f"{_ACTOR}.megatron.pipeline_model_parallel_size",
    f"{_ACTOR}.megatron.grad_offload",
    f"{_ACTOR}.megatron.optimizer_offload",
    f"{_ACTOR}.megatron.overlap_grad_reduce",
    f"{_ACTOR}.megatron.param_offload",
    f"{_ACTOR}.megatron.recompute_modules",
    f"{_ACTOR}.megatron.tensor_model_parallel_size",
    f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu",
    "critic.forward_micro_batch_size_per_gpu",
    "critic.megatron",
    "critic.model.enable_gradient_checkpointing",
    "critic.ppo_max_token_len_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.cpu_kv_cache_gib",
    f"{_ROLLOUT}.enforce_eager",
    f"{_ROLLOUT}.expert_parallel_size",
    f"{_ROLLOUT}.free_cache_engine",
    f"{_ROLLOUT}.gpu_memory_utilization",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.max_num_batched_tokens",
    f"{_ROLLOUT}.max_num_seqs",
    f"{_ROLLOUT}.tensor_model_parallel_size",
    "trainer.device",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
)
# Keys (or sections) that change how a run goes on without changing what it is.
FREE = (
    *LAYOUT,
    f"{_ROLLOUT}.chunk_prompts",
    "algorithm.use_critic",  # adv_estimator decides
    "algorithm.filter_groups.max_num_gen_batches",
    "checkpoint",
    "cluster",
    "critic.enable",
    "data.val_batch_size",
    "data.val_files",
    "data.val_max_samples",
    "launch",
    "reshard",
    "resume",
    "reward.num_workers",
    "reward.timeout_s",
    "run_dir",
    "trainer.default_local_dir",
    "trainer.log_val_generations",
    "trainer.logger",
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.resume_from_path",
    "trainer.resume_mode",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.val_before_train",
    "trainer.wandb_mode",
)


def has_trained(directory: Path) -> bool:
    """Whether the directory is a run's for good: a start that failed before a step was trained binds nobody, though it
    has told of step 0."""
    metrics = directory / "metrics.jsonl"
    lines: list[bytes] = []
    if metrics.exists():
        with metrics.open("rb") as file:
            lines = list(islice(file, 2))
    if len(lines) < 2 and all(re.match(rb'\{"step": 0\b', line) for line in lines):
        return any((directory / "checkpoints").glob("step-*"))
    return True


def refuse_another(directory: Path, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> None:
    """Raises CheckpointError where the directory is that of another run, listing the keys that differ and may not, old
    and new value."""
    path = directory / RUN_NAME
    if not path.exists():
        return
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore it, or choose another run_dir") from error
    now = json.loads(json.dumps({"config": dict(config), "model": dict(model_config)}))
    binding = [change for change in _changes(stored, now) if not free(change[0].removeprefix("config."))]
    if not (_has_critic(stored) or _has_critic(now)):
        binding = [change for change in binding if not change[0].startswith("config.critic.")]
    if binding:
        raise CheckpointError(
            "\n  ".join([f"run_dir={directory} belongs to a run with other settings:", *shown(binding)]) + "\n"
            "restore these settings to go on with that run, or choose another run_dir, where resume.from="
            f"{directory} begins with this one's state and most settings may differ "
            f"(free to change: parallel sizes, microbatches, the machine, {', '.join(FREE[len(LAYOUT) :])})"
        )


def _changes(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs; a setting that the run's rlhpc didn't have is as it was where it has its default now."""
    defaults = dict(leaves("config", RunConfig().tree()))
    return [
        (key, old, new)
        for key, old, new in diff(stored, now)
        if not (old == MISSING and new in (None, defaults.get(key))) and not (old is None and new == MISSING)
    ]


def _has_critic(identity: Mapping[str, Any]) -> bool:
    return bool(identity.get("config", {}).get("algorithm", {}).get("adv_estimator") == "gae")


def check_identity(
    directory: Path, config: Mapping[str, Any], model_config: Mapping[str, Any], *, trained: bool
) -> None:
    """Writes the run's identity into its directory, where something was trained there already after comparing it.

    Raises CheckpointError as `refuse_another` does.
    """
    path = directory / RUN_NAME
    if trained:
        refuse_another(directory, config, model_config)
    text = json.dumps({"config": dict(config), "model": dict(model_config)}, indent=2) + "\n"

    def write(partial: Path) -> None:
        partial.write_text(text)

    directory.mkdir(parents=True, exist_ok=True)
    publish_file(path, write)


def free(key: str) -> bool:
    """Whether a run that has trained may go on with another value of a key."""
    return any(key == free or key.startswith(free + ".") for free in FREE)
