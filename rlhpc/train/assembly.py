"""Puts the parts of a run together: data, rewards, Ray, ranks, metrics, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.identity import check_identity, has_trained
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.placement import Placement
from rlhpc.cluster.stop import StopFlag
from rlhpc.config.checks import device_of
from rlhpc.config.model_dir import read_model_config
from rlhpc.config.schema import RunConfig
from rlhpc.data.cursor import PromptCursor
from rlhpc.data.dataset import PromptDataset, load_prompts
from rlhpc.errors import ConfigError, ModelError
from rlhpc.metrics.reporter import Reporter
from rlhpc.reshard.families import model_facts
from rlhpc.rewards import RewardPool
from rlhpc.rewards.overlong import overlong_penalty
from rlhpc.train.context import Run
from rlhpc.train.model_files import check_model_files
from rlhpc.train.progress import Progress
from rlhpc.train.ranks import Ranks
from rlhpc.train.ray_ranks import RayRanks
from rlhpc.train.saver import Saver
from rlhpc.train.scoring import Scorer
from rlhpc.train.start import check_start
from rlhpc.train.validation import Validation


@contextmanager
def assembled(
    cfg: RunConfig, directory: Path, attempt: Attempt | None, stop: StopFlag, progress: Progress
) -> Iterator[Run]:
    """A run whose ranks are up. Nothing of it is left on any way out.

    Raises RlhpcError for everything that the user can mend, StopRequested when a stop is asked for meanwhile.
    """
    device = resolve_device(cfg)
    tokenizer, dataset, held_out = load_data(cfg, directory)
    cursor = PromptCursor(len(dataset), cfg.data.draw_size, cfg.seed, cfg.data.shuffle, key=cfg.data.draw_key)
    total_steps = cfg.trainer.total_training_steps or cfg.trainer.total_epochs * cursor.batches_per_epoch
    num_ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    progress.plan(total_steps)
    stop.check()
    with ExitStack() as stack:
        placement = stack.enter_context(started_ray(cfg, attempt, stop, num_gpus=num_ranks if device == "cuda" else 0))
        progress.milestone("ray_ready")
        pool = stack.enter_context(
            RewardPool(
                cfg.reward.name,
                dict(cfg.reward.kwargs),
                timeout_s=cfg.reward.timeout_s,
                num_workers=cfg.reward.num_workers,
            )
        )
        for prompts in filter(None, (dataset, held_out)):
            pool.check_sources(prompts.data_sources)
        reporter = stack.enter_context(Reporter(cfg, directory, total_steps))
        if dataset.num_overlong:
            reporter.say(f"{dataset.num_overlong} prompts over data.max_prompt_length are left out")
        reporter.say(f"starting {num_ranks} ranks on {device}; logs in {directory / 'logs'}")
        workers = RayRanks(cfg, device, placement, directory / "logs")
        stack.callback(workers.close)
        pool.wait_ready()  # a reward that can't be used is told of while the ranks come up
        workers.call("start", waiting=stop.check)
        progress.milestone("ranks_ready")
        scorer = Scorer(
            tokenizer,
            pool,
            overlong_penalty=overlong_penalty_of(cfg),
            shuffle=cfg.reward.shuffle_control,
            waiting=stop.check,
        )
        ranks = Ranks(workers, stop.requested)
        store = CheckpointStore(cfg.checkpoint_root(), attempt.name if attempt else "")
        saver = stack.enter_context(Saver(cfg, ranks, store, progress, reporter))
        yield Run(
            cfg=cfg,
            directory=directory,
            dataset=dataset,
            cursor=cursor,
            ranks=ranks,
            scorer=scorer,
            validation=Validation(cfg, held_out, scorer, directory / "val_generations"),
            store=store,
            saver=saver,
            reporter=reporter,
            stop=stop,
            progress=progress,
            total_steps=total_steps,
        )


def load_data(cfg: RunConfig, directory: Path) -> tuple[Any, PromptDataset, PromptDataset | None]:
    """The tokenizer, the prompts to train on and those held out, after the model's directory, the run's identity and
    what it starts from were checked."""
    model_config = read_model_config(cfg.actor_rollout_ref.model.path)
    check_model_files(cfg, model_config)
    check_start(cfg, model_config)
    check_identity(directory, cfg.tree(), model_config, trained=has_trained(directory))
    tokenizer = load_tokenizer(cfg)
    dataset = load_prompts(cfg.data.train_files, tokenizer, cfg.data)
    held_out = load_prompts(cfg.data.val_files, tokenizer, cfg.data) if cfg.data.val_files else None
    if held_out is not None and cfg.data.val_max_samples > 0:
        held_out = held_out.head(cfg.data.val_max_samples)
    for prompts in filter(None, (dataset, held_out)):
        prompts.check_tokens(model_facts(model_config).vocab_size)
    return tokenizer, dataset, held_out


def started_ray(
    cfg: RunConfig, attempt: Attempt | None, stop: StopFlag, *, num_gpus: int
) -> AbstractContextManager[Placement]:
    """The Ray of this attempt, or one of this process alone, which settles how Ray is loaded before it is."""
    if attempt:
        from rlhpc.cluster.ray_attempt import attempt_ray

        return attempt_ray(cfg, attempt, waiting=stop.check)
    from rlhpc.cluster.ray_local import local_ray

    num_ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    return local_ray(cfg.cluster, num_ranks=num_ranks, num_gpus=num_gpus)


def overlong_penalty_of(cfg: RunConfig) -> Callable[[int], float] | None:
    """By the number of an answer's tokens; None without an overlong buffer."""
    overlong, limit = cfg.reward.overlong_buffer, cfg.data.max_response_length
    if not overlong.enable:
        return None
    buffer_tokens = overlong.len or max(1, limit // 5)
    return partial(overlong_penalty, max_tokens=limit, buffer_tokens=buffer_tokens, factor=overlong.penalty_factor)


def resolve_device(cfg: RunConfig) -> str:
    """ "cpu" or "cuda", as trainer.device asks and the machine allows."""
    import torch

    device, available = device_of(cfg), torch.cuda.device_count()
    if device == "cuda" and available < cfg.trainer.n_gpus_per_node:
        raise ConfigError(
            f"trainer.device=cuda with trainer.n_gpus_per_node={cfg.trainer.n_gpus_per_node}, but this machine "
            f"shows {available} GPUs; set trainer.n_gpus_per_node={available} or trainer.device=cpu"
        )
    return device


def load_tokenizer(cfg: RunConfig) -> Any:
    """The model's own tokenizer; nothing is fetched from a network when the path is a directory."""
    from transformers import AutoTokenizer

    model = cfg.actor_rollout_ref.model
    try:
        return AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no tokenizer could be loaded from actor_rollout_ref.model.path={model.path}: {error}; the directory "
            "needs the tokenizer files next to config.json"
        ) from error
