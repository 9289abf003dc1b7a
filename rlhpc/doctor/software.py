"""Python, the pinned packages, and whether what is compiled loads here. Standard library only."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhpc.doctor.finding import Finding, judged

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = {"cpu": "3.11", "gpu": "3.12"}  # for which requirements/*.txt were resolved
SETUPS = {"cpu": "bash scripts/setup.sh", "gpu": "pip install -r requirements/gpu.txt"}
LOAD_TIMEOUT_S = 9.0
MAX_NAMED = 6
# In a process of its own: a library that doesn't fit the machine may end it, a driver that hangs would hang this one.
LOAD = """
import ctypes, json, sys
import torch
seen = dict(torch=torch.__version__, cuda_build=torch.version.cuda, devices=[], error="", nccl="", deaf=[])
if torch.version.cuda:
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        seen["devices"] = [(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)) for i in range(count)]
        seen["memory"] = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
        seen["deaf"] = [(i, j) for i in range(count) for j in range(count)
                        if i != j and not torch.cuda.can_device_access_peer(i, j)]
        seen["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        seen["architectures"] = torch.cuda.get_arch_list()
    except (RuntimeError, AssertionError) as error:
        seen["error"] = str(error).splitlines()[0]
print(json.dumps(seen), flush=True)
for library in sys.argv[1:]:
    ctypes.CDLL(library)
"""


def software(root: Path = ROOT) -> Iterator[Finding]:
    """This Python and its packages, compared with requirements/ under `root`."""
    installed = {_canonical(dist.metadata["Name"] or ""): dist.version for dist in reversed([*distributions()])}
    kind = "gpu" if "vllm" in installed else "cpu"
    yield _python(kind)
    yield _packages(kind, installed, root)
    yield from _compiler(kind)


def loads(seen: dict[str, Any]) -> Iterator[Finding]:
    """Whether torch and vLLM's kernels load. Fills `seen` with what torch sees: torch, cuda_build, devices (name,
    major, minor), error, nccl, deaf (pairs of GPUs without access to each other), memory (bytes), architectures."""
    libraries = _kernels()
    command = [sys.executable, "-c", LOAD, *map(str, libraries)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        fix = "try again, the first time it is read from the disk; else look at the disk and the driver (nvidia-smi)"
        yield Finding("torch", "warning", f"not loaded after {LOAD_TIMEOUT_S:g} s", fix)
        return
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    if not done.stdout.startswith("{"):
        yield Finding("torch", "failed", f"does not load: {said[-1]}", "bash scripts/setup.sh")
        return
    seen.update(json.loads(done.stdout))
    yield Finding("torch", "ok", f"{seen['torch']}, for {'CUDA' if seen['cuda_build'] else 'CPUs'}")
    for library in libraries:
        lacking = re.search(r"(\S+\.so\S*): cannot open shared object", done.stderr)
        fix = f"install what has {lacking[1]} (libnuma1, say)" if lacking else "bash scripts/setup.sh"
        found = f"{library.name} does not load: {said[-1]}" if done.returncode else f"{library.name} loads"
        yield judged("vLLM's kernels", found, fix, failed=done.returncode != 0)


def _python(kind: str) -> Finding:
    version = platform.python_version()
    here = version.rpartition(".")[0]
    venv = sys.prefix if sys.prefix != sys.base_prefix else f"{sys.prefix}, no virtual environment"
    fix = f"use {PYTHONS[kind]}, for which requirements/{kind}.txt was resolved"
    failed, other = here not in PYTHONS.values(), here != PYTHONS[kind]
    return judged("Python", f"{version} in {venv}", fix, failed=failed, warning=other)


def _packages(kind: str, installed: Mapping[str, str], root: Path) -> Finding:
    pinned, project = root / f"requirements/{kind}.txt", root / "pyproject.toml"
    if not (pinned.is_file() and project.is_file()):
        fix = "install rlhpc from its repository: pip install -e ."
        return Finding("packages", "warning", f"{pinned} is missing, nothing to compare with", fix)
    lines = re.findall(r"^([\w.-]+)==(\S+)$", pinned.read_text(), re.MULTILINE)
    pins = {_canonical(name): version for name, version in lines}
    table = tomllib.loads(project.read_text())["project"]
    asked = [*table["dependencies"], *table["optional-dependencies"][kind]]
    direct = {_canonical(re.split(r"[<>=]", line)[0]): "==" in line for line in asked}
    other = {name for name in pins if installed.get(name, "").partition("+")[0] != pins[name]}
    # What pyproject.toml pins is used beyond its documented interface: another version may be anything.
    fatal = {name for name in other if name in direct and (direct[name] or name not in installed)}
    told = [
        f"{name} {installed.get(name, 'missing')} instead of {pins[name]}"
        for name in sorted(other, key=lambda name: (name not in fatal, name not in direct, name))
    ]
    more = f" and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
    found = f"{len(other)} of {len(pins)} are not as in requirements/{kind}.txt: {', '.join(told[:MAX_NAMED])}{more}"
    found = found if other else f"{len(pins)} as in requirements/{kind}.txt"
    return judged("packages", found, SETUPS[kind], failed=bool(fatal), warning=bool(other))


def _compiler(kind: str) -> Iterator[Finding]:
    able = ("g++", "c++") if kind == "cpu" else ("gcc", "clang", "cc")  # for torch's kernels, for Triton's launchers
    compiler = next(filter(None, map(shutil.which, able)), None)
    fix = f"apt-get install {able[0]}, or have the site's module loaded: 'cluster.setup=[module load gcc]'"
    yield judged("compiler", compiler or f"no {able[0]}, without which no kernel is compiled", fix, failed=not compiler)
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if kind == "gpu" and not headers.is_file():
        fix = f"apt-get install python{PYTHONS[kind]}-dev, or use a Python that has its headers"
        yield Finding("headers", "failed", f"no {headers}, which Triton compiles with", fix)


def _kernels() -> list[Path]:
    """Of vLLM's builds for several instruction sets the one that every machine can load."""
    spec = find_spec("vllm")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for name in ("_C_AVX2.abi3.so", "_C.abi3.so"):
            if (library := Path(place, name)).is_file():
                return [library]
    return []


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
