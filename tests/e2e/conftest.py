"""One task and one uninterrupted run of it, with which the others are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import DYNAMIC, command, run_to_end, write_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def reference(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of six steps, sampled dynamically."""
    folder = tmp_path_factory.mktemp("reference")
    run_to_end(command(task, folder / "run", *DYNAMIC), folder / "log")
    return folder / "run"
