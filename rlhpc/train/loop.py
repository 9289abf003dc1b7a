"""The whole algorithm on one page. Everything it calls is a pure function or an object that the run was built with."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from rlhpc.algorithms.statistics import mismatch
from rlhpc.cluster.stop import StopRequested
from rlhpc.config.critic import Critic
from rlhpc.config.schema import ActorConfig
from rlhpc.data.packing import TokenSequence
from rlhpc.errors import ExhaustedError
from rlhpc.metrics.records import batch_metrics, means
from rlhpc.train.batch import RolloutBatch, TrainBatch, prepare
from rlhpc.train.context import Run
from rlhpc.train.persistence import TrainState, save_and_leave, save_periodically
from rlhpc.train.restore import restore


def train(run: Run) -> TrainState:
    """From the newest checkpoint, or the beginning, to the last step.

    A step's weights are published and validated before they are committed together with the step's metrics: a run
    killed anywhere finds a checkpoint whose record is whole, and a resumed run repeats nothing that was committed.
    Raises StopRequested after a stop, and ExhaustedError where the prompts give a step nothing to train on, once the
    last whole step that was trained is committed.
    """
    state = restore(run)
    begun_at = state.step
    run.saver.retire()
    while True:
        try:
            timer = run.timer(state.step)
            with timer.phase("update_weights"):
                moved_bytes = run.ranks.publish(state.step)
            with timer.phase("testing"):
                state = run.validate(state)
            if run.save_due(state.step, begun_at):
                with timer.phase("save_checkpoint"):
                    save_periodically(run, state)
            published = timer.metrics() | run.ranks.usage() | {"perf/reshard_bytes": moved_bytes}
            run.log(state.step, state.record | published)
            if state.step >= run.total_steps:
                run.saver.drain()
                return state
            state = train_step(run, state)
            run.stop.check()
        except (StopRequested, ExhaustedError):  # no weight has changed since: the state stands
            save_and_leave(run, state, trained=state.step > begun_at)
            raise


def train_step(run: Run, state: TrainState) -> TrainState:
    """Sample, score, compare, estimate, update. Raises StopRequested only while no weight has changed, and UpdateCut
    where a change can't be finished in time."""
    cfg, step = run.cfg, state.step + 1
    actor, timer = cfg.actor_rollout_ref.actor, run.timer(step)
    seed = step_seed(cfg.seed, step)
    run.cursor.load(state.cursor)

    groups = run.groups()
    while not groups.full:
        sampling_seed = step_seed(cfg.seed, step, groups.num_batches)
        with timer.phase("gen"):
            prompts = [run.dataset[index] for index in run.cursor.next()]
            completions = run.generate(prompts, sampling_seed, step)
        with timer.phase("reward"):
            groups.add(run.score(prompts, completions, sampling_seed))
    rollout = RolloutBatch.collate(groups.trajectories, cfg.actor_rollout_ref.rollout.n)

    with timer.phase("old_log_prob"):
        run.ranks.begin_update()
        trainer_logprobs, rollout = run.old_logprobs(rollout)
    with timer.phase("ref"):
        ref_logprobs = run.ref_logprobs(rollout) if run.needs_reference else None
    with timer.phase("values"):
        values = run.values(rollout.sequences()) if run.critic else None

    with timer.phase("adv"):
        batch = prepare(
            rollout,
            trainer_logprobs,
            ref_logprobs,
            cfg.algorithm,
            kl_coef=run.kl_coef(state.record),
            kl_in_loss=actor.use_kl_loss,
            values=values,
        )
        due = updates(run, step, batch, seed)
    learnt: list[dict[str, float]] = []
    for model, mini_batch in run.in_time(step, due):
        with timer.phase(f"update_{model}"), run.batch_kept_on_failure(step, mini_batch):
            learnt.append(run.optimize(model, mini_batch))

    record = (
        batch_metrics(batch)
        | groups.metrics
        | mismatch(batch.trainer_logprobs, rollout.rollout_logprobs, rollout.mask)
        | batch.metrics
        | means(learnt)
        | {"training/global_step": step, "training/epoch": run.cursor.epoch}
        | timer.metrics()
        | run.ranks.usage()
    )
    return TrainState(step, run.cursor.state(), record)


def updates(run: Run, step: int, batch: TrainBatch, seed: int) -> list[tuple[str, list[TokenSequence]]]:
    """(model, mini-batch) of every optimizer step: the critic's, where there is one, then the policy's, but for the
    critic's warm-up."""
    actor, n = run.cfg.actor_rollout_ref.actor, run.cfg.actor_rollout_ref.rollout.n
    due: list[tuple[str, list[TokenSequence]]] = []
    if run.critic:
        sequences = batch.rollout.sequences(**batch.critic_fields)
        due += [("critic", mini_batch) for mini_batch in mini_batches(sequences, run.critic, n, seed)]
    if step >= run.cfg.trainer.critic_warmup:
        sequences = batch.rollout.sequences(routed=run.replays_routing, **batch.fields)
        due += [("actor", mini_batch) for mini_batch in mini_batches(sequences, actor, n, seed)]
    return due


def mini_batches(
    sequences: list[TokenSequence], model: ActorConfig | Critic, n: int, seed: int
) -> list[list[TokenSequence]]:
    """`ppo_mini_batch_size` prompts with all their n trajectories at a time, `ppo_epochs` times over."""
    size = model.ppo_mini_batch_size * n
    batches = []
    for epoch in range(model.ppo_epochs):
        order = np.arange(len(sequences))
        if model.shuffle:
            order = np.random.default_rng([seed, epoch]).permutation(len(sequences))
        for begin in range(0, len(sequences), size):
            batches.append([sequences[index] for index in order[begin : begin + size]])
    return batches


def step_seed(run_seed: int, step: int, batch: int = 0) -> int:
    """63-bit seed of one step's sampling, or of a further batch that it samples: a function of these alone, so that a
    restart repeats it."""
    name = f"{run_seed}:{step}" + (f":{batch}" if batch else "")
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
