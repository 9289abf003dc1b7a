"""The driver of a run: `python -m rlhpc.train.run RUN_DIR` trains as RUN_DIR/config.yaml says, here or in an attempt.

What is heavy to import is imported after the signals are taken over and progress.json is there.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rlhpc.checkpoint.writer import Writer
from rlhpc.cluster.attempt import EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE, NO_LOCKS, Attempt
from rlhpc.cluster.ray_node import RAY_ENVIRONMENT
from rlhpc.cluster.stop import STOP_SIGNALS, StopFlag, StopRequested, UpdateCut
from rlhpc.config.load import load_file
from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError, RlhpcError, print_error
from rlhpc.train.progress import Progress


def run(cfg: RunConfig) -> int:
    """Trains from the run directory's newest checkpoint, on this machine or, inside an attempt, over its nodes.

    Returns EXIT_FINISHED when the last step is done and EXIT_STOPPED after a stop. Raises RlhpcError for everything
    that the user can mend; main thread only.
    """
    directory = Path(cfg.run_dir).absolute()
    attempt = Attempt.current(os.environ)
    stop = StopFlag(attempt)
    try:
        with (
            stop.installed(),
            run_lock(directory, attempt),
            Progress(directory, attempt, stop) as progress,
        ):
            os.environ.update(RAY_ENVIRONMENT)  # some of it is read when Ray is imported
            from rlhpc.train.assembly import assembled
            from rlhpc.train.loop import train

            with assembled(cfg, directory, attempt, stop, progress) as parts:
                state = train(parts)
                parts.reporter.close_run(state.step, finished=True)
    except (StopRequested, UpdateCut):
        return EXIT_STOPPED
    return EXIT_FINISHED


@contextmanager
def run_lock(directory: Path, attempt: Attempt | None = None) -> Iterator[None]:
    """One driver per run directory, as far as the file system carries locks between nodes; beyond, the checkpoints'
    owner decides. The lock goes with the process, whatever ends it. A newer attempt doesn't wait for an older one."""
    writer = Writer.current(attempt.name if attempt else "")
    with _lock_file(directory) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = Writer.parse(known[-1]) if (known := lock.read().split()) else None
            if holder is None or not writer.supersedes(holder):
                who = f" (pid {holder.pid} on {holder.host})" if holder else ""
                raise ConfigError(
                    f"another process{who} is training in run_dir={directory}; wait for it, or choose another run_dir"
                ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        lock.truncate(0)
        lock.write(f"{os.getpid()} {writer}")
        lock.flush()
        yield


def _lock_file(directory: Path) -> TextIO:
    """Opened, in a directory that is made where it is missing. Raises ConfigError where that can't be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return (directory / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(
            f"run_dir={directory} can't be made or written to: {error.strerror}; choose another"
        ) from error


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m rlhpc.train.run RUN_DIR     trains as RUN_DIR/config.yaml says", file=sys.stderr)
        return EXIT_USAGE
    directory = Path(arguments[0]).absolute()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # also after the run: the exit code must tell how it ended
    try:
        cfg = load_file(directory / "config.yaml")
        cfg.run_dir = str(directory)  # it may have been moved
        return run(cfg)
    except RlhpcError as error:
        print_error(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
