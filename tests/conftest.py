"""Marks tests by the directory they are in, shares them out to workers, and keeps numerics and the machine calm: one
thread per process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")

MARKS = {"distributed": "distributed", "e2e": "distributed", "slurm": "slurm"}
SHARE_FIXTURES = ("e2e", "slurm")  # a reference run, a Slurm: made once, and used by all files of the directory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if mark := MARKS.get(item.path.relative_to(here).parts[0]):
            item.add_marker(mark)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Under `pytest -n N --dist loadscope` a worker runs a whole file, or a whole directory that shares fixtures."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            return str(path.parent if path.parent.name in SHARE_FIXTURES else path)

    return Scheduling(config, log)
