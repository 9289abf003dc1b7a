"""requirements/cpu.txt and dev.txt install with --no-deps, so they must be complete, and be what the tests run on."""

import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
NEVER_LOADED = {"torchvision", "torchaudio", "torchcodec"}  # asked for by vLLM's CPU build


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for requirement in requirements:
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], f"{requirement} is not pinned"
    return {canonicalize_name(r.name): next(iter(r.specifier)).version for r in requirements}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the CPU set is for Python 3.11")
def test_the_cpu_set_is_complete_and_installed() -> None:
    pinned = pins("cpu.txt") | pins("dev.txt")
    todo = [(name, "") for name in pinned]
    seen = set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        installed = distribution(name)
        assert installed.version.split("+")[0] == pinned[name], f"{name} {installed.version} is installed"
        for requirement in map(Requirement, installed.requires or []):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            needed = canonicalize_name(requirement.name)
            if needed in NEVER_LOADED:
                continue
            assert needed in pinned, f"{name} needs {requirement}: add it to requirements/cpu.txt"
            assert requirement.specifier.contains(distribution(needed).version, prereleases=True), (name, requirement)
            todo += [(needed, extra) for extra in ("", *requirement.extras)]


@pytest.mark.parametrize("name", ["cpu.txt", "dev.txt", "gpu.txt"])
def test_every_line_is_pinned_once(name: str) -> None:
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if not line.startswith("#")]
    assert len(pins(name)) == len(lines)
