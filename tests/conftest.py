"""Marks tests by the directory they are in, and keeps numerics and the machine calm: one thread per process."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

MARKS = {"distributed": "distributed", "e2e": "distributed", "slurm": "slurm"}
SHARE_FIXTURES = ("e2e", "slurm")  # a reference run, a Slurm: made once, and used by all files of the directory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `pytest -n N --dist loadgroup` one worker runs a file from its first to its last test, or a directory."""
    here = Path(__file__).parent
    for item in items:
        directory, *names = item.path.relative_to(here).parts
        if mark := MARKS.get(directory):
            item.add_marker(mark)
            item.add_marker(pytest.mark.xdist_group(directory if directory in SHARE_FIXTURES else names[-1]))
