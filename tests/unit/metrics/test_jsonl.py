"""metrics.jsonl under crashes, restarts and full disks."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

from rlhpc.checkpoint.durable import DiskFullError
from rlhpc.errors import DataError
from rlhpc.metrics.jsonl import MetricsFile


def strict(line: str) -> dict[str, object]:
    """JSON without Python's NaN and Infinity extensions."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    parsed: dict[str, object] = json.loads(line, parse_constant=refuse)
    return parsed


def test_floats_read_back_to_the_same_bits(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    values = {"a": 0.1 + 0.2, "b": 5e-324, "c": float(np.float32(1 / 3)), "d": 7, "e": -0.0}
    file.append(3, values)
    assert file.read() == [{"step": 3, **values}]
    assert math.copysign(1, file.read()[0]["e"]) == -1


def test_scalars_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(1, {"n": np.float64(0.5), "t": torch.tensor(0.25), "i": np.int64(3)})  # type: ignore[dict-item]
    assert file.read() == [{"step": 1, "n": 0.5, "t": 0.25, "i": 3.0}]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(1, {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "fine": 1.0})
    assert strict(file.path.read_text()) == {"step": 1, "nan": None, "inf": None, "minus": None, "fine": 1.0}


def test_later_steps_and_a_torn_line_are_cut(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate_after(5)  # nothing yet, nothing to do
    for step in range(5):
        file.append(step, {"x": step / 7})
    whole = file.path.read_text().splitlines(keepends=True)
    with file.path.open("a") as handle:
        handle.write('{"step": 5, "x": 0.7142')
    assert [row["step"] for row in file.read()] == [0, 1, 2, 3, 4]
    file.truncate_after(2)
    assert file.path.read_text() == "".join(whole[:3])
    file.append(3, {"x": 3 / 7})
    assert file.path.read_text() == "".join(whole[:4])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.path.write_text('{"step": 0}\n\0\0\0\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl line 2 is not JSON"):
        file.truncate_after(1)
    assert file.path.read_text() == '{"step": 0}\n\0\0\0\n{"step": 2}\n'


def test_a_full_disk_costs_no_line_and_is_an_error_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    file = MetricsFile(Path("/dev/full"))
    file.append(1, {"x": 1.0})
    assert "the metrics of step 1 wait in memory: can't write /dev/full: No space left on device" in caplog.text
    with pytest.raises(DiskFullError, match="/dev/full: No space left on device"):
        file.flush()


def test_lines_that_found_no_room_come_with_the_next(tmp_path: Path) -> None:
    """A limit on the file's size ends a write in its middle, as a quota does."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(0, {"x": 0.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.path.stat().st_size + 10, limits[1]))
    try:
        file.append(1, {"x": 1.0})
        file.append(2, {"x": 2.0})
        assert file.path.read_text() == '{"step": 0, "x": 0.0}\n'
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.append(3, {"x": 3.0})
    assert [row["step"] for row in file.read()] == [0, 1, 2, 3]


WRITER = """
import sys
from pathlib import Path
from rlhpc.metrics.jsonl import MetricsFile
file = MetricsFile(Path(sys.argv[1]))
for step in range(1_000_000):
    file.append(step, {f"metric_{i}": step / 3 for i in range(50)})
    print(step, flush=True)
"""


def test_what_append_returned_from_survives_a_kill(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file.path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    confirmed = [int(writer.stdout.readline()) for _ in range(20)][-1]
    writer.kill()
    writer.wait()
    steps = [row["step"] for row in file.read()]
    assert steps == list(range(len(steps))) and len(steps) > confirmed
    file.truncate_after(confirmed)
    assert [row["step"] for row in file.read()] == list(range(confirmed + 1))
