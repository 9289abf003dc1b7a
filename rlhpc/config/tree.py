"""Nested mappings such as configurations, by their leaves: dotted keys and values. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MISSING = "???"  # OmegaConf's mark of a value that must be given
Change = tuple[str, Any, Any]  # dotted key, old value, new value


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is below `key`, which is "" for a whole tree."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from leaves(f"{key}.{name}" if key else str(name), below)
    else:
        yield key, value


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every leaf that differs, sorted by key; MISSING stands for one that a side doesn't have."""
    before, after = dict(leaves("", old)), dict(leaves("", new))
    pairs = ((key, before.get(key, MISSING), after.get(key, MISSING)) for key in sorted(before.keys() | after.keys()))
    return [(key, a, b) for key, a, b in pairs if a != b or type(a) is not type(b)]


def shown(changes: Iterable[Change]) -> Iterator[str]:
    """A line for each change: `seed: 0 -> 7`."""
    for key, old, new in changes:
        yield f"{key}: {_value(old)} -> {_value(new)}"


def _value(value: Any) -> str:
    return "not set" if value == MISSING else json.dumps(value)
