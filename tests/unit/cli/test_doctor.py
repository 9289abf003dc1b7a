"""rlhpc doctor on a machine where much is really wrong: limits, packages, disks, leftovers, what is missing."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.cluster.session import open_session
from rlhpc.config.schema import RunConfig
from rlhpc.doctor.disk import run_directory, temp_root
from rlhpc.doctor.examine import side_by_side
from rlhpc.doctor.finding import Finding
from rlhpc.doctor.gpu import fits
from rlhpc.doctor.machine import Wanted, unused_segments

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB that runs no programs."""
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root; CI has it")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,noexec", "rlhpc-test", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def doctor(*arguments: str, shell: str = "", **variables: str) -> tuple[int, dict[tuple[str, str], Finding]]:
    """Exit code, and findings by part and check, of the command after `shell`, in an environment of `variables`."""
    command = [sys.executable, "-m", "rlhpc.cli.main", "doctor", "--json", *arguments]
    environ = {"PYTHONPATH": str(ROOT), "HOME": "/nonexistent", **variables}
    done = subprocess.run(
        ["/bin/bash", "-c", f'{shell}exec "$@"', "-", *command], env=environ, cwd="/", capture_output=True, text=True
    )
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    rows = json.loads(done.stdout)
    return done.returncode, {(row.pop("part"), row["check"]): Finding(**row) for row in rows}


def test_what_is_wrong_is_named_with_its_fix(tmp_path: Path) -> None:
    old = tmp_path / "site"
    for name, version in (("ray", "1.0"), ("fsspec", "1.0")):
        (old / f"{name}-{version}.dist-info").mkdir(parents=True)
        (old / f"{name}-{version}.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
    temp = Path("/tmp", f"k{os.getpid()}")  # short: sockets
    if not (child := os.fork()):
        open_session(str(temp))
        os._exit(0)  # as a kill leaves it
    os.waitpid(child, 0)
    code, found = doctor(
        "--slurm", "--gpu", "experiment=tiny_arithmetic", f"cluster.ray_temp_root={temp}",
        "cluster.network_interface=ib9", "actor_rollout_ref.model.path=/nowhere", "run_dir=/proc/run",
        shell="ulimit -n 512; ulimit -t 3600; ", PATH="/nowhere", PYTHONPATH=f"{old}:{ROOT}",
        NCCL_SOCKET_IFNAME="=bond7",
    )  # fmt: skip
    subprocess.run([sys.executable, "-m", "rlhpc.cluster.session", "sweep", "--temp-root", temp], cwd=ROOT, check=True)
    temp.joinpath(f"rlhpc-{os.getuid()}").rmdir()
    temp.rmdir()
    assert code == 1
    failed = {where: one for where, one in found.items() if one.level == "failed"}
    assert failed.keys() >= {
        ("run", "configuration"), ("software", "packages"), ("software", "compiler"), ("GPU", "driver"),
        ("machine", "open files"), ("machine", "other limits"), ("network", "interface"),
        ("network", "NCCL_SOCKET_IFNAME"), ("files", "run directory"), ("Slurm", "Slurm"),
    }  # fmt: skip
    assert all(one.found and one.fix for one in failed.values())
    packages = failed["software", "packages"].found
    assert packages.index("ray 1.0 instead of 2.") < packages.index("fsspec 1.0 instead of"), (
        "what matters most is first"
    )
    assert failed["machine", "open files"].found == "ulimit -n 512, may be raised to 512"
    assert failed["machine", "other limits"].found == "CPU seconds (-t) 3600"
    assert "which has lo (127.0.0.1)" in failed["network", "interface"].found
    assert failed["Slurm", "Slurm"].found == "no sbatch, srun, scontrol, squeue, scancel"
    dead = found["machine", "dead runs"]
    assert dead.level == "warning" and str(temp) in dead.found and f"sweep --temp-root {temp}" in dead.fix
    assert found["software", "torch"].level != "failed"  # on a busy machine it may take too long to load


def test_a_full_disk_and_one_that_runs_nothing(mounted: Path) -> None:
    (failed,) = run_directory(mounted / "new/run")
    assert (failed.level, failed.check) == ("failed", "run directory")
    assert failed.found.startswith(f"{mounted} (tmpfs), 0.0 GiB free; a checkpoint can't be written: No space left")
    (failed,) = temp_root(mounted)
    assert failed.level == "failed" and "mounted noexec" in failed.found and "ray_temp_root=DIR" in failed.fix
    assert list(mounted.iterdir()) == []


def test_a_good_directory_is_left_as_it_was(tmp_path: Path) -> None:
    levels = {one.check: one.level for one in run_directory(tmp_path / "run")}
    assert levels == {"run directory": "ok", "file system": "ok", "times of files": "ok"}
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_is_left_over_when_nobody_has_it_open() -> None:
    kept, lost = (Path(f"/dev/shm/rlhpc-doctor-{name}-{os.getpid()}") for name in ("kept", "lost"))
    try:
        for path in (kept, lost):
            path.write_bytes(bytes(8192))
            os.utime(path, (time.time() - 100,) * 2)
        with kept.open("rb"):
            segments, num_bytes = unused_segments()
        assert lost in segments and kept not in segments and num_bytes >= 8192
    finally:
        kept.unlink()
        lost.unlink()


def test_what_hangs_costs_its_own_findings_alone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def hanging() -> Iterator[Finding]:
        yield Finding("first", "ok", "seen")
        pipe.read_text()  # nobody writes: as a dead file server

    def refused() -> Iterator[Finding]:
        yield Finding("other", "ok", Path("/proc/self/mem").read_text())

    def broken() -> list[Finding]:
        return [Finding("never", "ok", str(float("[N/A]")))]

    jobs = [("disk", hanging), ("rest", refused), ("rest", lambda: [Finding("last", "ok", "")]), ("own", broken)]
    found = side_by_side(jobs, 0.5)
    (own,) = found["own"]
    assert own.level == "failed" and "rlhpc's own: ValueError: could not convert" in own.found
    assert [(one.check, one.level) for one in found["disk"]] == [("first", "ok"), ("disk", "failed")]
    assert found["disk"][1].found == "no further answer in 0.5 s"
    assert [(one.check, one.level) for one in found["rest"]] == [("rest", "failed"), ("last", "ok")]
    pipe.write_text("")  # lets the thread go


def test_a_rank_has_to_fit_a_gpu() -> None:
    gib = 2**30
    cfg = RunConfig()  # the engine may fill half of the GPU
    wanted = Wanted(host=0, trainer=75 * gib, staying=0, engine=41 * gib)
    assert [one.level for one in fits(cfg, wanted, 141 * gib)] == ["ok", "ok", "ok"]
    trainer, engine, beside = fits(cfg, wanted, 80 * gib)
    assert (trainer.level, engine.level, beside.level) == ("ok", "failed", "ok")
    assert engine.found == "41.0 of its 50%, 40.0 GiB, then the KV cache"
    assert [one.level for one in fits(cfg, wanted, 40 * gib)] == ["failed", "failed", "ok"]
    _, _, beside = fits(cfg, Wanted(host=0, trainer=75 * gib, staying=75 * gib, engine=41 * gib), 141 * gib)
    assert (beside.level, beside.found) == ("failed", "75.0 of the 70.5 GiB that the engine leaves")
