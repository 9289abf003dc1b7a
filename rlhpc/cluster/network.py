"""The one network interface that a node's Ray, vLLM, gloo and NCCL use. IPv4. Standard library only."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from rlhpc.errors import ConfigError

_SIOCGIFCONF = 0x8912  # linux/sockios.h: all configured IPv4 addresses with their interfaces
_IFREQ_BYTES, _MAX_ADDRESSES = 40, 256
_DISCARD_PORT = 9  # connecting a datagram socket sends nothing; it only asks the kernel for a route


@dataclass(frozen=True)
class Interface:
    """A network interface and one of its addresses."""

    name: str
    ip: str

    def environment(self) -> dict[str, str]:
        """The variables that make the libraries agree on it. NCCL takes prefixes unless the name follows "="."""
        return {"VLLM_HOST_IP": self.ip, "GLOO_SOCKET_IFNAME": self.name, "NCCL_SOCKET_IFNAME": f"={self.name}"}


def interfaces() -> list[Interface]:
    """This node's addresses in the kernel's order. An alias such as eth0:1 counts as eth0."""
    buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
    address, length = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iP", length, address))
    used: int = struct.unpack("iP", answer)[0]
    entries = (buffer[at : at + _IFREQ_BYTES].tobytes() for at in range(0, used, _IFREQ_BYTES))
    return [
        Interface(os.fsdecode(entry[:16].partition(b"\0")[0]).partition(":")[0], socket.inet_ntoa(entry[20:24]))
        for entry in entries
    ]


def choose(wanted: str | None, target: str) -> Interface:
    """The interface that cluster.network_interface names, by its name or by the network of its address; None: the one
    over which the kernel reaches `target`, an address of another node of the job.

    Raises ConfigError when this node has no such interface, or no route.
    """
    here = interfaces()
    if wanted is None:
        ip = _source_address(target)
        return next((known for known in here if known.ip == ip), Interface("lo", ip))
    try:
        network = ipaddress.ip_network(wanted, strict=False) if "/" in wanted else None
    except ValueError as error:
        raise ConfigError(
            f"cluster.network_interface={wanted!r}: {error}; use a name or a CIDR as 10.1.0.0/16"
        ) from error
    for known in here:
        if known.name == wanted or (network is not None and ipaddress.ip_address(known.ip) in network):
            return known
    raise ConfigError(
        f"cluster.network_interface={wanted!r} is not on node {socket.gethostname()}, which has "
        f"{', '.join(f'{known.name} ({known.ip})' for known in here)}; name one of these, by a CIDR where the names "
        "differ between nodes, or leave it out for the route to the other nodes"
    )


def towards_peers(peers: Iterable[str], launch_ip: str | None) -> str:
    """An address by which node 0 finds its route to the other nodes, `peers` by name. `launch_ip` is this node's own
    address as the other nodes' srun tasks know it (SLURM_LAUNCH_NODE_IPADDR), for sites whose names don't resolve."""
    for peer in peers:
        try:
            return socket.gethostbyname(peer)
        except OSError:
            continue
    return launch_ip or "127.0.0.1"


def _source_address(target: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((target, _DISCARD_PORT))
        except OSError as error:
            raise ConfigError(
                f"node {socket.gethostname()} has no route to {target}: {error}; set cluster.network_interface to the "
                "interface that connects the nodes"
            ) from error
        return str(sock.getsockname()[0])
