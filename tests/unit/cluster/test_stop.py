"""The stop flag under real signals, in a process of its own."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from rlhpc.cluster.stop import StopFlag, StopRequested
number, name = int(sys.argv[1]), sys.argv[2]
for run in (1, 2):  # a sweep's runs come one after the other in one process
    flag = StopFlag()
    with flag.installed():
        flag.check()
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))  # as libraries do
        os.kill(os.getpid(), number)
        while not flag.requested():
            time.sleep(0.01)
        assert flag.reason == name, flag.reason
        assert time.time() - 60 < flag.at <= flag.seen_at
        try:
            flag.check()
        except StopRequested as stop:
            assert str(stop) == name
            print("stopped")
        if number == signal.SIGINT:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("interrupted")
os.kill(os.getpid(), signal.SIGTERM)  # nobody listens any more
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_signals_set_the_flag_and_a_second_ctrl_c_interrupts(number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number)), number.name], capture_output=True, text=True
    )
    expected = ["stopped", "interrupted"] if number == signal.SIGINT else ["stopped"]
    assert done.stdout.split() == 2 * expected
    assert done.returncode == -signal.SIGTERM, done.stderr


MASK = """
import subprocess, sys
from rlhpc.cluster.stop import StopFlag
with StopFlag().installed():
    print(subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True, text=True).stdout.split()[1])
"""


def test_processes_started_meanwhile_are_deaf() -> None:
    """Ray's daemons and the ranks must outlive the save with which the driver answers."""
    done = subprocess.run([sys.executable, "-c", MASK], capture_output=True, text=True, check=True)
    held = int(done.stdout, 16)
    assert held == 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGUSR2 - 1)
