"""All checks side by side under one deadline: a file system or a driver that hangs costs its own findings alone."""

from __future__ import annotations

import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.doctor import disk, gpu, software
from rlhpc.doctor.finding import Finding
from rlhpc.doctor.machine import Wanted, machine, room
from rlhpc.doctor.network import network
from rlhpc.doctor.scheduler import scheduler
from rlhpc.errors import RlhpcError

DEADLINE_S = 9.5
HANGS = (
    "something under it hangs: look at mounts (df), the driver (nvidia-smi) and Slurm (scontrol ping); on a slow disk "
    f"{disk.PREFIX}* may be left in the run directory"
)

Job = tuple[str, Callable[[], Iterable[Finding]]]  # a heading and what finds something for it


@dataclass(frozen=True)
class Part:
    """A heading and its findings, in order."""

    name: str
    findings: tuple[Finding, ...]


def examine(cfg: RunConfig | None, *, slurm: bool, gpus: bool) -> list[Part]:
    """Looks at everything, in some ten seconds at most; `cfg` names a run, `slurm` and `gpus` what has to be here."""
    named = cfg is not None
    cfg = cfg or RunConfig()
    here, seen, wanted = named and cfg.launch.mode != "slurm", dict[str, Any](), list[Wanted]()
    number = cfg.trainer.n_gpus_per_node if here and cfg.trainer.device == "cuda" else 1 if gpus else None
    ranks = cfg.trainer.n_gpus_per_node if here else 1
    jobs: list[Job] = []
    if named:
        from rlhpc.doctor.needs import needs

        jobs.append(("run", lambda: needs(cfg, wanted)))
    directory, required = Path(cfg.run_dir if named else "outputs"), slurm or cfg.launch.mode != "local"
    jobs += [
        ("software", software.software),
        ("software", lambda: software.loads(seen)),
        ("GPU", lambda: gpu.driver(number)),
        ("GPU", gpu.health),
        ("machine", lambda: machine(cfg, ranks)),
        ("network", lambda: network(cfg.cluster.network_interface)),
        ("files", lambda: disk.run_directory(directory)),
        ("files", lambda: disk.temp_root(Path(cfg.cluster.ray_temp_root))),
    ]
    if required or shutil.which("scontrol"):
        jobs.append(("Slurm", lambda: scheduler(wanted=required)))
    findings = side_by_side(jobs)
    findings["GPU"] += gpu.as_torch_sees(number, seen)
    if here and wanted:
        findings["machine"].append(room(wanted[0]))
        findings["GPU"] += gpu.fits(cfg, wanted[0], min(seen.get("memory") or [0]))
    return [Part(name, tuple(found)) for name, found in findings.items()]


def side_by_side(jobs: Sequence[Job], deadline_s: float = DEADLINE_S) -> dict[str, list[Finding]]:
    """The findings of all jobs under their headings, those of one that hangs as far as it came."""
    found: list[list[Finding]] = [[] for _ in jobs]
    failed: dict[threading.Thread | None, str] = {}

    def carry_out(index: int) -> None:
        name, job = jobs[index]
        try:
            for finding in job():
                found[index].append(finding)
        except (OSError, RlhpcError) as error:
            found[index].append(Finding(name, "failed", f"not all could be looked at: {error}"))

    def keep(args: threading.ExceptHookArgs) -> None:
        frame = traceback.extract_tb(args.exc_traceback)[-1]
        failed[args.thread] = f"{args.exc_type.__name__}: {args.exc_value} in {frame.filename}:{frame.lineno}"

    deadline, hook = time.monotonic() + deadline_s, threading.excepthook
    threading.excepthook = keep
    threads = [threading.Thread(target=carry_out, args=(index,), daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    threading.excepthook = hook
    headed: dict[str, list[Finding]] = {}
    for (name, _), thread, own in zip(jobs, threads, found, strict=True):
        headed.setdefault(name, []).extend(own)
        if thread in failed:
            headed[name].append(Finding(name, "failed", f"an error of rlhpc's own: {failed[thread]}", "report it"))
        elif thread.is_alive():
            headed[name].append(Finding(name, "failed", f"no further answer in {deadline_s:g} s", HANGS))
    return headed
