"""Ray on this machine: a private head node inside the session's directory, gone with the session."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from rlhpc.cluster.placement import Placement
from rlhpc.cluster.ports import claim_block
from rlhpc.cluster.ray_agent import without_its_agent
from rlhpc.cluster.ray_node import RAY_ENVIRONMENT
from rlhpc.cluster.session import TOKEN_VARIABLE, Reaper, open_session
from rlhpc.cluster.stop import STOP_SIGNALS, blocked
from rlhpc.config.schema import ClusterConfig
from rlhpc.errors import ConfigError


@contextmanager
def local_ray(cluster: ClusterConfig, *, num_ranks: int, num_gpus: int) -> Iterator[Placement]:
    """Starts Ray with one CPU slot per rank and yields where they meet; leaves nothing behind on any way out.

    Other users of the machine reach its ports, so that it takes only who has a token. Ray reads the mode when it is
    loaded and the token once: the next run of a sweep, in this process, has the same.
    """
    assert "ray" not in sys.modules or os.environ.get("RAY_AUTH_MODE") == "token", "Ray was loaded without tokens"
    try:
        session = open_session(cluster.ray_temp_root)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    reaper = Reaper(session)
    os.environ[TOKEN_VARIABLE] = session.token  # inherited by Ray's daemons and, through them, by the ranks
    os.environ.update(RAY_ENVIRONMENT, RAY_AUTH_MODE="token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    try:
        with blocked(STOP_SIGNALS), without_its_agent():
            ray.init(
                address="local",
                num_cpus=num_ranks,  # Ray starts as many workers at once: one for each rank
                num_gpus=num_gpus,
                object_store_memory=cluster.object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,  # each rank writes a log file of its own
                logging_level="warning",
                _temp_dir=str(session.directory),
                _node_ip_address="127.0.0.1",
            )
        with closing(claim_block(session.token, 0)) as ports:  # the ranks listen there many seconds later
            yield Placement(("127.0.0.1", ports["master"]), num_ranks)
    finally:
        ray.shutdown()
        os.environ.pop(TOKEN_VARIABLE, None)
        reaper.close()
