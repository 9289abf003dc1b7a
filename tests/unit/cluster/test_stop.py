"""The stop flag under real signals, in a process of its own."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from rlhpc.cluster.stop import StopFlag, StopRequested
flag = StopFlag()
flag.install()
assert not flag.requested()
flag.check()
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))  # as libraries do
os.kill(os.getpid(), int(sys.argv[1]))
while not flag.requested():
    time.sleep(0.01)
assert flag.reason == sys.argv[2], flag.reason
try:
    flag.check()
except StopRequested as stop:
    assert str(stop) == sys.argv[2]
    print("stopped")
if sys.argv[1] == str(int(signal.SIGINT)):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_signals_set_the_flag_and_a_second_ctrl_c_interrupts(number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number)), number.name], capture_output=True, text=True, check=True
    )
    expected = ["stopped", "interrupted"] if number == signal.SIGINT else ["stopped"]
    assert done.stdout.split() == expected
