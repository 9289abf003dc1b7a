"""Ray on this machine: a private head node inside the session's directory, gone with the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rlhpc.cluster.session import TOKEN_VARIABLE, Reaper, Session, open_session
from rlhpc.cluster.stop import STOP_SIGNALS, blocked
from rlhpc.config.schema import ClusterConfig
from rlhpc.errors import ConfigError


@contextmanager
def local_ray(cluster: ClusterConfig, *, num_ranks: int, num_gpus: int) -> Iterator[Session]:
    """Starts Ray with one CPU slot set per rank and yields the session; leaves nothing behind on any way out."""
    try:
        session = open_session(cluster.ray_temp_root)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    reaper = Reaper(session)
    os.environ[TOKEN_VARIABLE] = session.token  # inherited by Ray's daemons and, through them, by the ranks
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"  # vLLM's peer-to-peer check needs to see its peers
    try:
        with blocked(STOP_SIGNALS):
            ray.init(
                address="local",
                num_cpus=num_ranks * cluster.cpus_per_rank,
                num_gpus=num_gpus,
                object_store_memory=cluster.object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,  # each rank writes a log file of its own
                logging_level="warning",
                _temp_dir=str(session.directory),
                _node_ip_address="127.0.0.1",
            )
        yield session
    finally:
        ray.shutdown()
        os.environ.pop(TOKEN_VARIABLE, None)
        reaper.close()
