"""The stop flag: signals set it, the driver alone reads it, between chunks of generation and between phases."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # and Ctrl-C, from which Ray shields its processes itself


class StopRequested(Exception):
    """The step in progress is abandoned; the state from the step's start is what counts."""


class StopFlag:
    """Set by SIGTERM, SIGUSR2 or Ctrl-C. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def install(self) -> None:
        """Takes over the signals; main thread only."""
        for number in (*STOP_SIGNALS, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def requested(self) -> bool:
        return self.reason is not None

    def check(self) -> None:
        """Raises StopRequested once a stop was asked for."""
        if self.reason is not None:
            raise StopRequested(self.reason)
