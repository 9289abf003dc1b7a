"""Rewards for completions: decode, ask the reward pool, keep what went wrong as a status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhpc.data.types import Completion, Prompt, Trajectory
from rlhpc.rewards import RewardPool


class Scorer:
    """`overlong_penalty` of a number of response tokens lowers the rewards of what is trained on; None: nothing does.
    `shuffle` permutes these over the batch: a control run, whose policy must not learn the task. `waiting` is called a
    few times a second while rewards are out, and may raise to give them up."""

    def __init__(
        self,
        tokenizer: Any,
        pool: RewardPool,
        *,
        overlong_penalty: Callable[[int], float] | None,
        shuffle: bool,
        waiting: Callable[[], None],
    ) -> None:
        self._tokenizer, self._pool, self._shuffle, self._waiting = tokenizer, pool, shuffle, waiting
        self._overlong_penalty = overlong_penalty

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        *,
        seed: int,
        training: bool = False,
    ) -> list[Trajectory]:
        """Trajectories in the order of `completions`, which hold the same number per prompt, prompt-major."""
        n = len(completions) // len(prompts)
        texts = self._tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
        owners = [prompts[index // n] for index in range(len(completions))]
        results = self._pool.score(
            [(text, p.ground_truth, p.data_source) for text, p in zip(texts, owners, strict=True)],
            waiting=self._waiting,
        )
        order = np.arange(len(results))
        if self._shuffle and training:
            order = np.random.default_rng(seed).permutation(len(results))
        penalty = self._overlong_penalty if training else None
        penalties = [penalty(len(c.token_ids)) if penalty else None for c in completions]
        return [
            Trajectory(prompt, completion, text, results[o].score, results[o].status, penalties[o])
            for prompt, completion, text, o in zip(owners, completions, texts, order, strict=True)
        ]
