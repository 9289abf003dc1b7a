"""Blocks of ports, with real sockets."""

import socket
import subprocess
import sys

import pytest

from rlhpc.cluster.ports import BLOCK_SIZE, _bases, claim_block

CLAIM = """
import sys
from rlhpc.cluster.ports import claim_block
block = claim_block("4711", 3)
print(block.base, flush=True)
sys.stdin.read()
"""


def test_the_same_job_and_node_in_two_processes_get_different_blocks_and_a_dead_one_frees_its_own() -> None:
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", CLAIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    claimants = [start() for _ in range(4)]
    bases = [int(process.stdout.readline()) for process in claimants if process.stdout]
    assert len(set(bases)) == 4
    assert all(abs(a - b) >= BLOCK_SIZE for a in bases for b in bases if a != b)
    first = claimants[bases.index(min(bases))]
    first.kill()
    first.wait()
    again = start()
    assert again.stdout and int(again.stdout.readline()) == min(bases)
    for process in (*claimants, again):
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["gcs", "node_manager", "master"])
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_listener_anywhere_in_the_block_leads_to_another_block(name: str, address: str) -> None:
    planned = claim_block("815", 0)
    planned.close()
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        foreign.bind((address, planned[name]))
        foreign.listen()
        other = claim_block("815", 0)
    assert abs(other.base - planned.base) >= BLOCK_SIZE
    other.close()


def test_ports_have_names_and_workers_the_rest() -> None:
    block = claim_block("7", 1)
    names = ("gcs", "node_manager", "object_manager", "runtime_env_agent", "dashboard", "dashboard_agent_http")
    named = [block[name] for name in (*names, "dashboard_agent_grpc", "metrics", "master")]
    assert sorted({block.base, *named, *block.workers}) == sorted([block.base, *named, *block.workers])
    assert block.workers.stop == block.base + 128
    assert len(block.workers) == 112
    block.close()


@pytest.mark.parametrize(
    ("low", "high", "first", "last"),
    [
        (32768, 60999, 10000, 32528),  # Linux's default: 177 blocks end at 32655
        (15000, 64000, 10000, 14864),
        (1024, 50000, 50001, 65361),  # above, where nothing is left below
        (1024, 65535, 10000, 32528),  # no room outside: the usual place, every port still probed
    ],
)
def test_blocks_keep_out_of_the_ports_that_the_kernel_hands_out(low: int, high: int, first: int, last: int) -> None:
    bases = _bases(low, high)
    assert (bases[0], bases[-1], bases.step) == (first, last, 128)
