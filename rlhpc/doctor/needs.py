"""What one run needs, compared with this machine by the checks that starting and submitting it make anyway."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from netrc import NetrcParseError, netrc
from typing import Any

from rlhpc.cli.plan import checkpoint_bytes, node_memory, rank_memory, readable, too_little_memory
from rlhpc.cluster import preflight, storage
from rlhpc.cluster.preflight import Cluster
from rlhpc.cluster.submission import refuse_held
from rlhpc.config.checks import check_run, device_of
from rlhpc.config.critic import needs_critic
from rlhpc.config.schema import RunConfig
from rlhpc.doctor.finding import Finding, judged, refusal
from rlhpc.doctor.machine import Wanted
from rlhpc.errors import RlhpcError, SlurmError
from rlhpc.train.model_files import check_model_files
from rlhpc.train.start import check_start, describe_start

WANDB_HOST = "api.wandb.ai"


def wanted_of(cfg: RunConfig) -> Wanted:
    """What a node of the run gives it, where this machine is one; a configuration that is wrong wants nothing more."""
    trainer = cfg.trainer
    if cfg.launch.mode == "slurm":
        return Wanted()
    ranks, cpus = trainer.n_gpus_per_node, trainer.n_gpus_per_node * cfg.cluster.cpus_per_rank
    try:
        model_config = check_run(cfg)
        host = node_memory(cfg, model_config, device_of(cfg)).total
        of_trainer, of_engine = _on_device(cfg, model_config)
    except RlhpcError:
        return Wanted(ranks, cpus)
    return Wanted(ranks, cpus, host, of_trainer, of_engine)


def needs(cfg: RunConfig) -> Iterator[Finding]:
    """Configuration, model, start, run directory, memory, and what the cluster allows."""
    try:
        model_config = check_run(cfg)
    except RlhpcError as error:
        yield from (refusal("configuration", line) for line in str(error).splitlines())
        return
    trainer = cfg.trainer
    ranks = f"{trainer.nnodes} * {trainer.n_gpus_per_node} ranks on {device_of(cfg)}"
    yield Finding("configuration", "ok", f"{model_config['model_type']} on {ranks}; rlhpc plan shows layout and memory")
    yield from _held("model files", cfg, model_config)
    yield from _held("run directory", cfg, model_config)
    of_trainer, of_engine = map(readable, _on_device(cfg, model_config))
    found = f"trainer {of_trainer}, engine {of_engine}, without activations and KV cache"
    yield Finding("a rank's memory", "ok", found)
    yield from (refusal("memory of a node", line) for line in too_little_memory(cfg, model_config, device_of(cfg)))
    yield from _places(cfg, model_config)
    if "wandb" in cfg.trainer.logger:
        yield _wandb(cfg.trainer.wandb_mode or os.environ.get("WANDB_MODE"))


def _held(check: str, cfg: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Finding]:
    paths = [cfg.actor_rollout_ref.model.path]
    if needs_critic(cfg) and cfg.critic.model.path:
        paths.append(cfg.critic.model.path)
    try:
        if check == "model files":
            check_model_files(cfg, model_config)
            yield Finding(check, "ok", f"{' and '.join(paths)} {'are' if len(paths) > 1 else 'is'} whole")
        else:
            refuse_held(cfg.run_dir)
            check_start(cfg, model_config)
            yield Finding(check, "ok", f"{cfg.run_dir}: {' '.join(describe_start(cfg, model_config)[0].split())}")
    except SlurmError as error:
        yield Finding(check, "warning", f"{cfg.run_dir}: whether a job has it is not known: {error}", "scontrol ping")
    except RlhpcError as error:
        yield from (refusal(check, line) for line in str(error).splitlines())


def _on_device(cfg: RunConfig, model_config: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of the fullest rank: the trainer's and the engine's."""
    fullest = max(rank_memory(cfg, model_config), key=lambda rank: rank.total)
    return fullest.total - fullest.rollout_weights, fullest.rollout_weights


def _places(cfg: RunConfig, model_config: Mapping[str, Any]) -> Iterator[Finding]:
    cluster, size = None, checkpoint_bytes(cfg, model_config)
    if cfg.launch.mode == "slurm":
        from rlhpc.cluster.job import cpus_per_node

        try:
            cluster = Cluster.ask()
        except SlurmError:
            return  # Slurm's own part says so
        problems = preflight.limits(cfg, cluster, cpus_per_node(cfg))
        yield from (refusal("the cluster", line) for line in problems)
        yield from (refusal("the cluster", line, "warning") for line in preflight.cautions(cfg, cluster))
        if not problems:
            yield Finding("the cluster", "ok", f"can give {cfg.trainer.nnodes} nodes of what is asked for")
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
