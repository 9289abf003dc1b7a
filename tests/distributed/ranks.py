"""Runs a function on several real ranks, one process each, and brings back what each returned."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from contextlib import closing, suppress
from functools import cache
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rlhpc.cluster.ports import claim_block

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(
    target: str, world_size: int, timeout_s: float = 240.0, *, fresh: bool = False, **kwargs: Any
) -> list[Any]:
    """Calls `module:function(**kwargs)` in `world_size` processes with torchrun's environment (gloo is the function's
    to initialise) and returns the results in rank order. A failing or late rank ends all of them and raises with the
    tail of every rank's output. `fresh` ranks have imported nothing yet."""
    with tempfile.TemporaryDirectory() as folder, closing(claim_block("tests", os.getpid())) as ports:
        processes = []
        for rank in range(world_size):
            env = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports["master"]),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            }  # fmt: skip
            process = _context(fresh).Process(target=_run, args=(folder, dict(env), target, kwargs))
            process.start()
            processes.append(process)
        try:
            codes = _wait(processes, timeout_s)
        finally:
            for process in processes:
                if process.exitcode is None:
                    with suppress(ProcessLookupError):  # it may not have come to lead its session yet
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                process.join()
        if any(codes):
            tails = [Path(folder, f"log-{r}").read_text(errors="replace")[-4000:] for r in range(world_size)]
            report = "\n".join(f"--- rank {r}, exit {codes[r]}\n{tails[r]}" for r in range(world_size))
            raise RuntimeError(f"{target} failed on {world_size} ranks\n{report}")
        return [pickle.loads(Path(folder, f"result-{r}").read_bytes()) for r in range(world_size)]


@cache
def _context(fresh: bool) -> ForkServerContext | SpawnContext:
    """Ranks are forked from a process that has imported their libraries once: for each rank that takes 10 s of a core.
    CUDA, once a process has looked for it, can't be used after a fork."""
    import torch

    if fresh or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlhpc.backends.vllm.engine", "rlhpc.backends.megatron.trainer"])
    return context


def _wait(processes: list[BaseProcess], timeout_s: float) -> list[int]:
    """Exit codes; as soon as one rank fails the others are not waited for (-1)."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if all(code is not None for code in codes) or any(codes):
            break
        time.sleep(0.05)
    return [-1 if process.exitcode is None else process.exitcode for process in processes]


def _run(folder: str, env: dict[str, str], target: str, kwargs: dict[str, Any]) -> None:
    """One rank, in a session of its own, so that what it starts can be ended with it."""
    os.setsid()
    os.environ.update(env)
    os.chdir(ROOT)
    log = os.open(Path(folder, f"log-{env['RANK']}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    module, function = target.split(":")
    result = getattr(importlib.import_module(module), function)(**kwargs)
    Path(folder, f"result-{env['RANK']}").write_bytes(pickle.dumps(result))
