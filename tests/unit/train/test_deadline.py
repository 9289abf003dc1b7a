"""What a stop does to an update, by the deadline in the attempt's stop.json. Durations are sleeps of known length."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.cluster.attempt import Attempt, StopNotice
from rlhpc.cluster.stop import StopFlag, StopRequested, UpdateCut
from rlhpc.train.deadline import in_time


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = Attempt(tmp_path, "17_2", 3)
    attempt.create("token")
    return attempt


def stopped(flag: StopFlag, attempt: Attempt | None, left_s: float | None) -> None:
    """What the node's supervisor and the signal leave behind."""
    now = time.time()
    if attempt is not None:
        attempt.write("stop", vars(StopNotice("preempted", "SIGTERM", now, None if left_s is None else now + left_s)))
    flag.reason, flag.at = "SIGTERM", now


def update(flag: StopFlag, save_s: float, after_first: Callable[[], None] = lambda: None) -> list[int]:
    """Four mini-batches of 0.1 s; `after_first` happens in the first one."""
    done, parts = [], []
    for number in in_time([0, 1, 2, 3], flag, save_s=save_s, part=parts.append):
        time.sleep(0.1)
        done.append(number)
        if number == 0:
            after_first()
    assert parts == [0.0, 0.25, 0.5, 0.75]
    return done


def test_work_is_taken_a_fifth_longer(attempt: Attempt) -> None:
    flag = StopFlag(attempt)
    assert flag.leaves(1e9), "nobody has said when"
    stopped(flag, attempt, 120.0)
    assert flag.leaves(99.0) and not flag.leaves(100.1)
    stopped(flag, attempt, None)
    assert flag.leaves(1e9)


def test_before_the_first_mini_batch_the_step_is_given_up(attempt: Attempt) -> None:
    flag = StopFlag(attempt)
    stopped(flag, attempt, 3600.0)
    with pytest.raises(StopRequested, match="SIGTERM"):
        update(flag, save_s=0.0)


@pytest.mark.parametrize("left_s", [3600.0, None])
def test_an_update_that_fits_is_finished(attempt: Attempt, left_s: float | None) -> None:
    flag = StopFlag(attempt)
    assert update(flag, save_s=100.0, after_first=lambda: stopped(flag, attempt, left_s)) == [0, 1, 2, 3]
    local = StopFlag()
    assert update(local, save_s=100.0, after_first=lambda: stopped(local, None, None)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("left_s", "save_s"),
    [
        (60.0, 51.0),  # the save alone: 1.2 x 51 s
        (0.3, 0.0),  # three mini-batches alone: 1.2 x 0.3 s
    ],
)
def test_an_update_that_does_not_fit_is_cut(attempt: Attempt, left_s: float, save_s: float) -> None:
    flag, done = StopFlag(attempt), []
    with pytest.raises(UpdateCut, match="SIGTERM with 3 of 4 mini-batches to go"):
        for number in in_time([0, 1, 2, 3], flag, save_s=save_s, part=lambda fraction: None):
            time.sleep(0.1)
            done.append(number)
            stopped(flag, attempt, left_s)
    assert done == [0]


def test_a_deadline_that_moves_is_followed(attempt: Attempt) -> None:
    """An administrator gives the job more time after the first look: the update goes on; and takes it away again."""
    flag, done = StopFlag(attempt), []
    with pytest.raises(UpdateCut, match="2 of 4"):
        for number in in_time([0, 1, 2, 3], flag, save_s=10.0, part=lambda fraction: None):
            done.append(number)
            stopped(flag, attempt, [3600.0, 5.0][number])
    assert done == [0, 1]
