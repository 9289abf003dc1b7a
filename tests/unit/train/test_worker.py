"""What a rank says of its own errors."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from rlhpc.errors import TrainingError
from rlhpc.train.worker import _print_error


def test_a_log_on_a_full_disk_hides_no_error() -> None:
    error = TrainingError("loss is nan at step 3")
    with io.FileIO("/dev/full", "w") as full:
        with pytest.raises(OSError, match="No space left"):
            full.write(b"a line")
        with redirect_stderr(io.TextIOWrapper(full, write_through=True)):
            _print_error(type(error), error, None)  # and raises nothing
