"""Runs a function on several real ranks, one process each, and brings back what each returned."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(target: str, world_size: int, timeout_s: float = 240.0, **kwargs: Any) -> list[Any]:
    """Calls `module:function(**kwargs)` in `world_size` processes with torchrun's environment (gloo is the function's
    to initialise) and returns the results in rank order. A failing or late rank ends all of them and raises with the
    tail of every rank's output."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder, "request.pkl")
        request.write_bytes(pickle.dumps((target, kwargs)))
        processes = []
        for rank in range(world_size):
            env = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            }  # fmt: skip
            with Path(folder, f"log-{rank}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.distributed.ranks", folder],
                        env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip
        try:
            codes = _wait(processes, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if any(codes):
            tails = [Path(folder, f"log-{r}").read_text(errors="replace")[-4000:] for r in range(world_size)]
            report = "\n".join(f"--- rank {r}, exit {codes[r]}\n{tails[r]}" for r in range(world_size))
            raise RuntimeError(f"{target} failed on {world_size} ranks\n{report}")
        return [pickle.loads(Path(folder, f"result-{r}").read_bytes()) for r in range(world_size)]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """Exit codes; as soon as one rank fails the others are not waited for (-1)."""
    import time

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(code for code in codes):
            break
        time.sleep(0.05)
    return [-1 if process.poll() is None else process.returncode for process in processes]


def main() -> None:
    folder = Path(sys.argv[1])
    target, kwargs = pickle.loads((folder / "request.pkl").read_bytes())
    module, function = target.split(":")
    result = getattr(importlib.import_module(module), function)(**kwargs)
    (folder / f"result-{os.environ['RANK']}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
