"""What the driver says of a rank that gave no answer, from Ray's own errors."""

from __future__ import annotations

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError

from rlhpc.train.worker import _reason


def test_memory_is_told_with_what_to_do() -> None:
    reason = _reason(OutOfMemoryError("Task was killed due to the node running low on memory.\nMemory on the node ..."))
    assert reason.startswith("the machine ran out of memory") and "ppo_max_token_len_per_gpu" in reason
    assert "\n" not in reason


def test_other_deaths_are_in_rays_words_without_its_ids_and_guesses() -> None:
    text = "The actor died.\n\tactor_id: 17\n\tip: 127.0.0.1\nIts worker exited. Some common causes include: (1) ..."
    assert _reason(RayError(text)) == "The actor died. Its worker exited."
    assert _reason(ActorDiedError()) == "The actor died unexpectedly before finishing this task."
