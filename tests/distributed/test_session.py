"""Nothing of a session stays behind: processes, shared memory and directories, however the driver ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.cluster.session import Session, clean, open_session, processes
from tests.distributed.ray_attempts import CONNECT

DRIVER = """
import os, sys, time
from rlhpc.cluster.ray_local import local_ray
from rlhpc.cluster.session import ident_of
from rlhpc.config.schema import ClusterConfig

class Rank:
    def hold(self, ident):
        open(f"/dev/shm/{ident}-segment", "w").write("x")
        time.sleep(1000)

with local_ray(ClusterConfig(ray_temp_root=sys.argv[1]), num_ranks=2, num_gpus=0):
    import ray

    token = os.environ["RLHPC_SESSION"]
    ident = ident_of(token)
    ranks = [ray.remote(Rank).remote() for _ in range(2)]
    ray.get([rank.__ray_ready__.remote() for rank in ranks])
    ranks[0].hold.remote(ident)
    while not list(__import__("pathlib").Path("/dev/shm").glob(f"{ident}*")):
        time.sleep(0.1)
    print("READY", token, ray.get_runtime_context().gcs_address, flush=True)
    if sys.argv[2] == "wait":
        time.sleep(1000)
    if sys.argv[2] == "raise":
        raise RuntimeError("as a crash would")
"""


def start_driver(root: Path, mode: str) -> tuple[subprocess.Popen[str], Session, str]:
    """The driver once its Ray is up, its session, and where Ray listens."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(root), mode], stdout=subprocess.PIPE, text=True, env=env
    )
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("READY"):
            _, token, address = line.split()
            return driver, Session(token, root / f"rlhpc-{os.getuid()}" / token), address
    raise AssertionError("the driver ended before it was ready")


def remains(session: Session) -> list[str]:
    segments = [str(p) for p in Path("/dev/shm").glob(f"*{session.ident}*")]
    directory = [str(session.directory)] if session.directory.exists() else []
    return [str(pid) for pid in processes(session.token)] + segments + directory


def wait_until_gone(session: Session, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while remains(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert remains(session) == []


@pytest.mark.parametrize(("mode", "exit_code"), [("return", 0), ("raise", 1)])
def test_nothing_is_left_when_the_driver_returns_or_raises(short_tmp: Path, mode: str, exit_code: int) -> None:
    driver, session, _ = start_driver(short_tmp, mode)
    assert driver.wait(timeout=60) == exit_code
    assert remains(session) == []


def test_its_ray_refuses_others_and_nothing_is_left_when_the_driver_is_killed(short_tmp: Path) -> None:
    driver, session, address = start_driver(short_tmp, "wait")
    stranger = subprocess.run(
        [sys.executable, "-c", CONNECT, *address.split(":")], capture_output=True, text=True, timeout=120
    )
    assert "refused this process: its token" in stranger.stdout, stranger.stderr
    assert remains(session)
    driver.kill()
    driver.wait()
    wait_until_gone(session)


def test_the_next_start_sweeps_what_a_killed_reaper_left(short_tmp: Path) -> None:
    driver, session, _ = start_driver(short_tmp, "wait")
    reaper = [
        int(p.name)
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and session.token in _command_line(p) and "session.py" in _command_line(p)
    ]
    assert len(reaper) == 1
    os.kill(reaper[0], signal.SIGKILL)
    driver.kill()
    driver.wait()
    assert session.directory.exists()
    following = open_session(str(short_tmp))
    try:
        wait_until_gone(session)
        assert following.directory.exists()
    finally:
        clean(following)


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_live_session_is_not_swept(short_tmp: Path) -> None:
    first, second = open_session(str(short_tmp)), open_session(str(short_tmp))
    try:
        assert first.directory.exists()
        assert first.token != second.token
    finally:
        clean(first)
        clean(second)


def test_a_long_directory_is_refused_with_its_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cluster.ray_temp_root=.*bytes; Ray's sockets allow 43"):
        open_session(str(tmp_path / ("d" * 40)))
