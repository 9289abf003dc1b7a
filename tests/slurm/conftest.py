"""One mini Slurm for all tests of a session. MINISLURM_DIR (PORT, PREFIX) names a running one to use instead."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, own_cluster


@pytest.fixture(scope="session")
def running_slurm() -> Iterator[Cluster]:
    if directory := os.environ.get("MINISLURM_DIR"):
        cluster = Cluster(
            Path(directory),
            int(os.environ.get("MINISLURM_PORT", "27800")),
            os.environ.get("MINISLURM_PREFIX", "n"),
            int(os.environ.get("MINISLURM_NODES", "4")),
        )
        cluster.up()
        yield cluster
        return
    cluster = own_cluster("t")
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(cluster.directory)


@pytest.fixture
def slurm(running_slurm: Cluster) -> Iterator[Cluster]:
    """The session's Slurm; what a test leaves running is cancelled."""
    yield running_slurm
    running_slurm.free()
