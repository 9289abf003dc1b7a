"""The TCP ports of one session: a block of its own, so that jobs and users on a node never meet.

Blocks have one size and lie between 10000 and the ports that the kernel hands out by itself. A listening socket on a
block's first port claims it for as long as its holder lives; the kernel makes that one step for everybody on the node.
Standard library only.
"""

from __future__ import annotations

import socket
import zlib
from dataclasses import dataclass
from pathlib import Path

from rlhpc.errors import ClusterError

BLOCK_SIZE = 128
FIRST_PORT = 10000  # below lie the well-known services
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NAMES = (
    "claim",
    "gcs",
    "node_manager",
    "object_manager",
    "runtime_env_agent",
    "dashboard",
    "dashboard_agent_http",
    "dashboard_agent_grpc",
    "metrics",
    "master",
)
_FIRST_WORKER = 16  # the workers' ports fill the rest of the block


@dataclass(frozen=True)
class PortBlock:
    """`base` is the first port; `claim` keeps the block while it is open."""

    base: int
    claim: socket.socket

    def __getitem__(self, name: str) -> int:
        """The port of one of gcs, node_manager, object_manager, runtime_env_agent, dashboard, dashboard_agent_http,
        dashboard_agent_grpc, metrics, master."""
        return self.base + _NAMES.index(name)

    @property
    def workers(self) -> range:
        return range(self.base + _FIRST_WORKER, self.base + BLOCK_SIZE)

    def close(self) -> None:
        self.claim.close()


def claim_block(job_id: str, node_id: int) -> PortBlock:
    """The first free block, tried from a place that the job and the node choose, so that neighbours rarely collide.

    Raises ClusterError when no block of this node is free.
    """
    bases = _bases(*map(int, _EPHEMERAL.read_text().split()))
    start = zlib.crc32(f"{job_id}/{node_id}".encode())
    for k in range(len(bases)):
        base = bases[(start + k) % len(bases)]
        if (claim := _bound(base)) is None:
            continue
        claim.listen(1)
        if all(_free(port) for port in range(base + 1, base + BLOCK_SIZE)):
            return PortBlock(base, claim)
        claim.close()
    raise ClusterError(
        f"none of the {len(bases)} blocks of {BLOCK_SIZE} TCP ports from {bases[0]} to {bases[-1] + BLOCK_SIZE - 1} is "
        "free on this node; see `ss -ltn` for what listens there and end what is left over from earlier jobs"
    )


def _bases(ephemeral_low: int, ephemeral_high: int) -> range:
    """First ports of the blocks outside the kernel's own range; where that leaves no room, of those below 32768."""
    for low, high in ((FIRST_PORT, ephemeral_low), (max(FIRST_PORT, ephemeral_high + 1), 65536)):
        if high - low >= 8 * BLOCK_SIZE:
            return range(low, high - BLOCK_SIZE + 1, BLOCK_SIZE)
    return range(FIRST_PORT, 32768 - BLOCK_SIZE + 1, BLOCK_SIZE)


def _bound(port: int) -> socket.socket | None:
    """A socket bound to the port on all addresses, None where anybody has it. Without SO_REUSEADDR: a port whose last
    connection the kernel still remembers counts as taken."""
    sock = socket.socket()
    try:
        sock.bind(("", port))
    except OSError:
        sock.close()
        return None
    return sock


def _free(port: int) -> bool:
    if (sock := _bound(port)) is None:
        return False
    sock.close()
    return True
