"""The stop flag: signals set it, the driver alone reads it, in every phase, and tells the ranks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rlhpc.cluster.attempt import Attempt

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # and Ctrl-C, from which Ray shields its processes itself
SAFETY = 1.2  # estimates of what remains are taken a fifth longer


class StopRequested(Exception):
    """A stop was asked for while no weight had changed: the state from the step's start is what counts."""


class UpdateCut(Exception):
    """A stop was asked for in mid-update, and the rest doesn't fit before the deadline: the last checkpoint counts."""


class StopFlag:
    """Set by SIGTERM, SIGUSR2 or Ctrl-C. A second Ctrl-C interrupts at once."""

    def __init__(self, attempt: Attempt | None = None) -> None:
        self.reason: str | None = None
        self.at = 0.0  # when the signal came and when the driver turned to it, seconds since the epoch
        self.seen_at = 0.0
        self._attempt = attempt

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes over the signals meanwhile; main thread only, before libraries start threads of their own.

        SIGTERM and SIGUSR2 are held back from every thread that is started from here on, and one of this flag's own
        takes them: libraries such as Ray put handlers in place that would end the process. Processes inherit that, as
        `blocked` says.
        """
        ended = threading.Event()

        def take() -> None:
            while number := signal.sigwait(STOP_SIGNALS):
                if ended.is_set():
                    return
                self._on_signal(number, None)

        # Handlers too: a signal must not be ignored, and threads that were there before may be the ones to hear it.
        before = {number: signal.signal(number, self._on_signal) for number in (*STOP_SIGNALS, signal.SIGINT)}
        taker = threading.Thread(target=take, name="stop signals", daemon=True)
        with blocked(STOP_SIGNALS):
            taker.start()
            try:
                yield
            finally:
                ended.set()
                signal.pthread_kill(taker.ident or 0, signal.SIGUSR2)
                taker.join()
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        if self.reason is None:
            self.at = time.time()
            self.reason = signal.Signals(number).name

    def requested(self) -> bool:
        if self.reason is not None and not self.seen_at:
            self.seen_at = time.time()
        return self.reason is not None

    def check(self) -> None:
        """Raises StopRequested once a stop was asked for."""
        if self.requested():
            raise StopRequested(self.reason)

    def deadline(self) -> float | None:
        """When the scheduler kills, seconds since the epoch, as the attempt's stop.json says at this moment; None where
        nobody will, or nobody knows when."""
        notice = self._attempt.stop_notice() if self._attempt else None
        return notice.deadline if notice else None

    def leaves(self, seconds: float) -> bool:
        """Whether there is time for `seconds` of work, taken a fifth longer; always without a deadline."""
        deadline = self.deadline()
        return deadline is None or time.time() + SAFETY * seconds <= deadline


@contextmanager
def blocked(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Holds signals back from this thread. Processes started meanwhile inherit the mask, which is how Ray's daemons
    and ranks stay deaf to what timeout, systemd and Slurm send to every process of a job: they have to outlive the
    checkpoint with which the driver answers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
