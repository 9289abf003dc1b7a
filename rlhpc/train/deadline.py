"""Whether an update that a stop interrupts is worth finishing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rlhpc.cluster.stop import StopFlag, UpdateCut

MiniBatch = TypeVar("MiniBatch")


def in_time(
    mini_batches: Sequence[tuple[str, MiniBatch]],
    stop: StopFlag,
    *,
    save_s: float,
    pace: dict[str, float],
    part: Callable[[float], None],
) -> Iterator[tuple[str, MiniBatch]]:
    """The mini-batches of an update, each with the name of its model, one after the other, unless a stop makes it
    pointless to go on.

    Before the first one no weight has changed: raises StopRequested. After it the update is finished when what remains
    and the save (`save_s`, what the last one took) end before the deadline; else raises UpdateCut, and nothing of the
    step is kept. A model's mini-batches are judged by its slowest so far; before its first by `pace`, seconds by model,
    which a whole update leaves for the next one; and where that doesn't know it, by the slowest of another model.
    `part` hears which share of them is done.
    """
    stop.check()
    slowest_s: dict[str, float] = {}
    for done, (model, mini_batch) in enumerate(mini_batches):
        part(done / len(mini_batches))
        expected_s = {name: max(slowest_s.values(), default=0.0) for name, _ in mini_batches} | pace | slowest_s
        needed_s = sum(expected_s[name] for name, _ in mini_batches[done:]) + save_s
        if done and stop.requested() and not stop.leaves(needed_s):
            raise UpdateCut(
                f"{stop.reason} with {len(mini_batches) - done} of {len(mini_batches)} mini-batches to go: they and a "
                f"save take some {needed_s:.0f} s, more than is left"
            )
        begin = time.monotonic()
        yield model, mini_batch
        slowest_s[model] = max(slowest_s.get(model, 0.0), time.monotonic() - begin)
    pace.update(slowest_s)
