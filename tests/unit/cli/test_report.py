"""The report of a metrics.jsonl written here by hand."""

import json
import os
import subprocess
import sys

import pytest

from rlhpc.cli.report import moving_mean, report, series, timing_shares
from rlhpc.errors import DataError

ROWS = [
    {"step": 0, "val-core/arithmetic/reward/mean@1": 0.25, "timing_s/testing": 1.0, "timing_s/step": 1.0},
    {
        "step": 1,
        "critic/score/mean": 0.5,
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 1.0,
        "timing_s/step": 4.0,
    },
    {
        "step": 2,
        "critic/score/mean": 0.75,
        "actor/entropy": None,
        "val-core/arithmetic/reward/mean@1": 0.875,
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 2.0,
        "timing_s/ranks/update_actor": 1.75,  # a part of it
        "timing_s/step": 5.0,
    },
]


def test_numbers():
    assert series(ROWS, "critic/score/mean") == ([1, 2], [0.5, 0.75])
    assert series(ROWS, "actor/entropy") == ([], [])  # null: not finite
    assert timing_shares(ROWS) == {"gen": (2.0, 0.6), "update_actor": (1.0, 0.3), "testing": (1 / 3, 0.1)}


def test_moving_mean():
    assert moving_mean([1.0, 3.0, 5.0, 1.0], 2) == [1.0, 2.0, 4.0, 3.0]


def test_text_and_plot(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    text = report(tmp_path)
    (validation,) = [line.split() for line in text.splitlines() if line.startswith("val-core/")]
    assert validation == ["val-core/arithmetic/reward/mean@1", "0.25", "0.875", "0.5625", "0.25", "0.875"]
    assert [line.split() for line in text.splitlines() if line.startswith("gen ")] == [["gen", "2.000", "60.0%"]]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_reader_that_had_enough(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "rlhpc.cli.main", "report", str(tmp_path)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_to_report(tmp_path):
    with pytest.raises(DataError, match="metrics.jsonl is missing or empty"):
        report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(DataError, match="choose another place with --plot"):
        report(tmp_path, tmp_path / "nowhere" / "plot.png")
