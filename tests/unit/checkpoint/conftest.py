import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory that outlives processes, though not the machine: nothing waits for a disk."""
    with tempfile.TemporaryDirectory(prefix="rlhpc-test-", dir="/dev/shm") as directory:
        yield Path(directory)
