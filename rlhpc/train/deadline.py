"""Whether an update that a stop interrupts is worth finishing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rlhpc.cluster.stop import StopFlag, UpdateCut

MiniBatch = TypeVar("MiniBatch")


def in_time(
    mini_batches: Sequence[MiniBatch], stop: StopFlag, *, save_s: float, part: Callable[[float], None]
) -> Iterator[MiniBatch]:
    """The mini-batches of an update, one after the other, unless a stop makes it pointless to go on.

    Before the first one no weight has changed: raises StopRequested. After it the update is finished when what remains,
    judged by the slowest mini-batch so far (by the critic's before the policy's first), and the save (`save_s`, what
    the last one took) end before the deadline; else raises UpdateCut, and nothing of the step is kept. `part` hears
    which share of them is done.
    """
    stop.check()
    slowest_s = 0.0
    for done, mini_batch in enumerate(mini_batches):
        part(done / len(mini_batches))
        needed_s = slowest_s * (len(mini_batches) - done) + save_s
        if done and stop.requested() and not stop.leaves(needed_s):
            raise UpdateCut(
                f"{stop.reason} with {len(mini_batches) - done} of {len(mini_batches)} mini-batches to go: they and a "
                f"save take some {needed_s:.0f} s, more than is left"
            )
        begin = time.monotonic()
        yield mini_batch
        slowest_s = max(slowest_s, time.monotonic() - begin)
