"""metrics.jsonl: one JSON object per step, whole lines only."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.durable import DiskFullError, publish_file, raise_write_error
from rlhpc.errors import DataError

log = logging.getLogger(__name__)


class MetricsFile:
    """Appends `{"step": ..., <metric>: ...}` lines that are on the disk when `append` returns.

    JSON has no NaN or infinity: both are written as null, which pandas and polars read as missing. Floats are
    written with the digits that read back to the same bits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""  # lines for which there was no room

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line that finds the disk full is written with the next one that doesn't, or by `flush`."""
        line = json.dumps({"step": step} | {name: _number(value) for name, value in metrics.items()})
        self._waiting += line.encode() + b"\n"
        try:
            self.flush()
        except DiskFullError as error:
            log.warning("the metrics of step %d wait in memory: %s", step, error)

    def flush(self) -> None:
        """Writes what waits. Raises DiskFullError while there is no room; what was written before stays readable."""
        if not self._waiting:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _append_whole(descriptor, self._waiting)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise_write_error(error, self.path, len(self._waiting))
        self._waiting = b""

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


def _append_whole(descriptor: int, content: bytes) -> None:
    """All of it, on the disk, or nothing."""
    size = os.fstat(descriptor).st_size
    try:
        while content:
            content = content[os.write(descriptor, content) :]
        os.fsync(descriptor)
    except OSError:
        if os.fstat(descriptor).st_size > size:
            os.ftruncate(descriptor, size)
        raise


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _number(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    value = float(value)  # scalars of numpy and torch too
    return value if math.isfinite(value) else None
