"""Everything that a run is made of, assembled once by run.py and read by the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors.numpy import save_file

from rlhpc.algorithms.groups import FEWEST_BATCHES, Groups, VaryingGroups
from rlhpc.algorithms.kl import adapted_coef
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.cluster.stop import StopFlag, UpdateCut
from rlhpc.config.algorithm import needs_reference
from rlhpc.config.critic import Critic, needs_critic
from rlhpc.config.schema import RefConfig, RolloutConfig, RunConfig
from rlhpc.data.cursor import PromptCursor
from rlhpc.data.dataset import PromptDataset
from rlhpc.data.packing import TokenSequence
from rlhpc.data.types import Completion, Prompt, Trajectory
from rlhpc.errors import TrainingError
from rlhpc.metrics.reporter import Reporter
from rlhpc.metrics.timer import PhaseTimer
from rlhpc.train.batch import RolloutBatch
from rlhpc.train.deadline import in_time
from rlhpc.train.persistence import TrainState
from rlhpc.train.progress import PHASES, Progress
from rlhpc.train.protocols import LossSpec, SamplingSpec, ValueLossSpec
from rlhpc.train.ranks import Ranks
from rlhpc.train.saver import Saver
from rlhpc.train.scoring import Scorer
from rlhpc.train.validation import Validation

Update = TypeVar("Update")


@dataclass(frozen=True)
class Run:
    """One training run. The methods only fill in what the configuration says."""

    cfg: RunConfig
    directory: Path
    dataset: PromptDataset
    cursor: PromptCursor
    ranks: Ranks
    scorer: Scorer
    validation: Validation
    store: CheckpointStore
    saver: Saver
    reporter: Reporter
    stop: StopFlag
    progress: Progress
    total_steps: int
    pace: dict[str, float] = field(default_factory=dict)  # seconds of the last update's slowest mini-batch, by model

    @cached_property
    def critic(self) -> Critic | None:
        """What the critic is trained with; None without one."""
        return Critic.of(self.cfg) if needs_critic(self.cfg) else None

    @property
    def needs_reference(self) -> bool:
        return needs_reference(self.cfg)

    @property
    def replays_routing(self) -> bool:
        """Whether updates follow a routing."""
        return self.cfg.actor_rollout_ref.actor.megatron.router_replay.mode != "disabled"

    def log(self, step: int, record: dict[str, float]) -> None:
        """A finished step's metrics, with those of saves that have ended. Raises CheckpointError when a newer attempt
        has taken the run over, and what a save in the background failed of."""
        self.store.require_ownership()
        self.reporter.log(step, record | self.saver.collect())

    def timer(self, step: int) -> PhaseTimer:
        """Times the phases of a step; tells the ranks which one it is, and progress.json."""

        def entered(name: str) -> None:
            self.ranks.phase = name
            self.progress.enter(step, PHASES[name])

        return PhaseTimer(entered)

    def part(self, step: int, phase: str, fraction: float) -> None:
        """So much of a phase is done, 0 to 1."""
        self.reporter.progress(step, phase, fraction)
        self.progress.part(fraction)

    def save_due(self, step: int, begun_at: int) -> bool:
        """Every save_freq steps that were trained since the start, at step `begun_at`, and at the end."""
        freq = self.cfg.trainer.save_freq
        if step >= self.total_steps:
            return self.cfg.checkpoint.save_final
        return step > begun_at and freq > 0 and step % freq == 0

    def in_a_hurry(self) -> bool:
        """Whether a stop leaves no time to read back what is saved."""
        return self.stop.requested() and not self.stop.leaves(2 * self.progress.save_s)

    def newest_step(self) -> int:
        """The newest committed step, once the save in flight is over; 0 without any. Where the run ends before its
        time."""
        self.saver.wind_up()
        return max(self.store.steps(), default=0)

    def validate(self, state: TrainState) -> TrainState:
        """The state with validation metrics in its record, where due and not restored with the state. Raises
        StopRequested: the run that goes on validates again."""
        if not self.validation.due(state.step, self.total_steps) or any(
            name.startswith("val-core/") for name in state.record
        ):
            return state

        def between_chunks(fraction: float) -> None:
            self.stop.check()
            self.part(state.step, "testing", fraction)

        metrics, samples = self.validation.evaluate(self.ranks, state.step, between_chunks)
        self.reporter.generations(state.step, samples)
        return replace(state, record=state.record | metrics)

    @contextmanager
    def batch_kept_on_failure(self, step: int, mini_batch: Sequence[TokenSequence]) -> Iterator[None]:
        """Writes the mini-batch beside the logs when the optimizer refuses it, and names the file in the error."""
        try:
            yield
        except TrainingError as error:
            path = self.directory / "failures" / f"step-{step:06d}.safetensors"
            _save_sequences(path, mini_batch)
            raise TrainingError(
                f"step {step}: {error}\nthe batch is in {path}; checkpoints up to step "
                f"{self.newest_step()} are kept in {self.store.root}"
            ) from error

    def generate(self, prompts: Sequence[Prompt], seed: int, step: int) -> list[Completion]:
        """n completions per prompt. Raises StopRequested."""
        rollout = self.cfg.actor_rollout_ref.rollout

        def between_chunks(fraction: float) -> None:
            self.stop.check()
            self.part(step, "gen", fraction)

        return self.ranks.generate(
            prompts,
            SamplingSpec(
                n=rollout.n,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_response_length=self.cfg.data.max_response_length,
                stop=tuple(rollout.stop),
                ignore_eos=rollout.ignore_eos,
                routing=rollout.enable_rollout_routing_replay,
            ),
            seed=seed,
            chunk_prompts=rollout.chunk_prompts,
            between_chunks=between_chunks,
        )

    def groups(self) -> Groups:
        """What a step gathers its groups of samples in."""
        wanted, n = self.cfg.data.train_batch_size, self.cfg.actor_rollout_ref.rollout.n
        filtering = self.cfg.algorithm.filter_groups
        if not filtering.enable:
            return Groups(wanted, n)
        most = filtering.max_num_gen_batches
        if most <= 0:
            most = max(FEWEST_BATCHES, self.cursor.batches_per_epoch)
        return VaryingGroups(wanted, n, metric=filtering.metric, max_batches=most)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion], seed: int) -> list[Trajectory]:
        """Trajectories with their rewards. Raises StopRequested while a reward is waited for."""
        return self.scorer.score(prompts, completions, seed=seed, training=True)

    def old_logprobs(self, rollout: RolloutBatch) -> tuple[list[np.ndarray], RolloutBatch]:
        """Per-token logprobs under the policy before the step's updates, at the sampling temperature; and the batch
        with the routing that these follow, where they do. Raises StopRequested before it begins."""
        self.stop.check()
        ref, sequences = self.cfg.actor_rollout_ref, rollout.sequences(routed=True)
        if ref.actor.megatron.router_replay.mode != "R2":
            return self.ranks.logprobs(sequences, model="policy", **self._forward_options(ref.rollout)), rollout
        logprobs, experts = self.ranks.routed_logprobs(sequences, **self._forward_options(ref.rollout))
        return logprobs, replace(rollout, experts=tuple(experts))

    def ref_logprobs(self, rollout: RolloutBatch) -> list[np.ndarray]:
        """The same under the reference policy."""
        self.stop.check()
        options = self._forward_options(self.cfg.actor_rollout_ref.ref)
        return self.ranks.logprobs(rollout.sequences(), model="reference", **options)

    def _forward_options(self, limits: RolloutConfig | RefConfig) -> dict[str, Any]:
        return {
            "temperature": self.cfg.actor_rollout_ref.rollout.temperature,
            "max_tokens": limits.log_prob_max_token_len_per_gpu
            or self.cfg.actor_rollout_ref.actor.ppo_max_token_len_per_gpu,
            "max_sequences": limits.log_prob_micro_batch_size_per_gpu,
        }

    def kl_coef(self, last: Mapping[str, float]) -> float:
        """Of the KL in a step's rewards, from the last step's record, which a checkpoint holds."""
        ctrl, coef = self.cfg.algorithm.kl_ctrl, last.get("actor/reward_kl_penalty_coeff")
        if ctrl.type == "fixed" or coef is None:
            return ctrl.kl_coef
        num_samples = self.cfg.data.train_batch_size * self.cfg.actor_rollout_ref.rollout.n
        kl = last["actor/reward_kl_penalty"]
        return adapted_coef(coef, kl, target=ctrl.target_kl, horizon=ctrl.horizon, num_samples=num_samples)

    def values(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """The critic's values before each response token. Raises StopRequested before it begins."""
        self.stop.check()
        assert self.critic is not None
        return self.ranks.values(
            sequences,
            max_tokens=self.critic.forward_max_token_len_per_gpu,
            max_sequences=self.critic.forward_micro_batch_size_per_gpu,
        )

    def in_time(self, step: int, updates: Sequence[tuple[str, Update]]) -> Iterator[tuple[str, Update]]:
        """One after the other, each with the name of its model. Raises StopRequested before the first one, and
        UpdateCut after it where the others can't be made before a deadline."""

        def part(fraction: float) -> None:
            self.part(step, "update", fraction)

        try:
            save_s = self.progress.save_s + self.saver.remaining_s
            yield from in_time(updates, self.stop, save_s=save_s, pace=self.pace, part=part)
        except UpdateCut as cut:
            newest = self.newest_step()
            self.reporter.say(f"{cut}: nothing of step {step} is kept, the run goes on after step {newest}")
            raise

    def optimize(self, model: str, sequences: Sequence[TokenSequence]) -> dict[str, float]:
        """One optimizer step of the "actor" or the "critic" on a mini-batch, whose global token and sequence counts
        normalise the loss."""
        lengths = [sequence.num_loss_tokens for sequence in sequences]
        num_tokens, num_seqs = float(sum(lengths)), float(sum(length > 0 for length in lengths))
        if model == "critic":
            assert self.critic is not None
            limits, loss = self.critic, self._value_loss(self.critic, num_tokens, num_seqs)
        else:
            limits, loss = self.cfg.actor_rollout_ref.actor, self._policy_loss(num_tokens, num_seqs)
        return self.ranks.step(
            sequences,
            loss,
            max_tokens=limits.ppo_max_token_len_per_gpu,
            max_sequences=limits.ppo_micro_batch_size_per_gpu,
        )

    def _policy_loss(self, num_tokens: float, num_seqs: float) -> LossSpec:
        actor = self.cfg.actor_rollout_ref.actor
        return LossSpec(
            loss_mode=actor.policy_loss.loss_mode,
            clip_low=_or(actor.clip_ratio_low, actor.clip_ratio),
            clip_high=_or(actor.clip_ratio_high, actor.clip_ratio),
            clip_c=actor.clip_ratio_c,
            loss_agg_mode=actor.loss_agg_mode,
            num_global_tokens=num_tokens,
            num_global_seqs=num_seqs,
            loss_scale_factor=self._scale(actor.loss_scale_factor),
            entropy_coeff=actor.entropy_coeff,
            kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
            kl_type=actor.kl_loss_type,
            temperature=self.cfg.actor_rollout_ref.rollout.temperature,
        )

    def _value_loss(self, critic: Critic, num_tokens: float, num_seqs: float) -> ValueLossSpec:
        return ValueLossSpec(
            clip=critic.cliprange_value,
            loss_agg_mode=critic.loss_agg_mode,
            num_global_tokens=num_tokens,
            num_global_seqs=num_seqs,
            loss_scale_factor=self._scale(critic.loss_scale_factor),
        )

    def _scale(self, given: float | None) -> float:
        return _or(given, float(self.cfg.data.max_response_length))


def _save_sequences(path: Path, sequences: Sequence[TokenSequence]) -> None:
    """As safetensors: concatenated tokens, fields and experts, with per-sequence lengths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "token_ids": np.concatenate([s.token_ids for s in sequences]),
        "lengths": np.array([len(s.token_ids) for s in sequences]),
        "prompt_lens": np.array([s.prompt_len for s in sequences]),
    }
    for name in sequences[0].fields:
        arrays[f"fields.{name}"] = np.concatenate([s.fields[name] for s in sequences])
    if sequences[0].experts is not None:
        arrays["experts"] = np.concatenate([s.experts for s in sequences])
    save_file(arrays, path)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
