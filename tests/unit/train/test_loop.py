"""The loop over a rank of this process, which samples as an engine does: by (seed, prompt, sample) alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc.backends.vllm.rng import hash64
from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.cluster.stop import StopFlag
from rlhpc.config.load import load
from rlhpc.data.cursor import PromptCursor
from rlhpc.data.dataset import PromptDataset
from rlhpc.data.types import Completion, Prompt
from rlhpc.errors import ExhaustedError
from rlhpc.metrics.reporter import Reporter
from rlhpc.rewards import RewardPool
from rlhpc.train.context import Run
from rlhpc.train.loop import train_step
from rlhpc.train.persistence import TrainState
from rlhpc.train.progress import Progress
from rlhpc.train.protocols import SamplingSpec
from rlhpc.train.ranks import Ranks
from rlhpc.train.scoring import Scorer


class Sampler:
    """A rank that draws a letter for every sample; `seeds` counts the seeds that they were drawn with."""

    world_size = 1

    def __init__(self) -> None:
        self.seeds: Counter[int] = Counter()
        self.num_calls = 0

    def call(
        self, method: str, per_rank: Any = None, *, phase: str = "", waiting: Any = None, **common: Any
    ) -> list[Any]:
        return [getattr(self, method)(*arguments) for arguments in per_rank or [()]]

    def describe(self) -> dict[str, Any]:
        return {"dp_rank": 0, "dp_size": 1, "replica_rank": 0, "num_replicas": 1, "start_s": 0.0}

    def generate(self, prompts: Sequence[tuple[int, Any]], sampling: SamplingSpec, seed: int) -> list[Completion]:
        self.num_calls += 1
        answers = []
        for prompt_id, _ in prompts:
            for sample in range(sampling.n):
                self.seeds[drawn := hash64(seed, prompt_id, sample)] += 1
                answers.append(Completion(prompt_id, sample, np.array([drawn % 26]), np.zeros(1, np.float32), "stop"))
        return answers

    def interrupt(self) -> None:
        raise AssertionError("nobody stops here")

    def reports(self, save_id: str) -> list[str] | None:
        raise AssertionError("nobody saves here")


class Letters:
    def batch_decode(self, answers: Sequence[np.ndarray], **options: Any) -> list[str]:
        return ["".join(chr(ord("a") + token) for token in answer) for answer in answers]


def test_batches_of_a_step_and_their_chunks_sample_anew(tmp_path: Path) -> None:
    """Both prompts in each of three batches, a prompt at a time, since no answer is ever right: a step's 2 * 3 * 4
    samples have as many seeds, and those of the next step are others."""
    settings = {
        "actor_rollout_ref": {"model": {"path": "/m"}, "rollout": {"n": 4, "chunk_prompts": 1}},
        "data": {"train_files": "/d", "train_batch_size": 2},
        "algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 3}},
        "trainer": {"n_gpus_per_node": 1, "logger": []},
    }
    cfg, caller, stop = load(OmegaConf.create(settings)), Sampler(), StopFlag()
    prompts = tuple(Prompt(i, "1+1=", np.array([1], np.int32), "2", "arithmetic") for i in range(2))
    with RewardPool(num_workers=1) as pool, Reporter(cfg, tmp_path, 2) as reporter:
        scorer = Scorer(Letters(), pool, overlong_penalty=None, shuffle=False, waiting=stop.check)
        run = Run(
            cfg, tmp_path, PromptDataset(prompts), PromptCursor(2, 2), Ranks(caller, stop.requested), scorer, None,
            CheckpointStore(tmp_path), None, reporter, stop, Progress(tmp_path, None, stop), 2,
        )  # fmt: skip
        for step in range(2):
            with pytest.raises(ExhaustedError, match="after 6 prompts in 3 batches"):
                train_step(run, TrainState(step, run.cursor.state(), {}))
    assert caller.num_calls == 2 * 3 * 2
    assert len(caller.seeds) == caller.seeds.total() == 2 * 24
