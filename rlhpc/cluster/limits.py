"""What this process may use of its node: CPUs, memory, /dev/shm and processes, as cgroups (v1 and v2), Slurm and the
machine say. Standard library only."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_MIB = 1024**2


@dataclass(frozen=True)
class Limits:
    """The smallest bound that anybody sets. `cpus` may be a fraction under a CPU quota; the rest is in bytes."""

    cpus: float
    memory_bytes: int
    shm_bytes: int  # free in /dev/shm, and never more than memory_bytes: its pages count as memory


def limits(environ: Mapping[str, str], root: Path = Path("/")) -> Limits:
    """The limits of the process whose /proc and /sys lie under `root`."""
    memory = min([_machine_memory(root, "MemTotal"), *_cgroup_memory(root), *_slurm_memory(environ)])
    cpus = [float(len(os.sched_getaffinity(0))), *_cgroup_cpus(root)]
    if count := environ.get("SLURM_CPUS_PER_TASK") or environ.get("SLURM_CPUS_ON_NODE"):
        cpus.append(float(count))
    stat = os.statvfs(root / "dev/shm")
    return Limits(min(cpus), memory, min(stat.f_bavail * stat.f_frsize, memory))


def oom_kills(root: Path = Path("/")) -> int:
    """Processes of this one's memory cgroup that the kernel has ended for want of memory."""
    for directory, version in _levels(root, "memory"):
        text = _text(directory / ("memory.events" if version == 2 else "memory.oom_control"))
        for line in text.splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that processes here may still take: of what the machine has left, and of each cgroup's limit. What the
    kernel keeps of files counts as free."""
    left = [_machine_memory(root, "MemAvailable")]
    for directory, version in _levels(root, "memory"):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_text(directory / name).strip() for name in names)
        if limit.isdigit() and used.isdigit():
            left.append(int(limit) - int(used) + _file_pages(directory, version))
    return max(0, min(left))


def free_tasks(root: Path = Path("/")) -> int:
    """Processes and threads that may still be started here: of the kernel's number, each cgroup's, and the user's
    (RLIMIT_NPROC, which doesn't bind root)."""
    _, _, _, tasks, _ = _text(root / "proc/loadavg").split()
    left = [int(_text(root / "proc/sys/kernel/threads-max")) - int(tasks.partition("/")[2])]
    for directory, _ in _levels(root, "pids"):
        limit, used = (_text(directory / name).strip() for name in ("pids.max", "pids.current"))
        if limit.isdigit() and used.isdigit():
            left.append(int(limit) - int(used))
    user_limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if user_limit != resource.RLIM_INFINITY and os.getuid():
        left.append(user_limit - _own_threads(root))
    return max(0, min(left))


def _own_threads(root: Path) -> int:
    """Of this user, over all processes that are visible."""
    uid = f"\nUid:\t{os.getuid()}\t"
    texts = (_text(entry / "status") for entry in (root / "proc").iterdir() if entry.name.isdigit())
    return sum(int(text.partition("\nThreads:\t")[2].partition("\n")[0]) for text in texts if uid in text)


def _file_pages(directory: Path, version: int) -> int:
    prefix = "" if version == 2 else "total_"  # those of the groups below too, as in the other numbers
    counts = dict(line.split() for line in _text(directory / "memory.stat").splitlines())
    return sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _machine_memory(root: Path, kind: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no line {kind}")


def _slurm_memory(environ: Mapping[str, str]) -> Iterator[int]:
    """Slurm counts in MiB; 0 stands for the whole node."""
    if per_node := int(environ.get("SLURM_MEM_PER_NODE", "0")):
        yield per_node * _MIB
    cpus = environ.get("SLURM_CPUS_ON_NODE")
    if cpus and (per_cpu := int(environ.get("SLURM_MEM_PER_CPU", "0"))):
        yield per_cpu * int(cpus) * _MIB


def _cgroup_memory(root: Path) -> Iterator[int]:
    for directory, version in _levels(root, "memory"):
        text = _text(directory / ("memory.max" if version == 2 else "memory.limit_in_bytes")).strip()
        if text.isdigit():  # v2 says "max" for none; v1 a number that no machine reaches
            yield int(text)


def _cgroup_cpus(root: Path) -> Iterator[float]:
    for directory, version in _levels(root, "cpu"):
        if version == 2:
            words = _text(directory / "cpu.max").split()
        else:
            words = [_text(directory / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():  # "max" or -1: no quota
            yield int(words[0]) / int(words[1])


def _levels(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The directories that bind this process for a controller, its own first and then its parents', with the version
    of the hierarchy. A limit anywhere above holds too: Slurm sets it on the job or the step."""
    paths: dict[str, str] = {}  # of each controller, "" for version 2
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        mount_root, mount_point = mount.split()[3:5]
        kind, _, options = source.split(" ", 2)
        if kind == "cgroup" and controller in options.split(","):
            key, version = controller, 1
        elif kind == "cgroup2":
            key, version = "", 2
        else:
            continue
        if (path := paths.get(key)) is None:
            continue
        top = root / mount_point.lstrip("/")
        # In a container the mount shows only a part of the hierarchy, whose root the path repeats.
        below = Path(path.removeprefix(mount_root) if mount_root != "/" else path).as_posix().strip("/")
        own = top / below if (top / below).is_dir() else top
        for directory in (own, *own.parents):
            yield directory, version
            if directory == top:
                break


def _text(path: Path) -> str:
    """A file's text, empty where there is none: not every level has every file."""
    try:
        return path.read_text()
    except OSError:
        return ""
