"""Who may drive a run directory, between real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.cluster.attempt import Attempt
from rlhpc.errors import ConfigError
from rlhpc.train.run import run_lock

HOLDER = """
import sys
from pathlib import Path
from rlhpc.cluster.attempt import Attempt
from rlhpc.train.run import run_lock
directory = Path(sys.argv[1])
with run_lock(directory, Attempt(directory, "17_2", 3) if sys.argv[2] == "attempt" else None):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["attempt", "local"])
def holder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A driver that lives, as the third restart of an array's task or outside Slurm."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    yield request.param, process.pid
    process.kill()
    process.wait()


def test_one_driver_at_a_time_unless_it_is_an_older_attempt(holder: tuple[str, int], tmp_path: Path) -> None:
    kind, pid = holder
    for other in (None, Attempt(tmp_path, "17_2", 2), Attempt(tmp_path, "17_3", 9), Attempt(tmp_path, "18", 9)):
        with (
            pytest.raises(ConfigError, match=rf"another process \(pid {pid} on \S+\) is training in run_dir="),
            run_lock(tmp_path, other),
        ):
            pass
    newer = Attempt(tmp_path, "17_2", 4)
    if kind == "attempt":
        with run_lock(tmp_path, newer):
            pass
    else:
        with pytest.raises(ConfigError, match="another process"), run_lock(tmp_path, newer):
            pass


def test_the_lock_goes_with_its_process(holder: tuple[str, int], tmp_path: Path) -> None:
    subprocess.run(["kill", "-9", str(holder[1])], check=True)
    while Path(f"/proc/{holder[1]}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        pass
    with run_lock(tmp_path):
        pass


@pytest.mark.parametrize("name", ["a_file", "a_file/run", "/proc/run"])
def test_a_run_directory_that_cant_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a_file").write_text("mine")
    with (
        pytest.raises(ConfigError, match="run_dir=.* can't be made or written to: .*; choose"),
        run_lock(tmp_path / name),
    ):
        pass
    assert (tmp_path / "a_file").read_text() == "mine"
