"""Shared-memory segments of one engine. Standard library only: a reaper process cleans up after a kill."""

from __future__ import annotations

import re
from pathlib import Path

SHM = Path("/dev/shm")


def cleanup_shm(ident: str) -> list[str]:
    """Removes what engines with this `ident` left in /dev/shm and returns the names. Safe to repeat.

    vLLM's CPU communicator (0.32, distributed/device_communicators/cpu_communicator.py) creates
    `<ident>-<group>-[<ranks>]-cpushm_<rank>` exclusively: one that a crash left behind stops the next start.
    A running engine has attached its segments and needs their names no more.
    """
    if not re.fullmatch(r"\w+", ident):
        raise ValueError(f"ident={ident!r} can't begin a segment's name; use letters, digits and '_'")
    removed = []
    for segment in SHM.glob(f"{ident}-*"):
        segment.unlink(missing_ok=True)
        removed.append(segment.name)
    return sorted(removed)
