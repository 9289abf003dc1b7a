"""Which groups a step keeps, on scores written down by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rlhpc.algorithms.groups import Groups, VaryingGroups
from rlhpc.data.types import Completion, Prompt, Trajectory
from rlhpc.errors import ExhaustedError


def batch(*groups: Sequence[float], penalty: float | None = None, status: str = "ok") -> list[Trajectory]:
    """Two samples a group, of the given scores; the second of each pays `penalty` for its length."""
    empty = np.zeros(1, np.int32)
    return [
        Trajectory(
            Prompt(number, "", empty, "", "s"),
            Completion(number, sample, empty, np.zeros(1, np.float32), "stop"),
            "",
            score,
            status,
            penalty if sample else None,
        )
        for number, group in enumerate(groups)
        for sample, score in enumerate(group)
    ]


def varying(wanted: int, *, metric: str = "acc", max_batches: int = 9) -> VaryingGroups:
    return VaryingGroups(wanted, 2, metric=metric, max_batches=max_batches)


def test_without_filtering_everything_counts_at_once() -> None:
    groups, drawn = Groups(2, 2), batch((0, 0), (1, 1))
    groups.add(drawn)
    assert groups.full and groups.trajectories == drawn and groups.metrics == {}


def test_groups_are_kept_in_order_until_there_are_enough_and_the_rest_is_counted() -> None:
    groups = varying(3)
    first, second = batch((0, 1), (1, 1), (0, 0), (0, 0)), batch((0, 0), (1, 0), (0.5, 1), (0, 1))
    groups.add(first)
    assert not groups.full and groups.num_batches == 1
    groups.add(second)
    assert groups.full
    assert groups.trajectories == first[:2] + second[2:6]
    assert groups.metrics == {
        "train/num_gen_batches": 2,
        "training/filter_groups/evicted_samples": 4,
        "training/filter_groups/discarded_surplus_samples": 1,
        "training/filter_groups/solved_ratio": 1 / 8,
        "training/filter_groups/unsolved_ratio": 3 / 8,
        "training/filter_groups/sampled_score/mean": 6.5 / 16,
        "training/filter_groups/failed_reward_ratio": 0.0,
    }


@pytest.mark.parametrize(
    ("metric", "kept"),
    [("acc", False), ("score", False), ("reward", True), ("seq_reward", True), ("seq_final_reward", True)],
)
def test_a_penalty_tells_samples_apart_only_in_the_reward(metric: str, kept: bool) -> None:
    groups = varying(1, metric=metric)
    groups.add(batch((1, 1), penalty=-0.5))
    assert groups.full == kept


def test_equal_fractions_are_alike() -> None:
    """Their standard deviation, which verl asks for, is not 0 but 1.4e-17 in floating point."""
    groups = varying(1)
    groups.add(batch((0.1, 0.1)))
    assert not groups.full


def test_gives_up_at_the_limit_and_says_what_was_found() -> None:
    groups = varying(4, max_batches=3)
    groups.add(batch((0, 0), (1, 1)))
    groups.add(batch((0, 1), (1, 1)))
    with pytest.raises(ExhaustedError) as caught:
        groups.add(batch((0, 0), (0, 0), status="timeout"))
    told = str(caught.value)
    assert (
        "only 1 of data.train_batch_size=4 groups have answers that differ in acc, after 6 prompts in 3 batches" in told
    )
    assert "Groups all alike: 3 at 0, 2 at 1; 4 of 12 rewards failed" in told
    assert "algorithm.filter_groups.enable=false" in told


def test_the_last_batch_may_fill_the_step() -> None:
    groups = varying(2, max_batches=2)
    groups.add(batch((0, 1)))
    groups.add(batch((1, 0)))
    assert groups.full
