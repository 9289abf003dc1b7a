"""Cross-field checks, all made before anything starts. Each violation says key=value, the limit and a fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlhpc.config.algorithm import algorithm_problems
from rlhpc.config.batch_fit import batch_problems, length_problems
from rlhpc.config.critic import critic_problems
from rlhpc.config.in_place import in_place_problems
from rlhpc.config.keeping import keeping_problems
from rlhpc.config.model_dir import made_by, read_model_config
from rlhpc.config.model_fit import choose, engine_problems, model_problems, trainer_problems
from rlhpc.config.ranges import out_of_range, unknown_names
from rlhpc.config.schedule import schedule_problems
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError, DataError, raise_problems
from rlhpc.layout.parallel import divisors

SBATCH_OWN = {  # options of sbatch that follow from other keys
    "nodes": "cluster.nodes",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "constraint": "cluster.constraint",
    "reservation": "cluster.reservation",
    "nodelist": "cluster.nodelist",
    "exclude": "cluster.exclude",
    "cpus-per-task": "cluster.cpus_per_node",
    "mem": "cluster.memory_gib_per_node",
    "job-name": "launch.job_name",
    "time": "launch.time_min",
    "signal": "launch.stop_lead_s",
    "wait": "launch.wait",
    **dict.fromkeys(("array", "parsable", "test-only", "wrap"), "launch=slurm, with -m for an array,"),
    **dict.fromkeys(("output", "error", "open-mode"), "run_dir, where the log goes,"),
    **dict.fromkeys(("requeue", "no-requeue"), "launch.max_attempts_without_progress (every job may be requeued)"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "gpus"), "cluster.nodes and trainer.n_gpus_per_node"),
}

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MEGATRON, _ROLLOUT_TP = f"{_ACTOR}.megatron", f"{_ROLLOUT}.tensor_model_parallel_size"


def check_run(cfg: RunConfig) -> dict[str, Any]:
    """Checks files, model and configuration; returns the parsed config.json. Raises RlhpcError."""
    _check_files(cfg)
    model_config = read_model_config(cfg.actor_rollout_ref.model.path)
    check(cfg, model_config, cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node, device=device_of(cfg))
    return model_config


def device_of(cfg: RunConfig) -> str:
    """ "cpu" or "cuda": what trainer.device says, and for "auto" what this machine has.

    Raises ConfigError for "auto" where the run is for other machines.
    """
    if cfg.trainer.device != "auto":
        return cfg.trainer.device
    if cfg.launch.mode == "slurm":
        raise ConfigError(
            "trainer.device=auto: what the job's nodes have is not known here; set trainer.device=cuda (asks Slurm for "
            f"{cfg.trainer.n_gpus_per_node} GPUs a node) or cpu, or choose a cluster that sets it, such as cluster=h200"
        )
    import torch

    return "cuda" if torch.cuda.device_count() >= cfg.trainer.n_gpus_per_node else "cpu"


def check(cfg: RunConfig, model_config: Mapping[str, Any], world_size: int, *, device: str | None = None) -> None:
    """Raises ConfigError that lists every violation, one a line; ModelError where the model isn't supported.

    `model_config` is the parsed HF config.json; `world_size` the number of ranks over all nodes; `device` what they
    run on, where that is known better than trainer.device tells.
    """
    from rlhpc.reshard.families import model_facts

    problems = [*out_of_range(cfg), *unknown_names(cfg)]
    if not problems:  # the arithmetic below wants sizes of at least 1
        facts, device = model_facts(model_config), device or cfg.trainer.device
        problems = [
            *_layout(cfg, world_size, device),
            *trainer_problems(cfg),
            *engine_problems(cfg, facts, world_size, device),
            *model_problems(cfg, facts, device),
            *batch_problems(cfg, world_size),
            *length_problems(cfg, facts),
            *algorithm_problems(cfg),
            *_trainer(cfg),
            *schedule_problems(cfg),
            *keeping_problems(cfg),
            *_reward(cfg),
            *_launch(cfg),
            *critic_problems(cfg, model_config, world_size),
        ]
    if not problems:
        problems = [*in_place_problems(cfg, model_config, world_size)]
    raise_problems(problems)


def _check_files(cfg: RunConfig) -> None:
    from rlhpc.data.readers import data_files, parse, read_rows

    for key, files in (("data.train_files", cfg.data.train_files), ("data.val_files", cfg.data.val_files)):
        try:
            for path in data_files(files) if files is not None else ():
                for row in islice(read_rows(path), 1):  # of all rows only the run itself knows
                    parse(row, cfg.data)
        except DataError as error:
            made = made_by(str(files))
            raise DataError(f"{key}: {error}{f'; {made}' if made else ''}") from error


def _layout(cfg: RunConfig, ranks: int, device: str) -> Iterator[str]:
    megatron, per_node = cfg.actor_rollout_ref.actor.megatron, cfg.trainer.n_gpus_per_node
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    rollout_tp = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    where = f"the {ranks} ranks (trainer.nnodes * trainer.n_gpus_per_node)"
    if ranks % (tp * pp):
        yield (
            f"{_MEGATRON}: tensor_model_parallel_size={tp} * pipeline_model_parallel_size={pp} = {tp * pp} "
            f"must divide {where}; {choose(divisors(ranks))} as their product"
        )
    if ranks % (ep * etp * pp):
        yield (
            f"{_MEGATRON}: expert_model_parallel_size={ep} * expert_tensor_parallel_size={etp} * "
            f"pipeline_model_parallel_size={pp} = {ep * etp * pp} must divide {where}; "
            f"{choose(divisors(ranks))} as their product"
        )
    if device == "cuda" and cfg.trainer.nnodes > 1 and per_node % rollout_tp and rollout_tp % per_node:
        yield (
            f"{_ROLLOUT_TP}={rollout_tp} must divide trainer.n_gpus_per_node={per_node} or be a multiple of it: a "
            f"replica has a part of a node or whole nodes; {choose(divisors(per_node))}"
        )


def _trainer(cfg: RunConfig) -> Iterator[str]:
    trainer, data = cfg.trainer, cfg.data
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        yield (
            f"trainer.resume_mode={trainer.resume_mode} with resume_from_path={trainer.resume_from_path}; "
            "set both (resume_mode=resume_path) or neither"
        )
    resume = cfg.resume
    if resume.from_ is not None and trainer.resume_from_path is not None:
        yield (
            f"resume.from={resume.from_} and trainer.resume_from_path={trainer.resume_from_path} mean the same; set "
            "one of them (the latter goes with trainer.resume_mode=resume_path)"
        )
    if resume.from_ is None and resume.what != "all":
        yield f"resume.what={resume.what} needs something to take from; set resume.from, or resume.what=all"
    if trainer.test_freq > 0 and not data.val_files:
        yield f"trainer.test_freq={trainer.test_freq} needs data.val_files; give them, or set test_freq=-1"
    if not trainer.balance_batch:
        yield "trainer.balance_batch=false is not available: packing always evens out tokens; set true"


def _reward(cfg: RunConfig) -> Iterator[str]:
    from rlhpc.rewards import REWARDS
    from rlhpc.rewards.source import problem

    name = cfg.reward.name
    file, custom, function = (name or "").rpartition(":")
    if custom and not Path(file).is_file():
        yield f"reward.name={name}: there is no file {Path(file).absolute()}; give PATH/FILE.py:FUNCTION"
    elif custom and (found := problem(Path(file), function)):
        yield f"reward.name={name}: {file} {found}"
    if name and not custom and name not in REWARDS:
        yield f"reward.name={name!r} is unknown; choose {', '.join(sorted(REWARDS))} or FILE.py:FUNCTION"


def _launch(cfg: RunConfig) -> Iterator[str]:
    launch, cluster, nodes = cfg.launch, cfg.cluster, cfg.trainer.nnodes
    if launch.mode == "local" and nodes > 1:
        yield f"trainer.nnodes={nodes} needs launch=slurm, or launch=allocation inside a job; set 1 to train here"
    if launch.mode == "slurm" and launch.time_min is not None and launch.stop_lead_s >= launch.time_min * 60:
        yield (
            f"launch.stop_lead_s={launch.stop_lead_s} must leave something of launch.time_min={launch.time_min} "
            f"({launch.time_min * 60} s); set a longer limit or a shorter lead"
        )
    for option, value in cluster.sbatch.items():
        if (instead := SBATCH_OWN.get(option.replace("_", "-"))) is not None:
            yield f"cluster.sbatch.{option}={value}: set {instead} instead"
        elif not isinstance(value, (str, int, float, bool, type(None))):
            yield f"cluster.sbatch.{option}={value} must be a text, a number, or true for an option without a value"
