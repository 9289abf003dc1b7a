"""Held-out problems: sampled as val_kwargs says, scored by the same rewards, written down."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.data.dataset import PromptDataset
from rlhpc.data.types import Trajectory
from rlhpc.train.protocols import SamplingSpec
from rlhpc.train.ranks import Ranks
from rlhpc.train.scoring import Scorer

_SEED = 0x76616C  # the same samples at every step, so that differences are the policy's


class Validation:
    """`dataset` None: nothing is held out and validation is never due."""

    def __init__(self, cfg: RunConfig, dataset: PromptDataset | None, scorer: Scorer, directory: Path) -> None:
        self._cfg, self._dataset, self._scorer, self._directory = cfg, dataset, scorer, directory
        val = cfg.actor_rollout_ref.rollout.val_kwargs
        self._sampling = SamplingSpec(
            n=val.n,
            temperature=val.temperature,
            top_p=val.top_p,
            top_k=val.top_k,
            max_response_length=cfg.data.max_response_length,
            stop=tuple(cfg.actor_rollout_ref.rollout.stop),
            ignore_eos=cfg.actor_rollout_ref.rollout.ignore_eos,
        )

    def due(self, step: int, total_steps: int) -> bool:
        """Before training when asked, every test_freq steps, and after the last step."""
        trainer = self._cfg.trainer
        if self._dataset is None:
            return False
        if step == 0:
            return trainer.val_before_train
        return trainer.test_freq > 0 and (step % trainer.test_freq == 0 or step == total_steps)

    def evaluate(
        self, ranks: Ranks, step: int, progress: Callable[[float], None]
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Metrics `val-core/<data_source>/reward/mean@n`, and the generations, which also go to a file of the step."""
        assert self._dataset is not None
        count = len(self._dataset)
        prompts = [self._dataset[index] for index in range(count)]
        completions = ranks.generate(
            prompts,
            self._sampling,
            seed=_SEED,
            chunk_prompts=self._cfg.data.val_batch_size or count,
            between_chunks=progress,
        )
        trajectories = self._scorer.score(prompts, completions, seed=_SEED)
        samples = [_sample(step, trajectory) for trajectory in trajectories]
        self._write(step, samples)
        by_source: dict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in trajectories:
            by_source[trajectory.prompt.data_source].append(trajectory)
        metrics: dict[str, float] = {}
        for source, group in by_source.items():
            lengths = [len(t.completion.token_ids) for t in group]
            metrics[f"val-core/{source}/reward/mean@{self._sampling.n}"] = _mean([t.reward for t in group])
            metrics[f"val-aux/{source}/response_length/mean"] = _mean(lengths)
            metrics[f"val-aux/{source}/num_samples"] = len(group)
        return metrics, samples

    def _write(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = self._directory / f".step-{step:06d}.jsonl.partial"
        partial.write_text("".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
        partial.replace(self._directory / f"step-{step:06d}.jsonl")


def _sample(step: int, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "step": step,
        "prompt": trajectory.prompt.text,
        "response": trajectory.text,
        "ground_truth": trajectory.prompt.ground_truth,
        "reward": trajectory.reward,
        "finish_reason": trajectory.completion.finish_reason,
        "data_source": trajectory.prompt.data_source,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
