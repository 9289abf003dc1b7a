"""What a command makes of a reader that leaves early, as `| head -1` does."""

from __future__ import annotations

import subprocess
import sys

PRINTS = """
import sys
from rlhpc.cli.output import reader_may_leave

def lines():
    for number in range(100_000):
        print(number)
    sys.exit("the reader was still there")

{block}
print("and a line at the end")
raise SystemExit(3)
"""


def without_a_reader(block: str) -> tuple[int, str]:
    """The exit code and what went to standard error."""
    code = PRINTS.format(block=block)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as printing:
        assert printing.stdout is not None and printing.stderr is not None
        printing.stdout.close()
        told = printing.stderr.read()
    return printing.returncode, told


def test_a_reader_that_leaves_is_no_error_then_or_at_the_end() -> None:
    assert without_a_reader("with reader_may_leave():\n    lines()") == (3, "")


def test_without_it_both_are_errors() -> None:
    code, told = without_a_reader("lines()")
    assert code != 3 and "BrokenPipeError" in told
