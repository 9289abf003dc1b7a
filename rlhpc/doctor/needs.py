"""What one run needs, compared with this machine by the checks that starting and submitting it make anyway."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from netrc import NetrcParseError, netrc
from typing import Any

import rlhpc.reshard.hf  # noqa: F401  (torch: loaded with this module, before the checks' time runs)
from rlhpc.cluster import preflight, storage
from rlhpc.cluster.preflight import Cluster
from rlhpc.cluster.submission import refuse_held
from rlhpc.config.checks import check_run, device_of
from rlhpc.config.critic import Critic, needs_critic
from rlhpc.config.schema import RunConfig
from rlhpc.doctor.finding import Finding, judged, refusal
from rlhpc.doctor.machine import Wanted
from rlhpc.errors import RlhpcError, SlurmError
from rlhpc.memory.device import doubtful, impossible
from rlhpc.memory.state import (
    RankMemory,
    checkpoint_bytes,
    fullest,
    kept_on_host,
    node_memory,
    rank_memory,
    readable,
    too_little_memory,
)
from rlhpc.train.model_files import check_model_files
from rlhpc.train.start import check_start, describe_start

WANDB_HOST = "api.wandb.ai"


def needs(cfg: RunConfig, wanted: list[Wanted]) -> Iterator[Finding]:
    """Configuration, model, start, run directory, memory, and what the cluster allows. Adds to `wanted` what the model
    takes, where the configuration is right."""
    try:
        model_config = check_run(cfg)
    except RlhpcError as error:
        yield from (refusal("configuration", line) for line in str(error).splitlines())
        return
    trainer, device, memory = cfg.trainer, device_of(cfg), rank_memory(cfg, model_config)
    ranks = f"{trainer.nnodes} * {trainer.n_gpus_per_node} ranks on {device}"
    yield Finding("configuration", "ok", f"{model_config['model_type']} on {ranks}; rlhpc plan shows layout and memory")
    wanted.append(model := _wanted(cfg, model_config, device, memory))
    found = f"trainer {readable(model.trainer)}, engine {readable(model.engine)}, without activations and KV cache"
    yield Finding("a rank's memory", "ok", found)
    yield from (refusal("memory of a node", line) for line in too_little_memory(cfg, model_config, device, memory))
    rank = fullest(memory)
    yield from (refusal("a rank's memory", line) for line in impossible(cfg, model_config, device, rank))
    yield from (refusal("a rank's memory", line, "warning") for line in doubtful(cfg, model_config, device, rank))
    yield from _model_files(cfg, model_config)
    yield from _run_directory(cfg, model_config)
    yield from _places(cfg, model_config)
    if "wandb" in cfg.trainer.logger:
        yield _wandb(cfg.trainer.wandb_mode or os.environ.get("WANDB_MODE"))


def _wanted(cfg: RunConfig, model_config: Mapping[str, Any], device: str, memory: Sequence[RankMemory]) -> Wanted:
    rank = fullest(memory)
    leaving = (
        *kept_on_host(cfg, rank),
        (cfg.actor_rollout_ref.actor.megatron.grad_offload, rank.gradients),
        (Critic.of(cfg).grad_offload, rank.critic_gradients),
    )
    return Wanted(
        host=node_memory(cfg, model_config, device, memory).total,
        trainer=sum(num_bytes for _, num_bytes in leaving),
        staying=sum(num_bytes for leaves, num_bytes in leaving if not leaves),
        engine=rank.rollout_weights,
    )


def _model_files(cfg: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Finding]:
    paths = [cfg.actor_rollout_ref.model.path]
    if needs_critic(cfg) and cfg.critic.model.path:
        paths.append(cfg.critic.model.path)
    try:
        check_model_files(cfg, model_config)
        yield Finding("model files", "ok", f"{' and '.join(paths)} {'are' if len(paths) > 1 else 'is'} whole")
    except RlhpcError as error:
        yield from (refusal("model files", line) for line in str(error).splitlines())


def _run_directory(cfg: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        refuse_held(cfg.run_dir)
        check_start(cfg, model_config)
        start = " ".join(describe_start(cfg, model_config)[0].split())
        yield Finding("run directory", "ok", f"{cfg.run_dir}: {start}")
    except SlurmError as error:
        found = f"{cfg.run_dir}: whether a job has it is not known: {error}"
        yield Finding("run directory", "warning", found, "scontrol ping")
    except RlhpcError as error:
        yield from (refusal("run directory", line) for line in str(error).splitlines())


def _places(cfg: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Finding]:
    cluster, size = None, checkpoint_bytes(cfg, model_config)
    if cfg.launch.mode == "slurm":
        from rlhpc.cluster.job import cpus_per_node

        with suppress(SlurmError):  # Slurm's own part says so
            cluster = Cluster.ask()
            problems = preflight.limits(cfg, cluster, cpus_per_node(cfg))
            yield from (refusal("the cluster", line) for line in problems)
            yield from (refusal("the cluster", line, "warning") for line in preflight.cautions(cfg, cluster))
            if not problems:
                yield Finding("the cluster", "ok", "can give what is asked for")
    elsewhere = cluster is not None and cluster.elsewhere
    problems = list(storage.refusals(cfg, elsewhere=elsewhere, checkpoint_bytes=size))
    yield from (refusal("paths", line) for line in problems)
    yield from (refusal("paths", line, "warning") for line in storage.cautions(cfg, elsewhere=elsewhere))
    if not problems:
        kept = cfg.checkpoint.keep + cfg.checkpoint.keep_best + 1
        yield Finding("paths", "ok", f"room for {kept} checkpoints of {readable(size)}")


def _wandb(mode: str | None) -> Finding:
    if mode in ("offline", "disabled"):
        return Finding("wandb", "ok", f"{mode}; wandb sync sends it later")
    known = bool(os.environ.get("WANDB_API_KEY"))
    with suppress(OSError, NetrcParseError):
        known = known or netrc().authenticators(WANDB_HOST) is not None
    found = "an API key is here" if known else "no API key in WANDB_API_KEY or ~/.netrc"
    return judged("wandb", found, "wandb login, or trainer.wandb_mode=offline", failed=not known)
