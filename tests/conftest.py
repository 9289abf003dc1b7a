"""Marks tests by the directory they are in, and keeps numerics and the machine calm: one thread per process."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

MARKS = {"distributed": "distributed", "e2e": "distributed", "slurm": "slurm"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if mark := MARKS.get(item.path.relative_to(here).parts[0]):
            item.add_marker(mark)
