"""What this machine lets a run have: CPUs, memory, processes, files, and what dead runs left of them. Standard library
only."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhpc.cluster import session
from rlhpc.cluster.limits import free_memory, free_tasks, limits, oom_kills
from rlhpc.cluster.ray_node import object_store_bytes
from rlhpc.cluster.submission import spec_of
from rlhpc.config.schema import RunConfig
from rlhpc.doctor.finding import Finding, judged
from rlhpc.errors import ConfigError

GIB = 2**30
FEW_FILES, ENOUGH_FILES = 1024, 8192  # Ray raises the soft limit to the hard one
TASKS_BESIDES, TASKS_PER_RANK = 300, 150  # Ray's daemons and the driver; a rank with torch, Ray and an engine
YOUNG_S = 60.0  # shared memory that is being made need not be open yet


@dataclass(frozen=True)
class Wanted:
    """Bytes that a run's model takes: of a node's memory, without processes and libraries; of a GPU by the trainer,
    without activations, what of that stays while the engine generates, and by the engine, without the KV cache."""

    host: int
    trainer: int
    staying: int
    engine: int


def machine(cfg: RunConfig, ranks: int) -> Iterator[Finding]:
    """`ranks` that a run would have here."""
    yield from _sizes(cfg, ranks)
    yield from _process_limits(ranks)
    yield from _left_over(cfg.cluster.ray_temp_root)


def room(wanted: Wanted) -> Finding:
    """Whether what the run keeps finds room in this machine's memory."""
    free = free_memory()
    found = f"{wanted.host / GIB:.2g} GiB, beside its processes and libraries, of {free / GIB:.1f} free"
    fix = "give the job more (cluster.memory_gib_per_node), or let fewer ranks keep less: rlhpc plan shows what"
    return judged("the run keeps", found, fix, failed=free < wanted.host)


def _sizes(cfg: RunConfig, ranks: int) -> Iterator[Finding]:
    bound, free, kills = limits(os.environ), free_memory(), oom_kills()
    few = ranks * cfg.cluster.cpus_per_rank > bound.cpus
    share = f"; {ranks} ranks of cluster.cpus_per_rank={cfg.cluster.cpus_per_rank} will share them" if few else ""
    fix = "ask for more CPUs, or for fewer ranks (trainer.n_gpus_per_node)"
    yield judged("CPUs", f"{bound.cpus:g} of {os.cpu_count()}{share}", fix, warning=few)
    found = f"{free / GIB:.1f} GiB free of {bound.memory_bytes / GIB:.1f} that a process may have"
    found += f"; the kernel has ended {kills} processes of this control group for want of it" if kills else ""
    yield Finding("memory", "ok", found)
    found = f"{bound.shm_bytes / GIB:.2g} GiB free"
    try:
        found += f"; Ray takes {object_store_bytes(spec_of(cfg), bound) / GIB:.2g}"
        yield Finding("/dev/shm", "ok", found)
    except ConfigError:
        fix = "remove what dead jobs left there; in a container: docker run --shm-size=16g"
        yield Finding("/dev/shm", "failed", f"{found}, too little for Ray's object store", fix)
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        fix = "CUDA reserves far more than it uses; as root: sysctl vm.overcommit_memory=0"
        yield Finding("overcommit", "warning", "vm.overcommit_memory=2: what is reserved counts as used", fix)


def _process_limits(ranks: int) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"ulimit -n {_limit(soft)}, may be raised to {_limit(hard)}"
    fix = "have the hard limit raised: /etc/security/limits.conf, for jobs LimitNOFILE of slurmd's unit"
    bounded = hard != resource.RLIM_INFINITY
    yield judged("open files", found, fix, failed=bounded and hard < FEW_FILES, warning=bounded and hard < ENOUGH_FILES)
    left, need = free_tasks(), TASKS_BESIDES + TASKS_PER_RANK * ranks
    found = f"{left} more may be started; a run takes about {need}, threads included"
    fix = "raise ulimit -u or the control group's pids.max, or end what is left over: ps -u $USER"
    yield judged("processes", found, fix, failed=left < need // 2, warning=left < need)
    kinds = {
        "address space (ulimit -v)": resource.RLIMIT_AS,
        "size of a file (-f)": resource.RLIMIT_FSIZE,
        "CPU seconds (-t)": resource.RLIMIT_CPU,
    }
    bounds = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    limited = [f"{name} {limit}" for name, limit in bounds.items() if limit != resource.RLIM_INFINITY]
    if limited:
        fix = "set them to unlimited; login nodes often have such limits, jobs don't"
        yield Finding("other limits", "failed", ", ".join(limited), fix)
    locked, fabric = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1], Path("/sys/class/infiniband")
    if fabric.is_dir() and any(fabric.iterdir()):
        fix = "NCCL can't register buffers with InfiniBand unless it is unlimited: LimitMEMLOCK of slurmd's unit"
        yield judged("locked memory", f"ulimit -l {_limit(locked)}", fix, failed=locked != resource.RLIM_INFINITY)


def _left_over(temp_root: str) -> Iterator[Finding]:
    dead, (segments, num_bytes) = session.left_over(temp_root), unused_segments()
    if dead:
        places = ", ".join(str(one.directory) for one in dead[:3]) + ", ..." * (len(dead) > 3)
        elsewhere = "" if temp_root == session.DEFAULT_TEMP_ROOT else f" --temp-root {temp_root}"
        fix = f"the next run here removes it, or: python -m rlhpc.cluster.session sweep{elsewhere}"
        yield Finding("dead runs", "warning", f"{len(dead)} left something: {places}", fix)
    if segments:
        found = f"{num_bytes / GIB:.2g} GiB in {len(segments)} files that no process has open which is visible here"
        named = " ".join(map(str, segments[:3])) + " ..." * (len(segments) > 3)
        yield Finding("shared memory", "warning", found, f"unless another container shares /dev/shm: rm {named}")
    if not dead and not segments:
        yield Finding("left over", "ok", "nothing of dead runs")


def unused_segments() -> tuple[list[Path], int]:
    """This user's files in /dev/shm that none of its processes has mapped or open, largest first, and their bytes."""
    used: set[str] = set()
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and process.stat().st_uid == os.getuid():
                maps = (process / "maps").read_text().splitlines()
                used.update(line[line.index("/dev/shm/") :] for line in maps if "/dev/shm/" in line)
                used.update(os.readlink(link) for link in (process / "fd").iterdir())
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # gone meanwhile, or shielded
    found = []
    for path in Path("/dev/shm").iterdir():
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue
        if (
            time.time() - stat.st_mtime > YOUNG_S
            and stat.st_uid == os.getuid()
            and path.is_file()
            and str(path) not in used
        ):
            found.append((stat.st_blocks * 512, path))
    return [path for _, path in sorted(found, reverse=True)], sum(size for size, _ in found)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
