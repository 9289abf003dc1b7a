"""A connection from every node's supervisor to node 0's, so that each hears within seconds that the other is gone.

A process that dies closes its connections; a node that loses its power or its network stops answering the kernel's
probes, and the connection breaks after about 15 s. srun and slurmctld notice the latter after minutes. Nothing is sent
but a greeting with the attempt's secret. Standard library only.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
from contextlib import suppress

from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.network import choose, towards_peers
from rlhpc.cluster.slurm_env import SlurmEnv

PROBES = {socket.TCP_KEEPIDLE: 3, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 4}  # seconds, seconds, probes
NAME = "link"  # link.json: where node 0 listens


class Links:
    """Node 0's end."""

    def __init__(self, attempt: Attempt, env: SlurmEnv, interface: str | None) -> None:
        """Listens and says where. Raises ConfigError for an interface that isn't there."""
        peers = env.nodes[1:]
        launch_ip = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") if peers else None
        self._names, self._secret = env.nodes, attempt.token_path.read_bytes()
        ip = choose(interface, towards_peers(peers, launch_ip)).ip
        self._server = socket.create_server((ip, 0), backlog=env.num_nodes)
        self._server.setblocking(False)
        self._peers: dict[socket.socket, str | None] = {}  # the node's name, once it has greeted
        attempt.write(NAME, {"ip": ip, "port": self._server.getsockname()[1]})

    def broken(self) -> str | None:
        """The name of a node whose connection broke, None while all stand. Never blocks."""
        ready, _, _ = select.select([self._server, *self._peers], [], [], 0)
        for connection in ready:
            if connection is self._server:
                with suppress(OSError):  # gone before it was greeted, as a port scan is
                    peer, _ = self._server.accept()
                    self._peers[peer] = None
                    _probe(peer)
            elif (name := self._heard(connection)) is not None:
                return name
        return None

    def _heard(self, peer: socket.socket) -> str | None:
        try:
            data = peer.recv(4096)
        except OSError:  # reset, or no answer to the probes
            data = b""
        if data and self._peers[peer] is None:
            secret, _, node = data.rpartition(b" ")
            if hmac.compare_digest(secret, self._secret) and node.isdigit() and int(node) < len(self._names):
                self._peers[peer] = self._names[int(node)]
                return None
        gone = self._peers.pop(peer)
        peer.close()
        return gone

    def close(self) -> None:
        for each in (self._server, *self._peers):
            each.close()


class Link:
    """Another node's end; connects as soon as node 0 says where."""

    def __init__(self, attempt: Attempt, env: SlurmEnv) -> None:
        self._attempt, self._node, self._name = attempt, env.node_id, env.nodes[0]
        self._socket: socket.socket | None = None

    def broken(self) -> str | None:
        """Node 0's name once it is gone. Blocks for a few seconds at most, while it connects."""
        if self._socket is None:
            self._connect()
            return None
        ready, _, _ = select.select([self._socket], [], [], 0)
        return self._name if ready else None  # node 0 says nothing, so that this is the end

    def _connect(self) -> None:
        if (found := self._attempt.read(NAME)) is None:
            return
        try:
            self._socket = socket.create_connection((found["ip"], found["port"]), timeout=5)
        except OSError:
            return  # the next look tries again; srun and Ray have time limits of their own
        _probe(self._socket)
        self._socket.sendall(self._attempt.token_path.read_bytes() + b" " + str(self._node).encode())

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _probe(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in PROBES.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
