"""One answer of a check. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """`found` is what there is; `fix` what to do about it, empty where all is well."""

    check: str
    level: Level
    found: str
    fix: str = ""


def judged(check: str, found: str, fix: str, *, failed: bool = False, warning: bool = False) -> Finding:
    """A finding with its fix where one is needed, else ok."""
    if not (failed or warning):
        return Finding(check, "ok", found)
    return Finding(check, "failed" if failed else "warning", found, fix)


def refusal(check: str, message: str, level: Level = "failed") -> Finding:
    """A message of another part of rlhpc: what is wrong, a semicolon, the fix."""
    found, _, fix = message.partition("; ")
    return Finding(check, level, found, fix)
