"""Seconds spent in the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class PhaseTimer:
    """Collects `timing_s/<phase>`; a phase entered again adds up. An exception's time counts too. `entered` hears of
    each phase that begins."""

    def __init__(self, entered: Callable[[str], None] | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._entered = entered

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._entered:
            self._entered(name)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}


def phase_seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """Of a step's metrics, the driver's seconds by phase, which add up to the step's: neither the step itself nor the
    ranks' seconds, which are parts of them."""
    names = [name for name in record if name.startswith("timing_s/") and not name.startswith("timing_s/ranks/")]
    return {name.removeprefix("timing_s/"): record[name] for name in names if name != "timing_s/step"}
