"""What a run prints: a table with one line per step, and on a terminal a progress bar below it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HEADER_EVERY = 25  # rows
ETA_WINDOW = 20  # steps whose mean duration the estimate rests on


@dataclass(frozen=True)
class Column:
    """A metric's place in the table. Where several names begin with `metric`, their mean is shown."""

    header: str
    metric: str
    spec: str
    width: int

    def cell(self, record: Mapping[str, float]) -> str:
        values = [value for name, value in record.items() if name == self.metric or name.startswith(self.metric + "/")]
        text = format(sum(values) / len(values), self.spec) if values else "-"
        return text.rjust(self.width)


COLUMNS = (
    Column("reward", "critic/score/mean", ".3f", 7),
    Column("val", "val-core", ".3f", 6),
    Column("length", "response_length/mean", ".1f", 7),
    Column("clipfrac", "actor/pg_clipfrac", ".3f", 8),
    Column("kl", "actor/kl_loss", ".1e", 8),
    Column("entropy", "actor/entropy", ".3f", 8),
    Column("grad", "actor/grad_norm", ".3f", 8),
    Column("gap", "training/rollout_logprobs_diff_mean", ".1e", 8),
    Column("tok/s/rank", "perf/throughput", ",.0f", 10),
    Column("s/step", "perf/time_per_step", ".2f", 7),
)


class Console:
    """Prints to `stream`. Everything that a log file gets is whole lines; only a terminal sees the bar."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self._out = rich.console.Console(file=stream or sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self._total_steps = total_steps
        self._step_width = len(str(total_steps))
        self._durations: deque[float] = deque(maxlen=ETA_WINDOW)
        self._rows = 0
        self._bar = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[phase]}"),
            console=self._out,
            disable=not self._out.is_terminal or self._out.is_dumb_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("steps", total=total_steps, phase="")
        self._bar.start()

    def say(self, text: str, style: str | None = None) -> None:
        """A line of its own, with the time of day."""
        self._out.print(f"{time.strftime('%H:%M:%S')}  {text}", style=style)

    def progress(self, step: int, phase: str, fraction: float) -> None:
        """How far a phase of a step has come, 0 to 1; on a terminal only."""
        self._bar.update(self._task, phase=f"step {step} {phase} {fraction:4.0%}")

    def doing(self, text: str) -> None:
        """What takes its time, beside the time that has passed; on a terminal only."""
        self._bar.update(self._task, phase=text, refresh=True)

    def row(self, step: int, record: Mapping[str, float]) -> None:
        """A step's line. `record` holds perf/time_per_step, which the remaining time is estimated from."""
        if step > 0:
            self._durations.append(record["perf/time_per_step"])
        if self._rows % HEADER_EVERY == 0:
            headers = "  ".join(column.header.rjust(column.width) for column in COLUMNS)
            self.say(f"{'step':>{2 * self._step_width + 1}}  {headers}  {'eta':>7}", style="bold")
        self._rows += 1
        cells = "  ".join(column.cell(record) for column in COLUMNS)
        self.say(f"{step:>{self._step_width}}/{self._total_steps}  {cells}  {self._eta(step):>7}")
        self._bar.update(self._task, completed=step, phase="")

    def _eta(self, step: int) -> str:
        if not self._durations:
            return "-"
        return duration(sum(self._durations) / len(self._durations) * (self._total_steps - step))

    def close(self) -> None:
        self._bar.stop()


def duration(seconds: float) -> str:
    """12s, 3m05s, 2h07m, 4d11h."""
    whole = round(seconds)
    for unit, size, smaller, smaller_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller_size:02d}{smaller}"
    return f"{whole}s"
