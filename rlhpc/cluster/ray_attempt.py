"""The driver's way into the Ray of its attempt: the supervisors start the daemons, the driver waits and connects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.placement import Placement
from rlhpc.config.schema import RunConfig


@contextmanager
def attempt_ray(cfg: RunConfig, attempt: Attempt) -> Iterator[Placement]:
    """Waits for head.json and for every node of the attempt, connects, and says where the ranks go. Stops nothing on
    the way out: Ray's daemons are their supervisors'.

    Raises ClusterError after cluster.start_timeout_s, naming the nodes that are missing, with the end of their logs.
    """
    raise NotImplementedError
    yield
