"""What a process may use: recorded trees of /proc and /sys, and a real cgroup."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from rlhpc.cluster.limits import free_memory, free_tasks, limits, oom_kills

GIB = 1024**3
MEMINFO = "MemTotal:       65536000 kB\nMemFree:        1000 kB\nMemAvailable:   41943040 kB\n"  # 40 GiB
V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "33 32 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:15 - cgroup cgroup rw,cpu,cpuacct\n"
    "36 32 0:32 / /sys/fs/cgroup/memory rw,nosuid shared:18 - cgroup cgroup rw,memory\n"
)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "dev/shm").mkdir(parents=True)
    return root


def test_version_2_takes_the_least_of_all_levels(tmp_path: Path) -> None:
    """As Slurm 23 lays them out: the memory limit stands on the job, the task has none."""
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_42"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n",
            "proc/self/mountinfo": V2_MOUNT,
            f"{job}/memory.max": f"{8 * GIB}\n",
            f"{job}/step_0/memory.max": "max\n",
            f"{job}/step_0/user/task_0/memory.max": "max\n",
            f"{job}/step_0/user/task_0/memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n",
            f"{job}/step_0/cpu.max": "50000 100000\n",
            f"{job}/cpu.max": "max 100000\n",
        },
    )
    found = limits({}, root)
    assert found.memory_bytes == 8 * GIB
    assert found.cpus == 0.5
    assert found.shm_bytes <= 8 * GIB
    assert oom_kills(root) == 2


def test_free_memory_counts_what_others_have_taken(tmp_path: Path) -> None:
    """The machine has 40 GiB; the job may have 16 and has 9, of which 2 are of files; its step has no limit."""
    job = "sys/fs/cgroup/job_42"
    files = {
        "proc/self/cgroup": "0::/job_42/step_0\n",
        "proc/self/mountinfo": V2_MOUNT,
        f"{job}/memory.max": f"{16 * GIB}\n",
        f"{job}/memory.current": f"{9 * GIB}\n",
        f"{job}/memory.stat": f"anon {7 * GIB}\nfile {3 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
        f"{job}/step_0/memory.max": "max\n",
        f"{job}/step_0/memory.current": f"{9 * GIB}\n",
    }
    assert free_memory(tree(tmp_path / "v2", files)) == 9 * GIB
    assert free_memory(tree(tmp_path / "none", {})) == 40 * GIB
    memory = "sys/fs/cgroup/memory/job_7"
    files = {
        "proc/self/cgroup": "5:memory:/job_7\n",
        "proc/self/mountinfo": V1_MOUNTS,
        f"{memory}/memory.limit_in_bytes": f"{3 * GIB}\n",
        f"{memory}/memory.usage_in_bytes": f"{4 * GIB}\n",
        f"{memory}/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}\ntotal_active_file {GIB}\n",
    }
    assert free_memory(tree(tmp_path / "v1", files)) == GIB // 2


def test_version_1_reads_each_controllers_own_hierarchy(tmp_path: Path) -> None:
    cpu, memory = "sys/fs/cgroup/cpu,cpuacct/slurm/uid_1", "sys/fs/cgroup/memory/slurm/uid_1/job_7"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/slurm/uid_1/job_7/step_0\n4:cpu,cpuacct:/slurm/uid_1\n0::/\n",
            "proc/self/mountinfo": V1_MOUNTS,
            f"{memory}/memory.limit_in_bytes": f"{3 * GIB}\n",
            f"{memory}/step_0/memory.limit_in_bytes": "9223372036854771712\n",
            f"{memory}/step_0/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
            f"{cpu}/cpu.cfs_quota_us": "150000\n",
            f"{cpu}/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    found = limits({}, root)
    assert found.memory_bytes == 3 * GIB
    assert found.cpus == min(1.5, len(os.sched_getaffinity(0)))
    assert oom_kills(root) == 5


def test_a_container_sees_its_part_of_the_hierarchy_as_the_whole(tmp_path: Path) -> None:
    """The mount shows /docker/abc at its top, and the process's path repeats that."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc/inner\n",
            "proc/self/mountinfo": "36 32 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": f"{5 * GIB}\n",
        },
    )
    assert limits({}, root).memory_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("environ", "gib"),
    [
        ({}, 62.5),  # the machine's 65536000 kB
        ({"SLURM_MEM_PER_NODE": "4096"}, 4),
        ({"SLURM_MEM_PER_NODE": "0"}, 62.5),  # all of the node
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "6"}, 3),
    ],
)
def test_slurm_bounds_memory_even_where_no_cgroup_does(tmp_path: Path, environ: dict[str, str], gib: float) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT})
    assert limits(environ, root).memory_bytes == gib * GIB


def test_slurms_cpus_and_the_affinity_bound_the_cpus(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT})
    assert limits({"SLURM_CPUS_PER_TASK": "1", "SLURM_CPUS_ON_NODE": "64"}, root).cpus == 1
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from rlhpc.cluster.limits import limits; print(limits({}).cpus)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1.0\n"


@pytest.mark.parametrize(("limit", "left"), [("max\n", 62000 - 700), ("512\n", 512 - 40)])
def test_a_control_group_bounds_the_processes(tmp_path: Path, limit: str, left: int) -> None:
    files = {
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": V2_MOUNT,
        "proc/loadavg": "0.0 0.1 0.2 2/700 4711\n",
        "proc/sys/kernel/threads-max": "62000\n",
        "sys/fs/cgroup/job/pids.max": limit,
        "sys/fs/cgroup/job/pids.current": "40\n",
    }
    assert free_tasks(tree(tmp_path, files)) == left


def test_the_users_limit_bounds_the_processes() -> None:
    code = (
        "import os; from rlhpc.cluster.limits import free_tasks; os.getuid() or os.setuid(65534); print(free_tasks())"
    )
    command = ["bash", "-c", 'ulimit -u 300; exec "$0" -c "$1"', sys.executable, code]  # which doesn't bind root
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) <= 300


def test_a_real_cgroup_binds_and_tells_of_its_dead(tmp_path: Path) -> None:
    """A process in a cgroup of 64 MiB sees that limit, and that the kernel ended a child that took more."""
    version_1 = Path("/sys/fs/cgroup/memory")
    top = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    if not os.access(top, os.W_OK):
        pytest.skip(f"{top} can't be written: needs root with cgroups; run the tests as root to cover this")
    group = top / f"rlhpc-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    (group / "inner").mkdir()
    try:
        (group / ("memory.limit_in_bytes" if version_1.is_dir() else "memory.max")).write_text(str(64 * 1024**2))
        code = (
            f"import os, subprocess, sys; open('{group}/inner/cgroup.procs', 'w').write(str(os.getpid()))\n"
            "from rlhpc.cluster.limits import limits, oom_kills\n"
            "print(limits({}).memory_bytes, oom_kills())\n"
            "child = subprocess.run([sys.executable, '-c', 'x = bytearray(200 << 20)'])\n"
            "print(child.returncode, oom_kills())\n"
        )
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert shown.split() == [str(64 * 1024**2), "0", "-9", "1"]
    finally:
        (group / "inner").rmdir()
        group.rmdir()
