"""What a rank tells of its phases: seconds that add up, memory at their ends, and nothing twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlhpc.train.usage import Usage, peaks


def resident_gib() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 2**20


def test_phases_add_up_and_are_told_once() -> None:
    usage = Usage()
    for _ in range(2):
        with usage.phase("gen"):
            time.sleep(0.02)
    with usage.phase("update_weights"):
        for _ in range(2):
            with usage.part("sync"):
                time.sleep(0.01)
    with pytest.raises(ValueError, match="in vain"), usage.phase("ref"):
        raise ValueError("in vain")
    told = usage.take()
    assert told["timing_s/ranks/gen"] >= 0.04
    assert 0.02 <= told["timing_s/ranks/update_weights/sync"] <= told["timing_s/ranks/update_weights"]
    assert told["timing_s/ranks/ref"] >= 0  # an exception's time counts too
    assert {name for name in told if name.startswith("timing_s/")} == {
        f"timing_s/ranks/{name}" for name in ("gen", "update_weights", "update_weights/sync", "ref")
    }
    for phase in ("gen", "update_weights", "ref"):
        assert told[f"perf/host_memory_gb/{phase}"] == pytest.approx(resident_gib(), rel=0.2)
    assert usage.take().keys() == peaks().keys()


def test_what_runs_in_no_phase_is_not_told() -> None:
    usage = Usage()
    with usage.phase("gen"):
        pass
    usage.take()
    with usage.phase(""), usage.part("offload"):  # as where a stop saves before it leaves
        pass
    assert usage.take().keys() == peaks().keys()
