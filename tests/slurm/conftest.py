"""One mini Slurm for all tests of a session. MINISLURM_DIR (PORT, PREFIX) names a running one to use instead."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, named_cluster


@pytest.fixture(scope="session")
def running_slurm() -> Iterator[Cluster]:
    with named_cluster("t", nodes=4) as cluster:
        yield cluster


@pytest.fixture
def slurm(running_slurm: Cluster) -> Iterator[Cluster]:
    """The session's Slurm; what a test leaves running is cancelled."""
    yield running_slurm
    running_slurm.free()
