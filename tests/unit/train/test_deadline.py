"""What a stop does to an update, by the deadline in the attempt's stop.json. Durations are sleeps of known length."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlhpc.cluster.attempt import Attempt, StopNotice
from rlhpc.cluster.stop import StopFlag, StopRequested, UpdateCut
from rlhpc.train.deadline import in_time

FOUR = [("actor", number) for number in range(4)]
BOTH = [("critic", 0), ("critic", 1), ("actor", 0), ("actor", 1), ("actor", 2)]


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
    for _, number in in_time(FOUR, flag, save_s=save_s, pace={}, part=parts.append):
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
        for _, number in in_time(FOUR, flag, save_s=save_s, pace={}, part=lambda fraction: None):
            time.sleep(0.1)
            done.append(number)
            stopped(flag, attempt, left_s)
    assert done == [0]


def test_a_deadline_that_moves_is_followed(attempt: Attempt) -> None:
    """An administrator gives the job more time after the first look: the update goes on; and takes it away again."""
    flag, done = StopFlag(attempt), []
    with pytest.raises(UpdateCut, match="2 of 4"):
        for _, number in in_time(FOUR, flag, save_s=10.0, pace={}, part=lambda fraction: None):
            done.append(number)
            stopped(flag, attempt, [3600.0, 5.0][number])
    assert done == [0, 1]


@pytest.mark.parametrize(
    ("pace", "left_s", "cut"),
    [
        ({"actor": 100.0}, 400.0, False),  # one of 0.1 s and three of 100 s: 1.2 x 300.1 s, and no save
        ({"actor": 100.0}, 350.0, True),
        ({"actor": 0.0, "critic": 1000.0}, 60.0, False),  # the critic's own time is known by then
        ({}, 60.0, False),  # nobody knows the policy's: as the critic's, 1.2 x 0.4 s
        ({}, 0.3, True),
    ],
)
def test_each_model_is_judged_by_its_own_mini_batches(
    attempt: Attempt, pace: dict[str, float], left_s: float, cut: bool
) -> None:
    """A stop in the critic's first of two mini-batches, before the policy's three."""
    flag, done = StopFlag(attempt), []
    with pytest.raises(UpdateCut, match="4 of 5 mini-batches to go") if cut else nullcontext():
        for model, number in in_time(BOTH, flag, save_s=0.0, pace=pace, part=lambda fraction: None):
            time.sleep(0.1)
            done.append((model, number))
            if len(done) == 1:
                stopped(flag, attempt, left_s)
    assert done == (BOTH[:1] if cut else BOTH)
    assert cut or 0.1 <= pace["critic"] < 30 and 0.1 <= pace["actor"] < 30  # for the next update


def test_a_policy_that_is_slower_than_its_last_update_is_cut(attempt: Attempt) -> None:
    """Expected to take next to nothing it took 0.2 s: two more and a save of 10 s don't fit into 12 s, 1.2 x 10.4."""
    flag, done = StopFlag(attempt), []
    with pytest.raises(UpdateCut, match="2 of 5"):
        for model, _ in in_time(BOTH, flag, save_s=10.0, pace={"actor": 0.0}, part=lambda fraction: None):
            done.append(model)
            if model == "actor":
                time.sleep(0.2)
                stopped(flag, attempt, 12.2)
    assert done == ["critic", "critic", "actor"]
