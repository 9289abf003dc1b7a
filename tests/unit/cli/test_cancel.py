"""What can be said of a cancellation before Slurm is asked; tests/slurm has the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.cli.cancel import cancel


def test_a_run_on_another_machine_is_left_to_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = {"attempt": None, "pid": 1, "host": "login2.site", "outcome": "running", "started": 1.0, "since": 1.0}
    (tmp_path / "progress.json").write_text(json.dumps(running))
    cancel(str(tmp_path))
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path}: process 1 on login2.site, as far as can be seen from here")
    assert said.endswith("; cancel it on that machine\n")


def test_a_run_that_never_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    cancel(str(tmp_path))
    assert capsys.readouterr().out == f"{tmp_path}: was never started; nothing to cancel\n"
