"""Where the benches run and keep their results."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts/bench/results"


def hardware() -> str:
    """The number of cores and the processor's name."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", text)
    return f"{os.cpu_count()} cores, {model[1] if model else platform.processor()}"


def versions(*packages: str, optional: Sequence[str] = ()) -> dict[str, str]:
    """Of packages, of those optional ones that are installed, and of Python."""
    found = {package: version(package) for package in packages}
    for package in optional:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {"python": platform.python_version()}


def place(gpu: str | None = None, num_gpus: int = 1) -> str:
    """How results name the machine: "cpu-2cores", "h200", "h200-x2"."""
    if gpu is None:
        return f"cpu-{os.cpu_count()}cores"
    return gpu.split()[-1].lower() + (f"-x{num_gpus}" if num_gpus > 1 else "")
