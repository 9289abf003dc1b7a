"""metrics.jsonl: one JSON object per step, whole lines only."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.durable import publish_file, raise_write_error
from rlhpc.errors import DataError


class MetricsFile:
    """Appends `{"step": ..., <metric>: ...}` lines that are on the disk when `append` returns.

    JSON has no NaN or infinity: both are written as null, which pandas and polars read as missing. Floats are
    written with the digits that read back to the same bits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises CheckpointError where the disk is full; what was written before stays readable."""
        line = json.dumps({"step": step} | {name: _number(value) for name, value in metrics.items()})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise_write_error(error, self.path, len(line) + 1)

    def read(self) -> list[dict[str, Any]]:
        """All whole lines. A last line that a crash tore is left out; raises DataError for any other bad line."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        rows = []
        for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is torn, or empty
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise DataError(
                    f"{self.path} line {number} is not JSON ({error}); mend it or move the file away"
                ) from error
        return rows

    def truncate_after(self, step: int) -> None:
        """Drops the lines of later steps and a torn last line, by renaming a new file over the old one."""
        if not self.path.exists():
            return
        kept = [json.dumps(row) + "\n" for row in self.read() if row["step"] <= step]
        publish_file(self.path, lambda partial: _write(partial, "".join(kept)))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _number(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    value = float(value)  # scalars of numpy and torch too
    return value if math.isfinite(value) else None
