"""What the driver says of a rank that gave no answer, from Ray's own errors."""

from __future__ import annotations

from pathlib import Path

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError

from rlhpc.errors import RankLostError, TrainingError
from rlhpc.train.ray_ranks import _reason, first_failure


def test_memory_is_told_with_what_to_do() -> None:
    reason = _reason(OutOfMemoryError("Task was killed due to the node running low on memory.\nMemory on the node ..."))
    assert reason.startswith("the machine ran out of memory") and "ppo_max_token_len_per_gpu" in reason
    assert "\n" not in reason


def test_other_deaths_are_in_rays_words_without_its_ids_and_guesses() -> None:
    text = "The actor died.\n\tactor_id: 17\n\tip: 127.0.0.1\nIts worker exited. Some common causes include: (1) ..."
    assert _reason(RayError(text)) == "The actor died. Its worker exited."
    text = (
        "The actor died unexpectedly before finishing this task.\n\tactor_id: 17\nThe actor is dead because its worker "
        "process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
        "connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer"
    )
    detail = "Worker unexpectedly exits with a connection error code 2. End of file"
    assert _reason(RayError(text)) == f"its process was killed or crashed ({detail})"
    assert _reason(ActorDiedError()) == "The actor died unexpectedly before finishing this task."


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("RankWorker.answer", f"Traceback (most recent call last):\n  ...\n{error!r}", error)


def test_a_dead_rank_is_told_before_the_collectives_that_it_broke(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(3)]
    logs[2].write_text("=== an attempt\nold\n=== another\n" + "".join(f"line {number}\n" for number in range(5)))
    errors = {0: raised(RuntimeError("Connection closed by peer")), 2: ActorDiedError()}
    error = first_failure("step", errors, logs)
    assert isinstance(error, RankLostError)
    lines = str(error).splitlines()
    assert lines[0] == "rank 2 died in step: The actor died unexpectedly before finishing this task."
    assert lines[1:] == [f"the end of {logs[2]}:", "=== another", *(f"line {number}" for number in range(5))]


def test_what_a_rank_raised_is_told_in_a_line_with_the_place_of_the_rest(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(3)]
    own = TrainingError("loss is nan at step 3")
    assert first_failure("step", {1: raised(RuntimeError("closed")), 0: raised(own)}, logs) is own
    error = first_failure("save", {1: raised(KeyError("layer")), 0: raised(RuntimeError("closed"))}, logs)
    assert str(error) == f"rank 1 failed in save: KeyError: 'layer'\nthe traceback is at the end of {logs[1]}"
    assert not isinstance(error, RankLostError)
