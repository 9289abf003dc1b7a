"""GPUs as the driver tells of them, and as torch sees them. Standard library only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhpc.config.schema import RunConfig
from rlhpc.doctor.finding import Finding, Level, judged
from rlhpc.doctor.machine import Wanted

HEALTH_CHECK = Path(__file__).resolve().parents[2] / "slurm/admin/health_check.sh"
LEVELS: dict[str, Level] = {"OK": "ok", "WARNING": "warning", "CRITICAL": "failed", "UNKNOWN": "warning"}
ELSEWHERE = "take another node (cluster.exclude=NODE), and tell the administrators"
FIXES = {  # by check of health_check.sh; its others are about whole nodes
    "gpu": ELSEWHERE,
    "ecc": ELSEWHERE,
    "remap": ELSEWHERE,
    "xid": f"dmesg shows it to root; {ELSEWHERE}",
    "throttle": "cooling and power of the node; a run is slower meanwhile",
    "nvlink": "nvidia-smi nvlink -s; peers talk over PCIe meanwhile, which is slower",
    "hca": "ibstat; NCCL takes another port or TCP meanwhile",
}
GIB = 2**30
BUSY_SHARE = 0.05  # of a GPU's memory, in use before a run is there
ASK_TIMEOUT_S = 8.0
COLUMNS = "index,name,driver_version,memory.total,memory.used,compute_mode,mig.mode.current"


def driver(wanted: int | None) -> Iterator[Finding]:
    """What nvidia-smi tells. `wanted`: GPUs that have to be here; None: there may be none."""
    if shutil.which("nvidia-smi") is None:
        fix = "on a node with GPUs put the driver's tools on the PATH; with trainer.device=cpu ranks run on CPUs"
        yield judged("driver", "no GPU: nvidia-smi is not installed", fix, failed=wanted is not None)
        return
    answer = _ask(f"--query-gpu={COLUMNS}", "--format=csv,noheader,nounits")
    rows = [cells for line in answer.splitlines() if len(cells := line.split(", ")) == len(COLUMNS.split(","))]
    if not rows:
        fix = "inside a job ask for GPUs (--gpus-per-node); else the driver must be loaded"
        yield Finding("driver", "failed", answer.strip() or "nvidia-smi shows no GPU", fix)
        return
    named = ", ".join(sorted({name for _, name, *_ in rows}))
    yield Finding("driver", "ok", f"{rows[0][2]}; {len(rows)} of {named}")
    yield from _memory(
        [
            (row[0], float(row[3]) / 1024, float(row[4]) / 1024)
            for row in rows
            if row[3][0].isdigit() and row[4][0].isdigit()
        ]
    )
    if closed := [row[0] for row in rows if row[5] == "Prohibited"]:
        yield Finding(
            "compute mode", "failed", f"Prohibited on GPU {', '.join(closed)}", "as root: nvidia-smi -c DEFAULT"
        )
    if sliced := [row[0] for row in rows if row[6] == "Enabled"]:
        found = f"on for GPU {', '.join(sliced)}; NCCL can't join two instances of one GPU"
        yield Finding("MIG", "warning", found, "use whole GPUs; an instance is enough for a run of one rank")


def health() -> Iterator[Finding]:
    """What slurm/admin/health_check.sh says of GPUs and fabric."""
    if shutil.which("nvidia-smi") is None:
        return
    command = ["bash", str(HEALTH_CHECK), "--gpus", str(_ask("-L").count("GPU ")), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
        found = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        yield Finding("health", "warning", f"{HEALTH_CHECK.name} gave no answer: {error}", f"run: bash {HEALTH_CHECK}")
        return
    for line in found:
        if (check := line["check"]) in FIXES:
            level = LEVELS[line["level"]]
            if check == "xid" and level == "warning":
                level = "ok"  # the kernel's log is not for users to see; administrators run the same as root
            yield Finding(check, level, line["text"], FIXES[check] if level != "ok" else "")


def as_torch_sees(wanted: int | None, seen: Mapping[str, Any]) -> Iterator[Finding]:
    """The same GPUs for a process of this environment; `seen` is what software.loads found."""
    if not seen and wanted:
        yield Finding("torch", "failed", "not looked at: torch didn't load in time, or not at all", "see torch above")
    if not seen or not (wanted or seen["devices"] or shutil.which("nvidia-smi")):
        return  # there is no GPU, and none has to be here
    devices, build = seen["devices"], seen["cuda_build"]
    if not build:
        fix = "pip install -r requirements/gpu.txt in an environment of Python 3.12"
        yield judged("torch", f"{seen['torch']} is built for CPUs", fix, failed=wanted is not None, warning=True)
        return
    if seen["error"] or len(devices) < (wanted or 1):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = seen["error"] or f"{len(devices)} GPUs" + ("" if wanted is None else f" instead of {wanted}")
        found += "" if hidden is None else f"; CUDA_VISIBLE_DEVICES={hidden}"
        yield Finding(
            "torch", "failed", found, f"a driver for CUDA {build}; inside a job ask for GPUs (--gpus-per-node)"
        )
        return
    known = {name.rpartition("_")[2].rstrip("af") for name in seen["architectures"]}
    foreign = [name for name, major, _ in devices if not any(number[:-1] == str(major) for number in known)]
    _, major, minor = devices[0]
    fix = f"this torch has no kernels for {', '.join(foreign)}; install one built for it"
    yield judged("torch", f"{len(devices)} GPUs, sm_{major}{minor}, NCCL {seen['nccl']}", fix, failed=bool(foreign))
    if len(devices) > 1:
        pairs = ", ".join(f"{i} and {j}" for i, j in seen["deaf"] if i < j)
        fix = "a virtual machine or the IOMMU keeps GPUs apart; NCCL copies through the host, slowly"
        found = f"no access between GPU {pairs}" if pairs else "all GPUs"
        yield judged("peer-to-peer", found, fix, warning=bool(pairs))


def fits(cfg: RunConfig, wanted: Wanted, smallest: int) -> Iterator[Finding]:
    """Whether a rank of the run finds room on a GPU of `smallest` bytes; 0: there is none. Trainer and engine take
    turns but for what isn't offloaded."""
    if not smallest:
        return
    share, total = cfg.actor_rollout_ref.rollout.gpu_memory_utilization, smallest / GIB
    fix = "spread it over more ranks: expert_model_parallel_size, tensor_model_parallel_size, more nodes"
    found = f"{wanted.trainer / GIB:.1f} of {total:.1f} GiB, then activations"
    yield judged("trainer", found, fix, failed=wanted.trainer > smallest)
    fix = "raise actor_rollout_ref.rollout.gpu_memory_utilization or its tensor_model_parallel_size"
    found = f"{wanted.engine / GIB:.1f} of its {share:.0%}, {share * total:.1f} GiB, then the KV cache"
    yield judged("engine", found, fix, failed=wanted.engine > share * smallest)
    fix = "lower gpu_memory_utilization, or more of actor.megatron.{param,optimizer,grad}_offload=true"
    found = f"{wanted.staying / GIB:.1f} of the {(1 - share) * total:.1f} GiB that the engine leaves"
    yield judged("beside the engine", found, fix, failed=wanted.staying > (1 - share) * smallest)


def _memory(sizes: list[tuple[str, float, float]]) -> Iterator[Finding]:
    """Of (index, total, used) in GiB each."""
    if not sizes:
        return
    _, total, used = min(sizes, key=lambda size: size[1] - size[2])
    taken = [f"GPU {index} {busy:.1f} GiB" for index, size, busy in sizes if busy > BUSY_SHARE * size]
    found = (
        f"{total - used:.1f} of {total:.1f} GiB free on the fullest{'; in use: ' if taken else ''}{', '.join(taken)}"
    )
    fix = "nvidia-smi shows whose it is; end it, or lower actor_rollout_ref.rollout.gpu_memory_utilization"
    yield judged("memory", found, fix, warning=bool(taken))


def _ask(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi does not answer in {ASK_TIMEOUT_S:g} s; the driver hangs"
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr
